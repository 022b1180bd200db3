"""Processes that make one release together: what the gate asks of them, and its part of the sums.

Nothing here knows a network of machines. `Group` is one process; `dpbnn.ranks` has the groups that
`torchrun` starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dpbnn.privacy.checks import check_one_process
from dpbnn.privacy.contracts import Clippable

__all__ = ["Group", "Shares"]

T = TypeVar("T")
_EXACT = 2.0**52  # steps of the grid up to which float64 adds whole numbers exactly
_LARGEST = 2.0**62  # steps up to which int64 does


@dataclasses.dataclass
class Group:
    """The processes of one run; here there is one.

    **Guarantee** to give: all methods are collective, every rank calls them in the same order, and
    a rank that fails makes the others fail. Rank 0 alone writes to the ledger, draws noise and
    writes files.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        shards: into how many parts every batch is divided, at least `size`. Sums depend on this
            number and not on the number of ranks; see `Shares`.
        starts: where ranks own their records, the number of the first record of each, and that of
            all records. Every rank is then one shard. Empty where all ranks have all records.
    """

    rank: int = 0
    size: int = 1
    shards: int = 1
    starts: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    def check_alone(self) -> None:
        """Raise where other processes would make releases beside a group of one."""
        check_one_process()

    def mine(self) -> range:
        """Return the shards of this rank; every shard belongs to one rank."""
        return range(self.rank, self.shards, self.size)

    def shard_of(self, records: Tensor) -> Tensor:
        """Return the shard of every record: its owner, or its number modulo the shards."""
        if not self.starts:
            return records % self.shards
        return torch.bucketize(records, torch.tensor(self.starts[1:]), right=True)

    def first(self, work: Callable[[], T]) -> T:
        """Let rank 0 do the work; all ranks get its result, or raise its error."""
        return work()

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks on rank 0, and nothing of use on the others."""
        return values

    def spread(self, values: Tensor) -> Tensor:
        """Return the values of rank 0, given ones of the same shape and dtype."""
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, rank by rank."""
        return values[None]

    def scatter(self, values: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks; all have equally many."""
        return values

    def copy_file(self, path: Path) -> None:
        """Write the file of rank 0 to a path of every other rank's own."""

    def check_same(self, parts: Mapping[str, str]) -> None:
        """Raise on all ranks where one of them has another digest of a part than rank 0."""


@dataclasses.dataclass
class Shares:
    """The contributions of one batch, which are computed shard by shard.

    **Guarantee.** Every record of the batch is in exactly one shard, by its number alone. The sum
    of a shard is rounded towards zero to the grid of the release, and the sums of shards are whole
    numbers of its spacing g, added exactly, in float64 or int64 (`check_range`). So the sum of the
    batch is the same, bit for bit, for every number of ranks, and in whatever order they are added
    up.

    Where the number of records is public, neighbours differ in one record of one shard, and one
    shard alone is rounded otherwise: sums get g sqrt(d) further apart, as if the batch were one
    shard. Under add/remove the records after the one that is missing change shards. Each of two
    sums is then off by less than g in each of d coordinates for each of m shards, so they get
    2 m g sqrt(d) further apart (`roundings`).

    Attributes:
        records: numbers of all records of the batch, those of other ranks too.
        like: contributions of no record.
        contributed: gives those of a shard, given its number and its records.
        group: who computes which shard.
        summed_in: see `Clippable`.
    """

    records: Tensor
    like: Clippable
    contributed: Callable[[int, Tensor], AbstractContextManager[Clippable]]
    group: Group
    summed_in: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.batch_size, self.shapes = len(self.records), self.like.shapes
        self.device, self.dtype = self.like.device, self.like.dtype
        self.summed_in = self.like.summed_in
        self.added_in = torch.float64
        self.numbers = sum(math.prod(shape) for shape in self.shapes.values())

    def sum_error(self, rows: int) -> float:
        """Return the bound of one batch; what float64 would lose between shards is in it."""
        own, self.like.summed_in = self.like.summed_in, self.summed_in
        try:
            return self.like.sum_error(rows)
        finally:
            self.like.summed_in = own

    def roundings(self, public_size: bool) -> int:
        """Return by how many g sqrt(d) rounding can take neighbouring sums apart."""
        return 1 if public_size or self.group.shards == 1 else 2 * self.group.shards

    def check_range(self, steps: float) -> None:
        """Choose how sums are added up exactly, if they have so many steps of the grid at most."""
        self.added_in = torch.float64 if steps <= _EXACT else torch.int64
        if steps > _LARGEST:
            raise ValueError(
                f"noise_multiplier: so small that a sum has {steps:.0e} steps of its grid, which "
                f"is too many to be added over processes; use more noise or smaller batches"
            )

    def total(
        self,
        g: float,
        keep: Tensor | None,
        sum_of: Callable[[Clippable, Tensor | None], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """Return the sum over all shards by name, in float64, on rank 0; elsewhere nothing.

        Args:
            g: spacing of the grid; 0 for no rounding, where nothing is private.
            keep: true or false for every record of the batch.
            sum_of: returns the clipped sum of contributions, given theirs of `keep`.
        """
        shard = self.group.shard_of(self.records)
        kind = self.added_in if g else torch.float64
        parts = torch.zeros(self.numbers, dtype=kind, device=self.device)
        views = self._named(parts)
        for number in self.group.mine():
            where = (shard == number).nonzero().flatten()
            own = None if keep is None else keep[where.to(keep.device)]
            with self.contributed(number, self.records[where]) as part:
                part.summed_in = self.summed_in
                for name, value in sum_of(part, own).items():
                    whole = torch.div(value, g, rounding_mode="trunc") if g else value
                    views[name].add_(whole.to(kind) if kind is torch.int64 else whole)
        parts = self.group.sum(parts)
        return {} if self.group.rank else self._named(parts.double() * (g or 1.0))

    def spread(self, release: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rank 0's release on all ranks, in the dtype of releases."""
        flat = torch.zeros(self.numbers, dtype=self.dtype, device=self.device)
        if not self.group.rank:
            flat = torch.cat([release[name].to(self.dtype).reshape(-1) for name in self.shapes])
        return self._named(self.group.spread(flat))

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts: Iterable[Tensor] = torch.split(flat, sizes)
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
