"""Releases of which every rank holds, noises and keeps its own rows: those of sharded networks.

Nothing here knows a network of machines; see `dpbnn.privacy.group`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dpbnn.privacy.contracts import Clippable
from dpbnn.privacy.group import Shares
from dpbnn.privacy.noise import NoiseSource, Places

__all__ = ["PartOfNoise", "SlicedShares", "Slices"]

_PIECE = 1 << 20  # numbers that ranks add up at once


@dataclasses.dataclass(frozen=True)
class Slices:
    """Which rows of every released tensor belong to which rank, as FSDP2 divides them.

    All released tensors, one after the other, are one long vector. The rows of a rank are one piece
    of it for each tensor.

    Attributes:
        shapes: of the whole tensors, by name; none is a single number.
        rank: whose rows are meant.
        size: number of ranks.
    """

    shapes: Mapping[str, torch.Size]
    rank: int
    size: int

    def rows(self, name: str) -> tuple[int, int]:
        """Return the first row and the number of rows."""
        whole = self.shapes[name][0]
        first = min(self.rank * self.padded(name), whole)
        return first, min(self.padded(name), whole - first)

    def padded(self, name: str) -> int:
        """Return the largest number of rows that a rank has."""
        return -(-self.shapes[name][0] // self.size)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return the rows of a whole tensor."""
        return whole.narrow(0, *self.rows(name))

    def width(self, name: str) -> int:
        """Return how many numbers a row has."""
        return math.prod(self.shapes[name][1:])

    def places(self) -> Places:
        """Return where the rows lie among all numbers."""
        first = {name: self.rows(name)[0] * self.width(name) for name in self.shapes}
        return Places(first, {name: math.prod(shape) for name, shape in self.shapes.items()})


@dataclasses.dataclass(frozen=True)
class PartOfNoise:
    """The noise of a release, of which this rank adds the part of its own rows.

    **Guarantee.** The ranks have one key. Each number of the long vector gets its noise from one
    place of one stream, whoever holds it: all ranks together add what one source would add.

    Attributes:
        source: of the same key on all ranks.
        slices: the rows of this rank.
    """

    source: NoiseSource
    slices: Slices

    def add(self, tensors: Mapping[str, Tensor], std: Any, dtype: torch.dtype | None) -> None:
        """Add the noise to this rank's rows; see `NoiseSource.add`."""
        self.source.add(tensors, std, dtype, at=self.slices.places())

    def prepare(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        """Draw nothing ahead."""


@dataclasses.dataclass
class SlicedShares(Shares):
    """The contributions of one batch to a release of which every rank keeps its rows.

    **Guarantee.** That of `Shares`, where the pieces that are rounded are the parts of a shard that
    are computed at once, `most` records each. The number of records is public, so neighbours differ
    in one record of one piece. An example is computed on one rank, with all parameters, so its norm
    is that of its whole contribution.

    All ranks make equally many passes, since each needs the others' parameters. A rank that has no
    records left computes one that is made up, and adds nothing.

    Attributes:
        slices: the rows of this rank.
        most: records that are computed at once; None is a shard.
    """

    slices: Slices = None  # type: ignore[assignment]
    most: int | None = None

    def roundings(self, public_size: bool) -> int:
        """Return by how many g sqrt(d) rounding can take neighbouring sums apart."""
        if not public_size:
            raise ValueError("relation: a sharded network needs a public number of records")
        return 1

    def passes(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of a piece, and where its records are in the batch, possibly nowhere."""
        shard = self.group.shard_of(self.records)
        m, k = self.group.shards, self.group.size
        places = [(shard == number).nonzero().flatten() for number in range(m)]
        most = self.most or max(1, len(self.records))
        for first in range(0, m, k):
            together = places[first : first + k]
            longest = max(map(len, together))
            own = together[self.group.rank] if self.group.rank < len(together) else places[0][:0]
            for part in range(-(-longest // most)):
                yield first + self.group.rank + m * part, own[part * most : (part + 1) * most]

    def total_of_rows(
        self,
        g: float,
        keep: Tensor | None,
        weights: Callable[[Clippable, Tensor | None], Any],
    ) -> dict[str, Tensor]:
        """Return the sum over all shards of this rank's rows, by name, in float64.

        Args:
            g: spacing of the grid; 0 for no rounding, where nothing is private.
            keep: true or false for every record of the batch.
            weights: returns the clip factors of contributions, given theirs of `keep`.
        """
        kind = torch.int64 if g else torch.float64
        sums = {
            name: torch.zeros(
                self.slices.rows(name)[1], self.slices.width(name), dtype=kind, device=self.device
            )
            for name in self.shapes
        }
        for number, where in self.passes():
            own = None if keep is None else keep[where.to(keep.device)]
            with self.contributed(number, self.records[where]) as part:
                part.summed_in = self.summed_in
                yields: Any = part
                found = iter(yields.weighted_sums(weights(part, own)) if len(where) else ())
                early: dict[str, Tensor] = {}
                for name in self.shapes:
                    while len(where) and name not in early:
                        early.update([next(found)])
                    for first, rows in self._rounded(name, early.pop(name, None), g, kind):
                        own_rows = sums[name][first : first + len(rows) // self.slices.size]
                        own_rows += self.group.scatter(rows)[: len(own_rows)]
        return {  # one at a time, so that few of them are held twice
            name: sums.pop(name).double().mul_(g or 1.0).view(-1, *self.shapes[name][1:])
            for name in self.shapes
        }

    def _rounded(
        self, name: str, value: Tensor | None, g: float, kind: torch.dtype
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield a sum in steps of the grid, some rows of each rank at a time, equally many.

        With them comes where they begin among a rank's rows.
        """
        width, size, most = self.slices.width(name), self.slices.size, self.slices.padded(name)
        step = max(1, _PIECE // (width * size))
        for first in range(0, most, step):
            rows = torch.zeros(size, min(step, most - first), width, dtype=kind, device=self.device)
            for rank in range(size if value is not None else 0):
                begin = rank * most + first
                part = value[begin : begin + rows.shape[1]]  # type: ignore[index]
                whole = torch.div(part, g, rounding_mode="trunc") if g else part
                rows[rank, : len(part)] = whole.reshape(-1, width)
            yield first, rows.flatten(0, 1)
