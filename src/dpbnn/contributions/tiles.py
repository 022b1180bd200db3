"""Gradients of bfloat16 factors on a GPU, formed tile by tile and never stored.

G_i = sum_t g_t a_t^T of bfloat16 g and a, whose products float32 holds exactly. One kernel squares
the tiles of G_i, another adds w_i times them up over examples, in float32 as `rows_error` has it:
weights multiply the finished G_i, so that what is summed is a multiple of what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpbnn.contributions.rounding import BLOCK
from dpbnn.privacy.chacha import on_device, triton_kernels

__all__ = ["tile_error", "tile_squares", "tile_sums", "tiled"]

# The quickest of six settings on an H200, for 288 examples of 196 positions, 1536 x 384 weights.
_SQUARES = {"HIGH": 128, "WIDE": 128, "STEP": 32, "num_warps": 4, "num_stages": 4}
_SUMS = {"HIGH": 64, "WIDE": 128, "STEP": 64, "num_warps": 4, "num_stages": 3}
_PROGRAMS = 528  # at once on a large GPU


def tiled(g: Tensor) -> bool:
    """Return whether the kernels take these gradients, [batch, T, rows]."""
    low = g.dtype is torch.bfloat16 and g.dim() == 3 and g.numel() > 0
    return low and g.is_cuda and triton_kernels() is not None


def tile_error(positions: int) -> float:
    """Return gamma: two ways to form G are within gamma sum_t |g_t| |a_t| of each other.

    Tensor cores may cut off what float32 addition would round: an error of 2^-22 of the partial sum
    for every position, in either way.
    """
    return positions * 2.0**-21


def _tiles(g: Tensor, a: Tensor, settings: Mapping[str, int]) -> int:
    return -(-g.shape[-1] // settings["HIGH"]) * -(-a.shape[-1] // settings["WIDE"])


def tile_squares(g: Tensor, a: Tensor) -> Tensor:
    """Return |G_i|^2 as computed, in float64.

    Args:
        g: [batch, T, rows], bfloat16, contiguous.
        a: [batch, T, columns], likewise.
    """
    batch, positions, rows = g.shape
    tiles = _tiles(g, a, _SQUARES)
    out = torch.empty(batch, tiles, dtype=torch.float64, device=g.device)
    # What squares too small for float32 lose.
    tiny = _SQUARES["HIGH"] * _SQUARES["WIDE"] * torch.finfo(torch.float32).tiny
    with on_device(g.device):
        launch = triton_kernels().tile_squares_kernel[(tiles, batch)]
        launch(g, a, out, positions, rows, a.shape[-1], tiny, **_SQUARES)
    return out.sum(1)


def tile_sums(g: Tensor, a: Tensor, w: Tensor) -> Tensor:
    """Return sum_i w_i G_i, [rows, columns]; runs of examples are added up in float64.

    Args:
        g: [batch, T, rows], bfloat16, contiguous.
        a: [batch, T, columns], likewise.
        w: one for each example; 0 where G_i is not finite.
    """
    batch, positions, rows = g.shape
    tiles, columns = _tiles(g, a, _SUMS), a.shape[-1]
    runs = max(1, min(batch, _PROGRAMS // tiles), -(-batch // BLOCK[torch.float32]))
    run = -(-batch // runs)
    runs = -(-batch // run)
    out = torch.empty(runs, rows, columns, dtype=torch.float32, device=g.device)
    with on_device(g.device):
        launch = triton_kernels().tile_sums_kernel[(tiles, runs)]
        launch(g, a, w.float(), out, batch, run, positions, rows, columns, **_SUMS)
    return out[0] if runs == 1 else out.sum(0, dtype=torch.float64)
