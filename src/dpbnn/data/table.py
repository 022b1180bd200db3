"""Tables: named columns of numbers or text, from files, frames, arrays or mappings.

A table never changes its values; errors quote no cell.
"""

from __future__ import annotations

import datetime
import decimal
import math
import numbers as abstract
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dpbnn.data import dates
from dpbnn.messages import unquoted

MISSING = frozenset({"", "?", "NA", "N/A", "NaN", "nan", "null", "NULL"})
"""Texts that stand for a missing value, unless a schema declares them as a category."""
Held = np.ndarray | list[str] | pa.Array
"""A column as a table holds it; text files are held as Arrow strings."""


class TableError(ValueError):
    """A table or schema that cannot be used; the message names the column and the fix."""


class TableWarning(UserWarning):
    """Something in a table that is ignored."""


class Table(Mapping[str, np.ndarray]):
    """Columns of equal length by name, in order.

    `table[name]` is a float64 array with NaN for missing values where every value is a number, and
    an array of text with None for missing values otherwise. A schema encodes the raw values, so
    that the type of a column does not depend on its values.

    Args:
        columns: arrays of numbers; arrays, lists or Arrow arrays of text; None only in arrays.
        source: what errors call the table.
        lines: for every row its line in the file, if it came from a text file.
        missing: texts that stand for a missing value.
        named: False where the names come from the first line of a text file. That line may be a
            record, so messages do not quote it.
    """

    def __init__(
        self,
        columns: Mapping[str, Held],
        *,
        source: str = "the table",
        lines: Sequence[int] | np.ndarray | None = None,
        missing: frozenset[str] = MISSING,
        named: bool = True,
    ) -> None:
        self._columns = dict(columns)
        self.named = named
        self.source = source
        self.missing = missing
        sizes = {name: len(values) for name, values in self._columns.items()}
        if len(set(sizes.values())) > 1:
            short, long = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
            raise TableError(
                f"{source}: column {short!r} has {sizes[short]} rows and column {long!r} has "
                f"{sizes[long]}; give columns of one length"
            )
        self.n = next(iter(sizes.values()), 0)
        self._unit, self._places = ("row", range(self.n)) if lines is None else ("line", lines)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> np.ndarray:
        raw = self.column(name)
        values, unreadable = numbers(raw, self.missing)
        return values if unreadable is None else _text(raw, self.missing)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of columns; the number of rows is `n`."""
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Table({self.source}: {self.n} rows, {len(self)} columns)"

    def raw(self, name: str) -> np.ndarray:
        """Return a column as it was given, as an array."""
        values = self.column(name)
        return values if isinstance(values, np.ndarray) else np.array(_list(values), dtype=object)

    def column(self, name: str) -> Held:
        """Return a column as it is held, without copying."""
        if name not in self._columns:
            raise TableError(
                f"{self.source}: has no column {name!r}, but {self.listed()}; correct the name"
            )
        return self._columns[name]

    def listed(self, names: Sequence[str] | None = None, *, show: bool = False) -> str:
        """Return column names for a message, or their number where they may be a record.

        Args:
            names: some of the table's; all of them by default.
            show: whether they may be quoted anyway.
        """
        some = self.names if names is None else names
        if self.named or show:
            return f"the column{'s' * (len(some) != 1)} {shown(some)}"
        return f"{len(some)} column{'s' * (len(some) != 1)} that the first line names"

    def rows(self, start: int, stop: int) -> Table:
        """Return a range of rows, arrays without copying."""
        start, stop, _ = slice(start, stop).indices(self.n)
        if (start, stop) == (0, self.n):
            return self
        part = {name: values[start:stop] for name, values in self._columns.items()}
        return self._like(part, self._places[start:stop])

    def take(self, index: Any) -> Table:
        """Return chosen rows: an array of row numbers or of booleans."""
        index = np.asarray(index)
        part = {name: self.raw(name)[index] for name in self._columns}
        return self._like(part, np.asarray(self._places)[index])

    def with_column(self, name: str, values: Held) -> Table:
        """Return the table with one column more, or in the place of another one."""
        return self._like({**self._columns, name: values}, self._places)

    def where(self, row: int) -> str:
        """Return the place of a row in words: its line, or its number."""
        return f"{self.source}, {self._unit} {self._places[row]}"

    def _like(self, columns: dict[str, Any], places: Sequence[int] | np.ndarray) -> Table:
        like = Table(columns, source=self.source, missing=self.missing, named=self.named)
        like._unit, like._places = self._unit, places
        return like


def numbers(raw: Held, missing: frozenset[str] = MISSING) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a column as float64 with NaN for missing, and which values are not numbers, if any."""
    if isinstance(raw, np.ndarray) and raw.dtype.kind in "biuf":
        return np.asarray(raw, dtype=np.float64), None
    if isinstance(raw, pa.Array):
        if not any(map(_reads_as_number, missing)):
            try:
                values = np.from_dlpack(raw.cast(pa.float64()))
                if not np.isnan(values).any():  # Arrow reads "nan(x)" too
                    return values, None
            except pa.ArrowException:  # a missing value, text, or digits that Arrow does not know
                pass
        texts, at = _distinct(raw)
        values, unreadable = numbers(texts, missing)
        return values[at], None if unreadable is None else unreadable[at]
    texts = _list(raw)
    known = {text: math.nan if text in missing else _number(text) for text in set(texts)}
    found = [known[text] for text in texts]
    unreadable = np.fromiter((value is None for value in found), bool, len(found))
    values = np.array([math.nan if value is None else value for value in found], dtype=np.float64)
    return values, unreadable if unreadable.any() else None


