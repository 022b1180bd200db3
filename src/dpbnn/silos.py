"""Sites that train one model, each on its own data, with its own ledger and its own noise.

A site sends one message a step: the clipped sum of its batch with its part of the noise. The sum of
all messages moves the model, in the same way at all sites. Who sees what, and how much noise is
then left, is in `Site.statement`. How messages travel is left to others; `train` runs a site over a
`Group`, such as `dpbnn.ranks.Ranks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn import likelihoods
from dpbnn.computed import digest
from dpbnn.likelihoods import Likelihood
from dpbnn.messages import unquoted
from dpbnn.methods import SEP, SGD, VI
from dpbnn.methods.method import Method, Problem
from dpbnn.methods.state import flat
from dpbnn.methods.watch import Watch, taken
from dpbnn.networks import training_mode
from dpbnn.posteriors import Posterior
from dpbnn.posteriors.evaluate import unfused_attention
from dpbnn.priors import Gaussian, Prior
from dpbnn.privacy import accountants
from dpbnn.privacy.checks import check_count, round_up
from dpbnn.privacy.events import Event
from dpbnn.privacy.group import Group, Shares
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import FullBatch, Poisson, Sampler
from dpbnn.privacy.schedule import scaled
from dpbnn.privacy.statement import PrivacyStatement
from dpbnn.resume import FAILED
from dpbnn.rows import checked_rows
from dpbnn.sources import seed_of
from dpbnn.training import _random_state, _Run, check_kinds

__all__ = ["Site", "train"]

_METHODS = (SEP, VI, SGD)
_NOISE = 2.0**24  # steps of the grid that noise stays within: 16 standard deviations


class _OneOfSeveral(Group):
    """A process that makes releases of its own, on a ledger of its own, beside others that do."""

    def check_alone(self) -> None:
        """Let others be there: what they release is no part of this site's releases."""


@dataclasses.dataclass
class _Message(Shares):
    """The contributions of a site's batch, whose noised sum stays whole numbers of the grid.

    Attributes:
        sites: how many messages are added up.
    """

    sites: int = 1

    def check_range(self, steps: float) -> None:
        """Raise where float64 would not add up all messages exactly."""
        super().check_range(self.sites * (steps + _NOISE))
        if self.added_in is not torch.float64:
            raise ValueError(
                "noise_multiplier: too small for messages that are added up exactly; use more "
                "noise or smaller batches"
            )

    def spread(self, release: Any) -> dict[str, Tensor]:
        """Return the release as it is, in float64."""
        return dict(release)


