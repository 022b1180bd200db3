"""Reading tables from CSV, Parquet and NumPy files. No pickle is ever loaded."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from dpbnn.data import text
from dpbnn.data.frames import as_table
from dpbnn.data.table import MISSING, Table, TableError
from dpbnn.messages import alone, check_on_bad_rows

_GZIP, _PARQUET, _NUMPY, _ZIP = b"\x1f\x8b", b"PAR1", b"\x93NUMPY", b"PK\x03\x04"
_LARGE = 32 * 2**20  # bytes; larger files show progress
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
    on_bad_rows: str = "error",
) -> Table:
    """Read a table from a file: CSV (.gz too), Parquet, .npy or .npz.

    In text, spaces around values are removed, empty lines are skipped, and any line end will do.
    Arrays in .npy are memory-mapped, and a Parquet file is read a row group at a time when its
    values are used: both can be larger than memory.

    Args:
        path: the file.
        header: whether the first line of a text file names the columns.
        names: names of the columns, in place of the header or where there is none.
        separator: "," or ";" or tab or " " (any white space); found from the first lines if left
            out.
        decimal: "," where numbers are written as 3,14.
        encoding: of a text file.
        missing: texts that stand for a missing value.
        comment: lines that begin with this are skipped.
        progress: show a progress bar; by default for large files on a terminal.
        on_bad_rows: "error" refuses lines of a wrong length and cells that are neither numbers
            nor text; "show" does the same and names the line; "zero" fills such lines with
            missing values.
    """
    check_on_bad_rows(on_bad_rows)
    path = Path(path)
    first = _opening(path)
    if first.startswith(_PARQUET):
        from dpbnn.data.stored import parquet_table

        return parquet_table(path, names, on_bad_rows)
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
    if separator is not None and separator not in (*text.SEPARATORS, " "):
        raise TableError(f"separator={separator!r}: must be ',', ';', a tab or ' '")
    if decimal not in (".", ","):
        raise TableError(f"decimal={decimal!r}: must be '.' or ','")
    strict = on_bad_rows != "zero"
    with _errors(path, encoding), _text(path, first, encoding, progress, strict) as lines:
        return text.parse(
            path,
            lines,
            header=header,
            names=names,
            separator=separator,
            decimal=decimal,
            missing=frozenset(missing),
            comment=comment,
            on_bad_rows=on_bad_rows,
        )


def _opening(path: Path) -> bytes:
    """Return the first bytes of a file, or raise if it cannot be read."""
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
        alone(
            TableError(
                f"{path}: is not {encoding} text; pass encoding={other!r} (--encoding {other}), or "
                f"save it as UTF-8"
            )
        )
    except LookupError:
        raise TableError(f"encoding={encoding!r}: is unknown; give utf-8 or latin-1") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TableError(
            f"{path}: the gzip data is damaged or ends early; copy or download it again"
        ) from None


@contextlib.contextmanager
def _text(
    path: Path, first: bytes, encoding: str, progress: bool | None, strict: bool
) -> Iterator[IO[str]]:
    """Open a text file, compressed or not; unless strict, invalid bytes are replaced."""
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
            raise TableError(f"{path}: is UTF-16 text; pass encoding='utf-16' (--encoding utf-16)")
        code = "utf-8-sig" if encoding.replace("-", "").lower() == "utf8" else encoding
        errors = "strict" if strict else "replace"
        yield io.TextIOWrapper(buffered, encoding=code, errors=errors, newline="")


def _numpy(path: Path, names: Sequence[str] | None) -> Table:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise TableError(
            f"{path}: holds Python objects or is damaged; save an array of numbers or text"
        ) from None
    return as_table(array, names, source=str(path))


def _archive(path: Path) -> Table:
    """Read an .npz: an array with one axis is a column, one with two axes is several."""
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
