"""fit(): the loop that every method runs in, with progress, checkpoints and a true ledger."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn import likelihoods, posteriors
from dpbnn.checkpoint import Checkpoint, Keys, RunFolder, folder_lock
from dpbnn.contributions import UnsupportedModel
from dpbnn.likelihoods import Likelihood
from dpbnn.messages import unquoted
from dpbnn.methods.method import Method, OpenProcess, Problem, Process
from dpbnn.methods.watch import Watch, taken
from dpbnn.mixtures import GaussianMixture, checked_points
from dpbnn.networks import LearnedNoise, training_mode
from dpbnn.posteriors import Posterior
from dpbnn.posteriors.evaluate import unfused_attention
from dpbnn.priors import Gaussian, Prior
from dpbnn.privacy.bayesian import BayesianAccountant
from dpbnn.privacy.checks import check_count, check_one_process, first_line, quoted
from dpbnn.privacy.events import Event
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.keys import ratchet
from dpbnn.privacy.ledger import Attempt, Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.sampling import FROZEN_KEY
from dpbnn.privacy.statement import PrivacyStatement
from dpbnn.progress import deferred_interrupt, progress_bar
from dpbnn.rows import Rows, checked_rows

__all__ = ["fit", "load"]

_BLOCK = 50  # releases that are written to the ledger at once
_HELD = 1 << 28  # bytes that a process may hold back from the disk between two checkpoints
_BESIDE = "planned beside the training"
_FAILED = (
    "the method, the network or the likelihood raised an error on a batch of the data",
    "run it on public rows of that shape to see more",
)


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
    tuning_runs: int | None = None,
    progress: bool | None = None,
    debug_seed: int | None = None,
    accountants: Sequence[BayesianAccountant] = (),
    beside_paid: bool = False,
) -> Posterior:
    """Train a Bayesian network on a plan and return its posterior.

    **Guarantee.** Every release goes through one gate, whose ledger is charged before the release
    exists. What is charged is within `plan.epsilon` at `plan.delta`; `posterior.privacy` states it.
    Nothing that is returned, logged or written has seen the data by another way. Bad data is
    refused before anything is spent. A run that was interrupted goes on with the same noise only
    for the same steps of the same computation on the same data; otherwise it is refused, or gets
    new noise and pays for it.

    Args:
        model: a network (copied, left as it was), or a function that makes one, run under `seed`.
            It is trained in training mode; frozen modules, and BatchNorm layers, that are given in
            evaluation mode stay there.
        data: (inputs, targets), tensors or arrays with one row per record; inputs alone, or
            (inputs, None), for a `GaussianMixture`. They have plan.n rows; under add/remove any
            number of them, also none.
        likelihood: "categorical", "gaussian", "heteroscedastic", or a likelihood object.
        prior: of the weights; standard normal by default.
        method: settings of a method, such as SGD, SGLD, SGHMC, BBP, VI, MCDropout or SEP.
        plan: from `dpbnn.plan`, or `dpbnn.open_plan` for training without privacy.
        ledger: where releases are recorded; by default one in `out`, or in memory.
        out: folder for checkpoints, ledger and keys, for one process at a time; None keeps nothing
            on disk.
        resume: go on from the checkpoint in `out`, with the ledger that holds its releases.
        checkpoint_every: steps between checkpoints; about 20 in a run by default.
        seed: of initialisation, dropout and weight draws; noise and sampling have none.
        device: "cpu" or "cuda"; the model's by default.
        microbatch_size: most examples recorded at once.
        on_bad_rows: "error" refuses rows that are not finite, whose label is none of the classes,
            or that the network or likelihood raises on, and says how many there are; "show" does
            the same and names rows and what was raised, which quotes private data; "zero" lets
            them contribute nothing.
        tuning_runs: how many other runs on this data chose the settings, for the statement.
        progress: show a progress bar; by default on a terminal.
        debug_seed: seeds noise and sampling; the statement then says "debug: not private".
        accountants: Bayesian accountants that observe the clipped norms of every release. What
            they estimate is raw: it is in no statement and in nothing that is saved.
        beside_paid: the caller charges what the plan has beside it to `ledger`. Otherwise it is
            charged here, but for what single gates, such as private statistics, spent there.
    """
    check_one_process()
    if method is None or plan is None:
        raise ValueError(
            "method and plan: both are needed, such as method=dpbnn.SGLD(...), plan=plan"
        )
    check_kinds(model=model, method=method, plan=plan, prior=prior, device=device, ledger=ledger)
    check_count(checkpoint_every=checkpoint_every, microbatch_size=microbatch_size)
    check_count(0, tuning_runs=tuning_runs)
    prior = Gaussian(1.0) if prior is None else prior
    likely = likelihoods.likelihood(likelihood) if isinstance(likelihood, str) else likelihood
    if not isinstance(likely, Likelihood):
        raise ValueError(
            f"likelihood={quoted(likely)}: must be a name such as 'categorical', or have a method "
            f"log_prob(outputs, y)"
        )
    settled, clip = method.settled(plan)
    with _random_state(seed), unfused_attention():
        network = taken(model)
        if device is not None:
            network = network.to(device)
        learned = isinstance(likely, likelihoods.Gaussian) and likely.noise_std is None
        if learned and not method.own_noise:
            network, likely = _learned_noise(network), likelihoods.HeteroscedasticGaussian()
        if isinstance(network, GaussianMixture):
            hidden = None if plan.relation.public_size else plan.n
            data = checked_points(data, network, on_bad_rows, hidden)
            likely = likelihoods.Mixture()
        network = method.prepared(network)
        watch = Watch(network, likely)
        place = next(network.parameters()).device
        size = plan.n if plan.relation.public_size else None
        rows = checked_rows(data, network, likely, size, place, on_bad_rows)
        watch.check()
        run = _Run(
            method, settled, clip, watch, prior, network, rows,
            ledger=ledger, out=None if out is None else Path(out), resume=resume,
            microbatch_size=microbatch_size, debug_seed=debug_seed,
            every=checkpoint_every or max(1, settled.steps // 20), accountants=accountants,
            beside_paid=beside_paid, seed=seed,
        )  # fmt: skip
        with run.opened():
            run.train(sys.stderr.isatty() if progress is None else progress)
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


@contextlib.contextmanager
def _random_state(seed: int) -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        if devices:
            torch.cuda.manual_seed_all(seed)
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` is far slower
        yield


def check_kinds(**given: Any) -> None:
    """Raise where an argument of `fit` is of another kind than it must be; None is left out.

    Args:
        **given: any of model, method, plan, prior and device.
    """
    kinds: dict[str, tuple[Any, str]] = {
        "model": (nn.Module | Callable, "a network, or a function that makes one"),
        "method": (Method, "a method's settings, such as dpbnn.SGLD(learning_rate=1e-5)"),
        "plan": (Plan, "what dpbnn.plan(...) or dpbnn.open_plan(...) returns"),
        "prior": (Prior, "a prior, such as dpbnn.Gaussian(1.0)"),
        "ledger": (Ledger, "a ledger, such as dpbnn.Ledger('ledger.jsonl')"),
    }
    for name, value in given.items():
        if name in kinds and value is not None and not isinstance(value, kinds[name][0]):
            raise ValueError(f"{name}={quoted(value)}: must be {kinds[name][1]}")
    device = given.get("device")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ValueError(
                f"device={device!r}: cannot be used here ({first_line(error)}); pass device='cpu'"
            ) from None


def _learned_noise(network: nn.Module) -> nn.Module:
    last = [m for m in network.modules() if isinstance(m, nn.Linear)]
    if not last:
        raise ValueError("a learned noise needs a network that ends in a Linear layer")
    return nn.Sequential(network, LearnedNoise(last[-1].out_features).to(last[-1].weight.device))


@dataclasses.dataclass
class _Run:
    """One training run: the gate, the process, and what is on disk."""

    method: Method
    plan: Plan
    clip: float
    watch: Watch
    prior: Prior
    network: nn.Module
    rows: Rows
    ledger: Ledger | None
    out: Path | None
    resume: bool
    every: int
    microbatch_size: int | None
    debug_seed: int | None
    accountants: Sequence[BayesianAccountant] = ()
    beside_paid: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        plan, method = self.plan, self.method
        self.x, self.y = self.rows.x, self.rows.y
        self.sigmas = [sigma for sigma, count in plan.noise_multipliers for _ in range(count)]
        self.step, self.process_id = 0, os.getpid()
        self.run, self.label = secrets.token_hex(8), method.name
        if self.out is not None:
            self.label = f"{method.name}, run {self.run[:8]}"
        problem = Problem(
            self.network,
            self.watch.likelihood,
            self.prior,
            plan.n,
            plan.batch_size,
            plan.steps,
            plan.private,
            self.microbatch_size,
            self.out,
            self.watch.network,
        )
        training_mode(self.network)
        self.process: Process = method.start(problem)
        self.process.contribute(self.x[:0], self.y[:0])  # refuses what is not per example

    @property
    def settings(self) -> dict[str, Any]:
        """Public settings, for the manifest and to recognise a checkpoint."""
        return {**self.method.settings(), "clip": self.clip, "plan": self.plan.to_dict()}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open folder, ledger, keys and gate; a run that ends well leaves no keys."""
        self.folder = None if self.out is None else RunFolder(self.out)
        if self.folder is None and self.resume:
            raise ValueError("resume=True: needs out=, the folder of the run to go on with")
        with contextlib.nullcontext() if self.out is None else folder_lock(self.out):
            before = self._earlier()
            ledger = self._opened_ledger(before)
            self.keys = self._opened_keys(before)
            if before is not None:
                self._restore(before)
            attempt = Attempt(self.run, self.keys.name, self.keys.what)
            beside = () if before is not None or self.beside_paid else self._unpaid()
            ledger.check((*self._uncharged(ledger, attempt), *beside))
            for observer in self.accountants:
                observer.begin(self.plan, ledger.spent(self.label) if self.resume else ())
            for event in beside:
                ledger.spend(event, label=_BESIDE)
            self.gate = Gate(
                self.clip,
                self.sigmas[0],
                self.plan.sampler,
                ledger,
                noise=self._noise(),
                label=self.label,
                step=self.step,
                attempt=attempt,
                watchers=[observer.watch for observer in self.accountants],
            )
            try:
                self.process.ready()
                self._forget_keys()  # so that going on twice from here cannot repeat noise
                yield
            finally:
                self.process.close()

    def _earlier(self) -> Checkpoint | None:
        """Return the checkpoint to go on with, if that is asked for."""
        if self.folder is None:
            return None
        if not self.resume:
            if self.folder.holds_a_run():
                raise FileExistsError(
                    f"{self.out} holds an earlier run; pass resume=True to go on with it, or give "
                    f"another folder"
                )
            return None
        checkpoint = self.folder.load(self.x.device)
        if checkpoint.settings != json.dumps(self.settings, default=str):
            raise ValueError(
                f"{self.out}: the checkpoint is of a run with other settings; give the same plan "
                f"and method, or another folder"
            )
        return checkpoint

    def _opened_ledger(self, before: Checkpoint | None) -> Ledger:
        """Return the ledger; the one that holds all of the run so far, where it goes on."""
        ledger = self.ledger
        path = None if self.folder is None else self.folder.ledger_file
        if ledger is None and (before is None or (path is not None and path.exists())):
            ledger = Ledger(path, delta=self.plan.delta, relation=self.plan.relation)
        if before is not None and (
            ledger is None
            or ledger.id != before.ledger
            or not ledger.holds(before.head)
            or ledger.steps(before.run) < before.step
        ):
            raise ValueError(
                f"{self.out}: the {before.step} releases of this run are not in the ledger given, "
                f"so it cannot say what was spent. Give the ledger that the run began with, "
                f"restored from a backup if need be; or start a new run in another folder, and "
                f"count all of this one as spent: dpbnn.plan(..., beside=[plan])"
            )
        assert ledger is not None
        if ledger.relation is not self.plan.relation:
            raise ValueError(
                f"relation: the plan has {self.plan.relation} and the ledger {ledger.relation}; "
                f"give the plan the ledger's"
            )
        return ledger

    def _opened_keys(self, before: Checkpoint | None) -> Keys:
        """Return keys that serve this computation alone.

        Without keys on disk the steps after the checkpoint get new ones: they are other releases,
        and are charged.
        """
        if self.debug_seed is not None:
            seed = hashlib.sha256(f"debug {self.debug_seed}".encode()).digest()
            return Keys("debug", seed, ratchet(seed, before.step if before else 0), seed)
        keys = None
        if self.folder is not None and before is not None:
            keys = self.folder.keys(before.step)
        keys = keys or Keys.new(FROZEN_KEY.get())
        if self.folder is not None:
            keys.bind(
                [p for p in self.network.parameters() if p.requires_grad],
                settings=self.settings,
                method=self.method,
                plan=self.plan.to_dict(),
                network=self.network,
                likelihood=self.watch.likelihood,
                prior=self.prior,
                data=(self.x, self.y, self.rows.kept),
                seed=self.seed,
                microbatch_size=self.microbatch_size,
                device=self.x.device.type,
            )
        return keys

    def _uncharged(self, ledger: Ledger, attempt: Attempt) -> list[Event]:
        """Return the events of the steps to come that the ledger does not hold yet."""
        first = self.step + len(ledger.covered(attempt, self.step))
        return [
            self.plan.sampler.event(sigma, len(list(same)), first)
            for sigma, same in itertools.groupby(self.sigmas[first:])
        ]

    def _unpaid(self) -> list[Event]:
        """Return what the plan has beside the training and nobody has charged.

        What single gates have spent from the given ledger, such as private statistics, is theirs.
        Equal events of other runs, or charged for them, pay for nothing.
        """
        held = Counter[Event]()
        for event in [] if self.ledger is None else self.ledger.outside_runs(_BESIDE):
            held[dataclasses.replace(event, count=1)] += event.count
        unpaid = []
        for event in self.plan.beside:
            unit = dataclasses.replace(event, count=1, start=0, order="")
            there = min(held[unit], event.count)
            held[unit] -= there
            if event.count > there:
                unpaid.append(dataclasses.replace(event, count=event.count - there))
        return unpaid

    def _noise(self) -> NoiseSource:
        if self.debug_seed is not None:
            return NoiseSource.seeded(self.debug_seed, self.step)
        purpose = f"noise {self.keys.what}"
        return NoiseSource.from_key(self.keys.noise, self.step, purpose=purpose)

    def train(self, progress: bool) -> None:
        """Run the remaining steps; an interrupt leaves a checkpoint that can be gone on with."""
        plan = self.plan
        self.watch.begin(self.process)
        batches = plan.sampler.batches(
            plan.steps - self.step,
            start=self.step,
            key=self.keys.sampling,
            records=len(self.x),
        )
        with (
            progress_bar(plan, self.step, progress) as advance,
            deferred_interrupt() as interrupted,
        ):
            for batch in batches:
                self._one(batch)
                self._check_process()
                self.keys.advance(self.gate.noise.key)
                advance(self.step)
                stop = interrupted()
                if stop or (self._due() and self.step < plan.steps):
                    self._save_checkpoint()
                if stop:
                    raise stop
        self._forget_keys()

    def _check_process(self) -> None:
        if os.getpid() != self.process_id:
            raise RuntimeError(
                "fit was forked in the middle of a run, so that two processes would go on with it; "
                "fork before or after"
            )

    def _forget_keys(self) -> None:
        if self.folder is not None:
            self.folder.forget_keys()

    def _due(self) -> bool:
        return self.step % self.every == 0 or self.process.held_bytes > _HELD

    def _one(self, batch: Tensor) -> None:
        sigma = self.sigmas[self.step]
        if not self.gate.reserved:
            # Under a budget all at once: runs that share it must not use it up between them.
            block = _BLOCK if self.gate.ledger.budget is None else self.plan.steps
            ahead = self.sigmas[self.step : self.step + block]
            same = next((i for i, s in enumerate(ahead) if s != sigma), len(ahead))
            self.gate.reserve(same, sigma)
        records = batch.to(self.x.device)
        kept = self.rows.kept
        with self._drawing():
            with unquoted(*_FAILED, let=(UnsupportedModel,)):
                contributions = self.process.contribute(self.x[records], self.y[records])
            keep = None if kept is None else kept[records]
            release = self.gate(contributions, noise_multiplier=sigma, records=batch, keep=keep)
            self.watch.contributed()
        self.process.update(release)
        self.watch.updated()
        if isinstance(self.process, OpenProcess) and not self.plan.private:
            whole = records if kept is None else records[kept[records]]
            with unquoted(*_FAILED):
                self.process.visit(self.x[whole], self.y[whole], whole.cpu())
        self.step += 1

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        """Let a step draw from a seed of its own.

        How many numbers a network draws can depend on the batch; what is drawn later, and the
        state of the generators in a checkpoint, must not.
        """
        return _random_state(int(torch.randint(2**62, ())))

    def posterior(self, tuning_runs: int | None) -> Posterior:
        """Return the posterior with its statement."""
        statement = self.gate.statement(delta=self.plan.delta, tuning_runs=tuning_runs)
        for observer in self.accountants:
            observer.dp = statement
        posterior = self.process.posterior(
            privacy=statement, prior=self.prior, settings=self.settings
        )
        return self.watch.checked(posterior)

    def _save_checkpoint(self) -> None:
        if self.folder is not None:
            self.folder.save(self._checkpoint, self.keys if self.debug_seed is None else None)

    def _checkpoint(self) -> Checkpoint:
        tensors = {f"process.{k}": v.cpu() for k, v in self.process.state().items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if self.x.is_cuda:
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.x.device)
        return Checkpoint(
            step=self.step,
            run=self.run,
            label=self.label,
            ledger=self.gate.ledger.id,
            head=self.gate.ledger.head,
            settings=json.dumps(self.settings, default=str),
            tensors=tensors,
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        state, prefix = checkpoint.tensors, "process."
        try:
            self.process.restore({k[len(prefix) :]: v for k, v in state.items() if prefix in k})
        except (RuntimeError, KeyError, IndexError):
            raise ValueError(
                f"{self.out}: the checkpoint does not fit this network and method; give the same "
                f"ones as before, or another folder"
            ) from None
        torch.set_rng_state(state["random.cpu"].cpu())
        if "random.cuda" in state:
            torch.cuda.set_rng_state(state["random.cuda"].cpu(), self.x.device)
        self.step, self.run, self.label = checkpoint.step, checkpoint.run, checkpoint.label
