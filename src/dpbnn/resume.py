"""A run and what lies beside it: its ledger, its keys, its gate, its checkpoints.

Everything here is about opening a run, also an earlier one, and about writing checkpoints. The
steps are elsewhere: `training.py` has the private ones, `open_training.py` those without privacy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpbnn.checkpoint import Checkpoint, Keys, RunFolder, folder_lock
from dpbnn.computed import arithmetic, code, repeats
from dpbnn.methods.method import AnyProcess, Method, Problem
from dpbnn.methods.state import flat
from dpbnn.methods.watch import Watch
from dpbnn.networks.sharded import Sharding
from dpbnn.posteriors import Posterior
from dpbnn.posteriors.shards import ShardedPosterior
from dpbnn.privacy.bayesian import BayesianAccountant
from dpbnn.privacy.events import Event, unpaid
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.group import Group
from dpbnn.privacy.keys import ratchet
from dpbnn.privacy.ledger import Attempt, Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.relation import check_same
from dpbnn.progress import deferred_interrupt, progress_bar
from dpbnn.rank_rows import RankRows
from dpbnn.ranks import check_same_state, in_step
from dpbnn.rows import Rows, StreamedRows
from dpbnn.shard_files import RowFiles

FAILED = (
    "the method, the network or the likelihood raised an error on a batch of the data",
    "run it on public rows of that shape to see more",
)

_BLOCK = 50  # releases that are written to the ledger at once
_HELD = 1 << 28  # bytes of iterates that wait for the disk between two checkpoints
_BESIDE = "planned beside the training"


@dataclasses.dataclass
class Run(ABC):
    """One training run: the process and its state, the gate, and what is on disk."""

    method: Method
    problem: Problem
    process: AnyProcess[Any]
    plan: Plan
    clip: float | dict[str, float]
    watch: Watch
    rows: Rows | StreamedRows | RankRows
    ledger: Ledger | None
    resume: bool
    every: int
    debug_seed: int | None
    observers: Sequence[BayesianAccountant] = ()
    beside_paid: bool = False
    seed: int = 0
    group: Group = dataclasses.field(default_factory=Group)

    def __post_init__(self) -> None:
        self.x, self.y = self.rows.x, self.rows.y  # None where rows are read batch by batch
        self.device, self.out = self.rows.device, self.problem.folder
        self.sigmas = [sigma for sigma, count in self.plan.noise_multipliers for _ in range(count)]
        self.step, self.process_id = 0, os.getpid()
        self.run, self.label = secrets.token_hex(8), self.method.name
        if self.out is not None:
            self.label = f"{self.method.name}, run {self.run[:8]}"
        self.state: Any = self.process.begin()
        parts = self.problem.parts
        self.sharding = parts if isinstance(parts, Sharding) else None
        self.files = RowFiles.of(self.sharding, self.group, self.out)
        self._network, self._trained = parts.identity(self.problem.model)

    @abstractmethod
    def train(self, progress: bool) -> None:
        """Run the remaining steps; an interrupt leaves a checkpoint to resume from."""

    @property
    def settings(self) -> dict[str, Any]:
        """Public settings, for the manifest and to recognise a checkpoint."""
        return {**self.method.settings(), "clip": self.clip, "plan": self.plan.to_dict()}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open folder, ledger, keys and gate; a run that ends well leaves no keys.

        Of several ranks the first one has them, and tells the others what they need.
        """
        given = {"resume": self.resume, "checkpoint_every": self.every, "out": self.out is None,
                 "debug_seed": self.debug_seed, "beside_paid": self.beside_paid}  # fmt: skip
        self.group.check_same({name: str(value) for name, value in given.items()})
        self.folder = None if self.out is None or self.group.rank else RunFolder(self.out)
        if self.out is None and self.resume:
            raise ValueError("resume=True: needs out=, the folder of the run to resume")
        if self.out is not None or self.group.size > 1:
            flat(self.state)  # raises where it cannot be saved
        with contextlib.ExitStack() as stack:
            if self.out is not None:
                own = folder_lock(self.out)
                self.group.first(lambda: stack.enter_context(own))
            before = self.group.first(self._earlier)
            ledger = self._joint_ledger(before)
            self.keys = self._joint_keys(before)
            if before is not None:
                self._restore(before)
            attempt = Attempt(self.run, self.keys.name, self.keys.what)

            def begin() -> None:
                paid = () if self.ledger is None else self.ledger.outside_runs(_BESIDE)
                again = before is not None or self.beside_paid
                beside = () if again else unpaid(self.plan.beside, paid)
                ledger.check((*self._uncharged(ledger, attempt), *beside))
                for observer in self.observers:
                    observer.begin(self.plan, ledger.spent(self.label) if self.resume else ())
                for event in beside:
                    ledger.spend(event, label=_BESIDE)

            self.group.first(begin)
            self.gate = Gate(
                self.clip,
                self.sigmas[0],
                self.plan.sampler,
                ledger,
                noise=self._noise(),
                label=self.label,
                step=self.step,
                attempt=attempt,
                watchers=[observer.watch for observer in self.observers],
                group=self.group,
            )
            try:
                self.group.first(lambda: self.process.ready(self.state))
                self._forget_keys()  # so that going on twice from here cannot repeat noise
                self._compare()
                yield
            finally:
                self._close_writer()

    def _compare(self) -> None:
        """Raise where ranks that should have the same state do not."""
        if self.sharding is None:
            check_same_state(self.group, self.state)

    def _close_writer(self) -> None:
        """Forget iterates since the last checkpoint: the key of their noise may be on disk.

        After a run that ended well there are none. An error of one that failed is not hidden.
        """
        if self.process.writer is not None:
            with contextlib.suppress(OSError):
                self.process.writer.close(drop=True)

    def _earlier(self) -> Checkpoint | None:
        """Return the checkpoint to resume from, if that is asked for."""
        if self.folder is None:
            return None
        if not self.resume:
            if self.folder.holds_a_run():
                raise FileExistsError(
                    f"{self.out} holds an earlier run; pass resume=True to continue it, or give "
                    f"another folder"
                )
            return None
        checkpoint = self.folder.load(torch.device("cpu") if self.group.size > 1 else self.device)
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
        check_same(self.plan.relation, ledger.relation)
        return ledger

    def _joint_ledger(self, before: Checkpoint | None) -> Ledger:
        """Return the ledger on rank 0, and on others one in memory that is never charged."""
        opened: list[Ledger] = []
        if self.group.size > 1 and self.ledger is not None and self.ledger.path is None:
            raise ValueError(
                "ledger: is in memory, where the processes of a group do not share it; give it a "
                "path, or leave it out"
            )

        def name() -> str:
            opened.append(self._opened_ledger(before))
            return opened[0].id

        own = self.group.first(name)
        self.group.check_same({"ledger": self.ledger.id if self.ledger is not None else own})
        return opened[0] if opened else Ledger(relation=self.plan.relation)

    def _joint_keys(self, before: Checkpoint | None) -> Keys:
        """Return the keys on rank 0, and on others all but that of the noise.

        Ranks that were given different data or settings are refused.
        """
        opened: list[Keys] = []

        def told() -> Keys:
            opened.append(self._opened_keys(before))
            if self.sharding is not None:  # each rank noises its own rows
                return opened[0]
            return dataclasses.replace(opened[0], noise=b"")

        keys = self.group.first(told)
        self.group.shards = keys.shards
        if self.group.size > 1:
            own = dataclasses.replace(keys, bound={})
            self._bind(own)
            self.group.check_same(own.bound)
        return opened[0] if opened else keys

    def _opened_keys(self, before: Checkpoint | None) -> Keys:
        """Return keys that serve this computation alone.

        Without keys on disk the steps after the checkpoint get new ones: they are other releases,
        and are charged.
        """
        shards, threads = self.group.shards, torch.get_num_threads()
        if self.debug_seed is not None:
            seed = hashlib.sha256(f"debug {self.debug_seed}".encode()).digest()
            sampling = ratchet(seed, before.step if before else 0)
            return Keys("debug", seed, sampling, seed, shards=shards, threads=threads)
        keys = None
        if self.folder is not None and before is not None:
            keys = self.folder.keys(before.step)
        if keys is not None and keys.shards < self.group.size:
            raise ValueError(
                f"{self.out}: this run divides batches among {keys.shards} processes at most, and "
                f"cannot go on with the same noise on {self.group.size}; start fewer, or delete "
                f"its keys.json, so that it continues with new noise and pays for it"
            )
        keys = keys or dataclasses.replace(Keys.new(), shards=shards, threads=threads)
        if self.folder is not None:
            self._bind(keys)
        return keys

    def _bind(self, keys: Keys) -> None:
        split = {} if keys.shards == 1 else {"shards": [keys.shards, keys.threads]}
        keys.bind(
            self._trained,
            settings=self.settings,
            method=self.method,
            plan=self.plan.to_dict(),
            network=self._network,
            likelihood=self.watch.likelihood,
            prior=self.problem.prior,
            data=self.rows.identity,
            seed=self.seed,
            microbatch_size=self.problem.microbatch_size,
            device=self.device.type,
            **{"the code of dpbnn": code(), "torch's arithmetic": arithmetic(self.device)},
            **split,
        )

    def _uncharged(self, ledger: Ledger, attempt: Attempt) -> list[Event]:
        """Return the events of the steps to come that the ledger does not hold yet."""
        first = self.step + len(ledger.covered(attempt, self.step))
        return [
            self.plan.sampler.event(sigma, len(list(same)), first)
            for sigma, same in itertools.groupby(self.sigmas[first:])
        ]

    def _noise(self) -> NoiseSource:
        if self.debug_seed is not None:
            return NoiseSource.seeded(self.debug_seed, self.step)
        if self.group.rank and self.sharding is None:
            return NoiseSource()  # never drawn from
        purpose = f"noise {self.keys.what}"
        return NoiseSource.from_key(self.keys.noise, self.step, purpose=purpose)

    def _forget_keys(self) -> None:
        if self.folder is not None:
            self.folder.forget_keys()

    def batches(self) -> Iterator[Tensor]:
        """Return the batches of the remaining steps, as the plan draws them."""
        return self.plan.sampler.batches(
            self.plan.steps - self.step,
            start=self.step,
            key=self.keys.sampling,
            records=self.rows.drawn,
        )

    def reserve(self) -> float:
        """Charge the ledger for the next step, where that has not been done; return its sigma."""
        sigma = self.sigmas[self.step]
        if not self.gate.reserved:
            # Under a budget all at once: runs that share it must not use it up between them.
            budget = self.group.first(lambda: self.gate.ledger.budget)  # rank 0 alone has one
            block = _BLOCK if budget is None else self.plan.steps
            ahead = self.sigmas[self.step : self.step + block]
            same = next((i for i, s in enumerate(ahead) if s != sigma), len(ahead))
            self.gate.reserve(same, sigma)
        return sigma

    @contextlib.contextmanager
    def steps(self, progress: bool) -> Iterator[Callable[[], None]]:
        """Give a function that ends a step: keys move on, checkpoints are written.

        An interrupt is held back until then.
        """
        self.watch.begin(self.process, self.state)
        with (
            progress_bar(self.plan, self.step, progress) as advance,
            deferred_interrupt() as interrupted,
        ):

            def done() -> None:
                self._check_process()
                self.keys.advance(self.gate.noise.key)
                advance(self.step)
                stop = in_step(self.group, self.state, interrupted(), self.sharding is None)
                if self.step % self.every == 0:
                    self._compare()
                if stop or (self._due() and self.step < self.plan.steps):
                    self._save_checkpoint(stop is not None)
                if stop:
                    raise stop

            yield done
        self._forget_keys()

    def _due(self) -> bool:
        writer = self.process.writer
        return self.step % self.every == 0 or (writer is not None and writer.held_bytes > _HELD)

    def _check_process(self) -> None:
        if os.getpid() != self.process_id:
            raise RuntimeError(
                "fit was forked in the middle of a run, so that two processes would continue it; "
                "fork before or after"
            )

    def posterior(self, tuning_runs: int | None) -> Posterior:
        """Return the posterior with its statement."""
        self._compare()
        details = {"tuning_runs": tuning_runs, "public": self.method.public()}
        statement = self.group.first(lambda: self.gate.statement(delta=self.plan.delta, **details))
        self.process.share(self.state, self.group)
        for observer in self.observers:
            observer.dp = statement
        caveats = self.method.caveats(self.plan, self.problem.prior)
        settings = {**self.settings, "caveats": list(caveats)}
        posterior = self.process.posterior(
            self.state, privacy=statement, prior=self.problem.prior, settings=settings
        )
        if self.sharding is None:
            return self.watch.checked(posterior)
        self.watch.check()
        average = getattr(self.state, "average", None)
        return ShardedPosterior(posterior, self.sharding, average.values if average else {})

    def _settle(self) -> None:  # noqa: B027, most have nothing to look at
        """Look at what the steps have left, before anything of them leaves the run."""

    def _save_checkpoint(self, last: bool) -> None:
        if self.files is not None:
            self._save_rows(self.files)
        if self.folder is not None:
            self._settle()
            # Sums that may differ when they are made again would get the same noise once more.
            again = self.debug_seed is None and self.rows.fixed and (last or repeats(self.device))
            self.folder.save(self._checkpoint, self.keys if again else None)
            if self.files is not None:
                self.files.forget_others()

    def _save_rows(self, files: RowFiles) -> None:
        """Write what each rank has of a sharded run, after the keys on disk are gone."""
        self.watch.check()
        self.group.first(self._forget_keys)
        if self.process.writer is not None:
            self.process.writer.flush()
        files.save(flat(self.state, "state"))

    def _checkpoint(self) -> Checkpoint:
        if self.process.writer is not None:
            self.process.writer.flush()  # with the checkpoint, which replaces the key of its noise
        tensors = {name: value.cpu() for name, value in flat(self.state, "state").items()}
        if self.files is not None:
            tensors = self.files.rest(tensors)
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
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
        tensors, start = checkpoint.tensors, "state."
        tensors = {name: value.to(self.device) for name, value in tensors.items()}
        saved = {n[len(start) :]: v for n, v in tensors.items() if n.startswith(start)}
        try:
            if self.files is not None:
                rows = self.files.load(tensors)
                saved |= {name[len(start) :]: value for name, value in rows.items()}
            self.state = self.process.resumed(self.state, saved)
            if flat(self.state).keys() != self.process.read(saved.keys()):
                raise KeyError
        except (RuntimeError, KeyError, IndexError):
            raise ValueError(
                f"{self.out}: the checkpoint does not fit this network and method; give the same "
                f"ones as before, or another folder"
            ) from None
        torch.set_rng_state(tensors["random.cpu"].cpu())
        if "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"].cpu(), self.device)
        self.step, self.run, self.label = checkpoint.step, checkpoint.run, checkpoint.label
