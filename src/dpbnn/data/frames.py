"""Tables from objects in memory: frames of pandas and polars, Arrow tables, arrays, mappings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dpbnn.data import dates
from dpbnn.data.table import Held, Table, TableError, cell, unique
from dpbnn.messages import unquoted

EXACT = 2.0**53
"""Below it, float64 holds every whole number."""


def as_table(
    values: Any,
    names: Sequence[str] | None = None,
    *,
    source: str | None = None,
    on_bad_rows: str = "error",
) -> Table:
    """Return a table from any supported object.

    Args:
        values: a table, the path of a file, a pandas or polars DataFrame, a pyarrow Table, a
            mapping of columns, a structured array, or an array or tensor [rows, columns].
        names: of the columns of an array; x0, x1, ... by default.
        source: what errors call the table.
        on_bad_rows: "error" or "show" refuse a cell that is neither a number nor text; "zero"
            takes it for text that is not a category.
    """
    if isinstance(values, Table):
        return values
    if isinstance(values, str | os.PathLike):
        from dpbnn.data.files import read_table

        return read_table(values, names=names, on_bad_rows=on_bad_rows)
    source = source or "the table"
    problem, cure = f"{source}: cannot be turned into columns", "give numbers or text"
    with unquoted(problem, cure, TableError, let=(TableError,)):
        columns = _columns(values, names, source, on_bad_rows)
    return Table(columns, source=source)


def _columns(
    values: Any, names: Sequence[str] | None, source: str, on_bad_rows: str
) -> dict[str, Held]:
    if isinstance(values, Mapping):
        pairs = [(name, _plain(column)) for name, column in values.items()]
    elif hasattr(values, "columns") and hasattr(values, "dtypes"):  # pandas, polars
        own = [str(name) for name in values.columns]
        unique(own, source)
        get: Callable[[int], Any] = (
            (lambda i: values.iloc[:, i]) if hasattr(values, "iloc") else values.to_series
        )
        pairs = [(name, _series(get(i))) for i, name in enumerate(own)]
    elif hasattr(values, "column_names") and hasattr(values, "itercolumns"):  # pyarrow
        pairs = [
            (name, arrow_column(column))
            for name, column in zip(values.column_names, values.itercolumns(), strict=True)
        ]
        unique([name for name, _ in pairs], source)
    else:
        array = _plain(values)
        if array.dtype.names:
            pairs = [(name, array[name]) for name in array.dtype.names]
        elif array.ndim == 2:
            own = [f"x{i}" for i in range(array.shape[1])] if names is None else list(names)
            if len(own) != array.shape[1]:
                raise TableError(
                    f"{source}: has {array.shape[1]} columns and {len(own)} names were given; "
                    f"give one name per column"
                )
            unique(own, source)
            pairs = [(name, array[:, i]) for i, name in enumerate(own)]
        else:
            raise TableError(
                f"{source}: must have rows and columns, and its number of axes is {array.ndim}; "
                f"give an array [rows, columns], a DataFrame or a mapping of columns"
            )
    return {str(name): column_of(str(name), cells, source, on_bad_rows) for name, cells in pairs}


def column_of(name: str, values: Any, source: str, on_bad_rows: str = "error") -> Held:
    """Return a column as numbers, or as text with None for missing values.

    Dates are held as text, so that tables with dates can be drafted and their other columns used.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if values.ndim != 1:
        raise TableError(f"{source}: column {name!r} has {values.ndim} axes; give one value a row")
    if values.dtype.kind in "biuf":
        return values
    if values.dtype.kind in "OUST":
        kinds: set[str] = set()
        texts = [_cell(value, kinds) for value in values.tolist()]
        if kinds and on_bad_rows != "zero":
            raise TableError(
                f"{source}: column {name!r} holds values of type {', '.join(sorted(kinds))}; give "
                f"numbers or text"
            )
        return np.array(texts, dtype=object)
    if values.dtype.kind == "M":
        return dates.as_text(values)
    kind = {"m": "time spans", "c": "complex numbers"}.get(values.dtype.kind, str(values.dtype))
    cure = (
        "turn them into numbers, such as days" if kind == "time spans" else "give numbers or text"
    )
    raise TableError(f"{source}: column {name!r} holds {kind}; {cure}")


def _cell(value: Any, kinds: set[str]) -> str | None:
    """Return one value as text; for another type, add it to `kinds` and return a mark."""
    try:
        return cell(value)
    except Exception:  # another type, or an error of its own methods
        kinds.add(type(value).__name__)
        return "\ufffd"


def _plain(values: Any) -> Any:
    """Return an array from an array, a tensor, a series or a list."""
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "isna") or hasattr(values, "is_null"):
        return _series(values)
    if hasattr(values, "detach"):
        return np.asarray(values.detach().cpu().numpy())
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = np.empty(len(values), dtype=object)
        for i, value in enumerate(values):
            array[i] = value
    if array.ndim == 1 and (array.dtype.kind in "USc" or _has_changed(array, values)):
        array = np.array(list(values), dtype=object)  # NumPy turned all into what a few of them are
    return array


def _has_changed(array: np.ndarray, values: Any) -> bool:
    """Return whether booleans have become numbers, or whole numbers floats of another value."""
    if array.dtype.kind in "iuf" and any(isinstance(value, bool | np.bool_) for value in values):
        return True
    large = array.dtype.kind == "f" and bool((np.abs(array) >= EXACT).any())
    return large and any(isinstance(value, int) and abs(value) >= EXACT for value in values)


def _series(series: Any) -> Any:
    """Return a pandas or polars series as an array, missing values as None or NaN."""
    kind = str(getattr(series, "dtype", ""))
    if not hasattr(series, "isna"):  # polars
        text = kind.startswith(("String", "Categorical", "Enum"))
        whole = kind.startswith(("Int", "UInt"))
        arrow = text or (whole and series.null_count())
        return arrow_column(pa.chunked_array([series.to_arrow()])) if arrow else series.to_numpy()
    if kind in ("category", "str", "string"):
        try:
            return arrow_column(pa.chunked_array([pa.Array.from_pandas(series)]))
        except (pa.ArrowException, TypeError):  # categories of several types
            pass
    absent = np.asarray(series.isna(), dtype=bool)
    if getattr(series.dtype, "kind", "O") in "iuf" and absent.any():
        numbers = np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
        if series.dtype.kind == "f" or not (np.abs(numbers) >= EXACT).any():
            return numbers
        return np.asarray(series.to_numpy(dtype=object, na_value=None))
    values = np.asarray(series.to_numpy())
    if absent.any():
        values = values.astype(object)
        values[absent] = None
    return values


def arrow_column(column: Any) -> Any:
    """Return an Arrow column: text as it is, without spaces around it; other types as an array."""
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_dictionary(kind):  # `to_numpy` gives a missing one the last category
        column = column.cast(kind.value_type)
        kind = column.type
    if _is_text(kind):
        try:
            return pc.utf8_trim_whitespace(column)
        except pa.ArrowException:  # texts that are not UTF-8
            column = column.cast(pa.large_binary())
    numbers = np.asarray(column.to_numpy(zero_copy_only=False))
    if pa.types.is_integer(kind) and column.null_count and (np.abs(numbers) >= EXACT).any():
        return np.array(column.to_pylist(), dtype=object)
    return numbers


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)
