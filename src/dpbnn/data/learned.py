"""Bounds and categories read from the data: NOT PRIVATE, for training without privacy only."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dpbnn.data.column import Column
from dpbnn.data.table import Table, TableError, cell


def learned_column(table: Table, name: str) -> Column:
    """Return a column with the bounds or categories that the data shows."""
    values = table[name]
    if values.dtype == object:
        absent = any(value is None for value in values)
        rule = "category" if absent else "zeros"
        return Column(
            name, "categorical", categories=distinct(table, name), missing=rule, other=True
        )
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if not low < high:
        width = max(1.0, abs(low)) / 2
        low, high = low - width, high + width
    if not math.isfinite(high - low):
        raise TableError(
            f"{table.source}: {table.listed([name])} holds numbers that are too far apart for any "
            f"scale; correct them"
        )
    rule = "indicator" if np.isnan(values).any() else "middle"
    return Column(name, "numeric", bounds=(low, high), missing=rule)


def learned_target(table: Table, name: str, task: str | None) -> Column:
    """Return a target as the data shows it; see `Schema.learned`."""
    text = table[name].dtype == object
    if task in ("classification", "ordinal") or (task is None and text):
        if task == "ordinal" and text:
            raise TableError(
                f"{table.source}: the order of classes that are texts cannot be learned; state it "
                f"in a schema, with kind = 'ordinal' and the lowest class first"
            )
        kind = "ordinal" if task == "ordinal" else "categorical"
        return Column(name, kind, categories=distinct(table, name))
    found = learned_column(table, name)
    if task == "count" and found.bounds is not None:
        return Column(name, "count", bounds=(0.0, max(1.0, math.ceil(found.bounds[1]))))
    return dataclasses.replace(found, missing="refuse", other=False)


def distinct(table: Table, name: str) -> tuple[str, ...]:
    """Return the distinct values of a column as text; numbers are sorted by value."""
    raw = table.raw(name)
    if raw.dtype.kind in "biuf":
        found = {cell(value) for value in np.unique(raw).tolist()}
    else:
        found = {value for value in raw.tolist() if value not in table.missing}
    texts = sorted((text for text in found if text is not None), key=_order)
    if not texts:
        raise TableError(
            f"{table.source}: {table.listed([name])} has no value in any row; drop it from the "
            f"table"
        )
    return tuple(texts)


def _order(text: str) -> tuple[float, str]:
    try:
        number = float(text)
    except ValueError:
        number = math.inf
    return (math.inf if math.isnan(number) else number), text  # NaN has no place in an order
