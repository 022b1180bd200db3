"""Records by number: of arrays in memory or on disk, or of a dataset that makes them one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import mmap
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Arrays", "Block", "Fields", "Part", "Records", "Source", "first_record"]


@dataclasses.dataclass(frozen=True)
class Part:
    """Shape and type of one record's part: of an input, or of the target."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one record."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def empty(self, count: int) -> Tensor:
        """Return zeros in the place of so many records."""
        return torch.zeros(count, *self.shape, dtype=self.dtype)


@dataclasses.dataclass
class Block:
    """Some records.

    Attributes:
        parts: inputs, and the target last; zeros where a record could not be loaded.
        loaded: which records could be loaded; None where all could.
        unlike: whether a record has other fields, another shape or another type.
    """

    parts: list[Tensor]
    loaded: Tensor | None = None
    unlike: bool = False


class Source(ABC):
    """Records 0 to n - 1, each of which is made of the same parts.

    Attributes:
        parts: inputs, and the target last.
        names: of the inputs, where the network takes them by name.
        single: whether the input is one tensor, which the network takes as it is.
        held: whether all records lie in memory already.
        fixed: whether a record is the same whenever it is read, so that noise may be drawn again.
        memory: bytes up to which the data may be copied whole.
        workers: processes that load records.
        owned: whether these are records of this process alone, of several.
        missing: a record that is left out, for audits.
    """

    parts: list[Part]
    names: tuple[str, ...] = ()
    single: bool = True
    held: bool = False
    fixed: bool = True
    memory: int = 2**30
    workers: int = 0
    owned: bool = False
    missing: int | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, records: np.ndarray, seed: int) -> Block:
        """Return records by number.

        Args:
            records: their numbers.
            seed: of what the records themselves draw, if anything.
        """

    def run(self, start: int, stop: int, seed: int) -> Block:
        """Return consecutive records."""
        return self.read(np.arange(start, stop), seed)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return max(1, sum(part.nbytes for part in self.parts))

    def scattered(self) -> contextlib.AbstractContextManager[None]:
        """Announce that records are read here and there, and not one after the other."""
        return contextlib.nullcontext()

    def x(self, inputs: Sequence[Any]) -> Any:
        """Return inputs as the network takes them: a tensor, a tuple or a mapping."""
        if self.names:
            return dict(zip(self.names, inputs, strict=True))
        return inputs[0] if self.single else tuple(inputs)

    def left_out(self, block: Block, records: np.ndarray) -> Block:
        """Return a block without the record that is to be missing."""
        if self.missing is None:
            return block
        there = torch.from_numpy(records != self.missing)
        loaded = there if block.loaded is None else block.loaded & there
        return dataclasses.replace(block, loaded=loaded)


class Arrays(Source):
    """Records that are rows of tensors or of memory-mapped arrays.

    Args:
        arrays: inputs, and the targets last.
        loaded: which rows can be used, if not all.
    """

    def __init__(self, arrays: Sequence[Tensor | np.ndarray], loaded: np.ndarray | None = None):
        self.arrays, self.loaded = list(arrays), loaded
        self.held = all(isinstance(array, Tensor) for array in arrays)
        self.parts = [
            Part(tuple(array.shape[1:]), _tensor(array[:0]).dtype) for array in self.arrays
        ]

    def __len__(self) -> int:
        return len(self.arrays[-1])

    def read(self, records: np.ndarray, seed: int = 0) -> Block:
        """Return rows."""
        return self.left_out(self._rows(records), records)

    def run(self, start: int, stop: int, seed: int = 0) -> Block:
        """Return consecutive rows, those of tensors without a copy."""
        block = self._rows(slice(start, stop))
        return block if self.missing is None else self.left_out(block, np.arange(start, stop))

    @contextlib.contextmanager
    def scattered(self) -> Iterator[None]:
        """Let the system read the pages of single rows of a memory map, and not their neighbours.

        It reads 128 KB around a page otherwise, where a batch needs some rows of 50 GB.
        """
        maps = [getattr(array, "_mmap", None) for array in self.arrays]
        maps = [one for one in maps if isinstance(one, mmap.mmap)]
        wanted, usual = (getattr(mmap, f"MADV_{name}", None) for name in ("RANDOM", "NORMAL"))
        for one in maps if wanted is not None else ():
            one.madvise(wanted)
        try:
            yield
        finally:
            for one in maps if usual is not None else ():
                with contextlib.suppress(ValueError):  # closed in the meantime
                    one.madvise(usual)

    def _rows(self, rows: Any) -> Block:
        loaded = None if self.loaded is None else torch.from_numpy(self.loaded[rows])
        return Block([_tensor(array[rows]) for array in self.arrays], loaded)


