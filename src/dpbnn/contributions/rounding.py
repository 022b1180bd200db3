"""Norms that are never rounded down."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


@functools.lru_cache(maxsize=256)
def _underflow(terms: int, device: torch.device) -> Tensor:
    """Return what squares of that many numbers can lose by being too small for float32."""
    with torch.inference_mode(False):
        tiny = terms * torch.finfo(torch.float32).tiny
        return torch.tensor([tiny], dtype=torch.float64, device=device)


def row_squares(t: Tensor) -> Tensor:
    """Return the sum of squares over the last axis, in float64, never below by underflow.

    Sums of squares beyond float32 come out infinite and count as non-finite.
    """
    rows = torch.linalg.vector_norm(accurate(t), dim=-1)
    return torch.addcmul(_underflow(t.shape[-1], t.device), rows, rows)  # float64 as its first


def squares(t: Tensor) -> Tensor:
    """Return each example's sum of squares over all but the first axis, in float64."""
    rows = t if t.dim() == 2 else t.reshape(t.shape[0], t.shape[1:].numel())
    whole = rows.shape[1] // _PIECE * _PIECE
    if not whole:
        return row_squares(rows)
    total = row_squares(torch.unflatten(rows[:, :whole], 1, (-1, _PIECE))).sum(1)
    return total + row_squares(rows[:, whole:])


@functools.cache
def no_rows(device: torch.device) -> Tensor:
    """Return the indices of no example."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.long, device=device)


def without(t: Tensor, bad: Tensor, axis: int = 0) -> Tensor:
    """Return the tensor with zeros for the bad examples, in place."""
    return t.index_fill_(axis, bad, 0.0) if bad.numel() else t


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


_AS_IT_IS = nullcontext()


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Accumulate in float32 or better: no TF32, no bf16 products, no autocast."""
    reduced = [
        (switch, switch.fp32_precision)
        for switch in _SWITCHES.get(device.type, [])
        if switch.fp32_precision not in ("none", "ieee")
    ]
    if reduced or torch.is_autocast_enabled(device.type):
        return _raised_precision(device, reduced)
    return _AS_IT_IS


@contextmanager
def _raised_precision(device: torch.device, reduced: list[tuple[Any, str]]) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False):
        try:
            for switch, _ in reduced:
                switch.fp32_precision = "ieee"
            yield
        finally:
            for switch, value in reduced:
                switch.fp32_precision = value
