"""Rows that are read batch by batch: converted, checked and moved to their device as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dpbnn.messages import HiddenError
from dpbnn.sources.bits import Bits
from dpbnn.sources.prefetch import ahead
from dpbnn.sources.source import Block, Source

__all__ = ["StreamedRows", "filled"]

Cleaned = tuple[list[Tensor], Tensor, Tensor]


def filled(values: Tensor, bad: Tensor, stand_in: float) -> Tensor:
    """Return values in which bad rows hold a public stand-in."""
    return values.masked_fill(bad.view(-1, *[1] * (values.dim() - 1)).to(values.device), stand_in)


def _pinned(values: Tensor) -> Tensor:
    return values if values.is_cuda else values.pin_memory()


class StreamedRows:
    """Inputs and targets of a source, batch by batch.

    A record that has become bad since the check contributes nothing.

    Args:
        source: of the records.
        clean: returns a block's inputs and targets as the network takes them, and its bad records.
        stand_in: the public target of bad records.
        device: where batches go.
        left_out: records that do not count; None is none.
        identity: a digest of all records, where it was asked for.
        strict: whether a record that can no longer be loaded ends the run.
    """

    x: Any = None  # nothing is held whole
    y: Any = None
    kept: Any = None
    units: Any = None

    def __init__(
        self,
        source: Source,
        clean: Callable[[Block], Cleaned],
        stand_in: float,
        device: torch.device,
        left_out: Bits | None,
        identity: str,
        strict: bool,
    ) -> None:
        self.source, self.left_out, self.fixed = source, left_out, source.fixed
        self.device, self.identity = device, identity
        self._clean, self._stand_in, self._strict = clean, stand_in, strict
        self._ready: tuple[Tensor, tuple[list[Tensor], Tensor, Tensor]] | None = None

    def __len__(self) -> int:
        return len(self.source)

    @property
    def drawn(self) -> int:
        """Number of what batches are drawn from."""
        return len(self)

    def by_unit(self, units: Any) -> Any:
        """Raise: the records of a person are found in memory alone."""
        raise ValueError(
            "units: are for data that is held in memory, and this is read batch by batch; give "
            "tensors or arrays"
        )

    def none(self) -> tuple[Any, Tensor]:
        """Return the inputs and targets of no record at all."""
        x, y, _ = self._clean(Block([part.empty(0) for part in self.source.parts]))
        return self.source.x([part.to(self.device) for part in x]), y.to(self.device)

    def take(self, records: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Return inputs and targets of the batch that `ahead` gave last, and which records count.

        Args:
            records: that batch.
        """
        if self._ready is None or self._ready[0] is not records:
            raise RuntimeError("another batch was taken than `ahead` has read")
        x, y, keep = self._ready[1]
        inputs = [part.to(self.device, non_blocking=True) for part in x]
        return (
            self.source.x(inputs),
            y.to(self.device, non_blocking=True),
            keep.to(self.device, non_blocking=True),
        )

    def ahead(self, batches: Iterator[Tensor], seed: int) -> Iterator[Tensor]:
        """Yield batches, the next of which are read in the meantime.

        Args:
            batches: numbers of records.
            seed: of what records draw.
        """
        with self.source.scattered():
            for ready in ahead(self.source, batches, seed, self._made):
                self._ready = ready
                yield ready[0]
        self._ready = None

    def _made(self, records: Tensor, block: Block) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return a batch without its bad records, in memory that a GPU copies from."""
        if self._strict and block.loaded is not None and not block.loaded.all():
            raise HiddenError(
                "a record that could be loaded before cannot be loaded now; look after the files "
                "that the dataset reads, and resume the run"
            )
        x, y, bad = self._clean(block)
        bad = bad if self.left_out is None else bad | self.left_out.at(records).to(bad.device)
        x = [filled(part, bad, 0) for part in x]
        y = filled(y, bad, self._stand_in)
        if self.device.type != "cuda":
            return x, y, ~bad
        return [_pinned(part) for part in x], _pinned(y), _pinned(~bad)

    def check_batches(self, most: int) -> None:
        """Raise where batches of so many records do not fit into memory."""
        needed, limit = most * self.source.record_bytes, self.source.memory
        if needed > limit:
            raise ValueError(
                f"a batch of up to {most} records takes {needed / 1e9:.3g} GB, and memory="
                f"{limit} bytes may be used; plan with a smaller batch_size, or pass "
                f"dpbnn.DataSource(data, memory=...)"
            )
