"""Columns that stay in a Parquet file: values are read when they are used, by row groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpbnn.data.frames import EXACT, arrow_column, column_of
from dpbnn.data.table import Held, Table, TableError, unique
from dpbnn.messages import alone, unquoted


class StoredColumn:
    """A range of rows of one column of a Parquet file.

    Slices are ranges of it, without reading. `read` gives the values. The last row group that was
    read is kept, so that a pass over the rows reads every group once.

    Args:
        file: a `pyarrow.parquet.ParquetFile`.
        name: of the column in the file.
        convert: turns an Arrow column into what a table holds.
        source: what errors call the file.
    """

    def __init__(self, file: Any, name: str, convert: Any, source: str) -> None:
        self._file, self._name, self._convert = file, name, convert
        self._source = source
        groups = file.metadata.num_row_groups
        sizes = [file.metadata.row_group(i).num_rows for i in range(groups)]
        self._ends = np.cumsum([0, *sizes])
        self._last: dict[int, Held] = {}
        self.start, self.stop = 0, int(self._ends[-1])

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, rows: slice) -> StoredColumn:
        start, stop, _ = rows.indices(len(self))
        part = StoredColumn.__new__(StoredColumn)
        part.__dict__.update(self.__dict__)
        part.start, part.stop = self.start + start, self.start + max(start, stop)
        return part

    def read(self) -> Held:
        """Return the values."""
        first = int(np.searchsorted(self._ends, self.start, side="right")) - 1
        parts = []
        for group in range(max(first, 0), len(self._ends) - 1):
            begin = int(self._ends[group])
            if begin >= self.stop and parts:
                break
            values = self._group(group)
            parts.append(values[max(self.start - begin, 0) : max(self.stop - begin, 0)])
        return _joined(parts) if parts else np.zeros(0)

    def _group(self, group: int) -> Held:
        if group not in self._last:
            self._last.clear()
            try:
                found = self._file.read_row_group(group, columns=[self._name], use_threads=False)
            except (pa.ArrowException, OSError):
                alone(_damaged(self._source))
            self._last[group] = self._convert(found.column(0))
        return self._last[group]


def parquet_table(path: Path, names: Any, on_bad_rows: str) -> Table:
    """Return the table in a Parquet file, whose values are read when they are used.

    Args:
        path: the file.
        names: of the columns, in place of those in the file; or None.
        on_bad_rows: as in `read_table`.
    """
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        inside = file.schema_arrow.names
    except (pa.ArrowException, OSError):
        alone(_damaged(path))
    if names is not None and len(names) != len(inside):
        raise TableError(
            f"{path}: has {len(inside)} columns and {len(names)} names were given; give one name "
            f"per column"
        )
    own = list(inside if names is None else names)
    unique(inside, str(path))
    unique(own, str(path))

    def converted(name: str) -> Any:
        def convert(column: Any) -> Held:
            problem = f"{path}: column {name!r} cannot be read"
            with unquoted(problem, "give numbers or text", TableError, let=(TableError,)):
                return column_of(name, arrow_column(column), str(path), on_bad_rows)

        return convert

    columns = {
        name: StoredColumn(file, known, converted(name), str(path))
        for name, known in zip(own, inside, strict=True)
    }
    return Table(columns, source=str(path))


def _damaged(path: Any) -> TableError:
    return TableError(f"{path}: is a damaged Parquet file; copy or write it again")


def _joined(parts: list[Held]) -> Held:
    """Return parts of a column as one.

    Booleans are text where some part has missing ones; so are whole numbers that float64 would
    change.
    """
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, pa.ChunkedArray) for part in parts):
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)
    arrays = [np.asarray(part) for part in parts]
    kinds = {array.dtype.kind for array in arrays}
    large = len(kinds) > 1 and any(
        array.dtype.kind in "iu" and (np.abs(array.astype(np.float64)) >= EXACT).any()
        for array in arrays
    )
    if "O" in kinds or large:
        arrays = [np.asarray(column_of("", array.astype(object), "")) for array in arrays]
    return np.concatenate(arrays)
