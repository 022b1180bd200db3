"""Estimators on disk: run folders, which `save`, `fit(out=...)` and the command line write alike.

A run folder has manifest.json, schema.toml where the estimator has a schema, and model/ with a
manifest of its own and the posterior. It is read without pickle.
"""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpbnn import methods, priors, training
from dpbnn.data.schema import Schema
from dpbnn.estimators import frames
from dpbnn.fit_arguments import check_kinds
from dpbnn.posteriors import Posterior
from dpbnn.posteriors.folder import write as write_posterior
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan, open_plan
from dpbnn.report.template import short
from dpbnn.storage import (
    MANIFEST,
    Manifest,
    format_of,
    new_folder,
    plain,
    read_manifest,
    restored,
    write_manifest,
)

if TYPE_CHECKING:
    from dpbnn.estimators.estimator import PrivateBayes

__all__ = [
    "load", "opened", "packed", "plain_calibration", "plain_params", "save", "settings_of",
    "unpacked", "write_run",
]  # fmt: skip

RUN, FORMAT = "dpbnn-run", "dpbnn-estimator"
LEDGER, SCHEMA, MODEL, POSTERIOR = "ledger.jsonl", "schema.toml", "model", "posterior"
PROGRESS = "progress"  # of a fit that has not ended
_FITTED = (
    "bounds_", "classes_", "target_bounds_", "feature_names_in_", "n_features_in_", "seed_",
    "standardisation_", "target_standardisation_", "temperature_", "threshold_",
)  # fmt: skip
_NO_SETTING = ("schema", "bounds", "classes", "target_bounds", "ledger", "progress")


def save(estimator: PrivateBayes, folder: Path, overwrite: bool) -> None:
    """Write a fitted estimator beside its place and move it there complete."""
    with new_folder(folder, "estimator", overwrite=overwrite) as partial:
        path = getattr(estimator.ledger, "path", estimator.ledger)
        write_run(estimator, partial, ledger=None if path is None else str(path), settings={})


def write_run(
    estimator: PrivateBayes, folder: Path, *, ledger: str | None, settings: Mapping[str, Any]
) -> None:
    """Write the files of a run to an empty folder.

    Args:
        estimator: the fitted one.
        folder: the folder.
        ledger: its path as a reader would type it; None where it is not kept.
        settings: further settings for the manifest.
    """
    model = folder / MODEL
    (model / POSTERIOR).mkdir(parents=True)
    write_posterior(estimator.posterior_, model / POSTERIOR)
    fitted = {name: getattr(estimator, name) for name in _FITTED if hasattr(estimator, name)}
    params = {**plain_params(estimator), "schema": None}
    if ledger == LEDGER:
        params["ledger"] = None
    values = {
        "class": type(estimator).__name__,
        "params": params,
        "fitted": {name: plain(value, as_text=True) for name, value in fitted.items()},
        "plan": estimator.plan_.to_dict(),
    }
    write_manifest(model, FORMAT, values)
    if estimator.schema_ is not None:
        (folder / SCHEMA).write_text(estimator.schema_.to_toml(), encoding="utf-8")
    values = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {**settings, **settings_of(estimator)},
        "calibration": plain_calibration(estimator),
        "ledger": ledger,
        "privacy": estimator.privacy_.to_dict(),
    }
    write_manifest(folder, RUN, values)


def plain_params(estimator: PrivateBayes) -> dict[str, Any]:
    """Return the settings of an estimator as JSON values; a schema as that of its TOML file."""
    params = estimator.get_params(deep=False)
    if isinstance(params["ledger"], Ledger):
        params["ledger"] = params["ledger"].path
    schema = estimator.schema_
    params["schema"] = None if schema is None else schema.to_toml()
    return {name: plain(value, as_text=True) for name, value in params.items()}


