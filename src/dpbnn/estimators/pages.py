"""The page of a fitted estimator, and its figures on test data, which are not protected."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpbnn import report
from dpbnn.data.column import Column
from dpbnn.data.dates import text_of
from dpbnn.data.frames import as_table
from dpbnn.data.schema import Schema
from dpbnn.data.table import Table
from dpbnn.estimators import frames
from dpbnn.estimators.bands import band_along
from dpbnn.estimators.kinds import likelihood_of
from dpbnn.estimators.storage import settings_of
from dpbnn.evaluation import Evaluation, evaluate
from dpbnn.predictive import Predictive
from dpbnn.report import RunPage
from dpbnn.report.template import short
from dpbnn.storage import versions

if TYPE_CHECKING:
    from dpbnn.estimators.estimator import PrivateBayes

__all__ = [
    "Tested",
    "described",
    "evaluated",
    "page",
    "tested",
    "values_of",
    "with_records",
    "write",
]

_TASKS = {
    **dict.fromkeys(("categorical", "bernoulli"), "Classification"),
    "ordinal": "Classification in order",
    "gaussian": "Regression",
    "poisson": "Counts",
}
_MISSING = {  # "refuse" needs no word
    "middle": "the middle of the bounds",
    "indicator": "the middle of the bounds, and marked",
    "category": "a category of their own",
    "zeros": "no category",
}
_ALIKE = 3  # neighbouring columns with the same bounds that are listed one by one


@dataclasses.dataclass(frozen=True)
class Tested:
    """Predictions for test records and their truth, with classes in the order of the schema.

    Attributes:
        predictive: of the records.
        truth: class numbers, or targets in their own units.
        evaluation: metrics of the two.
        coverage: how often sets or intervals hold the truth; None without them.
        training_table: whether the records are those of the training, so that no guarantee covers
            the figures.
    """

    predictive: Predictive
    truth: np.ndarray
    evaluation: Evaluation
    coverage: dict[str, Any] | None
    training_table: bool = False


def names_of(estimator: PrivateBayes) -> tuple[str, ...]:
    """Return the names of the classes in the order of `predicted`; none for a regression."""
    if estimator._regression:
        return ()
    if estimator.schema_ is not None:
        return estimator.schema_.classes or ()
    return tuple(str(label) for label in estimator.classes_.tolist())


def tested(estimator: PrivateBayes, X: Any, y: Any, options: Mapping[str, Any]) -> Tested:
    """Return what an estimator says about test records, and how that compares with the truth.

    Args:
        estimator: the fitted one.
        X: test inputs.
        y: test targets; with a schema they may be a column of X.
        options: of `dpbnn.evaluation.evaluate`.
    """
    if estimator.schema_ is not None:
        X = frames.table_with(estimator.schema_, X, y, "error")  # read a file once
        y = None
    elif y is None:
        raise ValueError("y: missing; pass the true targets of the test records")
    predictive = estimator.predicted(estimator.inputs(X))
    truth = estimator._truth(X, y)
    named = {} if estimator._regression else {"classes": names_of(estimator)}
    found = evaluate(predictive, truth, **{**named, **options})
    covered = _coverage(estimator, predictive, truth)
    return Tested(predictive, truth, found, covered, estimator._trained_on(X, y))


def evaluated(estimator: PrivateBayes, X: Any, y: Any, options: Mapping[str, Any]) -> Evaluation:
    """Return metrics on test data, and warn where they are the training data."""
    found = tested(estimator, X, y, options)
    if found.training_table:
        warnings.warn(
            "X: these are the records of the training; the figures do not say how the model does "
            "on new records, and epsilon does not cover them; give other records",
            stacklevel=3,
        )
    return found.evaluation


def values_of(found: Tested) -> dict[str, Any]:
    """Return the figures as plain values, with the coverage of sets or intervals."""
    covered = {"conformal": found.coverage} if found.coverage else {}
    raw = {"training_table": True} if found.training_table else {}
    return {**raw, **found.evaluation.to_dict(), **covered}


def write(
    estimator: PrivateBayes,
    path: Path,
    X: Any,
    y: Any,
    test_data_public: bool,
    options: Mapping[str, Any],
) -> Path:
    """Write the page of an estimator; see `PrivateBayes.report`."""
    if X is None:
        return report.write(page(estimator, None), path)
    found = tested(estimator, X, y, options)
    contents = page(estimator, values_of(found), test_data_public=test_data_public)
    if test_data_public and estimator.schema_ is not None:
        contents = with_records(contents, estimator, as_table(X), found)
    return report.write(contents, path)


def page(
    estimator: PrivateBayes,
    evaluation: Any,
    *,
    test_data_public: bool = False,
    privacy: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **entries: Any,
) -> RunPage:
    """Return the page of an estimator, without any test record.

    Args:
        estimator: the fitted one.
        evaluation: figures on test data, if there are any.
        test_data_public: whether single test records may be shown.
        privacy: the statement of its run; the estimator's own by default.
        settings: of its run; the estimator's own by default.
        **entries: further ones of the page.
    """
    privacy = estimator.privacy_.to_dict() if privacy is None else privacy
    shown = dict(settings_of(estimator) if settings is None else settings)
    shown["model"] = {k: v for k, v in estimator.posterior_.settings.items() if k != "plan"}
    if calibration := dict(estimator.calibration_):
        if isinstance(evaluation, dict) and "conformal" in evaluation:
            calibration |= {
                f"{name} on the test records": evaluation["conformal"][key]
                for name, key in (("coverage", "observed"), ("mean size", "size"))
            }
        shown["calibration"] = calibration
    schema = estimator.schema_
    task = _TASKS[likelihood_of(estimator)]
    own: dict[str, Any] = {
        "title": task if schema is None else f"{task} of {schema.target.name}",
        "versions": versions(),
        "ledger": None,
    }
    return RunPage(
        privacy=privacy,
        evaluation=evaluation,
        rows=_rows(estimator, privacy),
        public=_bounds(estimator) if schema is None else described(schema),
        promise=_promise(estimator, evaluation),
        settings=shown,
        diagnostics=estimator.diagnostics_,
        band=None if schema is None else band_along(schema, estimator.predicted),
        test_data_public=test_data_public,
        **{**own, **entries},
    )


def with_records(contents: RunPage, estimator: PrivateBayes, rows: Table, found: Tested) -> RunPage:
    """Return the page with the most and least certain test records."""
    schema = estimator.schema_
    assert schema is not None
    records = _Records(rows, [column.name for column in schema.columns])
    examples = report.select_examples(
        found.predictive, found.truth, rows=records, classes=schema.classes or ()
    )
    return dataclasses.replace(contents, examples=examples)


def described(schema: Schema) -> dict[str, str]:
    """Return columns and target with their public bounds or categories, in words."""
    paid = () if schema.private_bounds is None else schema.private_bounds.columns

    def words_of(column: Column) -> str:
        return _described(column) + ", released privately" * (column.name in paid)

    found: dict[str, str] = {}
    for words, columns in itertools.groupby(schema.columns, words_of):
        names = [column.name for column in columns]
        found |= _listed(names, words)
    return {**found, f"{schema.target.name} (target)": words_of(schema.target)}


def _listed(names: list[str], words: str) -> dict[str, str]:
    if len(names) > _ALIKE:
        names = [f"{names[0]} to {names[-1]}, {len(names)} columns"]
    return dict.fromkeys(names, words)


def _described(column: Column) -> str:
    if column.bounds is not None and column.categories is None:
        low, high = map(float, column.bounds)
        if column.date:
            return _with_missing(column, f"date, {text_of(low)} to {text_of(high)}")
        what = "count" if column.kind == "count" else "number"
        words = f"{what}, {short(low)} to {short(high)}" + ", in logarithms" * column.log
    else:
        words = _listed_classes(column.categories or (), column.kind == "ordinal")
        words += ", or another" * column.other
        if column.weights is not None:
            words += f"; public weights in training: {short(list(column.weights))}"
    return _with_missing(column, words)


def _listed_classes(classes: Sequence[str], ordered: bool) -> str:
    return f"{'ordered classes' if ordered else 'categories'} {short(list(classes))}"


def _with_missing(column: Column, words: str) -> str:
    how = _MISSING.get(column.missing)
    return words if how is None else f"{words}; missing values: {how}"


def _bounds(estimator: PrivateBayes) -> dict[str, str]:
    """Return the bounds of an estimator without a schema, in words."""
    low, high = (np.ravel(end).tolist() for end in estimator.bounds_)
    names = list(getattr(estimator, "feature_names_in_", [f"x{i}" for i in range(len(low))]))
    given = {"private": ", released privately", None: ", learned from the data"}
    how = given.get(estimator.bounds if isinstance(estimator.bounds, str | None) else "", "")
    found: dict[str, str] = {}
    columns = zip(names, low, high, strict=True)
    for ends, same in itertools.groupby(columns, lambda column: column[1:]):
        words = f"number, {short(ends[0])} to {short(ends[1])}{how}"
        found |= _listed([str(name) for name, *_ in same], words)
    if not estimator._regression:
        ordered = likelihood_of(estimator) == "ordinal"
        return {**found, "target": _listed_classes(names_of(estimator), ordered)}
    ends = estimator.target_bounds_
    what = "count" if likelihood_of(estimator) == "poisson" else "number"
    return {**found, "target": f"{what}, {short(ends[0])} to {short(ends[1])}"}


def _rows(estimator: PrivateBayes, privacy: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of rows that the statement names, which are public."""
    mechanisms = privacy.get("mechanisms", ())
    found = {m["label"]: m["n"] for m in mechanisms if m.get("n") is not None}
    calibration = {
        name: found.pop(name, None) for name in ("recalibration", "conformal calibration")
    }
    if estimator.recalibrate == "training":
        calibration["recalibration"] = None  # its rows are among those of the training
    if not found:
        return {}
    held = {name: n for name, n in calibration.items() if n is not None}
    return {"training": max(found.values()), **held}


