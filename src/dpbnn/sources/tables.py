"""Columns of Parquet and Arrow files, as arrays in memory or in a nameless file on disk.

A row of a compressed file cannot be read alone. So the columns that are needed are written once,
piece by piece, to arrays: in memory where they fit the limit, and otherwise in a temporary file
that has no name, so that it is gone when the process ends, however it ends.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpbnn.messages import unquoted
from dpbnn.sources.source import Arrays

__all__ = ["table"]

_ROWS = 1 << 16
_FORMATS = {".parquet": "parquet", ".arrow": "ipc", ".feather": "ipc", ".ipc": "ipc"}


def table(
    path: str, inputs: tuple[str, ...] | None, target: str, stacked: bool, memory: int
) -> Arrays:
    """Return the columns of a file, or of all files of a folder in the order of their names.

    Args:
        path: of the file or folder.
        inputs: names of the columns that are inputs.
        target: name of the targets' column.
        stacked: whether the inputs are single numbers that make up one vector.
        memory: bytes up to which the columns are kept in memory.
    """
    dataset = _dataset(path)
    names = [*(inputs or ()), target]
    absent = [name for name in names if name not in dataset.schema.names]
    if absent:
        raise ValueError(f"{path}: has no columns {absent[:4]}; inputs and target must name some")
    with unquoted(f"{path}: cannot be read", "write it anew, as Parquet or Arrow", ValueError):
        count = dataset.count_rows()
    *rest, last = _empty(dataset, names, path)
    if stacked:
        rest = [np.empty((0, len(rest)), np.result_type(*rest))]
    kept = sum(p.itemsize * int(np.prod(p.shape[1:])) for p in (*rest, last)) * count <= memory
    *x, y = (_room((count, *part.shape[1:]), part.dtype, kept) for part in (*rest, last))
    cells = [x[0][:, index] for index in range(len(names) - 1)] if stacked else x
    loaded, at, alike = np.ones(count, dtype=np.bool_), 0, True
    with unquoted(f"{path}: cannot be read", "write it anew, as Parquet or Arrow", ValueError):
        for batch in _batches(dataset, names):
            rows = slice(at, at + batch.num_rows)
            for name, place in zip(names, (*cells, y), strict=True):
                there, same = _fill(place[rows], batch.column(name))
                loaded[rows] &= there
                alike &= same
            at = rows.stop
    if not alike:
        raise ValueError(f"{path}: lists of a column differ in length; pad them to one length")
    arrays = [torch.from_numpy(array) if kept else array for array in (*x, y)]
    return Arrays(arrays, None if loaded.all() else loaded)


def _dataset(path: str) -> Any:
    import pyarrow.dataset as arrow

    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    inside = (file for file in place.rglob("*") if file.suffix.lower() in _FORMATS)
    files = sorted(inside) if place.is_dir() else [place]
    kinds = {_FORMATS.get(file.suffix.lower()) for file in files}
    if len(kinds) != 1 or None in kinds:
        raise ValueError(
            f"{path}: must be a file that ends in {', '.join(_FORMATS)}, or a folder of such files "
            f"of one kind"
        )
    with unquoted(f"{path}: cannot be read", "write it anew, as Parquet or Arrow", ValueError):
        return arrow.dataset([str(file) for file in files], format=kinds.pop())


def _batches(dataset: Any, names: list[str]) -> Any:
    columns = list(dict.fromkeys(names))
    return dataset.to_batches(
        columns=columns, batch_size=_ROWS, batch_readahead=1, fragment_readahead=1
    )


def _empty(dataset: Any, names: list[str], path: str) -> list[np.ndarray]:
    """Return an empty array for each column, of its type and of the shape of its cells."""
    import pyarrow as pa

    found = []
    for name in names:
        kind, shape = dataset.schema.field(name).type, ()
        if pa.types.is_fixed_size_list(kind):
            kind, shape = kind.value_type, (kind.list_size,)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind, shape = kind.value_type, (_length(dataset, name),)
        plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if not plain:
            raise ValueError(
                f"{path}: column {name!r} is of type {kind}; give numbers, or lists of equally many"
            )
        found.append(np.empty((0, *shape), dtype=kind.to_pandas_dtype()))
    return found


def _length(dataset: Any, name: str) -> int:
    """Return the length of the first list of a column."""
    for batch in _batches(dataset, [name]):
        for value in batch.column(0).drop_null()[:1]:
            return len(value)
    return 0


def _fill(cells: np.ndarray, column: Any) -> tuple[np.ndarray, bool]:
    """Write a column's values; return which rows have them all, and whether lists are alike."""
    import pyarrow as pa
    import pyarrow.compute as compute

    there = np.asarray(column.is_valid())
    if cells.ndim == 1:
        cells[:] = np.asarray(column.fill_null(False if pa.types.is_boolean(column.type) else 0))
        return there, True
    width = cells.shape[1]
    lengths = compute.fill_null(compute.list_value_length(column), width)
    if not (np.asarray(lengths) == width).all():
        return there, False
    flat = compute.list_flatten(column.filter(pa.array(there)))
    whole = np.asarray(flat.is_valid()).reshape(-1, width).all(1)
    values = np.asarray(flat.fill_null(False if pa.types.is_boolean(flat.type) else 0))
    cells[~there] = 0
    cells[there] = values.reshape(-1, width)
    there = there.copy()
    there[there.nonzero()[0][~whole]] = False
    return there, True


def _room(shape: tuple[int, ...], dtype: Any, kept: bool) -> np.ndarray:
    """Return an array to be filled: in memory, or in a file without a name."""
    if kept or 0 in shape:
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile() as file:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error, not a crash
        return np.memmap(file, dtype=dtype, mode="r+", shape=shape)
