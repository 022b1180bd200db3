"""Reading text files: separators, headers, quotes, line ends.

Errors quote no cell, and name a line only with on_bad_rows="show".
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from dpbnn.data.table import Table, TableError, unique
from dpbnn.messages import alone

SEPARATORS = (",", ";", "\t")
_SAMPLE = 50  # lines from which the separator is found
_BLOCK = 1 << 22  # characters read at once
_TEXT = pa.large_string()
_SPACES = " \t\v\f\x1c\x1d\x1e\x1f"


def parse(
    path: Path,
    file: IO[str],
    *,
    header: bool,
    names: Sequence[str] | None,
    separator: str | None,
    decimal: str,
    missing: frozenset[str],
    comment: str | None,
    on_bad_rows: str = "error",
) -> Table:
    """Return the table in a text file; the arguments are those of `dpbnn.data.read_table`.

    Arrow cuts the lines in large blocks. From the first block on that holds a quote, an empty line
    or a line of another length, the csv module reads line by line: it finds broken quotes and
    the number of a bad line.
    """
    lines = _clean(path, file, comment, on_bad_rows)
    sample = list(itertools.islice(lines, _SAMPLE))
    separator = separator or _sniff(sample)
    text = "".join(sample)
    plain = separator != " " and '"' not in text and bool(text.strip())
    every = sample if plain else itertools.chain(sample, lines)
    rows = _rows(path, every, separator, on_bad_rows=on_bad_rows)
    begin, top = next(rows, (0, []))
    if not top:
        raise TableError(f"{path}: is empty; give a table with a header and rows")
    named = names is not None or not header
    own = _names(path, top, header, names, named or on_bad_rows == "show")
    parts: list[list[pa.Array]] = []
    numbers: list[np.ndarray] = []

    def add(rows: Iterable[tuple[int, list[str]]]) -> None:
        if found := [*_of_width(path, rows, len(own), on_bad_rows)]:
            numbers.append(np.array([line for line, _ in found], dtype=np.int64))
            columns = zip(*(row for _, row in found), strict=True)
            parts.append([_texts(map(str.strip, column)) for column in columns])

    add(rows if header else itertools.chain([(begin, top)], rows))
    before = len(sample)
    while plain and (block := file.read(_BLOCK) + file.readline()):
        cut = None if _commented(block, comment) else _cut(block, separator, len(own))
        if cut is None:
            rest = itertools.chain(io.StringIO(block, newline=""), file)
            clean = _clean(path, rest, comment, on_bad_rows)
            add(_rows(path, clean, separator, before, on_bad_rows))
            break
        parts.append(cut)
        count = len(cut[0])
        numbers.append(np.arange(before + 1, before + count + 1))
        before += count - 1 + len(_line_ends(block).splitlines())
    if not parts:
        raise TableError(f"{path}: has a header and no rows; give at least one row")
    columns = [pa.concat_arrays(column) for column in zip(*parts, strict=True)]
    if decimal == ",":
        columns = [_texts(map(_point, column.to_pylist())) for column in columns]
    where = np.concatenate(numbers)
    held = dict(zip(own, columns, strict=True))
    return Table(held, source=str(path), lines=where, missing=missing, named=named)


def _names(
    path: Path, top: list[str], header: bool, names: Sequence[str] | None, named: bool
) -> list[str]:
    """Return the column names: given, from the header, or x0, x1, ...; quoted only if `named`."""
    if header and names is None and _looks_like_data(top):
        raise TableError(
            f"{path}: the first line holds only numbers, so it is no header; pass "
            f"header=False, or name the columns (names=[...], --names)"
        )
    if names is not None and len(names) != len(top):
        raise TableError(
            f"{path}: has {len(top)} columns and {len(names)} names were given; give one per column"
        )
    own = [name.strip() for name in top] if header else [f"x{i}" for i in range(len(top))]
    own = own if names is None else list(names)
    unique(own, str(path), named=named)
    return own


def _clean(
    path: Path, lines: Iterable[str], comment: str | None, on_bad_rows: str
) -> Iterator[str]:
    """Yield the lines of a text file; comments become empty lines."""
    for line in lines:
        if "\0" in line and on_bad_rows == "zero":
            line = line.replace("\0", "\ufffd")
        if "\0" in line:
            raise TableError(f"{path}: holds NUL bytes, so it is no text; give a CSV file")
        yield "\n" if comment and line.startswith(comment) else line


def _rows(
    path: Path,
    lines: Iterable[str],
    separator: str,
    before: int = 0,
    on_bad_rows: str = "error",
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, values) for every line that is not empty.

    With on_bad_rows="zero" a line with broken quotes has no values. It is refused all the same if
    the quotes span several lines: the number of rows is unknown then.
    """
    if separator == " ":
        for number, line in enumerate(lines, before + 1):
            if row := line.split():
                yield number, row
        return
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    while True:
        begin = reader.line_num
        try:
            row = next(reader, None)
        except csv.Error as error:
            if on_bad_rows == "zero" and reader.line_num <= begin + 1:
                yield before + reader.line_num, []
                continue
            where = _where(before + reader.line_num, on_bad_rows)
            alone(TableError(f"{path}, {where}: {error}; correct the quotes in that line"))
        if row is None:
            return
        if len(row) > 1 or (row and row[0].strip()):
            yield before + reader.line_num, row


