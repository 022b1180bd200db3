"""Norms that are never rounded down, and sums whose rounding is bounded."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dpbnn.privacy.chacha import on_device, triton_kernels
from dpbnn.privacy.fused import scaled_rows

INFLATION = 1 + 3e-4
"""Reported norms are this factor above the computed ones; covers float32 forward and reductions."""

Bad = Tensor | None
"""For every example whether it is not finite; or None: none is."""
_PIECE = 1 << 14
"""Numbers summed in float32 before the sum goes on in float64."""
_PART = 1 << 13
"""Numbers of a row that one program of a GPU squares and adds up."""
_LONG = 1 << 16
"""Columns from which kernels fill a GPU that take 128 or 256 of them at a time."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 where the dtype is that."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def accurate(t: Tensor) -> Tensor:
    """Return the tensor in float32, or in float64 if it already is."""
    return t.to(wide(t.dtype))


def row_squares(t: Tensor) -> Tensor:
    """Return the sum of squares over the last axis, in float64, never below by underflow.

    Sums of squares beyond float32 come out infinite and count as non-finite.
    """
    # Contiguous: over strided rows the sum is sequential, and may be 1e-3 too small.
    t = t.contiguous()
    tiny = t.shape[-1] * torch.finfo(torch.float32).tiny  # what squares too small for float32 lose
    if _by_kernel(t):
        return _squares_on_gpu(t, tiny)
    t = accurate(t)
    rows: Tensor = torch.linalg.vector_norm(t, dim=-1)
    return rows.double().square_().add_(tiny)


def _by_kernel(t: Tensor) -> bool:
    exact = t.dtype in (torch.float32, torch.bfloat16)  # squares of them are, in float64
    return t.is_cuda and exact and t.numel() > 0 and triton_kernels() is not None


