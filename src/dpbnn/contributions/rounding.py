"""Norms that are never rounded down."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

INFLATION = 1 + 3e-4
"""Reported norms are this factor above the computed ones; covers float32 forward and reductions."""


_PIECE = 1 << 14
"""Numbers summed in float32 before the sum goes on in float64."""


def accurate(t: Tensor) -> Tensor:
    """Return the tensor in float32, or in float64 if it already is."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def row_squares(t: Tensor) -> Tensor:
    """Return the sum of squares over the last axis, in float64, never below by underflow.

    Sums of squares beyond float32 come out infinite and count as non-finite.
    """
    length = t.shape[-1]
    rows: Tensor = torch.linalg.vector_norm(accurate(t), dim=-1).double().square()
    return rows + length * torch.finfo(torch.float32).tiny


def squares(t: Tensor) -> Tensor:
    """Return each example's sum of squares over all but the first axis, in float64."""
    rows = t.reshape(len(t), t.shape[1:].numel())
    whole = rows.shape[1] // _PIECE * _PIECE
    if not whole:
        return row_squares(rows)
    total = row_squares(torch.unflatten(rows[:, :whole], 1, (-1, _PIECE))).sum(1)
    return total + row_squares(rows[:, whole:])


def sum_error(terms: int, dtype: torch.dtype) -> float:
    """Return gamma: |computed - exact| <= gamma * sum |terms|, for a sum of that many terms.

    gamma = u min(n, 8 + 4 sqrt(n)), the probabilistic bound of Higham and Mary (2019) with a
    margin; u is the unit roundoff.
    """
    roundoff = torch.finfo(dtype).eps / 2
    return roundoff * min(terms, 8 + 4 * math.sqrt(terms)) if terms > 1 else 0.0


_SWITCHES: dict[str, list[Any]] = {
    "cuda": [torch.backends.cuda.matmul, torch.backends.cudnn.conv],  # type: ignore[attr-defined]
    "cpu": [torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv],  # type: ignore[attr-defined]
}


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Accumulate in float32 or better: no TF32, no bf16 products, no autocast."""
    before = [(switch, switch.fp32_precision) for switch in _SWITCHES.get(device.type, [])]
    reduced = [(switch, value) for switch, value in before if value not in ("none", "ieee")]
    autocast = torch.is_autocast_enabled(device.type)
    with torch.no_grad(), torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        try:
            for switch, _ in reduced:
                switch.fp32_precision = "ieee"
            yield
        finally:
            for switch, value in reduced:
                switch.fp32_precision = value
