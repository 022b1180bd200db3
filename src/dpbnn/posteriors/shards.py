"""Posteriors of networks whose parameters are spread over ranks: each rank writes its own rows.

The files are those of any posterior. The rows that a rank has of a parameter lie side by side in
them, so all ranks write to one file, which all must see, and nobody holds it whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from dpbnn.networks.sharded import Sharding, local
from dpbnn.posteriors import architecture
from dpbnn.posteriors import folder as folders
from dpbnn.posteriors.iterate_file import IterateWriter, put, reopen
from dpbnn.posteriors.posterior import Posterior
from dpbnn.storage import new_folder

__all__ = ["ShardedPosterior", "SliceWriter"]

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class SliceWriter(IterateWriter):
    """Writes this rank's rows of iterates to a file that all ranks write to; rank 0 makes it.

    Args:
        path: seen by all ranks.
        sharding: of the network.
        capacity: see `IterateWriter`.
        dtype: "float32" or "bfloat16".
        start: see `IterateWriter`.
        hold: see `IterateWriter`.
    """

    def __init__(
        self, path: Path, sharding: Sharding, capacity: int, dtype: str, start: int, hold: bool
    ) -> None:
        slices, self._leads = sharding.slices, sharding.group.rank == 0
        kind: torch.dtype = getattr(torch, dtype)
        first = {name: slices.rows(name)[0] * slices.width(name) for name in slices.shapes}
        like = {n: torch.empty(shape, device="meta") for n, shape in slices.shapes.items()}
        super().__init__(path, like, capacity, dtype=kind, start=start, hold=hold)
        self._shapes = {n: (slices.rows(n)[1], *slices.shapes[n][1:]) for n in like}
        self._skip = {name: count * kind.itemsize for name, count in first.items()}

    def _open(self, start: int) -> FileIO:
        if self._leads:
            return super()._open(start)
        if not self.path.exists():
            raise OSError(f"{self.path}: rank 0 has made it, and this rank does not see it; give "
                          f"a folder that all ranks share")  # fmt: skip
        return reopen(self.path, self._layout)


class ShardedPosterior(Posterior):
    """A posterior of which every rank holds its own rows.

    It cannot predict. Save it, on all ranks, and load it in a process that has memory for the whole
    network: `dpbnn.load`.

    Args:
        whole: the posterior, of a network without values.
        sharding: whose network has them, but for those that are averaged.
        averages: rows of averages by name, instead of the network's.
    """

    def __init__(self, whole: Posterior, sharding: Sharding, averages: dict[str, Tensor]) -> None:
        self.whole, self.model, self.likelihood = whole, whole.model, whole.likelihood
        self.privacy, self.prior, self.settings = whole.privacy, whole.prior, whole.settings
        self._joined, self._slices = sharding.joined, sharding.all_slices()
        network = sharding.network
        held = {
            name: local(p) for name, p in network.named_parameters() if name in self._slices.shapes
        }
        self._rows = {name: averages.get(name, rows).clone() for name, rows in held.items()}

    def _parts(self) -> dict[str, Any]:
        """Return what this rank holds: its rows, and what the posterior has beside them."""
        return {**self.whole._parts(), "rows": self._rows}

    def _draws(self, *given: Any) -> NoReturn:
        self.outputs()

    def outputs(self, *given: Any, **options: Any) -> NoReturn:
        """Raise: no rank has all weights."""
        raise RuntimeError(
            "the rows of this posterior are spread over ranks, so it cannot predict; call "
            "posterior.save(folder) on all ranks, and dpbnn.load(folder) in one process"
        )

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the posterior to a folder that all ranks see; all ranks call it.

        Args:
            folder: see `Posterior.save`.
            overwrite: see `Posterior.save`.
        """
        tensors = architecture.named_tensors(self.model)
        header, begins, size = _laid_out(tensors)
        with self._joined() as group, contextlib.ExitStack() as stack:
            if (group.rank, group.size) != (self._slices.rank, self._slices.size):
                raise RuntimeError(
                    f"rank {self._slices.rank} of {self._slices.size} holds these rows, and this "
                    f"is rank {group.rank} of {group.size}; save before the process group ends"
                )
            place = new_folder(Path(folder), "posterior", overwrite=overwrite)
            partial = group.first(lambda: stack.enter_context(place))
            path = partial / folders.MODEL

            def begin() -> None:
                with path.open("xb") as file:
                    file.truncate(size)
                with FileIO(path, "r+") as file:
                    put(file, memoryview(header), 0)
                    for name, value in tensors.items():
                        if name not in self._rows:
                            put(file, _bytes(value), begins[name])

            group.first(begin)
            failed = self._write_rows(path, begins)
            ranks = group.gather(torch.tensor(failed is not None))
            if ranks.any():
                raise failed or OSError(f"{path}: rank {int(ranks.int().argmax())} cannot write it")

            def end() -> None:
                folders.write_parts(self.whole, partial)
                folders.write_record(self.whole, partial)
                stack.close()

            group.first(end)

    def _write_rows(self, path: Path, begins: dict[str, int]) -> OSError | None:
        try:
            with FileIO(path, "r+") as file:
                for name, rows in self._rows.items():
                    before = self._slices.rows(name)[0] * self._slices.width(name)
                    put(file, _bytes(rows), begins[name] + before * rows.itemsize)
                os.fsync(file.fileno())
        except OSError as error:
            return error
        return None


def _bytes(value: Tensor) -> memoryview:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _laid_out(tensors: dict[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Return the head of a safetensors file, where each tensor begins, and the file's size."""
    entries, begins, end = {}, {}, 0
    for name, value in tensors.items():
        begins[name], end = end, end + math.prod(value.shape) * value.itemsize
        entries[name] = {
            "dtype": _CODES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {n: len(header) + at for n, at in begins.items()}, len(header) + end
