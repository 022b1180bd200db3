"""What `fit` takes as data, and what it refuses: the sampler of a private run is its own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from dpbnn.messages import as_numbers, unquoted
from dpbnn.privacy.checks import check_count, quoted
from dpbnn.sources.source import Arrays, Fields, Records, Source, first_record
from dpbnn.sources.tables import table

__all__ = ["DataSource", "opened", "rows_of_arrays", "without"]

_OURS = (
    "an epsilon rests on how batches are drawn, so that dpbnn draws them itself, record by record"
)


@dataclasses.dataclass(frozen=True)
class DataSource:
    """Data for `fit` with settings of how it is read.

    **Guarantee.** Records are read by number, each on its own; batches are drawn by the plan's
    sampler. Nothing here looks at two records together. Whether a dataset of one's own does so,
    as one that standardises by its own mean does, cannot be seen: epsilon is then false.

    Attributes:
        data: (inputs, targets); a mapping of columns; a `torch.utils.data.Dataset` or a Hugging
            Face dataset with records by number; or the path of a Parquet or Arrow file, or of a
            folder of them.
        inputs: names of the columns that are inputs. A list of names is one vector of numbers; one
            name is that column alone; a mapping {argument: column} gives the network each column
            by the name of its argument. By default all columns but the target, by name.
        target: name of the target's column, where columns have names.
        workers: processes that load records of a dataset; 0 loads them in this one. They are
            started afresh, so that no key and no ledger of this process is in them.
        memory: bytes up to which data may be copied whole, to memory or to a GPU. Larger data is
            read batch by batch.
        fixed: whether a record is the same whenever it is read. That is known of arrays and tables;
            a dataset of one's own counts as not fixed: a run on it that is interrupted goes on with
            new noise and pays for it. True is the user's word that its records never change.
        owned: under `torchrun`, whether these are rows of this process alone, which no other one
            has. A record of two processes would count twice, and epsilon would be false.
    """

    data: Any
    inputs: str | Sequence[str] | Mapping[str, str] | None = None
    target: str | None = None
    workers: int = 0
    memory: int = 2**30
    fixed: bool | None = None
    owned: bool = False
    missing: int | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count(0, workers=self.workers, memory=self.memory)

    def __repr__(self) -> str:
        return f"DataSource({type(self.data).__name__}, target={self.target!r})"


def rows_of_arrays(data: Any) -> bool:
    """Return whether data is one array, or a pair of them: inputs and targets."""
    parts = data if isinstance(data, tuple | list) else (data,)
    return not any(
        isinstance(part, DataSource | Dataset | Mapping | tuple | str | os.PathLike)
        or hasattr(part, "column_names")
        for part in parts
    )


def without(data: Any, record: int | None) -> DataSource:
    """Return the same data, of which one record cannot be loaded; or none, by the same steps."""
    source = data if isinstance(data, DataSource) else DataSource(data)
    return dataclasses.replace(source, missing=-1 if record is None else record)


def opened(data: Any, on_bad_rows: str) -> Source:
    """Return the data as records by number, or raise.

    Args:
        data: what a `DataSource` takes, or one; or what was opened already.
        on_bad_rows: as in `fit`; under "zero" cells that are no numbers count as NaN.
    """
    if isinstance(data, Source):
        return data
    given = data if isinstance(data, DataSource) else DataSource(data)
    _refuse(given.data)
    source = _source(given, on_bad_rows)
    if given.workers and not isinstance(source, Records):
        raise ValueError(
            f"workers={given.workers}: arrays and tables are read without worker processes; leave "
            f"workers out"
        )
    source.memory, source.workers = int(given.memory), int(given.workers)
    source.missing, source.owned = given.missing, bool(given.owned)
    source.fixed = source.fixed if given.fixed is None else given.fixed
    return source


def _refuse(data: Any) -> None:
    """Raise for what draws batches itself, or has no records by number."""
    if isinstance(data, DataLoader):
        raise ValueError(f"data: is a DataLoader; {_OURS}; give data=loader.dataset")
    if isinstance(data, Sampler):
        raise ValueError(f"data: is a {type(data).__name__}; {_OURS}; give the dataset alone")
    streams = isinstance(data, IterableDataset) or hasattr(data, "__next__")
    if streams or (hasattr(data, "column_names") and not hasattr(data, "__getitem__")):
        raise ValueError(
            f"data: is {type(data).__name__}, which has no records by number; {_OURS}; give a "
            f"Dataset with __len__ and __getitem__"
        )
    if isinstance(data, Mapping) and any(hasattr(part, "column_names") for part in data.values()):
        raise ValueError(
            f"data: is a mapping of datasets, {quoted(list(data)[:4])}; give one of them, such as "
            f"data=datasets['train']"
        )


def _source(given: DataSource, on_bad_rows: str) -> Source:
    data = given.data
    if isinstance(data, TensorDataset):
        *inputs, target = data.tensors
        data = (inputs[0] if len(inputs) == 1 else tuple(inputs), target)
    columns = hasattr(data, "column_names") and hasattr(data, "features")
    if isinstance(data, Dataset) or columns:
        return _records(given, columns)
    if isinstance(data, str | os.PathLike):
        names, by_name, stacked = _names(given, None)
        source: Arrays = table(os.fspath(data), names, _target(given), stacked, given.memory)
        source.names, source.single = by_name, not by_name
        return source
    if isinstance(data, Mapping):
        names, by_name, stacked = _names(given, [str(name) for name in data])
        inputs = [data[name] for name in names or ()]
        if stacked:
            inputs = [np.stack([np.asarray(part) for part in inputs], -1)]
        x = dict(zip(by_name, inputs, strict=True)) if by_name else inputs[0]
        data = (x, data[given.target])
    elif given.inputs is not None or given.target is not None:
        raise ValueError("inputs and target: name columns, and (inputs, targets) have none")
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ValueError(
            f"data: is {type(data).__name__}; give a pair (inputs, targets) of tensors or arrays, "
            f"a Dataset, or the path of a Parquet or Arrow file or folder"
        )
    return _arrays(*data, on_bad_rows)


def _arrays(x: Any, y: Any, on_bad_rows: str) -> Arrays:
    several = isinstance(x, tuple) and len(x) and all(isinstance(p, Tensor | np.ndarray) for p in x)
    if several and not isinstance(x[0], Tensor):
        several = len(x) != len(y)  # rows of arrays otherwise
    given = list(x.values()) if isinstance(x, Mapping) else list(x) if several else [x]
    arrays = [_array(part, "inputs", on_bad_rows) for part in given]
    source = Arrays([*arrays, _array(y, "targets", on_bad_rows)])
    source.names = tuple(map(str, x)) if isinstance(x, Mapping) else ()
    source.single = not (several or source.names)
    if len({len(array) for array in arrays}) != 1:
        raise ValueError("data: the inputs have different numbers of rows; give equally many")
    return source


def _array(part: Any, name: str, on_bad_rows: str) -> Tensor | np.ndarray:
    """Return an array as a tensor, a memory map as it is."""
    if isinstance(part, np.memmap) and part.ndim and part.dtype.kind in "biuf":
        return part
    with unquoted(
        f"data: the {name} are not numbers",
        "give a tensor or an array, or pass on_bad_rows='zero' to let rows with such cells "
        "contribute nothing",
        ValueError,
    ):
        tensor = torch.as_tensor(as_numbers(part) if on_bad_rows == "zero" else part).detach()
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _records(given: DataSource, columns: bool) -> Records:
    """Return the records of a dataset; the first one says what they are made of."""
    data = given.data
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ValueError(
            f"data: {type(data).__name__} has no __len__ or no __getitem__; both are needed to "
            f"draw batches; give a map-style Dataset"
        )
    made = columns and _format(data) == "custom"
    fields, by_name, single = _fields(given, data, columns)
    source = Records(data, fields, columns and not made)
    if not source.parts:
        raise ValueError(
            "data: no record can be loaded as numbers; records are (input, target), or mappings "
            "of which DataSource(data, target=...) names the target"
        )
    source.fixed, source.names = columns and not made, by_name
    source.single = single and len(source.parts) == 2
    return source


def _format(data: Any) -> Any:
    found = getattr(data, "format", None)
    return found.get("type") if isinstance(found, Mapping) else None


def _fields(given: DataSource, data: Any, columns: bool) -> tuple[Fields, tuple[str, ...], bool]:
    """Return how records are taken apart, the names of inputs, and whether one may be alone."""
    first = None if columns else first_record(data)
    known = list(data.column_names) if columns else None
    if isinstance(first, Mapping):
        known = [str(name) for name in first]
    if known is not None:
        names, by_name, stacked = _names(given, known)
        return Fields(names, _target(given), stacked), by_name, not by_name
    pair = isinstance(first, tuple | list) and len(first) == 2
    if given.inputs is not None or given.target is not None or not pair:
        raise ValueError(
            "data: its records must be pairs (input, target), or mappings with inputs= and target= "
            "naming their fields"
        )
    if isinstance(first[0], Mapping):
        by_name = tuple(map(str, first[0]))
        return Fields(by_name), by_name, False
    return Fields(), (), not isinstance(first[0], tuple)


def _target(given: DataSource) -> str:
    if given.target is None:
        raise ValueError(
            "target: missing; name the column of the targets, as in "
            "dpbnn.DataSource(data, target='label')"
        )
    return given.target


def _names(
    given: DataSource, known: list[str] | None
) -> tuple[tuple[str, ...] | None, tuple[str, ...], bool]:
    """Return the columns that are inputs, the arguments they are, and whether they are stacked."""
    target, inputs = _target(given), given.inputs
    if inputs is None and known is None:
        raise ValueError(
            "inputs: missing; name the columns, as in dpbnn.DataSource(path, inputs=['a', 'b'], "
            "target='y')"
        )
    if inputs is None:
        inputs = {name: name for name in known or () if name != target}
    columns = [inputs] if isinstance(inputs, str) else list(
        inputs.values() if isinstance(inputs, Mapping) else inputs
    )  # fmt: skip
    absent = [name for name in (*columns, target) if known is not None and name not in known]
    if absent or not columns or not all(isinstance(name, str) for name in columns):
        raise ValueError(f"inputs and target: {quoted(absent[:4])} are no columns of the data")
    if target in columns:
        raise ValueError(f"inputs: hold the target {target!r}; leave it out")
    by_name = tuple(map(str, inputs)) if isinstance(inputs, Mapping) else ()
    return tuple(columns), by_name, not isinstance(inputs, str | Mapping)
