"""What the gate asks of others: of contributions, of replayed ones, of an auditor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpbnn.privacy.events import Event
    from dpbnn.privacy.gate import Gate
    from dpbnn.privacy.units import Groups

__all__ = ["Auditor", "Clippable", "Replayed"]


class Clippable(Protocol):
    """Per-example vectors that can be clipped and summed; see `dpbnn.contributions`.

    A contribution that is not finite has norm 0 and is absent from every sum.
    """

    batch_size: int
    shapes: Mapping[str, torch.Size]
    device: torch.device
    summed_in: torch.dtype
    """What sums are formed in; the gate makes it float64 where the number of records is secret."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of what is released, float32 or float64; no function of the records."""

    def sum_error(self, rows: int) -> float:
        """Return e: sums of `rows` contributions of norm <= C, by chunks, err by e C at most.

        A function of public settings. The gate adds the chunks up in float64.
        """

    def squared_norms(self) -> dict[str, Tensor]:
        """Return |c_i|^2 per released name, never below the truth."""

    def norms(self) -> Tensor:
        """Return |c_i| over all released names, never below the truth."""

    def unit_squares(self, groups: Groups, names: Sequence[str]) -> Tensor:
        """Return |sum_i c_i|^2 over some names and the examples of each unit, never below it.

        A unit of one example may have less: its norm is that of the example.
        """

    def weighted_sum(self, w: Any) -> dict[str, Tensor]:
        """Return sum_i w_i c_i per released name, new tensors in float32 or better."""

    def chunks(self) -> Iterator[Clippable]:
        """Yield contributions whose examples, in order, make up this batch."""

    def unit_chunks(self, units: Tensor) -> Iterator[Clippable]:
        """Yield the same, where no unit's examples are in two of them."""


class Replayed(ABC):
    """Contributions of padded batches, made and summed by a captured CUDA graph.

    They are a `Clippable` but for norms, sums and chunks; these have `keep` for all padded rows.
    """

    @abstractmethod
    def summed(
        self, key: Hashable, keep: Tensor | None, sum_of: Callable[..., dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return sum_of(contributions, keep), or a replay of it for the same key."""

    @abstractmethod
    def released(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return noised sums in the dtype of releases."""


class Auditor(Protocol):
    """Another way to release, for audits: sees the sums before the noise, and answers for it.

    A gate with an auditor charges nothing. It notes in its ledger, durably and before anything is
    summed, that releases were observed; nothing in that ledger is private from then on.
    """

    sampling_key: bytes
    """What `fit` draws its batches with, instead of a key of its own."""

    def keep(self, records: Tensor | None, count: int) -> Tensor | None:
        """Return which examples take part, or None for all."""

    def release(self, gate: Gate, event: Event, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what stands for the release."""
