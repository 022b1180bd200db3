"""Run directories: what a trained model leaves on disk, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dpbnn.checkpoint import LOCK, folder_lock
from dpbnn.data.schema import Schema
from dpbnn.estimators.estimator import PrivateBayes
from dpbnn.estimators.storage import write as write_estimator
from dpbnn.privacy.ledger import Ledger
from dpbnn.storage import MANIFEST, read_manifest, replace_file, sync_tree, write_manifest

__all__ = ["Run", "Workspace", "new_run", "plain_calibration"]

FORMAT = "dpbnn-run"
LEDGER, SCHEMA, MODEL = "ledger.jsonl", "schema.toml", "model"
METRICS, REPORT = "metrics.json", "report.html"
FINGERPRINT = "private.json"  # of the training table; it is no part of what may be published
HEAD, PARTIAL = f"{LEDGER}.head", ".partial-"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory that is complete.

    It holds manifest.json, schema.toml, model/ (the estimator), ledger.jsonl (unless the run used
    another ledger), private.json, and after an evaluation metrics.json and report.html. All but
    private.json, a fingerprint of the training table, may be given away.

    Attributes:
        folder: the directory.
        manifest: settings, statement, versions and hashes.
        schema: how tables are encoded.
        estimator: the fitted estimator, on encoded inputs.
    """

    folder: Path
    manifest: dict[str, Any]
    schema: Schema
    estimator: PrivateBayes

    @classmethod
    def open(cls, folder: Path, device: str = "cpu") -> Run:
        """Read a run directory, checking that no file was changed."""
        return cls(
            folder,
            read_manifest(folder, FORMAT, "'dpbnn fit'"),
            Schema.read(folder / SCHEMA),
            PrivateBayes.load(folder / MODEL, device=device),
        )

    @property
    def metrics(self) -> dict[str, Any] | None:
        """What the last evaluation found, or None."""
        path = self.folder / METRICS
        return json.loads(path.read_text()) if path.is_file() else None

    @property
    def ledger(self) -> str | None:
        """The ledger's path as a reader would type it; None in older runs without privacy."""
        return self.manifest["ledger"]

    def check_test_table(self, x: Any, y: Any) -> None:
        """Raise where an encoded table is the very one that the run was trained on."""
        path = self.folder / FINGERPRINT
        if path.is_file():
            known = json.loads(path.read_text())
            if fingerprint(x, y, bytes.fromhex(known["salt"])) == known["table"]:
                raise ValueError(
                    "the table is the one that the run was trained on, so its figures would not "
                    "say how the model does on new records; give other records, or "
                    "--training-table to evaluate it anyway"
                )

    def write_metrics(self, values: dict[str, Any]) -> None:
        """Write metrics.json, whole or not at all."""
        text = json.dumps(values, indent=2) + "\n"
        replace_file(self.folder / METRICS, lambda path: path.write_text(text))