def _coverage(estimator: Any, predictive: Predictive, truth: np.ndarray) -> dict[str, Any] | None:
    """Return how often conformal sets or intervals hold the truth, and their mean size."""
    if estimator.threshold_ is None:
        return None
    if estimator._regression:
        low, high = estimator.covering(predictive)
        held, size = (low <= truth) & (truth <= high), float((high - low).mean())
    else:
        inside = estimator.covering(predictive)
        held, size = inside[range(len(truth)), truth], float(inside.sum(1).mean())
    return {
        "kind": "intervals" if estimator._regression else "sets",
        "promised": estimator.calibration_["coverage at least"],
        "observed": float(held.mean()),
        "size": size if math.isfinite(size) else None,
    }


def _promise(estimator: PrivateBayes, evaluation: Any) -> str:
    """Say what conformal sets or intervals promise and hold, empty where there are none."""
    promised = estimator.calibration_.get("coverage at least")
    if promised is None:
        return ""
    kind = "Prediction intervals" if estimator._regression else "Prediction sets"
    text = (
        f"{kind} hold the truth for at least {100 * promised:g} % of new records, however good the "
        f"model is, if those come from the same population as the training records."
    )
    found = (evaluation or {}).get("conformal") if isinstance(evaluation, dict) else None
    if found:
        text += f" On the test records they held {100 * found['observed']:.1f} %."
    return text


class _Records:
    """Rows of a table as mappings, made on demand."""

    def __init__(self, table: Table, names: list[str]) -> None:
        self.table, self.names = table, names

    def __getitem__(self, row: int) -> dict[str, Any]:
        part = self.table.rows(row, row + 1)
        return {name: part.raw(name)[0] for name in self.names}

    def __len__(self) -> int:
        return self.table.n