def _squares_on_gpu(t: Tensor, tiny: float) -> Tensor:
    """Return `row_squares` by one kernel, which adds up in float64; long rows in several parts."""
    parts = -(-t.shape[-1] // _PART)
    out = torch.empty(*t.shape[:-1], parts, dtype=torch.float64, device=t.device)
    with on_device(t.device):
        launch = triton_kernels().squares_kernel[(out.numel() // parts, parts)]
        launch(t, out, t.shape[-1], tiny / parts, PART=_PART, BLOCK=2048, num_warps=8)
    return out.squeeze(-1) if parts == 1 else out.sum(-1)


def squares(t: Tensor) -> Tensor:
    """Return each example's sum of squares over all but the first axis, in float64."""
    rows = t if t.dim() == 2 else t.reshape(t.shape[0], t.shape[1:].numel())
    if _by_kernel(rows):
        return row_squares(rows)
    whole = rows.shape[1] // _PIECE * _PIECE
    if not whole:
        return row_squares(rows)
    total = row_squares(torch.unflatten(rows[:, :whole], 1, (-1, _PIECE))).sum(1)
    return total + row_squares(rows[:, whole:])


def position_sums(h: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return sum_t h_t in float32 and |h|^2 in float64, by one pass; None where no kernel does it.

    Args:
        h: [batch, T, width].
    """
    if h.dim() != 3 or not h.is_contiguous() or not _by_kernel(h):
        return None
    batch, positions, columns = h.shape
    block = 128 if batch * columns >= _LONG else 32
    parts = -(-columns // block)
    sums = torch.empty(batch, columns, dtype=torch.float32, device=h.device)
    squared = torch.empty(batch, parts, dtype=torch.float64, device=h.device)
    tiny = positions * columns * torch.finfo(torch.float32).tiny / parts
    with on_device(h.device):
        launch = triton_kernels().positions_kernel[(batch, parts)]
        launch(h, sums, squared, positions, columns, tiny, STEP=16, BLOCK=block)
    return sums, squared.squeeze(-1) if parts == 1 else squared.sum(-1)


def _weighs(a: Tensor, exact: bool) -> bool:
    """Return whether a kernel adds up weighted rows; it leaves out those of weight zero."""
    few = a.dtype is torch.float32 and len(a) <= BLOCK[torch.float32]
    return few and not exact and _by_kernel(a)


def weighable(t: Tensor, bad: Bad, exact: bool) -> Tensor:
    """Return rows for `summed_rows` with one weight each, which is zero for the bad examples."""
    return t if _weighs(t, exact) else finite(t, bad)


def finite(t: Tensor, bad: Bad) -> Tensor:
    """Return the tensor in place with zeros for what is not finite, if some examples are bad.

    Their weights are zero, so their products then are too. Good examples have nothing to replace.
    """
    return t if bad is None else t.nan_to_num_(0.0, 0.0, 0.0)


def weighted_factors(a: Tensor, g: Tensor, w: Tensor, bad: Bad) -> tuple[Tensor, Tensor]:
    """Return a and g, the smaller of them times w, finite for the bad examples, whose w is zero."""
    if a.numel() < g.numel():
        other, scaled = weighted_factors(g, a, w, bad)
        return scaled, other
    both = scaled_rows(g, a, w)  # asked whether any example is bad or not: calls tell nothing
    if bad is not None and both is not None:
        return both[1], both[0]
    scaled = finite(g * w.to(g).view(-1, *[1] * (g.dim() - 1)), bad)
    return a if bad is None else torch.nan_to_num(a, 0.0, 0.0, 0.0), scaled


def without(t: Tensor, bad: Bad, axis: int = 0) -> Tensor:
    """Return the tensor with zeros for the bad examples, in place."""
    if bad is None:
        return t
    return t.masked_fill_(bad.view(-1, *[1] * (t.dim() - 1 - axis)), 0.0)


@functools.cache
def sum_error(terms: int, dtype: torch.dtype) -> float:
    """Return gamma: |computed - exact| <= gamma * sum |terms|, for a sum of that many terms.

    gamma = u min(n, 8 + 4 sqrt(n)), the probabilistic bound of Higham and Mary (2019) with a
    margin; u is the unit roundoff.
    """
    roundoff = torch.finfo(dtype).eps / 2
    return roundoff * min(terms, 8 + 4 * math.sqrt(terms)) if terms > 1 else 0.0


BLOCK = {torch.float32: 512, torch.float64: 4096}
"""Examples that are summed in one go, by dtype; the sums of blocks are added up in float64."""
_DEVIATIONS = 8.0
MANY = 1 << 20
"""Examples up to which bounds on float64 sums need no assumption."""


@functools.cache
def rows_error(rows: int, dtype: torch.dtype) -> float:
    """Return e: |computed - exact| <= e C for a sum of at most m contributions of norm C or less.

        e = u min(b m, 8 (b + 8) sqrt(m / 3)) + u' m min(m, 2^20 + 8 sqrt(m / 3))

    u is the roundoff of the dtype, b the smaller of m and its `BLOCK`, u' that of float64. In the
    worst case every example of a block of b adds a rounding error of u b C, the first bound. The
    second holds if rounding errors are mean-independent, as in the model of Higham and Mary (2019):
    the errors u |S_k|, of partial sums |S_k| <= k C in each block, are then a martingale with
    sum_k |S_k|^2 <= m (b + 1)^2 C^2 / 3, whose norm exceeds 8 roots of that with probability
    2 e^-32 at most, in any dimension (Pinelis 1994); 7 examples more per block make up for the
    rounding of the products. The last term is for the sums of blocks or chunks, as many as m of
    them, added up in float64. Sums of 20 rows need no assumption, nor do float64 sums of a million
    rows: for these the first bound is taken. They are within 2e-4 C.

    Contributions enter as computed. What the sum over an example's own positions or uses lost is
    part of the norm. Where the terms of an example can be larger than its contribution, at most
    2^23 times, since the norm has its share of them, they are multiplied and added in float64. That
    loses 2^-6 of what float32 loses of contributions, which has its room in the 8. Sums that are
    float64 anyway take no such terms, but the contributions that are formed of them.
    """
    block = min(rows, BLOCK[dtype])
    roundoff, finest = (torch.finfo(t).eps / 2 for t in (dtype, torch.float64))
    likely = _DEVIATIONS * math.sqrt(rows / 3)
    within = float(block * rows)
    if dtype is torch.float32:
        within = min(within, (block + 8) * likely)
    return roundoff * within + finest * rows * min(rows, MANY + likely)


def summed_rows(g: Tensor, a: Tensor, exact: bool = False, into: Tensor | None = None) -> Tensor:
    """Return g^T a; over more than a block of rows in float64, block by block.

    Args:
        g: [examples, rows].
        a: [examples, columns].
        exact: whether the products are float64 too. They must be where an example has several
            rows, which may cancel and be far larger than its contribution.
        into: where to write it, if that is in the dtype of the result.
    """
    step = BLOCK[a.dtype]
    if g.shape[1] == 1 and _weighs(a, exact):
        return _weighted_on_gpu(g, a)
    if exact and a.dtype is not torch.float64:
        blocks = (
            g[i : i + step].double().T @ a[i : i + step].double() for i in range(0, len(a), step)
        )
    elif len(a) <= step:
        fits = into is not None and into.dtype is a.dtype
        return torch.mm(g.T, a, out=into if fits else None)
    else:
        blocks = (torch.mm(g[i : i + step].T, a[i : i + step]) for i in range(0, len(a), step))
    total = torch.zeros(g.shape[1], a.shape[1], dtype=torch.float64, device=a.device)
    for block in blocks:
        total += block
    return total


def _weighted_on_gpu(w: Tensor, a: Tensor) -> Tensor:
    """Return w^T a by one kernel, which reads nothing but zeros of rows whose weight is zero."""
    columns = a.shape[1]
    out = torch.empty(1, columns, dtype=a.dtype, device=a.device)
    with on_device(a.device):
        rows, block = (16, 256) if columns >= _LONG else (128, 32)
        launch = triton_kernels().weighted_kernel[(-(-columns // block),)]
        launch(w.contiguous(), a.contiguous(), out, len(a), columns, ROWS=rows, BLOCK=block)
    return out


_SWITCHES: dict[str, list[Any]] = {
    "cuda": [torch.backends.cuda.matmul, torch.backends.cudnn.conv],  # type: ignore[attr-defined]
    "cpu": [torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv],  # type: ignore[attr-defined]
}


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Accumulate in float32 or better: no TF32, no bf16 products, no autocast."""
    reduced = [
        (switch, switch.fp32_precision)
        for switch in _SWITCHES.get(device.type, [])
        if switch.fp32_precision not in ("none", "ieee")
    ]
    on = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if on else nullcontext():
        try:
            for switch, _ in reduced:
                switch.fp32_precision = "ieee"
            yield
        finally:
            for switch, value in reduced:
                switch.fp32_precision = value
