"""Estimators on disk: a folder with a manifest and the posterior, read without pickle."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpbnn import methods, priors, training
from dpbnn.methods.method import Method
from dpbnn.posteriors import Posterior
from dpbnn.posteriors.folder import put_in_place
from dpbnn.priors import Prior
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan

if TYPE_CHECKING:
    from dpbnn.estimators.estimator import PrivateBayes

__all__ = ["load", "packed", "save", "unpacked"]

MANIFEST = "estimator.json"
FORMAT = "dpbnn-estimator"
VERSION = 1
_FITTED = (
    "bounds_", "classes_", "target_bounds_", "feature_names_in_", "n_features_in_", "seed_",
    "temperature_", "threshold_",
)  # fmt: skip


def save(estimator: PrivateBayes, folder: Path, overwrite: bool) -> None:
    """Write a fitted estimator beside its place and move it there complete."""
    empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not empty and not (overwrite and (folder / MANIFEST).is_file()):
        cure = "choose another folder" + ("" if overwrite else " or pass overwrite=True")
        raise FileExistsError(errno.EEXIST, f"exists already; {cure}", str(folder))
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        estimator.posterior_.save(partial / "posterior")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "class": type(estimator).__name__,
            "params": {name: _plain(v) for name, v in estimator.get_params(deep=False).items()},
            "fitted": {
                name: _plain(getattr(estimator, name))
                for name in _FITTED
                if hasattr(estimator, name)
            },
            "plan": estimator.plan_.to_dict(),
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        partial.chmod(0o755)
        put_in_place(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load(cls: type, folder: Path, device: str) -> Any:
    """Return a saved estimator; of any class where `cls` is the base."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            errno.ENOENT, f"no {MANIFEST}: pass a folder written by save", str(folder)
        )
    manifest = json.loads(path.read_text())
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path}: not an estimator of version {VERSION}; save it again")
    known = {kind.__name__: kind for kind in (cls, *cls.__subclasses__())}
    if manifest["class"] not in known:
        raise ValueError(
            f"{folder}: holds a {manifest['class']}, not a {cls.__name__}; load it with "
            f"dpbnn.{manifest['class']}.load"
        )
    params = {name: _object(value) for name, value in manifest["params"].items()}
    estimator = known[manifest["class"]](**params)
    estimator.temperature_ = estimator.threshold_ = None
    for name, value in manifest["fitted"].items():
        setattr(estimator, name, _object(value))
    estimator.posterior_ = training.load(folder / "posterior", device=device)
    path = params["ledger"]
    estimator.ledger_ = Ledger(path) if path is not None and Path(path).is_file() else None
    plan = dict(manifest["plan"])
    private = plan["epsilon"] is not None
    estimator.plan_ = Plan.from_dict(plan) if private else _open(plan)
    return estimator


def packed(posterior: Posterior) -> dict[str, bytes]:
    """Return the files of a posterior."""
    with tempfile.TemporaryDirectory(prefix="dpbnn-") as folder:
        posterior.save(Path(folder) / "posterior")
        return {path.name: path.read_bytes() for path in (Path(folder) / "posterior").iterdir()}


def unpacked(files: dict[str, bytes]) -> Posterior:
    """Return the posterior of `packed`; its files go when it goes."""
    folder = tempfile.TemporaryDirectory(prefix="dpbnn-", ignore_cleanup_errors=True)
    for name, content in files.items():
        (Path(folder.name) / name).write_bytes(content)
    posterior = training.load(folder.name)
    weakref.finalize(posterior, folder.cleanup)
    return posterior


def _open(values: dict[str, Any]) -> Plan:
    from dpbnn.privacy.plan import open_plan

    return open_plan(
        n=values["n"],
        batch_size=values["batch_size"],
        steps=values["steps"],
        sampling=values["sampling"],
    )


def _plain(value: Any) -> Any:
    """Return JSON values for a parameter."""
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.str}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (range, tuple, list)):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[key, _plain(item)] for key, item in value.items()]}
    if isinstance(value, Ledger):
        return None if value.path is None else str(value.path)
    if isinstance(value, (Method, Prior)):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, "arguments": fields}
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": repr(value)}
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return {"text": repr(value)}


def _object(value: Any) -> Any:
    """Return what `_plain` described; what has no JSON form comes back as its text."""
    if not isinstance(value, dict):
        return value
    if "number" in value:
        return float(value["number"])
    if "array" in value:
        return np.array(value["array"], dtype=np.dtype(value["dtype"]))
    if "tuple" in value:
        return tuple(_object(item) for item in value["tuple"])
    if "dict" in value:
        return {key: _object(item) for key, item in value["dict"]}
    if "class" in value:
        kind = getattr(methods, value["class"], None) or getattr(priors, value["class"])
        return kind(**{name: _object(item) for name, item in value["arguments"].items()})
    return value["text"]
