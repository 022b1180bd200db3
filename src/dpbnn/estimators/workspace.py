"""A run folder while it is made: its ledger, what an interrupted fit has released, its files.

The folder is one run's at a time, and complete once its manifest is there. Files of a fit that goes
on are in the folder `progress`, which is deleted at its end; they may not be given away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpbnn import training
from dpbnn.checkpoint import LOCK, RunFolder, folder_lock
from dpbnn.estimators.storage import (
    LEDGER,
    MODEL,
    POSTERIOR,
    PROGRESS,
    SCHEMA,
    plain_params,
    write_run,
)
from dpbnn.privacy.ledger import Ledger
from dpbnn.storage import MANIFEST, plain, replace_file, restored, sync_tree
from dpbnn.units import Units

if TYPE_CHECKING:
    from dpbnn.estimators.estimator import PrivateBayes

__all__ = ["Fingerprint", "Workspace", "check_folder", "new_run"]

METRICS, REPORT = "metrics.json", "report.html"
FINGERPRINT = "private.json"  # of the training table; it is no part of what may be published
HEAD, PARTIAL = f"{LEDGER}.head", ".partial-"
RELEASED = "released.json"
_FREE = ("ledger", "progress", "device", "random_state")  # may change before a fit goes on


@dataclasses.dataclass(frozen=True)
class Workspace:
    """A run folder to be, and the ledger that the run spends from.

    Attributes:
        out: the run folder.
        folder: within it, where the model is written until it is complete.
        ledger: path of the ledger.
        own: whether it is the run's own, which limits nothing.
        resumed: whether the fit goes on with an earlier attempt.
    """

    out: Path
    folder: Path
    ledger: Path
    own: bool
    resumed: bool = False

    @property
    def progress(self) -> Path:
        """The folder of what a fit leaves for another attempt."""
        return self.out / PROGRESS

    @property
    def training(self) -> Path:
        """The folder of the training's checkpoint and keys."""
        return self.progress / "training"

    @property
    def trained(self) -> Path:
        """The folder of the posterior, once the training has ended."""
        return self.progress / "trained"

    @property
    def checkpointed(self) -> bool:
        """Whether the training can go on."""
        return RunFolder(self.training).state_file.exists()

    @property
    def resumable(self) -> bool:
        """Whether another attempt can use something that was paid for."""
        path = self.progress / RELEASED
        kept = json.loads(path.read_text())["values"] if path.exists() else {}
        return self.checkpointed or bool(kept.keys() & {"bounds", "standard"})

    @property
    def complete(self) -> bool:
        """Whether the run is in its place."""
        return (self.out / MANIFEST).exists() and not self.progress.exists()

    def book(self, delta: float) -> Ledger:
        """Return the run's own ledger.

        Args:
            delta: of the ledger, where it is new.
        """
        return Ledger(self.ledger, delta=delta)

    def bind(
        self, estimator: PrivateBayes, table: tuple[Any, Any], units: Units | None = None
    ) -> None:
        """Begin with an encoded table and settings, or raise where a resumed fit had others.

        **Guarantee.** A fit goes on with the table and the settings that it began with, or not at
        all. The fingerprint of the table has a salt, and its file is readable by its owner alone.
        """
        settings = {
            name: value for name, value in plain_params(estimator).items() if name not in _FREE
        }
        path = self.progress / FINGERPRINT
        if not self.resumed:
            self.progress.mkdir()
            own = Fingerprint.of(*table)
            known = {
                "note": "a fingerprint of the training table: keep this file to yourself",
                "salt": own.salt.hex(),
                "table": own.table,
                "units": _owners(units, own.salt),
            }
            _write(self.progress / "settings.json", settings)
            _write(path, known, private=True)  # last: with it, there is a fit to be resumed
            return
        before = json.loads((self.progress / "settings.json").read_text())
        other = [name for name in settings if settings[name] != before.get(name)]
        if other:
            raise ValueError(
                f"{' and '.join(other)}: not as in the fit to be resumed; give the settings that "
                f"it began with, or begin another run"
            )
        known = json.loads(path.read_text())
        salt = bytes.fromhex(known["salt"])
        same = Fingerprint.of(*table, salt).table == known["table"]
        if not same or _owners(units, salt) != known.get("units"):
            raise ValueError(
                "the table is not that of the fit to be resumed: a record was changed, added, "
                "left out or moved; give the table that it began with, or begin another run"
            )

    def released(self, ledger: Ledger) -> dict[str, Any]:
        """Return what an earlier attempt has released, after checking that the ledger holds it."""
        path = self.progress / RELEASED
        if not path.exists():
            return {}
        kept = json.loads(path.read_text())
        if ledger.id != kept["ledger"] or not ledger.holds(kept["head"]):
            raise ValueError(
                f"{self.out}: what the fit to be resumed has released is not in the ledger "
                f"{self.ledger}; give the ledger that it began with (--ledger), restored from a "
                f"backup if need be"
            )
        return {name: restored(value, {}) for name, value in kept["values"].items()}

    def keep(self, ledger: Ledger, values: Mapping[str, Any]) -> None:
        """Keep released values for another attempt, with the state of the ledger that holds them.

        Args:
            ledger: of the run.
            values: arrays and numbers.
        """
        kept = {
            "ledger": ledger.id,
            "head": ledger.head,
            "values": {name: plain(value) for name, value in values.items()},
        }
        _write(self.progress / RELEASED, kept)

    def save(self, estimator: PrivateBayes, settings: Mapping[str, Any]) -> None:
        """Write model, schema and manifest, and move all to its place, the manifest last.

        The manifest names the ledger, not the model; it does not know of the fingerprint.

        Args:
            estimator: the fitted one; its posterior is then that of the run folder.
            settings: further settings for the manifest.
        """
        named = LEDGER if self.own else str(self.ledger)
        write_run(estimator, self.folder, ledger=named, settings=settings)
        sync_tree(self.folder)
        (self.out / MANIFEST).unlink(missing_ok=True)
        for name in (METRICS, REPORT, FINGERPRINT, SCHEMA):
            (self.out / name).unlink(missing_ok=True)
        shutil.rmtree(self.out / MODEL, ignore_errors=True)
        os.replace(self.progress / FINGERPRINT, self.out / FINGERPRINT)
        for name in (MODEL, SCHEMA, MANIFEST):
            if (self.folder / name).exists():
                os.replace(self.folder / name, self.out / name)
        device = estimator.posterior_.device
        estimator.posterior_ = training.load(self.out / MODEL / POSTERIOR, device=device)
        shutil.rmtree(self.progress)


