"""The rows of the data: which of them can be used, before anything is spent.

The data is looked at in pieces. It is copied whole, to memory or to a GPU, within a limit alone.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.bad_rows import Check
from dpbnn.likelihoods import Likelihood
from dpbnn.messages import SHOWN, check_on_bad_rows, refuse_rows
from dpbnn.sources import (
    Arrays,
    Bits,
    Block,
    Records,
    Source,
    StreamedRows,
    ahead,
    filled,
    opened,
)
from dpbnn.units import Units

__all__ = ["Rows", "StreamedRows", "checked_rows", "each"]

_PIECE = 1 << 22  # bytes that are looked at at once
_RECORDS = 1 << 10  # records of a dataset, likewise


@dataclasses.dataclass(frozen=True)
class Rows:
    """Inputs and targets on their device.

    Attributes:
        x: inputs, one row per record: a tensor, a tuple of tensors, or a mapping of them by name.
        y: targets, likewise.
        kept: false for rows that contribute nothing, under on_bad_rows="zero"; None where every
            row counts. Their inputs and targets are public stand-ins.
        fixed: whether the same rows come again when they are read again.
        units: whose records they are, where a batch takes all records of a person or none.
    """

    x: Any
    y: Tensor
    kept: Tensor | None = None
    fixed: bool = True
    units: Units | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def drawn(self) -> int:
        """Number of what batches are drawn from: records, or units."""
        return len(self) if self.units is None else len(self.units)

    def by_unit(self, units: Units) -> Rows:
        """Return the same rows as records of units."""
        if len(units.order) != len(self):
            raise ValueError("units: give one label for each record of the data")
        kept = self.kept
        if units.kept is not None:
            kept = units.kept.to(self.device) & (True if kept is None else kept)
        return dataclasses.replace(self, kept=kept, units=units)

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.y.device

    @property
    def identity(self) -> Any:
        """What tells these rows from others, for a run that goes on."""
        return self.x, self.y, self.kept, self.units

    def none(self) -> tuple[Any, Tensor]:
        """Return the inputs and targets of no record at all."""
        return each(self.x, lambda part: part[:0]), self.y[:0]

    def take(self, records: Tensor) -> tuple[Any, Tensor, Tensor | None]:
        """Return inputs and targets of a batch, and which of its records count."""
        at = records.to(self.device)
        keep = None if self.kept is None else self.kept[at]
        return each(self.x, lambda part: part[at]), self.y[at], keep

    def ahead(self, batches: Iterator[Tensor], seed: int) -> Iterator[Tensor]:
        """Yield batches, some of which may be read before they are taken."""
        return batches

    def check_batches(self, most: int) -> None:
        """Raise where batches of so many records do not fit into memory."""


def each(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return inputs of any kind with every part changed."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, dict):
        return {name: change(part) for name, part in x.items()}
    return tuple(change(part) for part in x)


def checked_rows(
    data: Any,
    network: nn.Module,
    likelihood: Likelihood,
    n: int | None,
    device: torch.device,
    on_bad_rows: str,
    hashed: bool = False,
) -> Rows | StreamedRows:
    """Return inputs and targets for the device, or raise before anything is spent.

    A row is bad where it cannot be loaded, where it is not finite, where its label is none of the
    classes, and where the network or the likelihood raises on it, as an Embedding does on an index
    that it does not hold. The last is found out by running them, which networks of the usual layers
    alone do not need. It is made by copies, so that nothing of the data stays in the network or
    the likelihood. All of this is one pass over the data, in pieces.

    Args:
        data: what a `DataSource` takes, or one.
        network: on its device.
        likelihood: of the targets.
        n: number of records of the plan; None where that is not the data's, under add/remove.
        device: where the rows go.
        on_bad_rows: "error", whose messages count bad rows (where n is given) and quote nothing of
            them; "show", whose messages name the rows; or "zero", under which nothing is raised for
            what a row holds (but for a kernel of the user's own that stops a GPU: that ends the
            run, unspent).
        hashed: whether rows that are read batch by batch need a digest.
    """
    check_on_bad_rows(on_bad_rows)
    zero = on_bad_rows == "zero"
    source = opened(data, on_bad_rows)
    _check_size(source, n)
    check = Check(*copy.deepcopy((network, likelihood)), source, device)
    whole, in_place = _whole(source, check.dtype, device, zero)
    found = _Found(check, len(source), on_bad_rows, counted=n is not None)
    digest = hashlib.sha256()
    kept_x: list[Tensor] = []
    kept_y: Tensor | None = None
    for start, block in _blocks(source):
        x, y, bad = found.add(start, block)
        stop = start + len(y)
        if whole and not in_place:
            if kept_y is None:
                kept_x = [_like(part, len(source), device) for part in x]
                kept_y = _like(y, len(source), device)
            for place, part in zip((*kept_x, kept_y), (*x, y), strict=True):
                place[start:stop] = part
        elif hashed and not whole:
            for part in (*x, y, bad):
                digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    found.refuse()
    if not whole:
        bad_ones, identity = found.bad if zero else None, f"{len(source)}, {digest.hexdigest()}"
        return StreamedRows(
            source, check.clean, check.stand_in, device, bad_ones, identity, strict=not zero
        )
    if in_place:
        *kept_x, kept_y = source.run(0, len(source), 0).parts
        kept_y = check.targets(kept_y)[0].to(device)
    assert kept_y is not None
    kept = ~found.bad.mask().to(device) if zero else None
    return Rows(source.x(kept_x), kept_y, kept, source.fixed)


def _like(part: Tensor, count: int, device: torch.device) -> Tensor:
    return torch.empty(count, *part.shape[1:], dtype=part.dtype, device=device)


def _check_size(source: Source, n: int | None) -> None:
    inputs = {len(array) for array in source.arrays} if isinstance(source, Arrays) else set()
    if n is None and len(inputs) > 1:
        raise ValueError(
            "data: the numbers of inputs and targets differ; give one target for each input"
        )
    if isinstance(source, Arrays) and n is not None and inputs != {n}:
        count, targets = len(source.arrays[0]), len(source)
        raise ValueError(
            f"the plan is for n={n} records and the data has {count} inputs and {targets} targets; "
            f"plan with n={count}"
        )
    if n is not None and len(source) != n:
        raise ValueError(
            f"the plan is for n={n} records and the data has {len(source)}; plan with "
            f"n={len(source)}"
        )


def _whole(
    source: Source, dtype: torch.dtype, device: torch.device, zero: bool
) -> tuple[bool, bool]:
    """Return whether all rows are held at once, and whether where they are already.

    They are copied whole within the limit alone. A dataset that is not fixed is always read anew.
    """
    if not source.fixed and not isinstance(source, Arrays):
        return False, False
    floats = [part for part in source.parts[:-1] if part.dtype.is_floating_point]
    width = source.record_bytes + sum(
        part.nbytes // part.dtype.itemsize * dtype.itemsize - part.nbytes for part in floats
    )
    if isinstance(source, Arrays) and source.held and not zero and source.missing is None:
        inputs_there = [array for array in source.arrays[:-1] if isinstance(array, Tensor)]
        if all(
            array.device.type == device.type
            and (array.dtype == dtype or not array.is_floating_point())
            for array in inputs_there
        ):
            return True, True
    return width * len(source) <= source.memory, False


def _blocks(source: Source) -> Iterator[tuple[int, Block]]:
    """Yield the records in pieces, with the number of the first; an empty piece where none is."""
    size, count = max(8, _PIECE // source.record_bytes // 8 * 8), len(source)
    if not isinstance(source, Records):
        for start in range(0, max(1, count), size):
            yield start, source.run(start, min(start + size, count), 0)
        return
    size = min(size, _RECORDS)
    numbers = (torch.arange(at, min(at + size, count)) for at in range(0, count, size))
    for records, block in ahead(source, numbers, 0, lambda records, block: block):
        yield int(records[0]), block


class _Found:
    """What the pass over the data has found so far.

    Args:
        check: looks at a piece.
        count: number of records.
        on_bad_rows: as in `fit`.
        counted: whether messages may say how many rows are bad.
    """

    def __init__(self, check: Check, count: int, on_bad_rows: str, *, counted: bool) -> None:
        self.check, self.mode, self.counted = check, on_bad_rows, counted
        self.bad, self.fails = Bits(count), Bits(0 if check.usual else count)
        self.wrong, self.unlike, self.unloaded, self.reason = False, False, False, ""

    def add(self, start: int, block: Block) -> tuple[list[Tensor], Tensor, Tensor]:
        """Look at a piece; return it as the network takes it, without what is bad."""
        x, y, bad, wrong = self.check.look(block)
        self.wrong = self.wrong or wrong
        self.unlike = self.unlike or block.unlike
        if block.loaded is not None:
            self.unloaded = self.unloaded or not bool(block.loaded.all())
        stand_in = self.check.stand_in
        zero, show = self.mode == "zero", self.mode == "show"
        if zero or not self.check.usual:
            x, y = [filled(part, bad, 0) for part in x], filled(y, bad, stand_in)
        if not self.check.usual:
            most = len(y) if zero else SHOWN - self.fails.total
            fails, reason = self.check.failing(x, y, most, show)
            self.reason = self.reason or reason
            if zero:
                x, y = [filled(part, fails, 0) for part in x], filled(y, fails, stand_in)
                bad = bad | fails.to(bad.device)
            else:
                self.fails.put(start, fails)
        self.bad.put(start, bad)
        return x, y, bad

    def refuse(self) -> None:
        """Raise for what was found, unless bad rows contribute nothing."""
        if self.unlike:
            raise ValueError(
                "data: records differ in shape or type; make all of them alike, such as by padding "
                "them to one length"
            )
        if self.mode == "zero":
            return
        said = {"show": self.mode == "show", "counted": self.counted}
        finite = "inputs and targets must be finite"
        if self.unloaded:
            finite = f"records must load as numbers, and {finite}"
        if self.bad.total:
            refuse_rows(self.bad.mask(), self.check.expected if self.wrong else finite, **said)
        if self.fails.total:
            cannot = f"the network or the likelihood cannot take them ({self.reason})"
            refuse_rows(self.fails.mask(), cannot, most=SHOWN, **said)
