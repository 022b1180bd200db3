"""The folder of a run: one process at a time, checkpoints, and the keys that go with them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpbnn.computed import digest
from dpbnn.privacy.checks import first_line
from dpbnn.privacy.keys import ratchet
from dpbnn.privacy.locks import lock, sync_folder, unlock
from dpbnn.storage import replace_file

__all__ = ["Checkpoint", "Keys", "RunFolder", "folder_lock"]

LOCK = ".lock"
_FORMAT = "2"  # of checkpoints: names of their tensors
_SECRET = ("noise", "sampling", "salt")


@dataclasses.dataclass
class Keys:
    """Secrets of a run's noise and sampling, as they are before one step.

    Attributes:
        name: public; a run that gets new keys gets a new name for them.
        noise: key of the next step's noise.
        sampling: key of the next step's batch.
        salt: key of the digests.
        bound: digests of all that the keys are used for, by part; the data are one of them.
        shards: into how many parts batches are divided; see `dpbnn.privacy.group`.
        threads: of every process. Sums depend on both.
    """

    name: str
    noise: bytes
    sampling: bytes
    salt: bytes
    bound: dict[str, str] = dataclasses.field(default_factory=dict)
    shards: int = 1
    threads: int = 0

    @classmethod
    def new(cls) -> Keys:
        """Draw keys from operating-system entropy."""
        noise, sampling, salt = (secrets.token_bytes(32) for _ in range(3))
        return cls(secrets.token_hex(8), noise, sampling, salt)

    @property
    def what(self) -> str:
        """One digest of all that the keys are bound to."""
        text = json.dumps(self.bound, sort_keys=True).encode()
        return hashlib.blake2b(text, key=self.salt, digest_size=16).hexdigest()

    def bind(self, trained: Iterable[Tensor], **parts: Any) -> None:
        """Bind new keys to what they are used for; raise where keys are bound to something else.

        Args:
            trained: the tensors that the run trains, whose values count in nothing.
            **parts: what is computed, and from what.
        """
        trained = list(trained)
        found = {name: digest(value, self.salt, trained) for name, value in parts.items()}
        if self.bound and self.bound != found:
            other = " and ".join(name for name in found if found[name] != self.bound.get(name))
            raise ValueError(
                f"{other}: not those of the run to be resumed. The same noise on another function "
                f"of the data would show the data. Give what the run began with; or delete its "
                f"keys.json, so that it continues with new noise and pays for it"
            )
        self.bound = found

    def advance(self, noise: bytes) -> None:
        """Move on by one step; the keys of the step that was made are gone."""
        self.noise, self.sampling = noise, ratchet(self.sampling)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A run after some steps.

    Attributes:
        step: how many steps were made.
        run: name of the run.
        label: of its entries in the ledger.
        ledger: name of the ledger that holds them.
        head: checksum of that ledger's entries when the checkpoint was written.
        settings: of the run, public, as JSON.
        tensors: state of the process and of the random numbers that are no noise.
    """

    step: int
    run: str
    label: str
    ledger: str
    head: str
    settings: str
    tensors: dict[str, Tensor] = dataclasses.field(repr=False)


class RunFolder:
    """Files of one run. Nothing in it is released by being written here.

    The key file holds the keys of the steps after the checkpoint, so it can remove the noise of
    nothing that is on disk: it is deleted before anything newer is written, and written anew last.
    Where a process dies in between, there are no keys; the run goes on with new ones and pays for
    the steps that it makes again.

    Args:
        path: the folder, made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state_file = path / "checkpoint.safetensors"
        self.key_file = path / "keys.json"
        self.ledger_file = path / "ledger.jsonl"

    def holds_a_run(self) -> bool:
        """Return whether an earlier run left its state here."""
        return self.state_file.exists() or (self.path / "iterates.safetensors").exists()

    def load(self, device: torch.device) -> Checkpoint:
        """Return the checkpoint."""
        if not self.state_file.exists():
            raise FileNotFoundError(
                f"{self.state_file}: no checkpoint to resume from; leave resume out"
            )
        try:
            with safe_open(self.state_file, "pt") as file:
                meta = file.metadata()
            if meta.pop("format", None) != _FORMAT:
                raise ValueError
            # Copies: Windows replaces no file that is mapped, and this one will be replaced.
            mapped = load_file(self.state_file, device=str(device))
            tensors = {name: value.clone() for name, value in mapped.items()}
            return Checkpoint(tensors=tensors, **{**meta, "step": int(meta["step"])})
        except (SafetensorError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"{self.state_file}: damaged, or written by another version of dpbnn. Restore it "
                f"from a backup, or resume with the version that began the run; or start a new run "
                f"in another folder, on the same ledger"
            ) from None

    def save(self, make: Callable[[], Checkpoint], keys: Keys | None) -> None:
        """Replace the checkpoint and its keys.

        Args:
            make: returns the checkpoint; may write other files of the run.
            keys: of the next step; None keeps none on disk.
        """
        self.forget_keys()
        checkpoint = make()
        names = ("step", "run", "label", "ledger", "head", "settings")
        meta = {"format": _FORMAT, **{name: str(getattr(checkpoint, name)) for name in names}}
        try:
            replace_file(
                self.state_file, lambda path: save_file(checkpoint.tensors, path, metadata=meta)
            )
        except SafetensorError as error:
            raise OSError(f"{self.state_file} cannot be written: {first_line(error)}") from None
        if keys is not None:
            values = {
                **dataclasses.asdict(keys),
                **{name: getattr(keys, name).hex() for name in _SECRET},
                "step": checkpoint.step,
                "state": self._state(),
            }
            text = json.dumps(values)
            replace_file(self.key_file, lambda path: path.write_text(text), private=True)

    def keys(self, step: int) -> Keys | None:
        """Return the keys that were written with the checkpoint of a step, or None."""
        try:
            values: dict[str, Any] = json.loads(self.key_file.read_text())
            if (values.pop("step"), values.pop("state")) != (step, self._state()):
                return None
            return Keys(**{**values, **{n: bytes.fromhex(values[n]) for n in _SECRET}})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _state(self) -> str:
        with self.state_file.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def forget_keys(self) -> None:
        """Delete the keys on disk, durably."""
        if self.key_file.exists():
            self.key_file.unlink(missing_ok=True)
            sync_folder(self.path)


@contextlib.contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Make a folder where it is missing, and hold it for this process alone.

    Two runs in one folder would overwrite each other's checkpoints and repeat each other's noise.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: is a file; give a folder")
    path.mkdir(parents=True, exist_ok=True)
    fd, process = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600), os.getpid()
    try:
        if not lock(fd, wait=False):
            raise ValueError(
                f"{path}: another process is at work in this folder; wait for it, or give another "
                f"folder"
            )
        try:
            yield
        finally:
            if os.getpid() == process:  # a forked process shares the lock, and leaves it alone
                unlock(fd)
    finally:
        os.close(fd)
