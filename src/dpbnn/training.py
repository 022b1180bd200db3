"""fit(): the loop that every method runs in, with progress, checkpoints and a true ledger."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import math
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpbnn import likelihoods, posteriors
from dpbnn.contributions.kept import Kept
from dpbnn.likelihoods import Likelihood
from dpbnn.methods.base import Method, OpenProcess, Problem, Process
from dpbnn.mixtures import GaussianMixture, checked_points
from dpbnn.networks import LearnedNoise
from dpbnn.posteriors import Posterior
from dpbnn.priors import Gaussian, Prior
from dpbnn.privacy.accountants import accountant
from dpbnn.privacy.bayesian import BayesianAccountant
from dpbnn.privacy.checks import check_count, first_line
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan, round_up
from dpbnn.privacy.sampling import FROZEN_KEY
from dpbnn.privacy.statement import PrivacyStatement
from dpbnn.rows import Rows, checked_rows

__all__ = ["fit", "load"]

_BLOCK = 50  # releases that are written to the ledger at once


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
) -> Posterior:
    """Train a Bayesian network on a plan and return its posterior.

    **Guarantee.** Every release goes through one gate, whose ledger is charged before the release
    exists. What is charged is within `plan.epsilon` at `plan.delta`; `posterior.privacy` states it.
    Nothing that is returned, logged or written has seen the data by another way. Bad data is
    refused before anything is spent.

    Args:
        model: a network (copied, left as it was), or a function that makes one, run under `seed`.
        data: (inputs, targets), tensors or arrays with one row per record; inputs alone, or
            (inputs, None), for a `GaussianMixture`.
        likelihood: "categorical", "gaussian", "heteroscedastic", or a likelihood object.
        prior: of the weights; standard normal by default.
        method: settings of a method, such as SGD, SGLD, SGHMC, BBP, VI, MCDropout or SEP.
        plan: from `dpbnn.plan`, or `dpbnn.open_plan` for training without privacy.
        ledger: where releases are recorded; by default one in `out`, or in memory.
        out: folder for checkpoints, ledger and keys; None keeps nothing on disk.
        resume: go on from the checkpoint in `out`.
        checkpoint_every: steps between checkpoints; about 20 in a run by default.
        seed: of initialisation, dropout and weight draws; noise and sampling have none.
        device: "cpu" or "cuda"; the model's by default.
        microbatch_size: most examples recorded at once.
        on_bad_rows: "error" refuses rows that are not finite, whose label is none of the classes,
            or that the network or likelihood raises on; "zero" lets them contribute nothing.
        tuning_runs: how many other runs on this data chose the settings, for the statement.
        progress: show a progress bar; by default on a terminal.
        debug_seed: seeds noise and sampling; the statement then says "debug: not private".
        accountants: Bayesian accountants that observe the clipped norms of every release. What
            they estimate is raw: it is in no statement and in nothing that is saved.
    """
    if method is None or plan is None:
        raise ValueError(
            "method and plan: both are needed, such as method=dpbnn.SGLD(...), plan=plan"
        )
    check_kinds(model=model, method=method, plan=plan, prior=prior, device=device)
    check_count(checkpoint_every=checkpoint_every, microbatch_size=microbatch_size)
    check_count(0, tuning_runs=tuning_runs)
    prior = Gaussian(1.0) if prior is None else prior
    likely = likelihoods.likelihood(likelihood) if isinstance(likelihood, str) else likelihood
    if not isinstance(likely, Likelihood):
        raise ValueError(
            f"likelihood={likely!r}: must be a name such as 'categorical', or have a method "
            f"log_prob(outputs, y)"
        )
    settled, clip = method.settled(plan)
    with _random_state(seed):
        network = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        if device is not None:
            network = network.to(device)
        learned = isinstance(likely, likelihoods.Gaussian) and likely.noise_std is None
        if learned and not method.own_noise:
            network, likely = _learned_noise(network), likelihoods.HeteroscedasticGaussian()
        if isinstance(network, GaussianMixture):
            data, likely = checked_points(data, network, on_bad_rows), likelihoods.Mixture()
        network = method.prepared(network)
        place = next(network.parameters()).device
        rows = checked_rows(data, network, likely, plan.n, place, on_bad_rows)
        run = _Run(
            method, settled, clip, likely, prior, network, rows,
            ledger=ledger, out=None if out is None else Path(out), resume=resume,
            microbatch_size=microbatch_size, debug_seed=debug_seed,
            every=checkpoint_every or max(1, settled.steps // 20), accountants=accountants,
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
    }
    for name, value in given.items():
        if name in kinds and value is not None and not isinstance(value, kinds[name][0]):
            raise ValueError(f"{name}={value!r}: must be {kinds[name][1]}")
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
    likelihood: Likelihood
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

    def __post_init__(self) -> None:
        plan, method = self.plan, self.method
        self.x, self.y = self.rows.x, self.rows.y
        self.sigmas = [sigma for sigma, count in plan.noise_multipliers for _ in range(count)]
        self.step = 0
        self.name = method.name
        if self.out is not None:
            self.name = f"{method.name}, run {secrets.token_hex(4)}"
        problem = Problem(
            self.network,
            self.likelihood,
            self.prior,
            plan.n,
            plan.batch_size,
            plan.steps,
            plan.private,
            self.microbatch_size,
            self.out,
        )
        self.process: Process = method.start(problem)
        self.network.train()
        self.process.contribute(self.x[:0], self.y[:0])  # refuses what is not per example

    @property
    def settings(self) -> dict[str, Any]:
        """Public settings, for the manifest and to recognise a checkpoint."""
        return {**self.method.settings(), "clip": self.clip, "plan": self.plan.to_dict()}

    @property
    def state_file(self) -> Path | None:
        """Where checkpoints are written."""
        return None if self.out is None else self.out / "checkpoint.safetensors"

    @property
    def key_file(self) -> Path | None:
        """Where the keys of noise and sampling lie between checkpoints, for the owner alone."""
        return None if self.out is None else self.out / "keys.json"

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open ledger, keys and gate; on the way out, delete the keys of a finished run."""
        self.keys, same = self._new_keys(), False
        if self.out is None or self.state_file is None or self.key_file is None:
            if self.resume:
                raise ValueError("resume=True: needs out=, the folder of the run to go on with")
        else:
            self.out.mkdir(parents=True, exist_ok=True)
            if self.resume:
                same = self._load_checkpoint(self.state_file, self.key_file)
            elif self.state_file.exists() or (self.out / "iterates.safetensors").exists():
                raise FileExistsError(
                    f"{self.out} holds an earlier run; pass resume=True to go on with it, or give "
                    f"another folder"
                )
        ledger = self.ledger
        if ledger is None:
            path = None if self.out is None else self.out / "ledger.jsonl"
            ledger = Ledger(path, delta=self.plan.delta, relation=self.plan.relation)
        if ledger.relation is not self.plan.relation:
            raise ValueError(
                f"relation: the plan has {self.plan.relation} and the ledger {ledger.relation}; "
                f"give the plan the ledger's"
            )
        for observer in self.accountants:
            observer.begin(self.plan, ledger.spent(self.name) if self.resume else ())
        if self.step == 0:
            ledger.check(self.plan.own_events)
        if self.ledger is None and not ledger.releases:
            for event in self.plan.beside:
                ledger.spend(event, label="planned beside the training")
        self.gate = Gate(
            self.clip,
            self.sigmas[0],
            self.plan.sampler,
            ledger,
            noise=self._noise(),
            label=self.name,
            step=self.step,
            charged=self._charged(ledger) if same else (),
            watchers=[observer.watch for observer in self.accountants],
        )
        try:
            self.process.ready()
            yield
        finally:
            self.process.close()
        if self.key_file is not None:
            self.key_file.unlink(missing_ok=True)

    def _noise(self) -> NoiseSource:
        if self.debug_seed is not None:
            return NoiseSource.seeded(self.debug_seed, self.step)
        return NoiseSource.from_key(self.keys["noise"], self.step)

    def _new_keys(self) -> dict[str, bytes]:
        if self.debug_seed is not None:
            sampling = hashlib.sha256(f"debug {self.debug_seed}".encode()).digest()
        else:
            sampling = FROZEN_KEY.get() or secrets.token_bytes(32)
        return {"noise": secrets.token_bytes(32), "sampling": sampling}

    def train(self, progress: bool) -> None:
        """Run the remaining steps; an interrupt leaves a checkpoint that can be gone on with."""
        plan = self.plan
        batches = plan.sampler.batches(
            plan.steps - self.step, start=self.step, key=self.keys["sampling"]
        )
        with _bar(plan, self.step, progress) as advance, _deferred_interrupt() as interrupted:
            for batch in batches:
                self._one(batch)
                advance(self.step)
                stop = interrupted()
                if stop or (self.step % self.every == 0 and self.step < plan.steps):
                    self._save_checkpoint()
                if stop:
                    raise KeyboardInterrupt

    def _one(self, batch: Tensor) -> None:
        sigma = self.sigmas[self.step]
        if not self.gate.reserved:
            # Under a budget all at once: runs that share it must not use it up between them.
            block = _BLOCK if self.gate.ledger.budget is None else self.plan.steps
            ahead = self.sigmas[self.step : self.step + block]
            same = next((i for i, s in enumerate(ahead) if s != sigma), len(ahead))
            self.gate.reserve(same, sigma)
        records = batch.to(self.x.device)
        contributions = self.process.contribute(self.x[records], self.y[records])
        kept = self.rows.kept
        if kept is not None:
            contributions = Kept(contributions, kept[records])
        release = self.gate(contributions, noise_multiplier=sigma, records=batch)
        self.process.update(release)
        if isinstance(self.process, OpenProcess) and not self.plan.private:
            whole = records if kept is None else records[kept[records]]
            self.process.visit(self.x[whole], self.y[whole], whole.cpu())
        self.step += 1

    def posterior(self, tuning_runs: int | None) -> Posterior:
        """Return the posterior with its statement."""
        statement = self.gate.statement(delta=self.plan.delta, tuning_runs=tuning_runs)
        for observer in self.accountants:
            observer.dp = statement
        return self.process.posterior(privacy=statement, prior=self.prior, settings=self.settings)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A keyed hash of the data; it is kept in the owner-only key file alone."""
        digest = hashlib.blake2b(key=self.keys["sampling"][:64], digest_size=16)
        for tensor in (self.x, self.y):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _save_checkpoint(self) -> None:
        """Write the state, then the keys that go with it; each replaces the last one at once."""
        if self.state_file is None or self.key_file is None:
            return
        state = {f"process.{k}": v.cpu() for k, v in self.process.state().items()}
        state["random.cpu"] = torch.get_rng_state()
        if self.x.is_cuda:
            state["random.cuda"] = torch.cuda.get_rng_state(self.x.device)
        meta = {
            "step": str(self.step),
            "name": self.name,
            "settings": json.dumps(self.settings, default=str),
        }
        _replace(self.state_file, lambda path: save_file(state, path, metadata=meta))
        if self.debug_seed is None:
            values = {
                "step": self.step,
                "noise": self.gate.noise.key.hex(),
                "sampling": self.keys["sampling"].hex(),
                "data": self.fingerprint,
            }
            _replace(self.key_file, lambda path: _write_private(path, json.dumps(values)))

    def _load_checkpoint(self, path: Path, key_file: Path) -> bool:
        """Restore the process; return whether the keys are those of this checkpoint and data.

        The key file is deleted before anything is released, so that going on twice from one
        checkpoint cannot repeat noise.
        """
        if not path.exists():
            raise FileNotFoundError(f"{path}: no checkpoint to go on with; leave resume out")
        with safe_open(path, "pt") as file:
            meta = file.metadata()
        if meta["settings"] != json.dumps(self.settings, default=str):
            raise ValueError(
                f"{self.out}: the checkpoint is of a run with other settings; give the same plan "
                f"and method, or another folder"
            )
        state = load_file(path, device=str(self.x.device))
        prefix = "process."
        self.process.restore({k[len(prefix) :]: v for k, v in state.items() if prefix in k})
        torch.set_rng_state(state["random.cpu"].cpu())
        if "random.cuda" in state:
            torch.cuda.set_rng_state(state["random.cuda"].cpu(), self.x.device)
        self.step, self.name = int(meta["step"]), meta["name"]
        if not key_file.exists():
            return self.debug_seed is not None
        values = json.loads(key_file.read_text())
        key_file.unlink()
        fresh, self.keys = self.keys, {k: bytes.fromhex(values[k]) for k in ("noise", "sampling")}
        if values["step"] == self.step and values["data"] == self.fingerprint:
            return True
        self.keys = fresh
        self.__dict__.pop("fingerprint", None)
        return False

    def _charged(self, ledger: Ledger) -> list[float]:
        """Return the sigmas of releases that were charged after the checkpoint.

        With the same keys and data they come out the same, so they are not charged again. With new
        keys they would be new releases, and are charged.
        """
        charged = sum(event.count for event in ledger.spent(self.name))
        return self.sigmas[self.step : charged]


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside its place and move it there once it is on disk."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold the first Ctrl-C back until a step is complete; a second one interrupts at once."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _bar(plan: Plan, start: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Show steps, an upper bound on the epsilon spent so far, and the time left.

    On a terminal that is a bar, elsewhere a line four times in a run.
    """
    if not wanted:
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    marks = {math.ceil(plan.steps * i / 4): 0.0 for i in (1, 2, 3)}
    marks[plan.steps] = round_up(plan.epsilon, 3) if plan.private else math.inf
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[spent]}"),
        TimeRemainingColumn(),
    )

    def spent(step: int) -> str:
        if not plan.private:
            return "not private"
        mark = min(m for m in marks if m >= step)
        if not marks[mark]:
            runs, left = [], mark
            for sigma, count in plan.noise_multipliers:
                runs.append((sigma, min(count, left)))
                left -= runs[-1][1]
            part = dataclasses.replace(plan, noise_multipliers=tuple(r for r in runs if r[1]))
            cost = accountant(plan.accountant).epsilon(part.events, plan.delta, plan.relation)
            marks[mark] = round_up(cost, 3)
        return f"epsilon <= {marks[mark]}"

    console = Console(stderr=True)
    if not console.is_terminal:

        def line(step: int) -> None:
            if step in marks:
                print(f"training: step {step}/{plan.steps}, {spent(step)}", file=sys.stderr)

        yield line
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=plan.steps, completed=start, spent=spent(max(1, start)))
        yield lambda step: bar.update(task, completed=step, spent=spent(step))