def _tensor(rows: Tensor | np.ndarray) -> Tensor:
    """Return rows as a tensor; those of a map are copied, as a type that torch computes with."""
    if isinstance(rows, Tensor):
        return rows
    wide = rows.dtype.kind == "u" and rows.dtype.itemsize > 1
    return torch.from_numpy(np.array(rows, np.int64 if wide else rows.dtype.newbyteorder("=")))


class Records(Source):
    """Records of a dataset that gives them one by one, `dataset[number]`.

    Every record is loaded on its own: no code of the user's sees two of them. What a record draws
    from the global generators of torch, numpy and `random` is seeded by its number, so that the
    draws of one record cannot move those of another.

    Args:
        dataset: anything with a length and records by number.
        fields: takes a record apart.
        columns: whether many records at once, `dataset[numbers]`, are a mapping of columns that no
            code of the user's has made.
    """

    fixed = False

    def __init__(self, dataset: Any, fields: Fields, columns: bool = False) -> None:
        self.dataset, self.fields, self.columns = dataset, fields, columns
        self.size, self.parts = len(dataset), []
        with _global_generators():
            for number in range(self.size):
                found, _ = self._load(number, 0)
                if found is not None:
                    self.parts = [_kind(part) for part in found]
                    break

    def __len__(self) -> int:
        return self.size

    def read(self, records: np.ndarray, seed: int = 0) -> Block:
        """Return records; those that raise, or are no numbers, are not loaded."""
        block = self._together(records) if self.columns else None
        return self.left_out(block or self._one_by_one(records, seed), records)

    def _together(self, records: np.ndarray) -> Block | None:
        """Return records that were read at once; None where one of them cannot be used."""
        try:
            parts = [torch.as_tensor(v) for v in self.fields(self.dataset[records.tolist()])]
        except Exception:  # what was raised may quote a record
            return None
        wanted = [(len(records), part) for part in self.parts]
        return Block(parts) if [(len(p), _kind(p[:1], 1)) for p in parts] == wanted else None

    def _one_by_one(self, records: np.ndarray, seed: int) -> Block:
        parts = [part.empty(len(records)) for part in self.parts]
        loaded = torch.ones(len(records), dtype=torch.bool)
        unlike = False
        with _global_generators():
            for at, number in enumerate(records.tolist()):
                found, other = self._load(number, seed)
                alike = found is not None and [_kind(part) for part in found] == self.parts
                unlike |= other or (found is not None and not alike)
                loaded[at] = alike
                for part, value in zip(parts, found or (), strict=False):
                    if alike:
                        part[at] = value
        return Block(parts, loaded, unlike)

    def _load(self, number: int, seed: int) -> tuple[list[Tensor] | None, bool]:
        """Return the parts of one record, if it can be loaded, and whether it has other fields."""
        _seed(seed, number)
        try:
            record = self.dataset[number]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # what was raised may quote the record
            return None, False
        try:
            values = self.fields(record)
        except Exception:
            return None, True
        try:
            return [torch.as_tensor(value).detach().cpu() for value in values], False
        except Exception:
            return None, False


def first_record(dataset: Any) -> Any:
    """Return the first record of a dataset that can be loaded, or None."""
    with _global_generators():
        for number in range(len(dataset)):
            _seed(0, number)
            with contextlib.suppress(Exception):
                return dataset[number]
    return None


def _kind(values: Tensor, skip: int = 0) -> Part:
    return Part(tuple(values.shape[skip:]), values.dtype)


def _seed(seed: int, number: int) -> None:
    drawn = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    value = int.from_bytes(drawn, "big")
    torch.default_generator.manual_seed(value >> 1)
    np.random.seed(value % 2**32)  # noqa: NPY002, the one that datasets draw from
    random.seed(value)


@contextlib.contextmanager
def _global_generators() -> Iterator[None]:
    """Give the global generators back as they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


@dataclasses.dataclass(frozen=True)
class Fields:
    """Takes a record apart into inputs and the target.

    Attributes:
        inputs: names of the inputs; None where they have none.
        target: name of the target; None where a record is (inputs, target).
        stacked: whether the inputs are single numbers that make up one vector.
    """

    inputs: tuple[str, ...] | None = None
    target: str | None = None
    stacked: bool = False

    def __call__(self, record: Any) -> list[Any]:
        """Return inputs, and the target last."""
        if isinstance(record, Mapping) is (self.target is None):
            raise TypeError("a record is a mapping, and others are not")
        x, y = (record, record[self.target]) if self.target is not None else record
        if self.inputs is None:
            return [*(x if isinstance(x, tuple) else (x,)), y]
        values = [x[name] for name in self.inputs]
        if self.stacked:
            values = [torch.stack([torch.as_tensor(v) for v in values], -1)]
        return [*values, y]