def _of_width(
    path: Path, rows: Iterable[tuple[int, list[str]]], width: int, on_bad_rows: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield rows of the right width; with on_bad_rows="zero" other rows are all missing values."""
    for line, row in rows:
        if len(row) == width:
            yield line, row
        elif on_bad_rows == "zero":
            yield line, [""] * width
        else:
            raise TableError(
                f"{path}, {_where(line, on_bad_rows)}: has {len(row)} values where {width} columns "
                f"are; correct the line (text with a separator in it needs quotes)"
            )


def _where(line: int, on_bad_rows: str) -> str:
    return f"line {line}" if on_bad_rows == "show" else "one line"


def _cut(block: str, separator: str, width: int) -> list[pa.Array] | None:
    """Return the columns of a block of whole lines, or None if the csv module must read them.

    Arrow would drop a byte order mark and would not see broken quotes.
    """
    body = block.removesuffix(_line_ends(block))
    if width == 1 or not body or body[0] == "\ufeff" or '"' in body or "\0" in body:
        return None
    import pyarrow.compute as pc  # slow to import, and only text files need it
    from pyarrow import csv as arrow_csv

    data = body.encode()
    names = [str(i) for i in range(width)]
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(data),
            arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
            arrow_csv.ParseOptions(delimiter=separator, quote_char=False, ignore_empty_lines=False),
            arrow_csv.ConvertOptions(
                check_utf8=False, column_types=dict.fromkeys(names, _TEXT), null_values=[]
            ),
        )
    except pa.ArrowException:  # a line of another length; its text quotes the line
        return None
    columns = [column.combine_chunks() for column in table.columns]
    sizes = functools.reduce(pc.add, map(pc.binary_length, columns))
    if pc.min(sizes).as_py() == 0:  # an empty line, perhaps
        return None
    if not body.isascii() or any(c in body for c in _SPACES if c != separator):
        columns = [pc.utf8_trim_whitespace(column) for column in columns]
    return columns


def _commented(block: str, comment: str | None) -> bool:
    """Return whether a line of a block is a comment."""
    return bool(comment) and any(f"{end}{comment}" in f"\n{block}" for end in "\r\n")


def _line_ends(block: str) -> str:
    """Return the line ends at the end of a block."""
    size = len(block)
    while size and block[size - 1] in "\r\n":
        size -= 1
    return block[size:]


def _texts(values: Iterable[str]) -> pa.Array:
    """Return texts as an Arrow array; `pa.array` would import pandas where it is installed."""
    data = [value.encode() for value in values]
    ends = np.cumsum([0, *map(len, data)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(_TEXT, len(data), buffers)


def _sniff(sample: list[str]) -> str:
    """Return the separator that gives the most values a line, equally many in the first lines."""
    best, width = "", 1
    for separator in (*SEPARATORS, " "):
        try:
            rows = [row for _, row in _rows(Path(), sample, separator)]
        except TableError:
            continue
        widths = {len(row) for row in rows}
        if len(widths) == 1 and (most := widths.pop()) > width and (separator != " " or not best):
            best, width = separator, most
    if best:
        return best
    top = next((line for line in sample if line.strip()), "")
    return max(SEPARATORS, key=top.count)


def _looks_like_data(row: list[str]) -> bool:
    """Return whether all names are numbers, other than 0, 1, 2, ..."""
    try:
        values = [float(name) for name in row]
    except ValueError:
        return False
    return values != list(range(len(row)))


def _point(value: str) -> str:
    """Return a number with a decimal point in place of a comma; other text as it is."""
    pointed = value.replace(",", ".")
    try:
        float(pointed)
    except ValueError:
        return value
    return pointed
