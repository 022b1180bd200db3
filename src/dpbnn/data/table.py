"""Tables: named columns of numbers or text, from files, frames, arrays or mappings.

A table never changes its values; errors quote no cell.
"""

from __future__ import annotations

import datetime
import decimal
import math
import numbers as abstract
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dpbnn.data import dates

MISSING = frozenset({"", "?", "NA", "N/A", "NaN", "nan", "null", "NULL"})
"""Texts that stand for a missing value, unless a schema declares them as a category."""
Held = np.ndarray | list[str] | pa.Array | pa.ChunkedArray
"""Values of a column; text of files and frames is held as Arrow strings."""


class Stored(Protocol):
    """A column that is read when its values are used; slices are not read either."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Stored: ...

    def read(self) -> Held:
        """Return the values."""


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
        columns: arrays of numbers; arrays, lists or Arrow arrays of text; or columns that are still
            in a file.
        source: what errors call the table.
        lines: for every row its line in the file, if it came from a text file.
        missing: texts that stand for a missing value.
        named: False where the names come from the first line of a text file. That line may be a
            record, so messages do not quote it.
    """

    def __init__(
        self,
        columns: Mapping[str, Held | Stored],
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

    def column(self, name: str, rows: slice | None = None) -> Held:
        """Return the values of a column as they are held, without copying, or read from a file.

        Args:
            name: of the column.
            rows: which of them; all by default.
        """
        if name not in self._columns:
            raise TableError(
                f"{self.source}: has no column {name!r}, but {self.listed()}; correct the name"
            )
        values = self._columns[name] if rows is None else self._columns[name][rows]
        return values.read() if hasattr(values, "read") else values

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
        """Return a range of rows, without copying or reading anything."""
        start, stop, _ = slice(start, stop).indices(self.n)
        if (start, stop) == (0, self.n):
            return self
        part = {name: values[start:stop] for name, values in self._columns.items()}
        return self._like(part, self._places[start:stop])

    def take(self, index: Any) -> Table:
        """Return chosen rows: an array of row numbers or of booleans."""
        index = np.asarray(index)
        index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
        part = {name: _taken(self.column(name), index) for name in self._columns}
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
    if isinstance(raw, pa.Array | pa.ChunkedArray):
        values = _cast(raw, missing)
        if values is not None:
            return values, None
        texts, at = _distinct(raw)
        values, unreadable = numbers(texts, missing)
        return values[at], None if unreadable is None else unreadable[at]
    texts = _list(raw)
    known = {text: math.nan if text in missing else _number(text) for text in set(texts)}
    found = [known[text] for text in texts]
    unreadable = np.fromiter((value is None for value in found), bool, len(found))
    values = np.array([math.nan if value is None else value for value in found], dtype=np.float64)
    return values, unreadable if unreadable.any() else None


def measured(raw: Held, missing: frozenset[str] = MISSING) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the same as `numbers`, with 1 and 0 for booleans whatever the other cells are.

    A column of booleans alone is one of numbers, and one of texts where a cell is missing.
    """
    values, unreadable = numbers(raw, missing)
    if unreadable is None:
        return values, None
    truth = codes(raw, {"false": 0, "true": 1}, missing)
    values = np.where(unreadable & (truth >= 0), truth, values)
    unreadable = unreadable & (truth < 0)
    return values, unreadable if unreadable.any() else None


def days(raw: Held, missing: frozenset[str] = MISSING) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a column of dates as days since 1970-01-01, and which values are no dates, if any."""
    if isinstance(raw, np.ndarray) and raw.dtype.kind in "biuf":
        distinct, at = np.unique(raw, return_inverse=True)
        values, unreadable = dates.days([cell(value) for value in distinct.tolist()], missing)
        return values[at], None if unreadable is None else unreadable[at]
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
        return codes(texts or [None], categories, missing)[positions]
    if isinstance(raw, pa.Array | pa.ChunkedArray):
        own, at = _distinct(raw)
        return codes(own, categories, missing)[at]
    texts, spelled = _list(raw), with_spellings(categories)
    known = {text: code_of(text, spelled, missing) for text in set(texts)}
    return np.fromiter(map(known.__getitem__, texts), np.int64, len(texts))


def with_spellings(categories: Mapping[str, int]) -> dict[str, int]:
    """Return categories with other ways to write them that are none themselves: 1 for 01.

    pandas reads 01 as a number where all cells of the column are numbers, and as text otherwise.
    """
    others = {same: code for text, code in categories.items() for same in _spellings(text)}
    return {**others, **categories}


def shown(names: Sequence[str], most: int = 8) -> str:
    """Return a list of names for a message, shortened where it is long."""
    text = ", ".join(repr(name) for name in names[:most])
    return text + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


def unique(names: Sequence[str], source: str, *, named: bool = True) -> None:
    """Raise unless all column names differ; a name is quoted only if `named`."""
    seen: set[str] = set()
    for position, name in enumerate(names, 1):
        if not name:
            raise TableError(
                f"{source}: column {position} has no name; name every column in the header, or "
                f"leave it out (pandas: to_csv(..., index=False))"
            )
        if name in seen:
            which = repr(name) if named else f"{position}'s name"
            raise TableError(f"{source}: column {which} is there twice; rename one of the two")
        seen.add(name)


def cell(value: Any) -> str | None:
    """Return one value as text, or None where it is missing."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace").strip()
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, abstract.Integral):
        return str(int(value))  # also where a float would be another number
    if isinstance(value, abstract.Real | decimal.Decimal):
        if value != value:
            return None
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        whole = number == int(number) if abs(number) < 2**53 else False
        return str(int(number)) if whole else repr(number)
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(f"values of type {type(value).__name__}")


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


def _cast(texts: pa.Array | pa.ChunkedArray, missing: frozenset[str]) -> np.ndarray | None:
    """Return texts as numbers by Arrow, or None where Python must read them.

    Arrow does not know all digits that Python knows, and reads "nan(x)". `to_numpy` in place of
    DLPack would import pandas where it is installed.
    """
    import pyarrow.compute as pc  # slow to import

    if not texts.null_count and not any(map(_reads_as_number, missing)):
        try:
            values = np.from_dlpack(_whole(texts.cast(pa.float64())))
            return None if np.isnan(values).any() else values
        except pa.ArrowException:  # a missing value, perhaps
            pass
    known = pc.is_in(texts, value_set=strings(missing))
    try:
        found = pc.if_else(known, pa.scalar(None, texts.type), texts).cast(pa.float64())
    except pa.ArrowException:
        return None
    values = np.from_dlpack(_whole(pc.fill_null(found, math.nan)))
    return None if np.isnan(values).sum() != found.null_count else values


def _whole(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _distinct(texts: pa.Array | pa.ChunkedArray) -> tuple[list[str | None], np.ndarray]:
    """Return the distinct texts, and for every row which of them it holds."""
    coded = _whole(texts.dictionary_encode("encode"))
    return coded.dictionary.to_pylist(), np.from_dlpack(coded.indices)


def distinct_texts(raw: Held) -> set[str | None]:
    """Return the different texts of a column."""
    arrow = isinstance(raw, pa.Array | pa.ChunkedArray)
    return set(_distinct(raw)[0] if arrow else _list(raw))


def _taken(raw: Held, index: np.ndarray) -> Held:
    if isinstance(raw, pa.Array | pa.ChunkedArray):
        whole = np.where(index < 0, index + len(raw), index)
        return raw.take(pa.Array.from_buffers(pa.int64(), len(whole), [None, pa.py_buffer(whole)]))
    return np.asarray(raw, dtype=object)[index] if isinstance(raw, list) else raw[index]


def _list(raw: Held) -> list[Any]:
    if isinstance(raw, pa.Array | pa.ChunkedArray):
        return raw.to_pylist()
    return raw if isinstance(raw, list) else raw.tolist()


def strings(texts: Iterable[str]) -> pa.Array:
    """Return texts as an Arrow array; `pa.array` would import pandas where it is installed."""
    data = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, data)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(pa.string(), len(data), buffers)


def _text(raw: Held, missing: frozenset[str]) -> np.ndarray:
    return np.array([None if v in missing else v for v in _list(raw)], dtype=object)


def code_of(text: str | None, categories: Mapping[str, int], missing: frozenset[str]) -> int:
    """Return the code of a text: -1 where it is missing, -2 where it is not a category.

    Args:
        text: as `cell` has it.
        categories: from `with_spellings`.
        missing: texts that stand for a missing value.
    """
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
