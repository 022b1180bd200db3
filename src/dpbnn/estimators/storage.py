"""Estimators on disk: a folder with a manifest and the posterior, read without pickle."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbnn import methods, priors, training
from dpbnn.posteriors import Posterior
from dpbnn.posteriors.folder import write as write_posterior
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan, open_plan
from dpbnn.storage import new_folder, plain, read_manifest, restored, write_manifest

if TYPE_CHECKING:
    from dpbnn.estimators.estimator import PrivateBayes

__all__ = ["load", "packed", "save", "unpacked", "write"]

FORMAT, POSTERIOR = "dpbnn-estimator", "posterior"
_FITTED = (
    "bounds_", "classes_", "target_bounds_", "feature_names_in_", "n_features_in_", "seed_",
    "standardisation_", "target_standardisation_", "temperature_", "threshold_",
)  # fmt: skip


def save(estimator: PrivateBayes, folder: Path, overwrite: bool) -> None:
    """Write a fitted estimator beside its place and move it there complete."""
    with new_folder(folder, "estimator", overwrite=overwrite) as partial:
        write(estimator, partial)


def write(estimator: PrivateBayes, folder: Path) -> None:
    """Write the files of a fitted estimator to an empty folder."""
    (folder / POSTERIOR).mkdir()
    write_posterior(estimator.posterior_, folder / POSTERIOR)
    params = estimator.get_params(deep=False)
    if isinstance(params["ledger"], Ledger):
        params["ledger"] = params["ledger"].path
    fitted = {name: getattr(estimator, name) for name in _FITTED if hasattr(estimator, name)}
    values = {
        "class": type(estimator).__name__,
        "params": {name: plain(value, as_text=True) for name, value in params.items()},
        "fitted": {name: plain(value, as_text=True) for name, value in fitted.items()},
        "plan": estimator.plan_.to_dict(),
    }
    write_manifest(folder, FORMAT, values)


def load(cls: type, folder: Path, device: str) -> Any:
    """Return a saved estimator; of any class where `cls` is the base."""
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
