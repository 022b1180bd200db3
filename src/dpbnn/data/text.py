"""Reading text files: separators, headers, quotes, line ends.

Arrow cuts and decodes blocks of lines. Blocks that Arrow would read in another way than the csv
module, or would refuse without saying where, are read by the csv module, each for itself. Errors
quote no cell, and name a line only with on_bad_rows="show".
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from dpbnn.data.table import Table, TableError, strings, unique
from dpbnn.messages import alone

SEPARATORS = (",", ";", "\t")
_SAMPLE = 50  # lines from which the separator is found
_BLOCK = 1 << 21  # characters read at once; four times as many fault in new pages for each block
_OPEN = 100  # lines that a quoted value at the end of a block may take
_SPACES = " \t\v\f\x1c\x1d\x1e\x1f"
_QUOTE, _LINE_FEED = b'"\n'
_BLANKS = re.compile(r"[^\S\r\n]+")
_MARGINS = re.compile(r"(?<![^\r\n]) | (?![^\r\n])")  # of lines
_COMMAS = (  # decimal ones
    r"^([+-]?[0-9]+),([0-9]*(?:[eE][+-]?[0-9]+)?)$",
    r"^([+-]?),([0-9]+(?:[eE][+-]?[0-9]+)?)$",
)


class _Part(NamedTuple):
    """Columns of some rows, the line of each row, and how many lines were read for them."""

    columns: list[pa.Array]
    lines: np.ndarray
    read: int


class _Reader:
    """How the lines of one file are cut into values."""

    def __init__(self, path: Path, file: IO[str], comment: str | None, on_bad_rows: str) -> None:
        self.path, self.on_bad_rows = path, on_bad_rows
        self._file = file
        self._comment = comment and re.compile(rf"(?<![^\r\n]){re.escape(comment)}[^\r\n]*")
        self.separator, self.width = ",", 0
        self.read = 0  # lines, by the last call of `rows`
        self.pulled: list[str] = []  # those of them that are not in the block

    def blocks(self) -> Iterator[str]:
        """Yield blocks of whole lines, and mostly of whole records; comments are empty lines."""
        while block := self._file.read(_BLOCK) + self._file.readline():
            for _ in range(_OPEN):
                if block.count('"') % 2 == 0:
                    break
                block += self._file.readline()
            yield self._clean(block)

    def part(self, block: str, before: int) -> _Part | None:
        """Return the columns of a block that comes after so many lines; None if it is empty."""
        found = _cut(block, self.separator, self.width)
        if found is None:
            found = self._by_line(block, before)
        else:
            found = found._replace(lines=found.lines + before)
        return found if len(found.lines) else None

    def rows(self, block: str, before: int = 0) -> Iterator[tuple[int, list[str]]]:
        """Yield (line number, values) for every line that is not empty.

        A quoted value at the end of the block may go on in the file. With on_bad_rows="zero" a line
        with broken quotes has no values. It is refused all the same if the quotes span several
        lines: the number of rows is unknown then.
        """
        own = io.StringIO(block, newline="").readlines()
        self.read, self.pulled = len(own), []
        if self.separator == " ":
            for number, line in enumerate(own, before + 1):
                if row := line.split():
                    yield number, row
            return
        reader = csv.reader(
            itertools.chain(own, self._more()),
            delimiter=self.separator,
            skipinitialspace=True,
            strict=True,
        )
        while reader.line_num < len(own):
            begin = reader.line_num
            try:
                row = next(reader, None)
            except csv.Error as error:
                if self.on_bad_rows == "zero" and reader.line_num <= begin + 1:
                    yield before + reader.line_num, []
                    continue
                self.refuse(before + reader.line_num, f"{error}; correct the quotes in that line")
            if row is None:
                return
            self.read = max(self.read, reader.line_num)
            if len(row) > 1 or (row and row[0].strip()):
                yield before + reader.line_num, row

    def refuse(self, line: int, problem: str) -> NoReturn:
        """Raise an error about a line."""
        alone(TableError(f"{self.path}, {_where(line, self.on_bad_rows)}: {problem}"))

    def _more(self) -> Iterator[str]:
        """Yield lines after the block."""
        for line in self._file:
            self.pulled.append(self._clean(line))
            yield self.pulled[-1]

    def _by_line(self, block: str, before: int) -> _Part:
        """Return the columns of a block, line by line."""
        found = [(line, self._of_width(line, row)) for line, row in self.rows(block, before)]
        columns = zip(*(row for _, row in found), strict=True)
        lines = np.array([line for line, _ in found], dtype=np.int64)
        return _Part([strings(map(str.strip, column)) for column in columns], lines, self.read)

    def _of_width(self, line: int, row: list[str]) -> list[str]:
        """Return a row of the right width; with on_bad_rows="zero" others are missing values."""
        if len(row) != self.width:
            if self.on_bad_rows == "zero":
                return [""] * self.width
            self.refuse(
                line,
                f"has {len(row)} values where {self.width} columns are; correct the line (text "
                f"with a separator in it needs quotes)",
            )
        return row

    def _clean(self, block: str) -> str:
        """Return lines with comments taken out."""
        if "\0" in block:
            if self.on_bad_rows != "zero":
                raise TableError(f"{self.path}: holds NUL bytes, so it is no text; give a CSV file")
            block = block.replace("\0", "\ufffd")
        return self._comment.sub("", block) if self._comment else block


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
    """Return the table in a text file; the arguments are those of `dpbnn.data.read_table`."""
    reader = _Reader(path, file, comment, on_bad_rows)
    blocks = reader.blocks()
    block, before = next(blocks, ""), 0
    while block and not block.strip():
        before += _count(block)
        block = next(blocks, "")
    reader.separator = separator or _sniff(path, block)
    begin, top = next(reader.rows(block, before), (0, []))
    block += "".join(reader.pulled)
    if not top:
        raise TableError(f"{path}: is empty; give a table with a header and rows")
    named = names is not None or not header
    own = _names(path, top, header, names, named or on_bad_rows == "show")
    reader.width = len(own)
    if header:
        block = _after(block, begin - before)
        before = begin
    parts: list[_Part] = []
    for text in itertools.chain([block], blocks):
        part = reader.part(text, before) if text else None
        if part is not None:
            parts.append(part)
        before += _count(text) if part is None else part.read
    if not parts:
        raise TableError(f"{path}: has a header and no rows; give at least one row")
    columns = [pa.chunked_array(column) for column in zip(*(p.columns for p in parts), strict=True)]
    if decimal == ",":
        columns = [_pointed(column) for column in columns]
    lines = np.concatenate([part.lines for part in parts])
    held = dict(zip(own, columns, strict=True))
    return Table(held, source=str(path), lines=lines, missing=missing, named=named)


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
            f"{path}: its first line has {len(top)} value{'s' * (len(top) != 1)} and {len(names)} "
            f"names were given; give one per column, or say how lines begin that are no records "
            f"(comment='|', --comment)"
        )
    own = [name.strip() for name in top] if header else [f"x{i}" for i in range(len(top))]
    own = own if names is None else list(names)
    unique(own, str(path), named=named)
    return own


def _where(line: int, on_bad_rows: str) -> str:
    return f"line {line}" if on_bad_rows == "show" else "one line"


def _cut(block: str, separator: str, width: int) -> _Part | None:
    """Return the columns of a block of whole lines, or None if the csv module must read them."""
    if width == 1 or block.startswith("\ufeff"):  # Arrow would drop a byte order mark
        return None
    if separator == " ":
        block = _MARGINS.sub("", _BLANKS.sub(" ", block))
    quotes = separator != " " and '"' in block
    returns = "\r" in block
    if returns and not quotes:
        block = block.replace("\r\n", "\n").replace("\r", "\n")
    data = block.encode()
    data += b"" if data.endswith(b"\n") else b"\n"
    letters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(letters == _LINE_FEED)
    outside = np.ones(len(ends), dtype=bool)
    if quotes:
        marks = np.flatnonzero(letters == _QUOTE)
        if returns or not _well_quoted(letters, marks, ord(separator)):
            return None
        outside = np.searchsorted(marks, ends) % 2 == 0
    lines = np.flatnonzero(outside) + 1
    sizes = np.diff(ends[outside], prepend=-1)
    lines = lines[sizes > 1]  # the others are empty
    columns = _columns(data, separator, width, quotes, not outside.all())
    if columns is None or len(columns[0]) != len(lines):
        return None
    if not block.isascii() or any(c in block for c in _SPACES if c != separator):
        import pyarrow.compute as pc

        columns = [pc.utf8_trim_whitespace(column) for column in columns]
    return _Part(columns, lines, len(ends))


def _columns(
    data: bytes, separator: str, width: int, quotes: bool, several: bool
) -> list[pa.Array] | None:
    """Return the columns of UTF-8 lines, or None where a line has another width.

    Args:
        data: the lines.
        separator: between values.
        width: number of columns.
        quotes: whether there are quoted values.
        several: whether a quoted value has several lines.
    """
    from pyarrow import csv as arrow_csv  # slow to import, and only text files need it

    names = [str(i) for i in range(width)]
    # Arrow's threads could abort a process that ended right after reading
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(data),
            arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
            arrow_csv.ParseOptions(
                delimiter=separator, quote_char='"' if quotes else False, newlines_in_values=several
            ),
            arrow_csv.ConvertOptions(
                check_utf8=False, column_types=dict.fromkeys(names, pa.string()), null_values=[]
            ),
        )
    except pa.ArrowException:  # its text quotes the line
        return None
    # one chunk is taken as it is: copies took a tenth of the time of reading
    return [c.chunk(0) if c.num_chunks == 1 else c.combine_chunks() for c in table.columns]


def _well_quoted(letters: np.ndarray, marks: np.ndarray, separator: int) -> bool:
    """Return whether every value is quoted as a whole or not at all, with quotes in it doubled.

    Args:
        letters: the bytes of a block that ends with a line end.
        marks: where the quotes are; those at even places open.
        separator: between values.
    """
    if len(marks) % 2:
        return False
    before, after = letters[marks[::2] - 1], letters[marks[1::2] + 1]  # -1 is a line end too
    around = (_LINE_FEED, separator, _QUOTE)
    return bool(np.isin(before, around).all() and np.isin(after, around).all())


def _after(block: str, lines: int) -> str:
    """Return a block without its first lines."""
    stream = io.StringIO(block, newline="")
    for _ in range(lines):
        stream.readline()
    return stream.read()


def _count(block: str) -> int:
    """Return the number of lines of a block."""
    return sum(1 for _ in io.StringIO(block, newline=""))


def _pointed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return numbers with a decimal point in place of a comma; other text as it is."""
    import pyarrow.compute as pc

    for pattern in _COMMAS:
        column = pc.replace_substring_regex(column, pattern, r"\1.\2")
    return column


def _sniff(path: Path, block: str) -> str:
    """Return the separator that gives the most values a line, equally many in the first lines."""
    sample = "".join(itertools.islice(io.StringIO(block, newline=""), _SAMPLE))
    best, width = "", 1
    for separator in (*SEPARATORS, " "):
        reader = _Reader(path, io.StringIO(), None, "error")
        reader.separator = separator
        try:
            widths = {len(row) for _, row in reader.rows(sample)}
        except TableError:
            continue
        if len(widths) == 1 and (most := widths.pop()) > width and (separator != " " or not best):
            best, width = separator, most
    if best:
        return best
    top = next((line for line in io.StringIO(sample, newline="") if line.strip()), "")
    return max(SEPARATORS, key=top.count)


def _looks_like_data(row: list[str]) -> bool:
    """Return whether all names are numbers, other than 0, 1, 2, ..."""
    try:
        values = [float(name) for name in row]
    except ValueError:
        return False
    return values != list(range(len(row)))