class Site:
    """One of k sites that train one model; each has records that no other site has.

        message_i = Trunc(sum of the clipped contributions of site i) + N(0, sigma^2 C^2 / k)
        the model moves by the sum of all messages, whose noise has variance sigma^2 C^2

    **Guarantee.** Every message is one release of this site's gate. Its own ledger is charged for
    noise sigma / sqrt(k), before the sum is formed. So what the ledger says holds against
    everybody: against who collects the messages, against all other sites together, and where
    others add no noise. Batches are drawn by this site alone, from a key that it shares with
    nobody, so that the others do not know who is in them.

    Who sees the sums of messages alone meets more noise: that of all sites but those whose noise it
    knows, and but those who added none (`statement`). All messages lie on one public grid of
    spacing g and are added exactly. A rounded Gaussian has the chances of a density, of Gaussian
    plus uniform noise on (-g, 0), at the points of the grid, up to exp(-2 pi^2 4^19). A sum of k of
    them has those of Gaussian plus k uniforms; that is the Gaussian of the sum, plus k - 1
    uniforms, rounded down. So it is post-processing of the Gaussian mechanism, and the sensitivity
    is the clip, since a record is at one site.

    Args:
        model: as in `fit`, the same at all sites.
        data: of this site; a record, or a person, that is at two sites counts twice, and what is
            said of sums is false.
        likelihood: as in `fit`.
        prior: as in `fit`.
        method: SEP, VI or SGD.
        plan: of all sites: n is the number of all records, batch_size that of all batches, and
            sigma that of the sums. Poisson or full-batch sampling under zero-out.
        site: number of this site, from 0.
        records: how many records each site has; public.
        ledger: of this site; in memory by default.
        seed: of initialisation and weight draws, the same at all sites.
        on_bad_rows: as in `fit`.
        debug_seed: seeds noise and sampling; the statement then says "debug: not private".

    Attributes:
        steps: how many messages there are in all.
        step: how many were answered by a sum.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        data: Any,
        likelihood: str | Likelihood = "categorical",
        prior: Prior | None = None,
        method: Method | None = None,
        plan: Plan | None = None,
        *,
        site: int,
        records: Sequence[int],
        ledger: Ledger | None = None,
        seed: int = 0,
        on_bad_rows: str = "error",
        debug_seed: int | None = None,
    ) -> None:
        if not isinstance(method, _METHODS) or plan is None:
            raise ValueError("method and plan: sites train by SEP, VI or SGD, on a plan of all")
        check_kinds(model=model, plan=plan, prior=prior, ledger=ledger)
        records = tuple(int(count) for count in records)
        _check_sites(plan, site, records)
        self.site, self.records, self.seed, self.plan = site, records, seed, plan
        settled, clip = method.settled(plan)
        own = _site_plan(settled, records[site], len(records))
        prior = Gaussian(1.0) if prior is None else prior
        likely = likelihoods.likelihood(likelihood) if isinstance(likelihood, str) else likelihood
        if not method.own_noise and likelihoods.full(likely).with_learned_noise() is not None:
            raise ValueError("likelihood: sites learn no noise but by SEP; give a noise_std")
        with _random_state(seed), unfused_attention():
            network = method.prepared(taken(model))
            watch = Watch(network, likely)
            place = next(network.parameters()).device
            rows = checked_rows(data, network, likely, records[site], place, on_bad_rows)
            rows.check_batches(own.sampler.most(0))
            watch.check()
            problem = Problem(
                network, watch.likelihood, prior, settled.n, settled.batch_size, settled.steps,
                settled.private, origin=watch.network,
                sigmas=tuple(s for s, count in settled.noise_multipliers for _ in range(count)),
            )  # fmt: skip
            training_mode(network)
            seeded = None if debug_seed is None else len(records) * debug_seed + site
            self._run = _Run(
                method, problem, method.start(problem), own, clip, watch, rows,
                ledger=ledger, resume=False, every=settled.steps + 1, debug_seed=seeded,
                seed=seed, group=_OneOfSeveral(),
            )  # fmt: skip
        self.agreed = {
            "method": digest((method, clip), b""),
            "plan": digest(settled.to_dict(), b""),
            "records": str(records),
            "seed": str(seed),
            "network": digest(flat(self._run.state), b""),
            "prior and likelihood": digest((prior, likely), b""),
        }
        """Digests of what all sites must have been given alike."""
        self._open = contextlib.ExitStack()
        self._open.enter_context(self._run.opened())
        self._run.watch.begin(self._run.process, self._run.state)
        self._batches = rows.ahead(self._run.batches(), seed)
        self._waiting: Any = None

    @property
    def steps(self) -> int:
        """How many messages there are in all."""
        return self.plan.steps

    @property
    def step(self) -> int:
        """How many messages were answered by a sum."""
        return self._run.step

    def message(self) -> Tensor:
        """Return the next message, in float64: this site's clipped sum with its own noise."""
        run = self._run
        if self._waiting is not None or self.step == self.steps:
            raise RuntimeError("message: the last one waits for its sum, or all steps are made")
        batch = next(self._batches)
        sigma = run.reserve()
        with _random_state(seed_of(self.seed, self.step)), unfused_attention():
            state = run.process.draw(run.state)
            x, y, keep = run.rows.take(batch)

            @contextlib.contextmanager
            def contributed(shard: int, records: Tensor) -> Iterator[Any]:
                with unquoted(*FAILED):
                    contributions = run.process.contribute(state, x, y)
                yield contributions

            share = _Message(batch, run.like, contributed, Group(), sites=len(self.records))
            sums = run.gate(share, noise_multiplier=sigma, keep=keep, records=batch)
            run.watch.contributed()
        self._waiting = state, {name: value.shape for name, value in sums.items()}
        return torch.cat([value.double().reshape(-1) for value in sums.values()])

    def apply(self, total: Tensor) -> None:
        """Move the model by the sum of all sites' messages of this step."""
        if self._waiting is None:
            raise RuntimeError("apply: no message waits for its sum; send one first")
        state, shapes = self._waiting
        total = torch.as_tensor(total, dtype=torch.float64)
        sizes = [math.prod(shape) for shape in shapes.values()]
        if total.shape != (sum(sizes),) or not total.isfinite().all():
            raise ValueError(
                f"total: must be {sum(sizes)} finite numbers, the sum of all messages; a site has "
                f"sent something else"
            )
        run, like, self._waiting = self._run, self._run.like, None
        parts = torch.split(total, sizes)
        release = {
            name: part.view(shape).to(like.dtype).to(like.device)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        run.state = run.process.update(state, release)
        run.watch.updated()
        run.keys.advance(run.gate.noise.key)
        run.step += 1

    def statement(self, knowing: int | None = None) -> PrivacyStatement:
        """Return what holds for the records of this site so far.

        Args:
            knowing: against so many of the other sites, who act together and see all sums of
                messages, but no message of a site that is not with them; 0 is somebody outside.
                Sites that add no noise are to be counted in. None is against everybody: who
                collects the messages, and all other sites; and with all that the ledger holds.
        """
        run, sites = self._run, len(self.records)
        if knowing is None:
            return run.gate.statement(delta=self.plan.delta, caveats=self._views())
        check_count(0, knowing=knowing)
        if knowing >= sites:
            raise ValueError(f"knowing={knowing}: there are {sites - 1} other sites")
        left = sites - knowing
        return PrivacyStatement.of(
            self._events(left),
            delta=self.plan.delta,
            relation=self.plan.relation,
            debug=not run.gate.noise.private,
            caveats=(
                f"holds against who sees sums over all {sites} sites and nothing else of a step, "
                f"where {left} of them, this one included, add their noise and keep it secret",
            ),
        )

    def _events(self, left: int) -> list[Event]:
        """Return this run's releases with the noise of so many sites."""
        made = self._run.sigmas[: self.step]
        runs = [(sigma, len(list(same))) for sigma, same in itertools.groupby(made)]
        sampler = self._run.plan.sampler
        return [sampler.event(math.sqrt(left) * sigma, count) for sigma, count in runs]

    def _views(self) -> tuple[str, ...]:
        sites = len(self.records)
        if not (self._run.gate.noise.private and self.plan.private and self.step):
            return ()
        chosen = accountants.accountant(self.plan.accountant)
        epsilon = [
            round_up(chosen.epsilon(self._events(left), self.plan.delta, self.plan.relation))
            for left in (sites, sites - 1)
        ]
        return (
            f"this is one of {sites} sites; epsilon holds against who collects its messages, and "
            f"against all other sites together, whatever noise they add",
            f"where all sites add their noise, and messages are seen by nobody but added up, this "
            f"run has epsilon {epsilon[0]} against others, and {epsilon[1]} against one other site",
        )

    def posterior(self) -> Posterior:
        """Return the posterior after all steps, with the statement of this site."""
        run = self._run
        if self.step < self.steps:
            raise RuntimeError(f"posterior: {self.steps - self.step} steps are left")
        self._open.close()
        settings = {**run.settings, "sites": list(self.records), "site": self.site}
        settings["caveats"] = list(run.method.caveats(self.plan, run.problem.prior))
        posterior = run.process.posterior(
            run.state, privacy=self.statement(), prior=run.problem.prior, settings=settings
        )
        return run.watch.checked(posterior)

    def check_same(self, group: Group) -> None:
        """Raise at all sites where one was given something else, or has another model."""
        state = {name: digest(part, b"") for name, part in flat(self._run.state).items()}
        group.check_same({**self.agreed, **state})


def train(site: Site, group: Group) -> Posterior:
    """Train a site together with others, and return the posterior.

    Args:
        site: the one of this process.
        group: adds up the messages of all sites. Its rank 0 collects them; see `Site.statement`.
    """
    site.check_same(group)
    while site.step < site.steps:
        site.apply(group.spread(group.sum(site.message())))
    site.check_same(group)
    return site.posterior()


def _check_sites(plan: Plan, site: int, records: tuple[int, ...]) -> None:
    if len(records) < 2 or not 0 <= site < len(records) or min(records) < 1:
        raise ValueError(
            f"site={site}, records={records}: give the numbers of records of two or more sites, "
            f"each at least 1, and which of them this one is"
        )
    if sum(records) != plan.n:
        raise ValueError(
            f"the plan is for n={plan.n} records and the sites have {sum(records)}; plan with "
            f"n={sum(records)}"
        )
    known = isinstance(plan.sampler, Poisson | FullBatch) and not plan.sampler.unit
    if not known or plan.relation is not Relation.ZERO_OUT or plan.beside:
        raise ValueError(
            "plan: sites draw records by Poisson or full-batch sampling, under zero-out, with "
            "nothing beside; plan with the defaults"
        )


def _site_plan(plan: Plan, records: int, sites: int) -> Plan:
    """Return the plan of a site: its share of every batch, and of the noise."""
    own: Sampler = FullBatch(records)
    if isinstance(plan.sampler, Poisson):
        own = Poisson(records, plan.batch_size * records / plan.n)
    noise = scaled(plan.noise_multipliers, 1 / math.sqrt(sites))
    made = dataclasses.replace(plan, sampler=own, noise_multipliers=noise, target_epsilon=None)
    if not plan.private:
        return made
    chosen = accountants.accountant(plan.accountant)
    epsilon = chosen.epsilon(made.events, plan.delta, plan.relation)
    return dataclasses.replace(made, epsilon=epsilon)