@dataclasses.dataclass(frozen=True)
class Workspace:
    """A folder inside the run directory to be, and the ledger that the run spends from.

    Attributes:
        folder: where the model is written until it is complete.
        ledger: path of the ledger.
        own: whether it is the run's own, which limits nothing.
        named: how the manifest names the ledger.
    """

    folder: Path
    ledger: Path
    own: bool
    named: str

    def book(self, delta: float) -> Ledger | str:
        """Return the ledger for an estimator; a new one of the user's gets the fit's budget.

        Args:
            delta: of the run's own ledger, where it is new.
        """
        return Ledger(self.ledger, delta=delta) if self.own else str(self.ledger)

    def save(
        self,
        estimator: PrivateBayes,
        schema: Schema,
        settings: dict[str, Any],
        trained_on: tuple[Any, Any],
    ) -> None:
        """Write model, schema, manifest and the fingerprint of the encoded training table.

        The manifest names the ledger, not the model; it does not know of the fingerprint.
        """
        estimator.set_params(ledger=None)
        (self.folder / MODEL).mkdir()
        write_estimator(estimator, self.folder / MODEL)
        (self.folder / SCHEMA).write_text(schema.to_toml(), encoding="utf-8")
        values = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": settings,
            "calibration": plain_calibration(estimator),
            "ledger": self.named,
            "privacy": estimator.privacy_.to_dict(),
        }
        write_manifest(self.folder, FORMAT, values)
        salt = secrets.token_bytes(16)
        known = {
            "note": "a fingerprint of the training table: keep this file to yourself",
            "salt": salt.hex(),
            "table": fingerprint(*trained_on, salt),
        }
        with open(
            self.folder / FINGERPRINT, "w", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as file:
            json.dump(known, file, indent=2)


@contextlib.contextmanager
def new_run(out: Path, *, overwrite: bool, ledger: Path | None = None) -> Iterator[Workspace]:
    """Yield a workspace whose files go to the run directory `out` when the block ends well.

    **Guarantee.** The ledger is made in `out` before anything is spent, and never moved or copied.
    One process at a time works in `out`. Whatever happens, a ledger in which something was spent
    stays; where nothing was, nothing is left behind. A run that replaces another goes on with its
    ledger.

    Args:
        out: the run directory.
        overwrite: replace a run that is there already.
        ledger: spend from this ledger instead of one in the run directory.
    """
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: its parent is not a folder; make that one first")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: exists already and is not a run; give another folder")
    made = not out.exists()
    own = out / LEDGER
    kept = own.exists() or (out / HEAD).exists()
    with folder_lock(out):
        try:
            _check_place(out, overwrite)
            if ledger is not None and own.exists():
                raise ValueError(
                    f"{out}: has a ledger of its own, which a run in its place must continue; "
                    f"leave --ledger out or give another folder"
                )
            named = LEDGER if ledger is None else str(ledger)
            with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=out) as partial:
                yield Workspace(Path(partial), ledger or own, ledger is None, named)
                _put_in_place(Path(partial), out)
        except BaseException:
            if not kept and own.is_file() and Ledger(own).untouched:
                own.unlink()
                (out / HEAD).unlink()
            if made and all(part.name == LOCK for part in out.iterdir()):
                shutil.rmtree(out)
            raise


def fingerprint(x: Any, y: Any, salt: bytes) -> str:
    """Return a salted hash of an encoded table: of all its rows, in order."""
    found = hashlib.blake2b(salt=salt, digest_size=16)
    for part in (x, y):
        values = np.ascontiguousarray(part)
        found.update(f"{values.dtype} {values.shape}".encode())
        found.update(values.tobytes())
    return found.hexdigest()


def plain_calibration(estimator: PrivateBayes) -> dict[str, float | None]:
    """Return what held-out rows have decided as JSON values; an infinite threshold is None."""
    found = estimator.calibration_.items()
    return {name: value if math.isfinite(value) else None for name, value in found}


def _check_place(out: Path, overwrite: bool) -> None:
    """Raise where `out` is in use; remove what a process that was killed has left."""
    for left in out.glob(f"{PARTIAL}*"):
        shutil.rmtree(left)
    there = {part.name for part in out.iterdir()} - {LOCK}
    if there and not there & {MANIFEST, LEDGER, HEAD}:
        raise ValueError(f"{out}: exists already and is not a run; give another folder")
    if (
        there
        and not overwrite
        and ((out / MANIFEST).exists() or not Ledger(out / LEDGER).untouched)
    ):
        raise ValueError(
            f"{out}: holds a run already; give another folder, or --overwrite to replace it (what "
            f"it has spent stays in its ledger)"
        )


def _put_in_place(partial: Path, out: Path) -> None:
    """Move the files of a finished run to their place, the manifest last."""
    sync_tree(partial)
    (out / MANIFEST).unlink(missing_ok=True)
    for name in (METRICS, REPORT, FINGERPRINT):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / MODEL, ignore_errors=True)
    if (partial / FINGERPRINT).exists():
        os.replace(partial / FINGERPRINT, out / FINGERPRINT)
    for name in (MODEL, SCHEMA, MANIFEST):
        os.replace(partial / name, out / name)
