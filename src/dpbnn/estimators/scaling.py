"""Tables of numbers: checked, and scaled by public bounds and released statistics."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_array
from sklearn.utils.validation import check_consistent_length, column_or_1d, validate_data

from dpbnn.data.standardising import Standardisation
from dpbnn.data.statistics import Bounds
from dpbnn.messages import SHOWN, alone, as_numbers, kind_of
from dpbnn.privacy.checks import quoted

__all__ = ["Scaling", "as_array", "in_a_line", "parsed_bounds", "validated"]

_TIMES = ("date", "time", "duration", "period")  # in the names of types that are not numbers
_BLOCK = 1 << 16  # numbers scaled at once, few enough for the processor's cache
_CELLS = ("some cells are text", "float() argument", "dtype='num", "Unable to convert", "Input")
_PUBLIC = re.compile(  # texts of scikit-learn and NumPy that quote no value
    r"Input( [Xy])? contains (NaN|infinity or a value too large for dtype\('\w+'\))"
    r"|float\(\) argument must be a string or a real number, not '[\w.]+'"
    r"|dtype='numeric' is not compatible with arrays of bytes/strings.*"
    r"|Unable to convert array of bytes/strings into decimal numbers with dtype='numeric'"
    r"|Found array with (\d+ \w+\(s\) \(shape=\([\d, ]*\)\)|dim \d+).*"
    r"|Expected 2D array, got (1D|scalar) array instead"
    r"|X has \d+ features, but \w+ is expecting \d+ features as input"
    r"|Found input variables with inconsistent numbers of samples: \[[\d, ]*\]"
    r"|y should be a 1d array, got an array of shape \([\d, ]*\) instead"
    r"|This \w+ estimator requires y to be passed, but the target y is None"
    r"|Complex data not supported"
    r"|Sparse data was passed( for [Xy])?, but dense data is required.*"
    r"|Unknown label type: [\w-]+\. Maybe you are trying to fit a classifier.*"
    r"|The feature names should match those that were passed during fit"
    r"|setting an array element with a sequence\. The requested array has an inhomogeneous shape "
    r"after \d+ dimensions\. The detected shape was \([\d, ]*\) \+ inhomogeneous part"
)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Clips numbers to bounds (l, h) and scales them to [-1, 1], and standardises them then.

        u = 2 (clip(x, l, h) - l)/(h - l) - 1,   z = clip((u - centre)/spread, -limit, limit)

    A column with l = h has u = 0. Values that are not finite become NaN, not a bound.

    Attributes:
        low: lower bounds, one or one per column.
        high: upper bounds, likewise.
        standard: centre and spread of u, public or privately released; None leaves u as it is.
        limit: largest |z|.
        features: from all that to what a network sees; None leaves it.
    """

    low: np.ndarray
    high: np.ndarray
    standard: Standardisation | None = None
    limit: float = 4.0
    features: Callable[[np.ndarray], np.ndarray] | None = None

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
        """Return values clipped to the bounds, scaled to [-1, 1], and standardised, or features.

        Args:
            values: the numbers; whatever they are, the same is done with them.
            dtype: of the result; it is computed in float64.
        """
        scaled = self._scaled(values, dtype)
        return scaled if self.features is None else self.features(scaled)

    def _scaled(self, values: np.ndarray, dtype: type) -> np.ndarray:
        scaled = np.empty(values.shape, dtype)
        step = max(1, _BLOCK // max(1, values[:1].size))
        for start in range(0, len(values), step):
            part = values[start : start + step]
            block = np.clip(part, self.low, self.high, dtype=np.float64)
            block -= self.middle
            block /= self.half
            np.clip(block, -1.0, 1.0, out=block)
            if self.standard is not None:
                block -= self.standard.centre
                block /= self.standard.spread
                np.clip(block, -self.limit, self.limit, out=block)
            block[~np.isfinite(part)] = np.nan
            scaled[start : start + step] = block
        return scaled


def as_array(values: Any, name: str = "X") -> Any:
    """Return a tensor as an array; anything else as it is, if it can be a table of numbers.

    Args:
        values: a data frame, array, tensor or list.
        name: what the values are called in errors.
    """
    if hasattr(values, "detach"):
        return values.detach().cpu().numpy()
    if isinstance(values, str | os.PathLike):
        raise ValueError(f"{name}: is text; the path of a table goes with schema=")
    if type(values).__name__ == "LazyFrame":
        raise ValueError(f"{name}: is a LazyFrame, which holds no rows yet; pass {name}.collect()")
    kinds = getattr(values, "dtypes", None)
    columns = getattr(values, "columns", None)
    if kinds is None or columns is None or isinstance(kinds, np.dtype):
        kinds, columns = [getattr(values, "dtype", "")], [""]
    if len(set(columns)) < len(columns):
        raise ValueError(f"{name}: two columns have the same name; rename one of them")
    for column, kind in zip(columns, kinds, strict=False):
        if str(kind).lower().startswith(_TIMES):
            where = f"column {column!r} holds" if column else "holds"
            raise ValueError(
                f"{name}: {where} {kind}, no numbers; turn it into numbers, such as days since a "
                f"fixed date"
            )
    return values


def validated(
    estimator: BaseEstimator, X: Any, y: Any, regression: bool, on_bad_rows: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return a table of numbers and its targets; set what scikit-learn wants to know of them.

    Args:
        estimator: that is fitted to them.
        X: inputs.
        y: targets.
        regression: whether targets are numbers.
        on_bad_rows: as in `dpbnn.fit`.
    """
    X, y = as_array(X), as_array(y, "y")
    options = {"dtype": [np.float64, np.float32], "ensure_min_samples": 2}
    cure = "remove or correct those rows, or pass on_bad_rows='zero' to let them contribute"
    numbers, show = y if regression else None, on_bad_rows == "show"
    with in_a_line(f"{cure} nothing", X, numbers, show=show):
        if on_bad_rows != "zero":
            found, y = validate_data(estimator, X, y, y_numeric=regression, **options)
        else:
            found = check_array(as_numbers(X), ensure_all_finite=False, **options)
            validate_data(estimator, X, skip_check_array=True)  # takes names and number of columns
            y = column_or_1d(as_numbers(y) if regression else _labels(y), warn=True)
            check_consistent_length(found, y)
        return found, y.astype(np.float64) if regression else y


def _labels(y: Any) -> Any:
    """Return a list of labels as an array of objects, each as it is.

    An array of one type would turn all labels into texts for the sake of one that is a text.
    """
    if not isinstance(y, list | tuple):
        return y
    cells = np.empty(len(y), dtype=object)
    for row, cell in enumerate(y):
        if isinstance(cell, list | tuple | np.ndarray):
            cell = cell[0] if len(np.shape(cell)) == 1 and len(cell) == 1 else None
        cells[row] = cell
    return cells


@contextlib.contextmanager
def in_a_line(cure: str, X: Any, y: Any = None, *, show: bool = False) -> Iterator[None]:
    """Turn errors of scikit-learn's validation into one line that quotes no value.

    Args:
        cure: what to do about values that are not finite.
        X: what is validated; its bad cells are counted by column.
        y: a column of numbers that is validated too.
        show: whether the first bad cells are quoted, with their rows.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        kind: type[Exception] = TypeError if isinstance(error, TypeError) else ValueError
        text = _told(error)
    else:
        return
    if text.startswith(_CELLS):
        found = ", ".join([text, *_bad_cells(X, "column", show), *_bad_cells(y, "y", show)])
        encode = "encode the others, as 'dpbnn fit' and dpbnn.data.Schema do"
        infinite = text.startswith("Input")
        text = f"{found}; {cure}" if infinite else f"X and y must hold numbers ({found}); {encode}"
    alone(kind(text))


def _told(error: Exception) -> str:
    """Return the parts of an error's text that quote no value, or else its type."""
    line, *rest = [part.strip().rstrip(".:") for part in str(error).strip().split("\n")]
    if line.startswith("could not convert string"):
        return _CELLS[0]
    if not _PUBLIC.fullmatch(line):
        return f"X or y cannot be used: {kind_of(error)}; its text may quote private data"
    if line.startswith("y should be a 1d array"):
        return f"{line}; fit one estimator for each target, on one ledger, or use dpbnn.fit"
    return "; ".join([line, *(part for part in rest if part.startswith("Reshape your data"))])


def _bad_cells(values: Any, name: str, show: bool) -> list[str]:
    """Return how many cells of each column are no finite numbers, or the first of them."""
    if values is None:
        return []
    try:
        cells = np.asarray(values)
        bad = ~np.isfinite(np.asarray(as_numbers(values), dtype=np.float64))
    except Exception:  # no table of cells
        return []
    if bad.shape != cells.shape or bad.ndim not in (1, 2):
        return []
    titles = [name] if bad.ndim == 1 else [f"{name} {c!r}" for c in _titles(values, bad.shape[1])]
    cells, bad = cells.reshape(len(cells), -1), bad.reshape(len(bad), -1)
    if show:
        first = np.argwhere(bad)[:SHOWN].tolist()
        return [f"row {row}, {titles[k]}: {cells[row, k]!r}" for row, k in first]
    counts = bad.sum(0)
    some = [f"{titles[k]}: {int(counts[k])} bad cells" for k in np.flatnonzero(counts)[:SHOWN]]
    more = int((counts > 0).sum()) - len(some)
    return [*some, f"{more} more columns"] if more > 0 else some


def _titles(values: Any, width: int) -> list[Any]:
    names = getattr(values, "columns", None)
    return [*range(width)] if names is None else [*names]


def parsed_bounds(
    bounds: Any, features: int | None, names: Sequence[str] | None = None, argument: str = "bounds"
) -> Scaling:
    """Return the scaling for a user's bounds.

    Args:
        bounds: (low, high), each a number or one per column; one (low, high) for every column; or a
            mapping from every column's name to its (low, high). Two pairs for two columns can be
            read in two ways and are refused, unless they are `dpbnn.data.Bounds`.
        features: number of columns; None for a single column.
        names: names of the columns, where they have names.
        argument: what the bounds are called in errors.
    """
    if isinstance(bounds, Mapping):
        if names is None:
            raise ValueError(
                f"{argument}: a mapping needs columns that have names; pass a data frame, or "
                f"(low, high) arrays with one value per column"
            )
        missing = [name for name in names if name not in bounds]
        if missing:
            raise ValueError(
                f"{argument}: column {missing[0]!r} has none ({len(missing)} of {len(names)} "
                f"columns lack them); add {missing[0]!r}: (low, high) from public knowledge"
            )
        unknown = [name for name in bounds if name not in set(names)]
        if unknown:
            raise ValueError(
                f"{argument}: {quoted(unknown[0])} is no column of the data; correct the name, or "
                f"take it out"
            )
        rows = [_pair(bounds[name], f"{argument}[{name!r}]") for name in names]
        low, high = (np.array([float(row[i]) for row in rows]) for i in (0, 1))
    else:
        low, high = _ends(bounds, features, argument)
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


def _ends(bounds: Any, features: int | None, argument: str) -> list[np.ndarray]:
    """Return the lower and the upper bounds, which may be given as one pair for every column."""
    try:
        pairs = np.asarray(as_array(bounds), dtype=np.float64)
    except (TypeError, ValueError):  # ends of different lengths
        pairs = np.empty(0)
    by_column = features is not None and pairs.shape == (features, 2)
    if isinstance(bounds, Bounds) or not by_column:
        return [np.asarray(as_array(end), dtype=np.float64) for end in _pair(bounds, argument)]
    if features == 2:
        one, other = ((ends[0] <= ends[1]).all() for ends in (pairs, pairs.T))
        if one and other and (pairs != pairs.T).any():
            raise ValueError(
                f"{argument}: two pairs for two columns can be (lows, highs) or one (low, high) "
                f"per column; pass dpbnn.data.Bounds(low=[...], high=[...])"
            )
        return [*(pairs if one else pairs.T)]
    return [*pairs.T]


def _pair(bounds: Any, argument: str) -> tuple[Any, Any]:
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ValueError(
            f"{argument}={quoted(bounds)}: must be (low, high), such as {argument}=(0, 1)"
        ) from None
    return low, high


def refuse(given: dict[str, Any]) -> None:
    """Raise for further arguments of a fit; weights of rows get the reason."""
    if "sample_weight" in given:
        raise TypeError(
            "sample_weight: is not taken, since weights that were computed from several rows would "
            "not be covered by epsilon; give class_weight={label: weight} with public weights, or "
            "use dpbnn.fit with dpbnn.likelihoods.Weighted, where each row brings its own weight"
        )
    if given:
        raise TypeError(f"{', '.join(given)}: fit takes X and y only; set it in the constructor")
