"""Files: CSV, Parquet and NumPy into tables."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from dpbnn.data.table import MISSING, Table, TableError, as_table, unique

__all__ = ["read_table"]

_GZIP, _PARQUET, _NUMPY, _ZIP = b"\x1f\x8b", b"PAR1", b"\x93NUMPY", b"PK\x03\x04"
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}
_LARGE = 32 * 2**20  # bytes from which on reading shows progress
_UNREADABLE = {
    ".xls": "an Excel file; save it as CSV",
    ".xlsx": "an Excel file; save it as CSV",
    ".ods": "a spreadsheet; save it as CSV",
    ".json": "JSON; save the table as CSV",
    ".jsonl": "JSON; save the table as CSV",
    ".pkl": "a pickle, which can run code; save the table as CSV or Parquet",
    ".pickle": "a pickle, which can run code; save the table as CSV or Parquet",
    ".zip": "an archive; unpack it and give the table in it",
    ".feather": "a Feather file; save it as Parquet or CSV",
}


def read_table(
    path: str | os.PathLike[str],
    *,
    header: bool = True,
    names: Sequence[str] | None = None,
    separator: str | None = None,
    decimal: str = ".",
    encoding: str = "utf-8",
    missing: Iterable[str] = MISSING,
    comment: str | None = None,
    progress: bool | None = None,
) -> Table:
    """Read a table from a file: CSV (.gz too), Parquet (with pyarrow), .npy or .npz.

    In text, spaces around values are taken off, empty lines are passed over, and lines may end in
    any way. Arrays in .npy are memory-mapped, so they can be larger than memory.

    Args:
        path: the file.
        header: whether the first line of a text file names the columns.
        names: names of the columns, in place of the header or where there is none.
        separator: "," or ";" or tab or " " (any white space); found from the first lines if left
            out.
        decimal: "," where numbers are written as 3,14.
        encoding: of a text file.
        missing: texts that stand for a missing value.
        comment: lines that begin with this are passed over.
        progress: show a progress bar; by default for large files on a terminal.
    """
    path = Path(path)
    first = _opening(path)
    if first.startswith(_PARQUET):
        return _parquet(path, names)
    if first.startswith(_NUMPY):
        return _numpy(path, names)
    if first.startswith(_ZIP) and path.suffix == ".npz":
        return _archive(path)
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() in _UNREADABLE:
        raise TableError(f"{path}: is {_UNREADABLE[suffix.lower()]}")
    if suffix.lower() in (".parquet", ".npy", ".npz"):
        raise TableError(
            f"{path}: has the ending {suffix} but not that content; correct the ending or write "
            f"the file anew"
        )
    if separator is not None and separator not in (*_SEPARATORS, " "):
        raise TableError(f"separator={separator!r}: must be ',', ';', a tab or ' '")
    if decimal not in (".", ","):
        raise TableError(f"decimal={decimal!r}: must be '.' or ','")
    with _errors(path, encoding), _text(path, first, encoding, progress) as lines:
        return _parse(path, lines, header, names, separator, decimal, frozenset(missing), comment)


def _opening(path: Path) -> bytes:
    """Return the first bytes of a file, or raise for what cannot be read at all."""
    if path.is_dir():
        raise TableError(f"{path}: is a folder; give the path of one file in it")
    try:
        with path.open("rb") as file:
            first = file.read(8)
    except FileNotFoundError:
        raise TableError(f"{path}: does not exist; correct the path") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}; correct that") from None
    if not first:
        raise TableError(f"{path}: is empty; give a table with a header and rows")
    return first


@contextlib.contextmanager
def _errors(path: Path, encoding: str) -> Iterator[None]:
    try:
        yield
    except UnicodeError:
        other = "latin-1" if encoding.replace("-", "").lower() == "utf8" else "utf-8"
        raise TableError(
            f"{path}: is not {encoding} text; pass encoding={other!r} (--encoding {other}), or "
            f"save it as UTF-8"
        ) from None
    except LookupError:
        raise TableError(f"encoding={encoding!r}: is unknown; give utf-8 or latin-1") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TableError(
            f"{path}: the gzip data is damaged or ends early; copy or download it again"
        ) from None


@contextlib.contextmanager
def _text(path: Path, first: bytes, encoding: str, progress: bool | None) -> Iterator[IO[str]]:
    """Open a text file, compressed or not."""
    size = path.stat().st_size
    if progress is None:
        progress = size > _LARGE and sys.stderr.isatty()
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(path.open("rb"))
        if progress:
            from rich.console import Console
            from rich.progress import wrap_file

            shown = wrap_file(
                file, size, description=f"reading {path.name}", console=Console(stderr=True)
            )
            file = stack.enter_context(shown)
        if first.startswith(_GZIP):
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        buffered = io.BufferedReader(file) if not hasattr(file, "peek") else file
        if first[:2] in (b"\xff\xfe", b"\xfe\xff") and not encoding.lower().startswith("utf-16"):
            raise TableError(f"{path}: is UTF-16 text; pass encoding='utf-16'")
        code = "utf-8-sig" if encoding.replace("-", "").lower() == "utf8" else encoding
        yield io.TextIOWrapper(buffered, encoding=code, newline="")


def _parse(
    path: Path,
    file: IO[str],
    header: bool,
    names: Sequence[str] | None,
    separator: str | None,
    decimal: str,
    missing: frozenset[str],
    comment: str | None,
) -> Table:
    lines = _clean(path, file, comment)
    sample = list(itertools.islice(lines, 50))
    separator = separator or _sniff(sample)
    rows = _rows(path, itertools.chain(sample, lines), separator)
    begin, top = next(rows, (0, []))
    if not top:
        raise TableError(f"{path}: is empty; give a table with a header and rows")
    if header:
        own = [name.strip() for name in top]
        if names is None and _looks_like_data(top):
            raise TableError(
                f"{path}: the first line holds only numbers, so it is no header; pass "
                f"header=False, or name the columns (names=[...], --names)"
            )
    else:
        own = [f"x{i}" for i in range(len(top))]
        rows = itertools.chain([(begin, top)], rows)
    if names is not None:
        if len(names) != len(top):
            raise TableError(
                f"{path}: has {len(top)} columns and {len(names)} names were given; give one per "
                f"column"
            )
        own = list(names)
    unique(own, str(path))
    numbers: list[int] = []
    values: list[list[str]] = []
    for line, row in rows:
        if len(row) != len(own):
            raise TableError(
                f"{path}, line {line}: has {len(row)} values where {len(own)} columns are; "
                f"correct the line (text with a separator in it needs quotes)"
            )
        numbers.append(line)
        values.append(row)
    if not values:
        raise TableError(f"{path}: has a header and no rows; give at least one row")
    columns = {}
    for name, column in zip(own, zip(*values, strict=True), strict=True):
        stripped: Iterable[str] = map(str.strip, column)
        if decimal == ",":
            stripped = map(_point, stripped)
        columns[name] = np.array(list(stripped), dtype=object)
    return Table(columns, source=str(path), lines=np.array(numbers), missing=missing)


def _clean(path: Path, file: IO[str], comment: str | None) -> Iterator[str]:
    """Yield the lines of a text file, comments as empty ones."""
    for line in file:
        if "\0" in line:
            raise TableError(f"{path}: holds NUL bytes, so it is no text; give a CSV file")
        yield "\n" if comment and line.startswith(comment) else line


def _rows(path: Path, lines: Iterable[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, values) for every line that is not empty."""
    if separator == " ":
        for number, line in enumerate(lines, 1):
            if row := line.split():
                yield number, row
        return
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    try:
        for row in reader:
            if len(row) > 1 or (row and row[0].strip()):
                yield reader.line_num, row
    except csv.Error as error:
        raise TableError(
            f"{path}, line {reader.line_num}: {error}; correct the quotes in that line"
        ) from None


