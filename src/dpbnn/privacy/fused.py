"""Small steps of the clip: each is one kernel on a GPU with Triton, torch operations elsewhere."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from dpbnn.privacy.chacha import on_device, triton_kernels

__all__ = ["clip_factors", "row_weights", "scaled_rows", "total_of", "with_roots"]

_BLOCK = 256


def _fused(*tensors: Tensor) -> Any:
    """Return the module of the kernels, where they take these tensors."""
    if not all(t.is_cuda and t.is_contiguous() and t.numel() for t in tensors):
        return None
    return triton_kernels()


def _bits(value: float) -> int:
    """Return the bits of a float64: Triton would make a float32 of it."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def clip_factors(norms: Tensor, clip: float) -> Tensor:
    """Return min(1, C/|c_i|), and 0 where the norm is not finite.

    Args:
        norms: float64, one for each example.
        clip: C.
    """
    kernels = _fused(norms) if norms.dtype is torch.float64 else None
    if kernels is None:
        return norms.reciprocal().mul_(clip).clamp_(max=1.0).nan_to_num_(0.0)
    out, size = torch.empty_like(norms), len(norms)
    with on_device(norms.device):
        launch = kernels.factor_kernel[(-(-size // _BLOCK),)]
        launch(norms, out, size, _bits(clip), BLOCK=_BLOCK)
    return out


def with_roots(values: Tensor, squared: Tensor, gamma: float) -> Tensor:
    """Return (sqrt(v) + gamma sqrt(s))^2, in float64; gamma is above 0."""
    kernels = _fused(values, squared) if gamma > 0 else None
    if kernels is None:
        return values.sqrt().add_(squared.sqrt(), alpha=gamma).square_()
    out, size = torch.empty_like(values), values.numel()
    with on_device(values.device):
        launch = kernels.slack_kernel[(-(-size // _BLOCK),)]
        launch(values, squared, out, size, _bits(gamma), BLOCK=_BLOCK)
    return out


def total_of(parts: Tensor, factor: float) -> tuple[Tensor, Tensor | None]:
    """Return a factor times the sum over the parts, 0 where that is not finite; and where it is so.

    The latter is None where the host knows that all are finite. Only the CPU asks: on a GPU that
    would be a wait for everything before it.

    Args:
        parts: float64, [parts, examples].
        factor: of the sum.
    """
    kernels = _fused(parts)
    if kernels is None:
        total = parts.sum(0).mul_(factor)
        bad = ~(total < torch.inf)
        if total.device.type == "cpu" and not bool(bad.any()):
            return total, None
        return total.masked_fill_(bad, 0.0), bad
    count, size = parts.shape
    total, bad = torch.empty_like(parts[0]), torch.empty_like(parts[0], dtype=torch.bool)
    with on_device(parts.device):
        launch = kernels.total_kernel[(-(-size // _BLOCK),)]
        launch(parts, total, bad.view(torch.int8), count, size, FACTOR=factor, BLOCK=_BLOCK)
    return total, bad


def row_weights(weights: Tensor, bad: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return weights in the dtype, 0 for the bad examples."""
    kernels = _fused(weights, weights if bad is None else bad)
    if kernels is None or bad is None:
        weights = weights.to(dtype)
        return weights if bad is None else weights.masked_fill(bad, 0.0)
    out, size = torch.empty_like(weights, dtype=dtype), len(weights)
    with on_device(weights.device):
        launch = kernels.row_weights_kernel[(-(-size // _BLOCK),)]
        launch(weights, bad.view(torch.int8), out, size, BLOCK=_BLOCK)
    return out


def scaled_rows(scaled: Tensor, plain: Tensor, w: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return w_i times the rows of one tensor, and those of another as they are.

    Both are zero where w_i is 0, finite or not. None where there is no kernel for it.

    Args:
        scaled: float32, [examples, ...].
        plain: likewise.
        w: float32, one for each example.
    """
    kernels = _fused(scaled, plain, w)
    if kernels is None or {t.dtype for t in (scaled, plain, w)} != {torch.float32}:
        return None
    outs = torch.empty_like(scaled), torch.empty_like(plain)
    columns = scaled[0].numel(), plain[0].numel()
    with on_device(w.device):
        launch = kernels.factors_kernel[(len(w), -(-max(columns) // 1024))]
        launch(w, scaled, plain, *outs, *columns, BLOCK=1024)
    return outs