def settings_of(estimator: PrivateBayes) -> dict[str, Any]:
    """Return the settings that were given, for people: numbers and texts."""
    return {
        name: value if isinstance(value, str | int | float) else short(value) or "none"
        for name, value in estimator.get_params(deep=False).items()
        if value is not None and name not in _NO_SETTING
    }


def plain_calibration(estimator: PrivateBayes) -> dict[str, float | None]:
    """Return what held-out rows have decided as JSON values; an infinite threshold is None."""
    found = estimator.calibration_.items()
    return {name: value if math.isfinite(value) else None for name, value in found}


def load(cls: type, folder: Path, device: str) -> Any:
    """Return a saved estimator; of any class where `cls` is the base."""
    return opened(cls, folder, device)[0]


def opened(cls: type, folder: Path, device: str) -> tuple[Any, Manifest]:
    """Return a saved estimator and the manifest of its folder, after checking every file.

    Folders of estimators that earlier versions wrote have no run around them.
    """
    check_kinds(device=device)
    origin = "an estimator's save or 'dpbnn fit'"
    if (folder / PROGRESS).is_dir() and not (folder / MANIFEST).exists():
        raise ValueError(
            f"{folder}: holds a fit that was interrupted and is no model yet; continue it first, "
            f"with resume=True (--resume)"
        )
    if format_of(folder) == FORMAT:
        return _model(cls, folder, device)
    manifest = read_manifest(folder, RUN, origin)
    estimator, own = _model(cls, folder / MODEL, device)
    if (folder / SCHEMA).is_file():
        _declare(estimator, Schema.read(folder / SCHEMA), encoded=own["version"] < 3)
    if manifest.get("ledger") == LEDGER and (folder / LEDGER).is_file():
        estimator.ledger_ = Ledger(folder / LEDGER)
    return estimator, manifest


def _model(cls: type, folder: Path, device: str) -> tuple[Any, Manifest]:
    manifest = read_manifest(folder, FORMAT, "an estimator's save")
    known = {kind.__name__: kind for kind in (cls, *cls.__subclasses__())}
    if manifest["class"] not in known:
        raise ValueError(
            f"{folder}: holds a {manifest['class']}, not a {cls.__name__}; load it with "
            f"dpbnn.{manifest['class']}.load"
        )
    classes = {**vars(priors), **vars(methods)}
    params = {name: restored(value, classes) for name, value in manifest["params"].items()}
    estimator = known[manifest["class"]](**params)
    estimator.temperature_ = estimator.threshold_ = estimator.standardisation_ = None
    estimator.target_standardisation_ = (0.0, 1.0)
    for name, value in manifest["fitted"].items():
        setattr(estimator, name, restored(value, classes))
    estimator.posterior_ = training.load(folder / POSTERIOR, device=device)
    path = params["ledger"]
    estimator.ledger_ = Ledger(path) if path is not None and Path(path).is_file() else None
    plan = dict(manifest["plan"])
    if plan["epsilon"] is None:
        public = ("n", "batch_size", "steps", "sampling")
        estimator.plan_ = open_plan(**{name: plan[name] for name in public})
    else:
        estimator.plan_ = Plan.from_dict(plan)
    return estimator, manifest


def _declare(estimator: PrivateBayes, schema: Schema, *, encoded: bool) -> None:
    """Give an estimator the schema of its run.

    Args:
        estimator: the loaded one.
        schema: of the run.
        encoded: whether it is of an earlier version, which took what the schema had encoded.
    """
    names = np.array([column.name for column in schema.columns], dtype=object)
    if encoded:
        low, high = (np.asarray(end) for end in estimator.bounds_)
        if not ((low == -1).all() and (high == 1).all()):  # raw numbers, and a schema to describe
            estimator.feature_names_in_ = names
            return
        estimator.set_params(bounds=None, **{estimator._stated: None})
        if schema.classes is not None:
            estimator.classes_ = np.sort(frames.labels(schema))
    estimator.schema = estimator.schema_ = schema
    estimator.feature_names_in_, estimator.n_features_in_ = names, len(names)


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