def _sniff(sample: list[str]) -> str:
    """Return the separator that cuts the first lines into equally many values, the most of them."""
    best, width = "", 1
    for separator in (*_SEPARATORS, " "):
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
    return max(_SEPARATORS, key=top.count)


def _looks_like_data(row: list[str]) -> bool:
    """Return whether all names are numbers, other than 0, 1, 2, ..."""
    try:
        values = [float(name) for name in row]
    except ValueError:
        return False
    return values != list(range(len(row)))


def _point(value: str) -> str:
    """Return a number with a decimal comma with a point instead."""
    pointed = value.replace(",", ".")
    try:
        float(pointed)
    except ValueError:
        return value
    return pointed


def _parquet(path: Path, names: Sequence[str] | None) -> Table:
    try:
        import pyarrow.parquet
    except ImportError:
        raise TableError(
            f"{path}: reading Parquet needs pyarrow; pip install pyarrow, or save the table as CSV"
        ) from None
    try:
        columns = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError):
        raise TableError(f"{path}: is a damaged Parquet file; copy or write it again") from None
    return as_table(columns if names is None else columns.rename_columns(names), source=str(path))


def _numpy(path: Path, names: Sequence[str] | None) -> Table:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise TableError(
            f"{path}: holds Python objects or is damaged; save an array of numbers or text"
        ) from None
    return as_table(array, names, source=str(path))


def _archive(path: Path) -> Table:
    """Read an .npz: every array of one axis is a column, every one of two axes several."""
    import zipfile

    columns: dict[str, np.ndarray] = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for name, array in arrays.items():
                if array.ndim == 2:
                    columns |= {f"{name}{i}": array[:, i] for i in range(array.shape[1])}
                else:
                    columns[name] = array
    except (ValueError, OSError, EOFError, zipfile.BadZipFile):
        raise TableError(
            f"{path}: holds Python objects or is damaged; save arrays of numbers or text"
        ) from None
    return as_table(columns, source=str(path))
