"""A regression along one column: what the page draws without looking at any record."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dpbnn.data.dates import text_of

if TYPE_CHECKING:
    from dpbnn.data import Column, Schema
    from dpbnn.report import Band

_POINTS = 101
_MOST = 32


def band_along(schema: Schema, predictive: Any) -> Band | None:
    """Return predictions along the numeric column that moves them most; None if there is none.

    Other numeric columns are held at the middle of their bounds, categories at their first value.
    Bounds are public and the model is private, so this looks at no data.

    Args:
        schema: how tables are encoded.
        predictive: function from encoded inputs to predictions in the target's units.
    """
    from dpbnn import report

    numeric = [c for c in schema.columns if c.bounds is not None and not c.date][:_MOST]
    if schema.task != "regression" or not numeric:
        return None
    rows = {column.name: [_held(column)] * (_POINTS * len(numeric)) for column in schema.columns}
    for i, column in enumerate(numeric):
        rows[column.name][i * _POINTS : (i + 1) * _POINTS] = _positions(column)
    inputs, _ = schema.encode({name: np.asarray(values) for name, values in rows.items()})
    found = predictive(inputs)
    means = found.mean.reshape(len(numeric), _POINTS)
    chosen = int((means.amax(1) - means.amin(1)).argmax())
    column, part = numeric[chosen], slice(chosen * _POINTS, (chosen + 1) * _POINTS)
    others = "Other columns are held at the middle of their bounds or at their first category."
    return report.Band(
        x=_positions(column),
        mean=found.mean.flatten()[part].numpy(),
        epistemic=found.epistemic.flatten()[part].sqrt().numpy(),
        aleatoric=found.aleatoric.flatten()[part].sqrt().numpy(),
        x_label=column.name,
        y_label=schema.target.name,
        bounds=found.bounds,
        note="" if len(schema.columns) == 1 else others,
    )


def _positions(column: Column) -> list[float]:
    middle, half = column.scale
    scaled = np.linspace(middle - half, middle + half, _POINTS)
    return (np.expm1(scaled) if column.log else scaled).tolist()


def _held(column: Column) -> float | str:
    if column.bounds is None:
        return (column.categories or ("",))[0]
    middle, _ = column.scale
    if column.date:
        return text_of(middle)
    return math.expm1(middle) if column.log else middle
