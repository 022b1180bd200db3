"""Public bounds of numbers, and the scaling that follows from them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Scaling", "as_array", "in_a_line", "parsed_bounds"]

_TIMES = ("date", "time", "duration", "period")  # how types of no use as numbers are called
_BLOCK = 1 << 16  # numbers scaled at once, few enough for the processor's cache


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
        low, high = np.nanmin(finite, axis=0), np.nanmax(finite, axis=0)
        return cls(low.astype(np.float64), high.astype(np.float64))

    @property
    def middle(self) -> np.ndarray:
        """Middle of the bounds."""
        return self.low / 2 + self.high / 2

    @property
    def half(self) -> np.ndarray:
        """Half the width of the bounds; 1 where they are equal."""
        width = self.high / 2 - self.low / 2
        return np.where(width > 0, width, 1.0)

    def __call__(self, values: np.ndarray, dtype: type = np.float64) -> np.ndarray:
        """Return values clipped to the bounds and scaled to [-1, 1].

        Args:
            values: the numbers; they are returned themselves where nothing is to be done.
            dtype: of the result; it is computed in float64.
        """
        if self._keeps(values, dtype):
            return values
        scaled = np.empty(values.shape, dtype)
        step = max(1, _BLOCK // max(1, values[:1].size))
        for start in range(0, len(values), step):
            part = values[start : start + step]
            block = np.clip(part, self.low, self.high, dtype=np.float64)
            block -= self.middle
            block /= self.half
            np.clip(block, -1.0, 1.0, out=block)
            block[~np.isfinite(part)] = np.nan
            scaled[start : start + step] = block
        return scaled

    def _keeps(self, values: np.ndarray, dtype: type) -> bool:
        """Return whether scaling would change nothing."""
        unit = bool((self.low == -1.0).all() and (self.high == 1.0).all())
        usable = values.dtype == dtype and values.flags.writeable and values.size > 0
        return unit and usable and bool(values.min() >= -1.0 and values.max() <= 1.0)


def as_array(values: Any, name: str = "X") -> Any:
    """Return a tensor as an array; anything else as it is, if it can be a table of numbers.

    Args:
        values: a data frame, array, tensor or list.
        name: what the values are called in errors.
    """
    if hasattr(values, "detach"):
        return values.detach().cpu().numpy()
    if type(values).__name__ == "LazyFrame":
        raise ValueError(f"{name}: is a LazyFrame, which holds no rows yet; pass {name}.collect()")
    kinds = getattr(values, "dtypes", None)
    columns = getattr(values, "columns", None)
    if kinds is None or columns is None or isinstance(kinds, np.dtype):
        kinds, columns = [getattr(values, "dtype", "")], [""]
    for column, kind in zip(columns, kinds, strict=False):
        if str(kind).lower().startswith(_TIMES):
            where = f"column {column!r} holds" if column else "holds"
            raise ValueError(
                f"{name}: {where} {kind}, no numbers; turn it into numbers, such as days since a "
                f"fixed date"
            )
    return values


@contextlib.contextmanager
def in_a_line(cure: str) -> Iterator[None]:
    """Say in one line what scikit-learn's validation finds.

    Args:
        cure: what to do about values that are not finite.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        line, *rest = [part.strip() for part in str(error).strip().split("\n")]
        line = line.rstrip(".:")
        if "contains NaN" in line or "contains infinity" in line:
            raise ValueError(f"{line}; {cure}") from None
        if "float() argument" in line or "could not convert string" in line:
            raise type(error)(
                f"X and y must hold numbers ({line}); encode the others, as 'dpbnn fit' and "
                f"dpbnn.data.Schema do"
            ) from None
        more = [part for part in rest if part.startswith("Reshape your data")]
        raise type(error)("; ".join([line, *more])) from None


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
