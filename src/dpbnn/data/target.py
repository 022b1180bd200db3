"""The target of a schema: classes with or without an order, a number or a count; its weights.

Nothing here may be learned from the data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpbnn.data.column import Column, cut
from dpbnn.data.faults import Fault
from dpbnn.data.table import TableError

TARGET_KEYS = ("name", "kind", "classes", "bounds", "cuts", "weights")
_KINDS = ("count", "ordinal")
_MOST = 1_000_000  # largest bound of a count


def target_of_values(values: Mapping[str, Any]) -> Column:
    """Return the target from plain values, as in a TOML file."""
    name = values["name"]
    classes, bounds, cuts = (_tuple(values.get(key)) for key in ("classes", "bounds", "cuts"))
    kind = values.get("kind", "")
    if kind and kind not in _KINDS:
        raise TableError(
            f"schema, target {name!r}: kind = {kind!r}: must be 'count' or 'ordinal'; leave it out "
            f"for unordered classes, or for a number within bounds"
        )
    if "TODO" in (classes or ()):
        raise TableError(
            f"schema, target {name!r}: classes: still TODO; fill in what is publicly known"
        )
    if cuts is not None:
        found = cut(name, cuts, classes or (), kind or "numeric")
    elif classes is None and bounds is None:
        raise TableError(
            f"schema, target {name!r}: has neither classes nor bounds; give classes = [...] "
            f"or bounds = [lowest, highest], from public knowledge"
        )
    elif kind == "count" and classes is not None:
        raise TableError(
            f"schema, target {name!r}: a count has no classes; give bounds = [0, most], from "
            f"public knowledge"
        )
    elif kind == "ordinal" and classes is None:
        raise TableError(
            f"schema, target {name!r}: kind = 'ordinal' needs classes = [...], the lowest first"
        )
    else:
        found = Column(name, kind, bounds=bounds, categories=classes)
    if "weights" not in values:
        return found
    return dataclasses.replace(found, weights=_weights(found, values["weights"]))


def values_of_target(target: Column) -> dict[str, Any]:
    """Return a target as plain values; `target_of_values` gives it back."""
    found: dict[str, Any] = {"name": target.name}
    if target.kind in _KINDS:
        found["kind"] = target.kind
    if target.categories is not None:
        found["classes"] = list(target.categories)
    for key in ("bounds", "cuts"):
        if getattr(target, key) is not None:
            found[key] = list(getattr(target, key))
    if target.weights is not None:
        found["weights"] = dict(zip(target.categories or (), target.weights, strict=True))
    return found


def check_target(target: Column, task: str) -> None:
    """Raise where a column cannot be the target of a classification or regression."""
    if task not in ("classification", "regression"):
        more = f"; write kind = {task!r} under [target]" if task in _KINDS else ""
        raise TableError(f"schema: task={task!r}: must be 'classification' or 'regression'{more}")
    if target.missing != "refuse" or target.other or target.log:
        raise _wrong(target, "missing, other and log are for inputs; leave them out")
    given = target.categories
    if task == "classification":
        if given is None or len(given) < 2:
            raise _wrong(
                target,
                f"a classification needs 2 classes or more, "
                f"{0 if given is None else len(given)} declared; give classes = [...]",
            )
        _check_weights(target)
        return
    if given is not None or target.cuts is not None or target.date:
        raise _wrong(
            target,
            "a regression needs bounds = [lowest, highest] alone; give them, or task = "
            "'classification'",
        )
    if target.weights is not None:
        raise _wrong(target, "weights go with classes, and it has none; leave them out")
    if target.kind == "count":
        _check_count(target)


def check_inputs(columns: tuple[Column, ...]) -> None:
    """Raise where an input has what only a target may have."""
    for column in columns:
        if column.kind in _KINDS or column.weights is not None:
            what = f"kind = {column.kind!r} is" if column.kind in _KINDS else "weights are"
            cure = "bounds" if column.kind == "count" else "categories"
            raise TableError(
                f"schema, column {column.name!r}: {what} for the target; give {cure} alone"
            )


def encoded(
    target: Column, task: str, raw: Any, missing: frozenset[str]
) -> tuple[np.ndarray, list[Fault]]:
    """Return class numbers, counts, or numbers scaled to [-1, 1], and the faults."""
    if task == "classification":
        return target.classes(raw, missing)
    return (target.counts if target.kind == "count" else target.targets)(raw, missing)


def whole_bounds(bounds: Any) -> list[int]:
    """Return bounds that a count can have, not narrower than those of a number."""
    low, high = (min(max(end, 0.0), _MOST) for end in bounds)
    return [math.floor(low), max(math.ceil(high), math.floor(low) + 1)]


def can_bound_counts(low: float, high: float) -> bool:
    """Return whether both are whole numbers that a count can be."""
    whole = float(low).is_integer() and float(high).is_integer()
    return whole and low >= 0 and high <= _MOST


def _check_count(target: Column) -> None:
    low, high = target.bounds or (0.0, 0.0)
    if not can_bound_counts(low, high):
        raise _wrong(
            target,
            f"bounds = [{low:g}, {high:g}]: the bounds of a count are whole numbers from 0 "
            f"to {_MOST:.0f}; give [0, most], from public knowledge",
        )


def _check_weights(target: Column) -> None:
    given = target.weights
    if given is None:
        return
    good = all(isinstance(w, int | float) and not isinstance(w, bool) for w in given)
    if not (good and all(0 < w < math.inf for w in given)):
        raise _wrong(target, "weights: must be finite numbers > 0, one for each class")
    if len(given) != len(target.categories or ()):
        raise _wrong(
            target, f"weights: {len(given)} of them; give one for each class, in its order"
        )


def _weights(target: Column, given: Any) -> tuple[float, ...]:
    """Return the weight of every class, 1 for those left out."""
    classes = target.categories or ()
    if not classes:
        raise _wrong(target, "weights go with classes, and it has none; leave them out")
    example = f"weights = {{{classes[-1]!r} = 5.0}}"
    if isinstance(given, str):
        raise _wrong(
            target,
            f"weights = {given!r}: weights computed from the labels would depend on all records "
            f"at once, which epsilon does not cover; give public ones, as in {example}",
        )
    if not isinstance(given, Mapping):
        raise _wrong(target, f"weights: must be given by class, as in {example}")
    for label in given:
        if label not in classes:
            raise _wrong(
                target,
                f"weights: {label!r} is none of its {len(classes)} classes; correct it, as in "
                f"{example} (a class with a point in it needs quotes)",
            )
    return tuple(given.get(label, 1.0) for label in classes)


def _wrong(target: Column, problem: str) -> TableError:
    return TableError(f"schema, target {target.name!r}: {problem}")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
