"""Sites that train one model, each on its own data, with its own ledger and its own noise.

A site sends one message a step: the clipped sum of its batch with its part of the noise. The sum of
all messages moves the model, in the same way at all sites. Who sees what, and how much noise is
then left, is in `Site.statement`. How messages travel is left to others; `train` runs a site over a
`Group`, such as `dpbnn.ranks.Ranks`.
"""

from __future__ import annotations

import contextlib
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
from dpbnn.privacy.checks import check_count
from dpbnn.privacy.group import Group
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.sites import (
    Message,
    OneOfSeveral,
    against_sums,
    check_sites,
    said_of_sums,
    site_plan,
)
from dpbnn.privacy.statement import PrivacyStatement
from dpbnn.resume import FAILED
from dpbnn.rows import checked_rows
from dpbnn.sources import seed_of
from dpbnn.training import _random_state, _Run, check_kinds

__all__ = ["Site", "train"]

_METHODS = (SEP, VI, SGD)


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
    knows, and but those who added none (`statement`). `dpbnn.privacy.sites` has the argument.

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
        check_sites(plan, site, records)
        self.site, self.records, self.seed, self.plan = site, records, seed, plan
        settled, clip = method.settled(plan)
        own = site_plan(settled, records[site], len(records))
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
                seed=seed, group=OneOfSeveral(),
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
        self._sent = 0
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
        if self._sent != self.step or self.step == self.steps:
            raise RuntimeError(
                "message: the last one waits for its sum, or a step has failed, or all steps are "
                "made"
            )
        self._sent += 1  # also where it fails: no step is made twice
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

            share = Message(batch, run.like, contributed, Group(), sites=len(self.records))
            sums = run.gate(share, noise_multiplier=sigma, keep=keep, records=batch)
            run.watch.contributed()
        self._waiting = state, {name: value.shape for name, value in sums.items()}
        return torch.cat([value.double().reshape(-1) for value in sums.values()])

    def apply(self, total: Tensor) -> None:
        """Move the model by the sum of all sites' messages of this step, each taken once."""
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
        """Return what holds for the records of this site, with all that its ledger holds so far.

        A message counts from when it is made, whether its sum has come or not.

        Args:
            knowing: against so many of the other sites, who act together and see all sums of
                messages, but no message of a site that is not with them; 0 is somebody outside.
                Sites that add no noise are to be counted in. None is against everybody: who
                collects the messages, and all other sites.
        """
        run, sites = self._run, len(self.records)
        public = run.method.public()
        if knowing is None:
            views: tuple[str, ...] = ()
            if run.gate.noise.private and self.plan.private and self._sent:
                views = said_of_sums(run.plan, self._sent, sites)
            return run.gate.statement(delta=self.plan.delta, public=public, caveats=views)
        check_count(0, knowing=knowing)
        if knowing >= sites:
            raise ValueError(f"knowing={knowing}: there are {sites - 1} other sites")
        whole = run.gate.statement(delta=self.plan.delta, public=public)
        if not (whole.private and whole.complete):
            return whole
        left = sites - knowing
        return PrivacyStatement.of(
            (*run.gate.ledger.beside(run.run), *against_sums(run.plan, self._sent, left)),
            delta=self.plan.delta,
            relation=self.plan.relation,
            public=public,
            caveats=(
                f"holds against who sees sums over all {sites} sites and nothing else of a step, "
                f"where {left} of them, this one included, add their noise and keep it secret",
            ),
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
    numbers = group.gather(torch.tensor(site.site)).tolist()
    if sorted(numbers) != list(range(len(site.records))):
        raise ValueError(
            f"group: has the sites {numbers} where {len(site.records)} were agreed on; each of "
            f"them takes part once, or the noise of the sums is not the one that is stated"
        )
    while site.step < site.steps:
        site.apply(group.spread(group.sum(site.message())))
    site.check_same(group)
    return site.posterior()
