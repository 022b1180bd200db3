"""Units: which rows of a batch belong to one person, or to another unit that is protected whole.

A sampler that has a `unit` draws units, not rows. All rows of a drawn unit are in the batch, and
the gate clips their summed contribution. Nothing here knows what the rows hold.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpbnn.privacy.relation import Relation

if TYPE_CHECKING:
    from dpbnn.privacy.contracts import Clippable
    from dpbnn.privacy.plan import Plan
    from dpbnn.privacy.sampling import Sampler

__all__ = [
    "BLOCK", "Groups", "Packed", "Padded", "by_unit", "check_units", "clipped_norms", "row_norms",
    "unit_norms",
]  # fmt: skip

BLOCK = 32
"""Rows whose inner products are all taken at once."""
SMALL = 8
"""The same for units that have no more rows: up to 5 % of a step of a perceptron."""
_POWERS = 1 << np.arange(62)


def by_unit(plan: Plan, unit: str) -> Plan:
    """Return the plan with n and batch size counted in units of this name; "" leaves it as it is.

    Its numbers stay the same: what was accounted for one of n records holds for one of n units,
    if every unit's rows are sampled together and clipped together.
    """
    if unit in ("", plan.sampler.unit):
        return plan
    if plan.relation is Relation.REPLACE_ONE:
        raise ValueError(
            f"relation: under replace-one another {unit} could have more records, whose number "
            f"must be public; plan with relation='zero-out', or 'add/remove'"
        )
    return dataclasses.replace(plan, sampler=dataclasses.replace(plan.sampler, unit=unit))


class Padded(NamedTuple):
    """Units with about as many rows each.

    Attributes:
        units: their positions among the units of the batch, [u].
        rows: positions of their rows in the batch, [u, m], where m is the least power of 2 that
            holds the rows of each; any row where there are fewer.
        there: false where there is no such row, or where it contributes nothing; [u, m].
    """

    units: Tensor
    rows: Tensor
    there: Tensor


class Packed(NamedTuple):
    """Units of several rows, some of them in each block of `BLOCK` or `SMALL` rows.

    Attributes:
        rows: positions of the blocks' rows in the batch; any row where a block is not full. None
            where the blocks are the rows of the batch as they stand.
        units: the unit of every row in a block; the number of units where there is none, or where
            it contributes nothing.
        apart: true for pairs of rows in a block that are not of one unit, [blocks, size, size] for
            every size that there is.
    """

    rows: Tensor | None
    units: Tensor
    apart: list[Tensor]

    def gram(self, t: Tensor) -> list[Tensor]:
        """Return <t_i, t_j> of all pairs of rows in a block, shaped like `apart`."""
        rows = t if self.rows is None else t.index_select(0, self.rows)
        found, start = [], 0
        for apart in self.apart:
            count, size, _ = apart.shape
            block = rows[start : start + count * size].view(count, size, t.shape[1])
            found.append(torch.bmm(block, block.mT))
            start += count * size
        return found

    def sums(self, pairs: Sequence[Tensor]) -> Tensor:
        """Return the sum over j of pairs (i, j) of one unit, for every row i in a block."""
        both = zip(pairs, self.apart, strict=True)
        return torch.cat([p.masked_fill_(apart, 0.0).sum(2).flatten() for p, apart in both])


@dataclasses.dataclass(frozen=True)
class Groups:
    """The units of a batch; the rows of each follow on one another.

    Attributes:
        of: the unit of every row, 0 to count - 1, on the device of the contributions.
        starts: first row of every unit, and then the number of rows, on the host.
        used: false for rows that contribute nothing; None where all count.
    """

    of: Tensor
    starts: np.ndarray
    used: Tensor | None = None

    @classmethod
    def of_rows(
        cls, units: Tensor, used: Tensor | None = None, device: torch.device | None = None
    ) -> Groups:
        """Return the units of a batch.

        Args:
            units: a number for every row, never falling, the same for the rows of one unit alone.
            used: false for rows that contribute nothing.
            device: of the contributions.
        """
        starts = _starts(units)
        of = np.arange(len(starts) - 1).repeat(np.diff(starts))
        device = device or torch.device("cpu")
        return cls(
            torch.from_numpy(of).to(device), starts, None if used is None else used.to(device)
        )

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.starts) - 1

    @functools.cached_property
    def sizes(self) -> Tensor:
        """Number of rows of every unit, in float64, on the device."""
        return torch.from_numpy(self._counts.astype(np.float64)).to(self.of.device)

    @functools.cached_property
    def _counts(self) -> np.ndarray:
        counts: np.ndarray = self.starts[1:] - self.starts[:-1]
        return counts

    def without(self, bad: Tensor | None) -> Groups:
        """Return the groups without some rows, which contribute nothing."""
        if bad is None:
            return self
        used = ~bad if self.used is None else self.used & ~bad
        return dataclasses.replace(self, used=used)

    def of_used(self, values: Tensor) -> Tensor:
        """Return one value per row [rows, ...], zero for rows that contribute nothing."""
        if self.used is None:
            return values
        return values.masked_fill(~self.used.view(-1, *[1] * (values.dim() - 1)), 0.0)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of each unit's rows, [units, ...]."""
        total = values.new_zeros(self.count, *values.shape[1:])
        return total.index_add_(0, self.of, self.of_used(values))

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest value >= 0 among each unit's rows."""
        none = values.new_zeros(self.count)
        return none.scatter_reduce_(0, self.of, self.of_used(values), "amax")

    @functools.cached_property
    def padded(self) -> list[Padded]:
        """Units of several rows by their number."""
        return self._padded(1)

    @functools.cached_property
    def large(self) -> list[Padded]:
        """Units of more than `BLOCK` rows, by their number."""
        return self._padded(BLOCK)

    @functools.cached_property
    def _widths(self) -> np.ndarray:
        """For every unit, the least power of 2 that holds its rows, whatever others have."""
        widths: np.ndarray = _POWERS[_POWERS.searchsorted(self._counts)]
        return widths

    def _padded(self, above: int) -> list[Padded]:
        found: list[Padded] = []
        if self._widths.max(initial=0) <= above:
            return found
        device = self.of.device
        for width in sorted({*self._widths[self._widths > above].tolist()}):
            units = np.flatnonzero(self._widths == width)
            first, stop = self.starts[units, None], self.starts[units + 1, None]
            places = first + np.arange(width)
            rows = torch.from_numpy(np.where(places < stop, places, first)).to(device)
            there = torch.from_numpy(places < stop).to(device)
            if self.used is not None:
                there = there & self.used[rows]
            found.append(Padded(torch.from_numpy(units).to(device), rows, there))
        return found

    @functools.cached_property
    def packed(self) -> Packed:
        """All units of 2 to `BLOCK` rows.

        Padded to powers of 2 and put in order of these, they fill up blocks.
        """
        own = np.flatnonzero((self._widths > 1) & (self._widths <= BLOCK))
        own = own[np.argsort(-self._widths[own], kind="stable")]
        starts, sizes, widths = self.starts[own], self._counts[own], self._widths[own]
        ends, small = widths.cumsum(), widths <= SMALL
        cut = -(-int(widths[~small].sum()) // BLOCK) * BLOCK  # where the small blocks begin
        first = ends - widths + small * (cut - int(widths[~small].sum()))
        total = cut + -(-int(widths[small].sum()) // SMALL) * SMALL
        members = np.arange(sizes.sum()) + (starts - sizes.cumsum() + sizes).repeat(sizes)
        slots = members + (first - starts).repeat(sizes)
        units, rows = np.full(total, self.count), np.zeros(total, dtype=np.int64)
        units[slots], rows[slots] = own.repeat(sizes), members
        at, whose = (torch.from_numpy(t).to(self.of.device) for t in (rows, units))
        if self.used is not None:
            whose = whose.masked_fill(~self.used[at], self.count)
        parts = [whose[:cut].view(-1, BLOCK)] if cut else []
        if total > cut or not cut:  # the same functions are called whoever is there
            parts.append(whose[cut:].view(-1, SMALL))
        apart = [part[:, :, None] != part[:, None, :] for part in parts]
        as_they_are = len(members) == total == self.starts[-1] and np.array_equal(slots, members)
        return Packed(None if as_they_are else at, whose, apart)


def _starts(units: Tensor) -> np.ndarray:
    """Return where each unit begins, and the number of rows."""
    values = units.detach().cpu().numpy()
    if values.ndim != 1 or values.dtype.kind not in "iu" or (values[1:] < values[:-1]).any():
        raise ValueError(
            "units: must be one whole number per row, in rising order, so that the rows of a "
            "unit follow on one another"
        )
    changes = (values[1:] != values[:-1]).nonzero()[0] + 1
    return np.concatenate([[0] * bool(len(values)), changes, [len(values)]]).astype(np.int64)


def unit_norms(rows: Clippable, groups: Groups, names: Sequence[str]) -> Tensor:
    """Return each unit's norm over some released names, never below the truth.

    That of the sum of its rows, or of its largest row if that is more.
    """
    whole, largest = rows.unit_squares(groups, names), groups.largest(row_norms(rows, names))
    return torch.maximum(whole.sqrt_(), largest)


def row_norms(rows: Clippable, names: Sequence[str]) -> Tensor:
    """Return |c_i| over some released names, never below the truth."""
    if len(names) == len(rows.shapes):
        return rows.norms()
    squares = rows.squared_norms()
    return torch.stack([squares[name] for name in names]).sum(0).sqrt()


def check_units(
    units: Tensor | None, rows: int, sampler: Sampler | None, watchers: Sequence[object] = ()
) -> int:
    """Return how many records or units a batch has.

    Raises where what a sampler draws and what a gate is given are not the same kind of unit.

    Args:
        units: the unit of every row, if given.
        rows: of the batch.
        sampler: what drew it.
        watchers: who asks for the norms of single records.
    """
    unit = "" if sampler is None else sampler.unit
    if (units is None) == bool(unit):
        needed = f"the sampler draws units ({unit}); say which one each example belongs to"
        none = "goes with a sampler that draws units, such as Poisson(n, b, unit='person')"
        raise ValueError(f"units: {needed if unit else none}")
    if units is None:
        return rows
    if units.shape != (rows,):
        raise ValueError("units: give one number for each example of the batch")
    if watchers:
        raise ValueError("units: observers estimate for single records; leave them out")
    return len(_starts(units)) - 1


def clipped_norms(chunk: Clippable, w: Tensor | dict[str, Tensor]) -> Tensor:
    """Return |w_i c_i|, a new tensor."""
    if isinstance(w, Tensor):
        return (w * chunk.norms()).nan_to_num_(0.0)
    parts = [w[name].square() * square for name, square in chunk.squared_norms().items()]
    return torch.stack(parts).sum(0).sqrt_().nan_to_num_(0.0)
