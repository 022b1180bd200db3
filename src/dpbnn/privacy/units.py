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
    "REACH", "Groups", "Padded", "Windows", "by_unit", "check_units", "clipped_norms", "row_norms",
    "unit_norms",
]  # fmt: skip

REACH = 32
"""Rows of a unit up to which the inner products of all its rows are taken in windows."""
STEP = 16
"""Rows from one window to the next."""
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


class Windows(NamedTuple):
    """Pairs of rows of one unit, for units of at most `REACH` rows, as the rows of a batch stand.

    A window has `STEP` + `REACH` rows; the next one begins `STEP` rows later. Its first `STEP` rows
    are paired with all rows of it. Rows of zeros fill up the last windows.

    Attributes:
        rows: of the batch.
        mask: all bits for pairs of one unit, none for others, [windows, STEP + REACH, STEP].
    """

    rows: int
    mask: Tensor

    @classmethod
    def of(cls, units: Tensor, dtype: torch.dtype) -> Windows:
        """Return the windows of a batch.

        Args:
            units: a number for every row, from 0 to 2^31 - 2.
            dtype: of what is to be paired.
        """
        numbers = units.to(torch.int64 if dtype is torch.float64 else torch.int32)
        rows, own = _views(numbers.unsqueeze(1), 2**31 - 1)
        # Bits in place of comparisons are a fortieth of the step of a small perceptron.
        return cls(len(units), (rows ^ own).sub_(1).bitwise_right_shift_(31))

    def gram(self, t: Tensor) -> Tensor:
        """Return <t_i, t_j> of all pairs, shaped like `mask`."""
        return torch.bmm(*_views(t, 0))

    def sums(self, pairs: Tensor) -> Tensor:
        """Return for every row i the sum over j >= i in its unit; i < j counts twice.

        Pairs of two units become 0, finite or not.
        """
        pairs.mul_(_twice(STEP, REACH, pairs.dtype, pairs.device))
        pairs.view(self.mask.dtype).bitwise_and_(self.mask)
        return pairs.sum(1).view(-1)[: self.rows]


def _views(t: Tensor, fill: int) -> tuple[Tensor, Tensor]:
    """Return the rows of all windows [windows, STEP + REACH, d], the first ones [_, d, STEP]."""
    count, d = -(-len(t) // STEP), t.shape[1]
    whole = torch.cat([t, _filling(STEP + REACH, d, fill, t.dtype, t.device)])
    rows = whole.as_strided((count, STEP + REACH, d), (STEP * d, d, 1))
    return rows, whole.as_strided((count, d, STEP), (STEP * d, 1, d))


@functools.lru_cache(64)
def _filling(rows: int, d: int, fill: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((rows, d), fill, dtype=dtype, device=device)


@functools.cache
def _twice(step: int, reach: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 2 for pairs of rows i < j, 1 for i = j and 0 otherwise, at [j, i]."""
    ones = torch.ones(step + reach, step, dtype=dtype, device=device)
    return ones.tril() + ones.tril(-1)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The units of a batch; the rows of each follow on one another.

    Attributes:
        of: the unit of every row, 0 to count - 1, on the device of the contributions.
        sizes: number of rows of every unit, on the host.
        used: false for rows that contribute nothing; None where all count.
    """

    of: Tensor
    sizes: Tensor
    used: Tensor | None = None

    @classmethod
    def of_rows(cls, units: Tensor, used: Tensor | None = None) -> Groups:
        """Return the units of a batch.

        Args:
            units: a number for every row, never falling, the same for the rows of one unit alone.
            used: false for rows that contribute nothing.
        """
        numbers, rising = units.detach().cpu(), False
        if numbers.dim() == 1 and numbers.numpy().dtype.kind in "iu":
            found, of, sizes = torch.unique_consecutive(numbers, True, True)
            rising = bool((found[1:] > found[:-1]).all())
        if not rising:
            raise ValueError(
                "units: must be one whole number per row, in rising order, so that the rows of a "
                "unit follow on one another"
            )
        return cls(of, sizes, used)

    def part(self, rows: slice, used: Tensor | None, device: torch.device) -> Groups:
        """Return the units of some rows, which have all rows of these units.

        Args:
            rows: of this batch.
            used: false for those of them that contribute nothing, on the device.
            device: of the contributions.
        """
        whole = rows == slice(0, len(self.of))
        own = self if whole else Groups.of_rows(self.of[rows])
        return Groups(own.of.to(device), own.sizes, used)

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.sizes)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """First row of every unit, and then the number of rows, on the host."""
        return np.append(0, self.sizes.numpy().cumsum())

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
        """Units of more than `REACH` rows, by their number."""
        return self._padded(REACH)

    def _padded(self, above: int) -> list[Padded]:
        """Return units of more rows by the least power of 2 that holds them, whatever others do."""
        found: list[Padded] = []
        if not self.count or int(self.sizes.max()) <= above:
            return found
        device, widths = self.of.device, _POWERS[_POWERS.searchsorted(self.sizes.numpy())]
        for width in sorted({*widths[widths > above].tolist()}):
            units = np.flatnonzero(widths == width)
            first, stop = self.starts[units, None], self.starts[units + 1, None]
            places = first + np.arange(width)
            rows = torch.from_numpy(np.where(places < stop, places, first)).to(device)
            there = torch.from_numpy(places < stop).to(device)
            if self.used is not None:
                there = there & self.used[rows]
            found.append(Padded(torch.from_numpy(units).to(device), rows, there))
        return found

    def windows(self, dtype: torch.dtype) -> Windows:
        """Return pairs of rows of one unit; none is of a row in use and one that is not.

        Args:
            dtype: of what is to be paired.
        """
        of = self.of if self.used is None else self.of.masked_fill(~self.used, self.count)
        return Windows.of(of, dtype)


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
) -> Groups | None:
    """Return the units of a batch; None where a sampler draws records.

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
        return None
    if units.shape != (rows,):
        raise ValueError("units: give one number for each example of the batch")
    if watchers:
        raise ValueError("units: observers estimate for single records; leave them out")
    return Groups.of_rows(units)


def clipped_norms(chunk: Clippable, w: Tensor | dict[str, Tensor]) -> Tensor:
    """Return |w_i c_i|, a new tensor."""
    if isinstance(w, Tensor):
        return (w * chunk.norms()).nan_to_num_(0.0)
    parts = [w[name].square() * square for name, square in chunk.squared_norms().items()]
    return torch.stack(parts).sum(0).sqrt_().nan_to_num_(0.0)
