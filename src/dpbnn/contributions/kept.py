"""Contributions of which some examples count as zero."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dpbnn.contributions.dense import Contributions, Weights

__all__ = ["Kept"]


class Kept(Contributions):
    """k_i c_i, k_i being 0 or 1: examples with k_i = 0 contribute nothing.

    Args:
        whole: the contributions c_i.
        kept: k, true or false for every example.
    """

    def __init__(self, whole: Contributions, kept: Tensor) -> None:
        self.batch_size, self.shapes, self.device = whole.batch_size, whole.shapes, whole.device
        self.dtype = whole.dtype
        self._whole, self._kept = whole, kept.to(whole.device)
        if kept.shape != (whole.batch_size,):
            raise ValueError(
                f"kept has shape {tuple(kept.shape)}; give one per example: ({whole.batch_size},)"
            )

    @property
    def summed_in(self) -> torch.dtype:
        """What the whole's sums are formed in."""
        return self._whole.summed_in

    @summed_in.setter
    def summed_in(self, dtype: torch.dtype) -> None:
        self._whole.summed_in = dtype

    def sum_error(self, rows: int) -> float:
        """Return e: sums of `rows` contributions of norm <= C, by chunks, err by e C at most."""
        return self._whole.sum_error(rows)

    def squared_norms(self) -> dict[str, Tensor]:
        """Return |c_i|^2 per released name, never below the truth (float64, [batch])."""
        return {name: v * self._kept for name, v in self._whole.squared_norms().items()}

    def norms(self) -> Tensor:
        """Return |c_i| over all released names, never below the truth (float64, [batch])."""
        return self._whole.norms() * self._kept

    def weighted_sum(self, w: Weights) -> dict[str, Tensor]:
        """Return sum_i w_i c_i per released name, in float32 or better."""
        if isinstance(w, Mapping):
            return self._whole.weighted_sum({name: v * self._kept for name, v in w.items()})
        return self._whole.weighted_sum(w * self._kept)

    def inner(self, other: Contributions) -> Tensor:
        """Return the inner products <c_i, d_j> with another batch's contributions (float64)."""
        if isinstance(other, Kept):
            return self._kept[:, None] * self._whole.inner(other._whole) * other._kept
        return self._kept[:, None] * self._whole.inner(other)

    def chunks(self) -> Iterator[Contributions]:
        """Yield contributions whose examples, in order, make up this batch."""
        first = 0
        for chunk in self._whole.chunks():
            yield Kept(chunk, self._kept[first : first + chunk.batch_size])
            first += chunk.batch_size