def check_folder(out: Path, *, resume: bool) -> None:
    """Raise where no run can be made in a folder, or resumed; a table need not be read for it."""
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: its parent is not a folder; make that one first")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: exists already and is not a run; give another folder")
    if resume and not (out / PROGRESS / FINGERPRINT).exists():
        done = ", and its run is complete" if (out / MANIFEST).exists() else ""
        raise ValueError(
            f"{out}: holds no interrupted fit{done}; leave resume=True (--resume) out, or give the "
            f"folder of one"
        )


@contextlib.contextmanager
def new_run(
    out: Path, *, overwrite: bool = False, ledger: Path | None = None, resume: bool = False
) -> Iterator[Workspace]:
    """Yield a workspace in the run folder `out`.

    **Guarantee.** The ledger is made in `out` before anything is spent, and never moved or copied.
    One process at a time works in `out`. Whatever happens, a ledger in which something was spent
    stays; where nothing was, nothing is left behind. A run that replaces another goes on with its
    ledger.

    Args:
        out: the run folder.
        overwrite: replace a run that is there already.
        ledger: spend from this ledger instead of one in the run folder.
        resume: go on with the fit that was interrupted in `out`.
    """
    check_folder(out, resume=resume)
    made = not out.exists()
    own = out / LEDGER
    kept = own.exists() or (out / HEAD).exists()
    with folder_lock(out):
        place = Workspace(out, out, ledger or own, ledger is None, resume)
        try:
            _check_place(out, overwrite, resume)
            if ledger is not None and own.exists():
                raise ValueError(
                    f"{out}: has a ledger of its own, which a run in its place must continue; "
                    f"leave --ledger out or give another folder"
                )
            if resume and not place.checkpointed:  # nothing there that a training can use
                shutil.rmtree(place.training, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=out) as partial:
                yield dataclasses.replace(place, folder=Path(partial))
        except BaseException:
            if not resume and not place.resumable:
                shutil.rmtree(place.progress, ignore_errors=True)
            if not kept and own.is_file() and Ledger(own).untouched:
                if not resume:  # else another ledger has paid for what is there
                    shutil.rmtree(place.progress, ignore_errors=True)
                own.unlink()
                (out / HEAD).unlink()
            if made and all(part.name == LOCK for part in out.iterdir()):
                shutil.rmtree(out)
            raise


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """A salted hash of an encoded table, by which its owner knows it again.

    Attributes:
        salt: random bytes.
        table: hash of all its rows, in order.
    """

    salt: bytes
    table: str

    @classmethod
    def of(cls, x: Any, y: Any, salt: bytes | None = None) -> Fingerprint:
        """Return the fingerprint of inputs and targets, with a new salt by default."""
        salt = secrets.token_bytes(16) if salt is None else salt
        found = hashlib.blake2b(salt=salt, digest_size=16)
        for part in (x, y):
            values = np.ascontiguousarray(part)
            found.update(f"{values.dtype} {values.shape}".encode())
            found.update(values.reshape(-1).view(np.uint8))
        return cls(salt, found.hexdigest())


def _owners(units: Units | None, salt: bytes) -> str | None:
    """Return a salted hash of whose rows they are, and which of them are nobody's."""
    if units is None:
        return None
    order = units.order.numpy()
    whose = order if units.kept is None else np.where(units.kept.numpy()[order], order, -1 - order)
    return Fingerprint.of(whose, units.starts, salt).table


def _write(path: Path, values: Mapping[str, Any], *, private: bool = False) -> None:
    text = json.dumps(values, indent=2)
    replace_file(path, lambda partial: partial.write_text(text), private=private)


def _check_place(out: Path, overwrite: bool, resume: bool) -> None:
    """Raise where `out` is in use; remove what a process that was killed has left."""
    for left in out.glob(f"{PARTIAL}*"):
        shutil.rmtree(left)
    there = {part.name for part in out.iterdir()} - {LOCK}
    if there and not there & {MANIFEST, LEDGER, HEAD, PROGRESS}:
        raise ValueError(f"{out}: exists already and is not a run; give another folder")
    if resume:
        return
    if not overwrite and PROGRESS in there:
        raise ValueError(
            f"{out}: holds a fit that was interrupted; continue it with resume=True (--resume), or "
            f"begin again with overwrite=True (--overwrite): what it has spent stays in its ledger"
        )
    if (
        there
        and not overwrite
        and ((out / MANIFEST).exists() or not Ledger(out / LEDGER).untouched)
    ):
        raise ValueError(
            f"{out}: holds a run already; give another folder, or overwrite=True (--overwrite) to "
            f"replace it (what it has spent stays in its ledger)"
        )
    shutil.rmtree(out / PROGRESS, ignore_errors=True)