def days(raw: Held, missing: frozenset[str] = MISSING) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a column of dates as days since 1970-01-01, and which values are no dates, if any."""
    if isinstance(raw, np.ndarray) and raw.dtype.kind in "biuf":
        absent = np.isnan(np.asarray(raw, dtype=np.float64))
        return np.full(len(raw), math.nan), None if absent.all() else ~absent
    if isinstance(raw, pa.Array | pa.ChunkedArray):
        texts, at = _distinct(raw)
        values, unreadable = dates.days(texts, missing)
        return values[at], None if unreadable is None else unreadable[at]
    return dates.days(_list(raw), missing)


def codes(
    raw: Held,
    categories: Mapping[str, int],
    missing: frozenset[str] = MISSING,
) -> np.ndarray:
    """Return the code of every value: -1 for missing, -2 for a value that is not a category."""
    if isinstance(raw, np.ndarray) and raw.dtype.kind in "biuf":
        distinct, positions = np.unique(raw, return_inverse=True)
        texts = [cell(value) for value in distinct.tolist()]
        own = np.array([_code(text, categories, missing) for text in texts] or [-1], dtype=np.int64)
        return own[positions]
    if isinstance(raw, pa.Array):
        own, at = _distinct(raw)
        return codes(own, categories, missing)[at]
    texts = _list(raw)
    known = {text: _code(text, categories, missing) for text in set(texts)}
    return np.fromiter(map(known.__getitem__, texts), np.int64, len(texts))


def shown(names: Sequence[str], most: int = 8) -> str:
    """Return a list of names for a message, shortened where it is long."""
    text = ", ".join(repr(name) for name in names[:most])
    return text + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


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
) -> dict[str, np.ndarray]:
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
            (name, _arrow(column))
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
                f"{source}: has {array.ndim} axes; give an array [rows, columns], a DataFrame or "
                f"a mapping of columns"
            )
    return {str(name): column_of(str(name), cells, source, on_bad_rows) for name, cells in pairs}


def column_of(name: str, values: np.ndarray, source: str, on_bad_rows: str = "error") -> np.ndarray:
    """Return a column as numbers, or as text with None for missing values."""
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
    raise TableError(
        f"{source}: column {name!r} holds {kind}; turn them into numbers, such as days"
    )


def unique(names: Sequence[str], source: str, *, named: bool = True) -> None:
    """Raise unless all column names differ; a name is quoted only if `named`."""
    seen: set[str] = set()
    for position, name in enumerate(names, 1):
        if not name:
            raise TableError(
                f"{source}: column {position} has no name; name every column in the header"
            )
        if name in seen:
            which = repr(name) if named else f"{position}'s name"
            raise TableError(f"{source}: column {which} is there twice; rename one of the two")
        seen.add(name)


def cell(value: Any) -> str | None:
    """Return one value as text, or None where it is missing."""
    if value is None:
        return None
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace").strip()
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, abstract.Real | decimal.Decimal):
        if value != value:
            return None
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        whole = number == int(number) if abs(number) < 2**53 else False
        return str(int(number)) if whole else repr(number)
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(f"values of type {type(value).__name__}")


def _cell(value: Any, kinds: set[str]) -> str | None:
    """Return one value as text; for another type, add it to `kinds` and return a mark."""
    try:
        return cell(value)
    except Exception:  # another type, or an error of its own methods
        kinds.add(type(value).__name__)
        return "\ufffd"


def _number(value: str | None) -> float | None:
    """Return the number that a text stands for, NaN for a missing value, None for other text."""
    if value is None:
        return math.nan
    try:
        return None if "_" in value else float(value)
    except ValueError:
        return None


def _reads_as_number(text: str) -> bool:
    """Return whether a text would be read as a number; NaN is a missing value anyway."""
    number = _number(text)
    return number is not None and not math.isnan(number)


def _distinct(texts: pa.Array) -> tuple[list[str], np.ndarray]:
    """Return the distinct texts, and for every row which of them it holds.

    `to_numpy` in place of DLPack would import pandas where it is installed.
    """
    coded = texts.dictionary_encode()
    return coded.dictionary.to_pylist(), np.from_dlpack(coded.indices)


def _list(raw: Held) -> list[Any]:
    return raw if isinstance(raw, list) else raw.tolist()


def _text(raw: Held, missing: frozenset[str]) -> np.ndarray:
    return np.array([None if v in missing else v for v in _list(raw)], dtype=object)


def _code(text: str | None, categories: Mapping[str, int], missing: frozenset[str]) -> int:
    if text is None:
        return -1
    if text in categories:
        return categories[text]
    if text in missing:
        return -1
    return next((categories[same] for same in _spellings(text) if same in categories), -2)


def _spellings(text: str) -> tuple[str, ...]:
    """Return other ways to write a value: 3 for 3.0, True for true, yes for yes with a stop."""
    if text.lower() in ("true", "false"):
        return text.lower(), text.capitalize(), text.upper()
    number = _number(text)
    if number is None or not math.isfinite(number):
        return (text[:-1],) if text.endswith(".") else ()
    return (cell(number) or text,)


def _plain(values: Any) -> np.ndarray:
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
    if array.dtype.kind in "US" and array.ndim == 1:  # NumPy turned numbers into text
        array = np.array(list(values), dtype=object)
    return array


def _series(series: Any) -> np.ndarray:
    """Return a pandas or polars series as an array, missing values as None or NaN."""
    if hasattr(series, "isna"):
        absent = np.asarray(series.isna(), dtype=bool)
        if getattr(series.dtype, "kind", "O") in "iuf" and absent.any():
            return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
        values = np.asarray(series.to_numpy())
        if absent.any():
            values = values.astype(object)
            values[absent] = None
        return values
    return np.asarray(series.to_numpy())


def _arrow(column: Any) -> np.ndarray:
    """Return a pyarrow column as an array, missing values as None or NaN."""
    if pa.types.is_dictionary(column.type):  # `to_numpy` gives a missing one the last category
        column = column.cast(column.type.value_type)
    try:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    except UnicodeDecodeError:
        pass
    binary = column.cast("binary")
    return np.asarray(binary.to_numpy(zero_copy_only=False))  # texts that are not UTF-8
