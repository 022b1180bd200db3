"""Public bounds of numbers, and the scaling that follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Scaling", "as_array", "parsed_bounds"]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Clips numbers to bounds (l, h) and scales them to [-1, 1]: 2 (clip(x, l, h) - l)/(h - l) - 1.

    A column with l = h carries nothing and becomes 0. What is not finite becomes NaN, so that it
    cannot pass for a bound.

    Attributes:
        low: lower bounds, one or one per column.
        high: upper bounds, likewise.
    """

    low: np.ndarray
    high: np.ndarray

    @classmethod
    def learned(cls, values: np.ndarray) -> Scaling:
        """Return the scaling by the smallest and largest value of each column: NOT PRIVATE."""
        finite = np.where(np.isfinite(values), values, np.nan)
        return cls(np.nanmin(finite, axis=0), np.nanmax(finite, axis=0))

    @property
    def middle(self) -> np.ndarray:
        """Middle of the bounds."""
        return self.low / 2 + self.high / 2

    @property
    def half(self) -> np.ndarray:
        """Half the width of the bounds; 1 where they are equal."""
        width = self.high / 2 - self.low / 2
        return np.where(width > 0, width, 1.0)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return values clipped to the bounds and scaled to [-1, 1]."""
        scaled = np.clip(values, self.low, self.high)
        scaled -= self.middle
        scaled /= self.half
        np.clip(scaled, -1.0, 1.0, out=scaled)
        scaled[~np.isfinite(values)] = np.nan
        return scaled


def as_array(values: Any) -> Any:
    """Return a tensor as an array; anything else as it is."""
    return values.detach().cpu().numpy() if hasattr(values, "detach") else values


def parsed_bounds(
    bounds: Any, features: int | None, names: Sequence[str] | None = None, argument: str = "bounds"
) -> Scaling:
    """Return the scaling that a user's bounds mean.

    Args:
        bounds: (low, high), each a number or one per column; or a mapping from every column's name
            to its (low, high).
        features: number of columns; None for a single column.
        names: names of the columns, where they have names.
        argument: what the bounds are called in errors.
    """
    if isinstance(bounds, Mapping):
        if names is None:
            raise ValueError(
                f"{argument}: a mapping goes with columns that have names; pass a data frame, or "
                f"(low, high) arrays with one value per column"
            )
        missing = [name for name in names if name not in bounds]
        if missing:
            raise ValueError(
                f"{argument}: column {missing[0]!r} has none ({len(missing)} of {len(names)} "
                f"columns lack them); add {missing[0]!r}: (low, high) from public knowledge"
            )
        rows = [_pair(bounds[name], f"{argument}[{name!r}]") for name in names]
        low, high = (np.array([float(row[i]) for row in rows]) for i in (0, 1))
    else:
        low, high = (np.asarray(as_array(end), dtype=np.float64) for end in _pair(bounds, argument))
    if features is not None:
        for end in (low, high):
            if end.shape not in ((), (1,), (features,)):
                raise ValueError(
                    f"{argument}: an end has shape {end.shape} and the data {features} columns; "
                    f"give one number, or one per column"
                )
        low, high = np.broadcast_to(low, features), np.broadcast_to(high, features)
    elif low.size != 1 or high.size != 1:
        raise ValueError(f"{argument}: must be two numbers (low, high)")
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        raise ValueError(f"{argument}: must be finite, and low <= high in every column")
    return Scaling(low.reshape(-1 if features is not None else ()).copy(), high.copy())


def _pair(bounds: Any, argument: str) -> tuple[Any, Any]:
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ValueError(
            f"{argument}={bounds!r}: must be (low, high), such as {argument}=(0, 1)"
        ) from None
    return low, high
