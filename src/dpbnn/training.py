"""fit(): its arguments, and the loop that every private method runs in."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn import likelihoods, posteriors
from dpbnn.captured import CapturedStep, can_be_seen
from dpbnn.contributions import UnsupportedModel
from dpbnn.contributions.probe import synthetic
from dpbnn.fit_arguments import alone, check_kinds
from dpbnn.likelihoods import Likelihood
from dpbnn.messages import unquoted
from dpbnn.methods.method import Method, OpenProcess, Problem, Process
from dpbnn.methods.sharded import check_sharded, start_sharded
from dpbnn.methods.watch import Watch, taken
from dpbnn.mixtures import GaussianMixture, checked_points
from dpbnn.networks import LearnedNoise, SlopedNoise, training_mode
from dpbnn.networks.inputs import arguments, each
from dpbnn.networks.sharded import Sharding, is_sharded, moved, parts_of
from dpbnn.open_training import OpenRun
from dpbnn.posteriors import Posterior
from dpbnn.posteriors.evaluate import unfused_attention
from dpbnn.priors import Gaussian, Prior
from dpbnn.privacy.bayesian import BayesianAccountant, given_observers
from dpbnn.privacy.checks import check_count, checked_unit, quoted
from dpbnn.privacy.events import check_one_unit
from dpbnn.privacy.group import Shares
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.slices import SlicedShares
from dpbnn.privacy.statement import PrivacyStatement
from dpbnn.privacy.units import by_unit as counted_by
from dpbnn.progress import shows_progress
from dpbnn.rank_rows import RankRows, over_ranks
from dpbnn.ranks import joined
from dpbnn.resume import FAILED, Run
from dpbnn.rows import Rows, StreamedRows, checked_rows
from dpbnn.threads import threads, threads_for
from dpbnn.units import Units


def fit(
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    likelihood: str | Likelihood = "categorical",
    prior: Prior | None = None,
    method: Method | None = None,
    plan: Plan | None = None,
    *,
    ledger: Ledger | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    microbatch_size: int | None = None,
    on_bad_rows: str = "error",
    units: Any = None,
    unit: str = "person",
    max_records: int | None = None,
    tuning_runs: int | None = None,
    progress: bool | None = None,
    debug_seed: int | None = None,
    observers: Sequence[BayesianAccountant] = (),
    beside_paid: bool = False,
    accountants: Sequence[BayesianAccountant] | None = None,
) -> Posterior:
    """Train a Bayesian network on a plan and return its posterior.

    **Guarantee.** Every release goes through one gate, whose ledger is charged before the release
    exists. What is charged is within `plan.epsilon` at `plan.delta`; `posterior.privacy` states it.
    Nothing that is returned, logged or written has seen the data by another way. Bad data is
    refused before anything is spent. A run that was interrupted goes on with the same noise only
    for the same steps of the same computation on the same data; otherwise it is refused, or gets
    new noise and pays for it.

    Under `torchrun` all processes make the same call and train one model together, by SGD, SGLD,
    SGHMC, BBP, VI or MCDropout; each returns the posterior. See docs/scaling.md.

    Args:
        model: a network (copied, left as it was), or a function that makes one, run under `seed`.
            It is trained in training mode; frozen modules, and BatchNorm layers, that are given in
            evaluation mode stay there.
        data: (inputs, targets), tensors, arrays or memory maps with one row per record; inputs
            alone, or (inputs, None), for a `GaussianMixture`. Inputs may be a tuple of tensors, or
            a mapping of them, which the network gets by name. Or a `torch.utils.data.Dataset` with
            records by number, a Hugging Face dataset, or a `DataSource`, which also takes Parquet
            and Arrow files. They have plan.n records; under add/remove any number, also none.
        likelihood: "categorical", "gaussian", "heteroscedastic", or a likelihood object.
        prior: of the weights; standard normal by default. A learned noise has one of its own.
        method: settings of a method, such as SGD, SGLD, SGHMC, BBP, VI, MCDropout or SEP.
        plan: from `dpbnn.plan`, or `dpbnn.open_plan` for training without privacy.
        ledger: where releases are recorded; by default one in `out`, or in memory.
        out: folder for checkpoints, ledger and keys, for one process at a time; None keeps nothing
            on disk.
        resume: go on from the checkpoint in `out`, with the ledger that holds its releases.
        checkpoint_every: steps between checkpoints; about 20 in a run by default.
        seed: of initialisation, dropout and weight draws; noise and sampling have none. Under
            add/remove what a step draws is secret too, and follows from no seed.
        device: "cpu" or "cuda"; the model's by default.
        microbatch_size: most examples recorded at once.
        on_bad_rows: "error" refuses rows that are not finite, whose label is none of the classes,
            or that the network or likelihood raises on, and says how many there are; "show" does
            the same and names rows and what was raised, which quotes private data; "zero" lets
            them contribute nothing.
        units: whose record each one is, such as a column of patient ids: one label for each record.
            All records of a person are then sampled together and clipped together, and the
            guarantee is for a person; plan.n counts persons. Labels are private.
        unit: what `units` are called in the statement, such as "patient".
        max_records: public number of records of a person that count; the rest are bad rows. Large
            runs are faster with it.
        tuning_runs: how many other runs on this data chose the settings, for the statement.
        progress: show a progress bar; by default on a terminal and in a notebook.
        debug_seed: seeds noise and sampling; the statement then says "debug: not private".
        observers: each is a `BayesianAccountant`, which gets the clipped norms of every release.
            What it estimates is raw: it is in no statement and in nothing that is saved.
        beside_paid: the caller charges what the plan has beside it to `ledger`. Otherwise it is
            charged here, but for what single gates, such as private statistics, spent there.
        accountants: the earlier name of `observers`, for one more release.
    """
    observers = given_observers(observers, accountants)
    if method is None or plan is None:
        raise ValueError(
            "method and plan: both are needed, such as method=dpbnn.SGLD(...), plan=plan"
        )
    check_kinds(model=model, method=method, plan=plan, prior=prior, device=device, ledger=ledger)
    check_count(checkpoint_every=checkpoint_every, microbatch_size=microbatch_size)
    check_count(max_records=max_records)
    if units is not None:
        method.check_units()
        if observers:
            raise ValueError("units: observers estimate for single records; leave them out")
        plan = counted_by(plan, checked_unit(unit) or "person")
        check_one_unit(plan.events)
    elif plan.sampler.unit:
        counted = f"units: missing, and the plan counts {plan.sampler.unit}s"
        raise ValueError(f"{counted}; say whose record each one is")
    check_count(0, tuning_runs=tuning_runs)
    prior = Gaussian(1.0) if prior is None else prior
    likely = likelihoods.likelihood(likelihood) if isinstance(likelihood, str) else likelihood
    if not isinstance(likely, Likelihood):
        raise ValueError(
            f"likelihood={quoted(likely)}: must be a name such as 'categorical', or have a method "
            f"log_prob(outputs, y)"
        )
    settled, clip = method.settled(plan)
    with _random_state(seed), unfused_attention(), joined() as group, ExitStack() as stack:
        network, folder = taken(model), None if out is None else Path(out)
        if is_sharded(network):
            check_sharded(method, plan, folder, bool(observers) or units is not None)
        if not method.over_ranks or observers:
            group = alone(group, type(method).__name__ if not observers else "observers=")
        network = moved(network, device)
        learned = None if method.own_noise else likelihoods.full(likely).with_learned_noise()
        if learned is not None:
            network, likely = _learned_noise(network, learned), learned
        if isinstance(network, GaussianMixture):
            hidden = None if plan.relation.public_size else plan.n
            data = checked_points(data, network, on_bad_rows, hidden)
            likely = likelihoods.Mixture()
        network = method.prepared(network)
        parts = stack.enter_context(parts_of(network, group, joined))
        watch = Watch(network, likely, parts.shell())
        place = next(network.parameters()).device
        size = plan.n if plan.relation.public_size else None
        if units is not None:
            group = alone(group, "units=")
            if torch.is_autocast_enabled(place.type):
                raise ValueError("units: are clipped in full precision; leave torch.autocast out")
            owners = Units.of(
                units, size, unit=settled.sampler.unit, most=max_records, on_bad_rows=on_bad_rows
            )
            owners.check(data)
            size = None if size is None else len(owners.order)
        runs = parts.runnable(network)

        def own_rows(own: Any, n: int | None) -> Rows | StreamedRows:
            if isinstance(parts, Sharding) and group.starts:  # ranks would run it unequally often
                alone(group, "owned", sharded=True)
            hashed = out is not None or group.size > 1
            rows = checked_rows(own, runs, likely, n, place, on_bad_rows, hashed)
            return rows if units is None else rows.by_unit(owners)

        rows = over_ranks(group, data, size, on_bad_rows, own_rows)
        rows.check_batches(settled.sampler.most(0))
        watch.check()
        problem = Problem(
            network, watch.likelihood, prior, settled.n, settled.batch_size, settled.steps,
            settled.private, microbatch_size, folder, watch.network,
            tuple(sigma for sigma, count in settled.noise_multipliers for _ in range(count)),
            group.rank == 0 or isinstance(parts, Sharding), parts,
        )  # fmt: skip
        training_mode(network)
        started = start_sharded if isinstance(parts, Sharding) else type(method).start
        process = started(method, problem)
        loop = OpenRun if isinstance(process, OpenProcess) else _Run
        run = loop(
            method, problem, process, settled, clip, watch, rows,
            ledger=ledger, resume=resume, debug_seed=debug_seed,
            every=checkpoint_every or max(1, settled.steps // 20), observers=observers,
            beside_paid=beside_paid, seed=seed, group=group,
        )  # fmt: skip
        with run.opened():
            shown = shows_progress() if progress is None else progress
            run.train(shown and group.rank == 0)
            return run.posterior(tuning_runs)


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    likelihood: object = None,
    device: torch.device | str = "cpu",
) -> Posterior:
    """Return a saved posterior with its privacy statement; see `dpbnn.posteriors.load`.

    Args:
        folder: written by `posterior.save`.
        model: an instance of the network, needed where it is not made of standard modules.
        likelihood: needed where it is not one of the library's.
        device: where predictions are to be computed.
    """
    return posteriors.load(
        folder,
        model,
        likelihood=likelihood,
        statement=PrivacyStatement.from_dict,
        device=device,
    )


_WORDS, _FIRST = 624, 24  # of the state of torch's generator on the CPU, and where they begin


@contextlib.contextmanager
def _random_state(seed: int, secret: bool = False) -> Iterator[None]:
    """Seed the generators; of a secret seed all 64 bits count, where torch takes 32 on the CPU."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        if devices:
            torch.cuda.manual_seed_all(seed)
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` is far slower
        if secret:
            drawn = hashlib.shake_128(seed.to_bytes(8, "big")).digest(4 * _WORDS)
            words = torch.frombuffer(bytearray(drawn), dtype=torch.int32).long() & 0xFFFFFFFF
            state = torch.get_rng_state()
            state[_FIRST : _FIRST + 8 * _WORDS] = words.view(torch.uint8)
            torch.set_rng_state(state)
        yield


def _learned_noise(network: nn.Module, likelihood: Likelihood) -> nn.Module:
    last = [m for m in network.modules() if isinstance(m, nn.Linear)]
    if not last:
        raise ValueError("a learned noise needs a network that ends in a Linear layer")
    kind = SlopedNoise if getattr(likelihood, "sloped", False) else LearnedNoise
    noise = kind(last[-1].out_features, getattr(likelihood, "start", 0.0))
    return nn.Sequential(network, noise.to(last[-1].weight.device))


class _Run(Run):
    """The private path: sample, contribute, gate, update, checkpoint.

    Records are handed to `contribute` and to nothing else.
    """

    process: Process[Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        drawn = self.process.draw(self.state)
        self.like: Any = self.process.contribute(drawn, *self.rows.none())  # or refuses
        self.captured: CapturedStep | None = None
        self._shares: Callable[..., Shares] = Shares
        self.made_up = self.rows.none()
        parts = self.problem.parts
        if isinstance(parts, Sharding):  # ranks without records need something to compute
            most = self.problem.microbatch_size
            self._shares = functools.partial(SlicedShares, slices=parts.slices, most=most)
            made = synthetic(self.process.model, arguments(self.made_up[0]), self.made_up[1])
            self.made_up = each(lambda part: part[:1], made[0]), made[1][:1]

    def train(self, progress: bool) -> None:
        """Run the remaining steps; an interrupt leaves a checkpoint to resume from."""
        size = sum(p.numel() for p in self.process.model.parameters())
        small = threads_for(self.plan.batch_size, size, arguments(self.rows.none()[0])[0].shape[1:])
        one = self._shared if self.group.shards > 1 else self._one
        if self.group.shards > 1:
            self.rows = RankRows.of(self.rows, self.group)
        batches = self.rows.ahead(
            self.batches(), self._seed(torch.default_generator.initial_seed())
        )
        self.captured = self._captured()
        if self.captured is not None:
            batches = self.captured.ahead(batches)
        with threads(self.keys.threads), small, self.steps(progress) as done:
            for batch in batches:
                if self.captured is not None:
                    self._replayed(batch, self.captured)
                else:
                    one(batch)
                done()
            if self.captured is not None:
                self._settle()

    def _captured(self) -> CapturedStep | None:
        """Return the step as CUDA graphs, where the run is on a GPU and nothing is in the way."""
        if self.group.shards > 1:
            return None
        public, fits = self.plan.relation.public_size, CapturedStep.fits(self.state, self.like)
        whole = isinstance(self.x, Tensor) and self.rows.units is None
        if self.observers or not (public and fits and whole):
            return None
        if not can_be_seen(self.process, self.state, *self.rows.none()):
            return None
        data, limit = (self.x, self.y, self.rows.kept), self.problem.microbatch_size
        captured = CapturedStep(self.process, self.state, self.like, data, self.plan.sampler, limit)
        own = type(self.process).__module__.startswith("dpbnn.")  # they count on tensors alone
        if own and not self.gate.audited():
            self.process.replays = captured.replays
        return captured

    def _replayed(self, batch: Tensor, captured: CapturedStep) -> None:
        sigma = self.reserve()
        with self._drawing() if captured.by_python else captured.seeded():
            contributions = captured.load(batch, self.state)
            release = self.gate(contributions, noise_multiplier=sigma, records=batch)
            if captured.by_python:
                self._settle(later=True)
        if self.process.replays is not captured.replays:  # a release may be kept
            release = {name: value.clone() for name, value in release.items()}
        state = dataclasses.replace(self.state, drawn=captured.drawn)
        self.state = self.process.update(state, release)
        self.step += 1

    def _settle(self, later: bool = False) -> None:
        """Look at what replayed steps have left, before anything of them leaves the run.

        The device itself has compared the parameters; `later` leaves its answer, and a look at
        every bit, for another time.
        """
        if self.captured is not None:
            self.watch.updated()
            self.watch.contributed()
        if not later:
            if self.captured is not None:
                self.captured.check()
            self.watch.check()

    def _one(self, batch: Tensor) -> None:
        sigma = self.reserve()
        drawn, whose, owners = batch, batch, self.rows.units
        by_unit: dict[str, Any] = {}
        if owners is not None:
            drawn, whose = owners.batch(batch)
            public = self.plan.relation.public_size
            most = owners.most_rows(self.plan.sampler.most(self.step), public)
            by_unit = {"units": whose, "most_rows": most}
        with self._drawing():
            state = self.process.draw(self.state)
            x, y, keep = self.rows.take(drawn)
            with unquoted(*FAILED, let=(UnsupportedModel,)):
                contributions = self.process.contribute(state, x, y)
            release = self.gate(
                contributions, noise_multiplier=sigma, keep=keep, records=whose, **by_unit
            )
            self.watch.contributed()
        self.state = self.process.update(state, release)
        self.watch.updated()
        self.step += 1

    def _shared(self, batch: Tensor) -> None:
        """Make a step with other ranks: what this one computes are its shards of the batch.

        Every shard draws from a seed of its own, so that it does not matter who computes it.
        """
        sigma, seed = self.reserve(), self._seed(int(torch.randint(2**62, ())))
        with _random_state(seed, self._hidden):
            state = self.process.draw(self.state)

        @contextlib.contextmanager
        def contributed(shard: int, records: Tensor) -> Iterator[Any]:
            x, y, _ = self.rows.take(records) if len(records) else (*self.made_up, None)
            with _random_state(seed + 1 + shard, self._hidden):
                with unquoted(*FAILED, let=(UnsupportedModel,)):
                    contributions = self.process.contribute(state, x, y)
                yield contributions

        shares = self._shares(batch, self.like, contributed, self.group)
        keep = self.rows.keep(batch)  # type: ignore[union-attr]
        release = self.gate(shares, noise_multiplier=sigma, keep=keep, records=batch)
        self.watch.contributed()
        self.state = self.process.update(state, release)
        self.watch.updated()
        self.step += 1

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        """Let a step draw from a seed of its own.

        How many numbers a network draws can depend on the batch; what is drawn later, and the
        state of the generators in a checkpoint, must not.
        """
        return _random_state(self._seed(int(torch.randint(2**62, ()))), self._hidden)

    @property
    def _hidden(self) -> bool:
        return not (self.plan.relation.public_size or self.gate.audited())

    def _seed(self, public: int) -> int:
        """Return a seed for what records draw, such as masks: a secret one under add/remove.

        There a record less moves others to other places of a batch, and to the draws of these. Who
        knew the draws would see all of that, and not one record.
        """
        if not self._hidden:
            return public
        drawn = hashlib.blake2b(
            public.to_bytes(8, "big"), key=self.keys.sampling, digest_size=8, person=b"dpbnn draws"
        )
        return int.from_bytes(drawn.digest(), "big") >> 2
