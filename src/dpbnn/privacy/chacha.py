"""Gaussian noise on GPUs: ChaCha20 keyed by the release, a function of key and position alone.

    words    = ChaCha20(key, counter), 16 words of 32 bits a counter (RFC 8439, nonce 0)
    u, v     = two words each, in (0, 1];   (z, z') = sqrt(-2 ln u) (cos 2 pi v, sin 2 pi v)
    position = 1024 t + 128 j + l  has normal j of 0..7 of the counter 128 t + l

All of it is float64, up to the rounding to the grid (`dpbnn.privacy.grid`); |z| ends at 9.5. It is
one kernel where Triton is installed, and otherwise the same in torch operations.

Noise is never drawn while a CUDA graph is captured: its key would be part of the graph, and every
replay would add the same noise. `add_noise` refuses that.

References: Bernstein, ChaCha, a variant of Salsa20, 2008; Nir and Langley, RFC 8439, 2018.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dpbnn.privacy.grid import add_on_grid, spacing

__all__ = ["TILE", "add_noise", "flat_views", "on_device", "shared_flat", "triton_kernels"]

_LANES = 128  # counters of a tile
TILE = 8 * _LANES
"""Positions that one program fills; tensors begin at multiples of it."""
_TOGETHER = 1 << 20  # numbers at once, where there is no Triton
_MASK = 0xFFFFFFFF
_CONSTANTS = struct.unpack("<4I", b"expand 32-byte k")


def flat_views(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one buffer of zeros, and views of it by name that begin at multiples of `TILE`."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // TILE) * TILE)
    flat = torch.zeros(starts.pop(), dtype=dtype, device=device)
    places = zip(shapes.items(), sizes, starts, strict=True)
    return flat, {name: flat[a : a + n].view(tuple(shape)) for (name, shape), n, a in places}


def shared_flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the buffer that the tensors are the last `flat_views` of, in order; None if none."""
    first, length = tensors[0].detach(), 0
    for tensor in tensors:
        own = first.data_ptr() + length * first.element_size()
        if tensor.data_ptr() != own or not tensor.is_contiguous():
            return None
        length += -(-tensor.numel() // TILE) * TILE
    start = first.storage_offset()
    room = first.untyped_storage().nbytes() // first.element_size()
    return first.as_strided((length,), (1,), start) if start + length == room else None


def add_noise(
    flat: Tensor,
    std: float,
    dtype: torch.dtype,
    key: bytes,
    *,
    first: int = 0,
    kernel: bool | None = None,
) -> None:
    """Replace a flat tensor by itself plus N(0, std^2), both rounded to the grid of `dtype`.

    Args:
        flat: float32 or float64, contiguous.
        std: above 0.
        dtype: of the grid.
        key: 32 bytes, for this tensor alone, or for the one that it is a piece of.
        first: position of the first number, where the tensor is a piece of a longer one.
        kernel: whether to use Triton; by default where it is installed.
    """
    if flat.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "noise cannot be part of a CUDA graph: every replay would add the same; release "
            "between the graphs"
        )
    tiles = -(-(first + flat.numel()) // TILE) - first // TILE
    _check_length((first // TILE + tiles) * _LANES)
    g = spacing(std, dtype)
    if (flat.is_cuda and triton_kernels() is not None) if kernel is None else kernel:
        words = struct.unpack("<8i", key)
        bits = [struct.unpack("<q", struct.pack("<d", value))[0] for value in (std / g, 1 / g, g)]
        with on_device(flat.device):
            launch = triton_kernels().add_kernel[(tiles,)]
            launch(flat, flat.numel(), first, *words, *bits, LANES=_LANES)
        return
    end = first + flat.numel()
    for tile in range(first // TILE * TILE, end, _TOGETHER):
        start, stop = max(first, tile), min(end, tile + _TOGETHER)
        noise = normals(key, tile, stop - tile, flat.device)[start - tile :]
        add_on_grid(flat[start - first : stop - first], noise.mul_(std / g), g)


def normals(key: bytes, start: int, count: int, device: torch.device) -> Tensor:
    """Return the normals at positions start, start + 1, ... (float64); start is whole tiles."""
    tiles = -(-count // TILE)
    w = words(key, start // 8, tiles * _LANES, device).double().view(4, 4, tiles, _LANES)
    u = w[:, 0].mul(2.0**32).add_(w[:, 1]).add_(0.5).mul_(2.0**-64)
    angle = w[:, 2].mul(2.0**32).add_(w[:, 3]).mul_(2.0**-64).mul_(2 * math.pi)
    radius = u.log_().mul_(-2).sqrt_()
    pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)  # [4, 2, tiles, lanes]
    return pairs.flatten(0, 1).transpose(0, 1).reshape(-1)[:count]


def words(key: bytes, first: int, count: int, device: torch.device, nonce: bytes = b"") -> Tensor:
    """Return ChaCha20's words, [16, count] in int64, of counters first, first + 1, ...

    Args:
        key: 32 bytes.
        first: the first counter.
        count: how many counters; they are below 2^32.
        device: where to compute.
        nonce: 12 bytes; 0 by default.
    """
    _check_length(first + count)
    fixed = [*_CONSTANTS, *struct.unpack("<8I", key), 0, *struct.unpack("<3I", nonce or bytes(12))]
    begin = torch.tensor(fixed, dtype=torch.int64, device=device)[:, None].repeat(1, count)
    begin[12] = torch.arange(first, first + count, device=device)
    rows = list(begin.view(4, 4, count).unbind())
    for _ in range(10):
        rows = _quarters(*rows)
        rows = [row.roll(-shift, 0) for shift, row in enumerate(rows)]
        rows = _quarters(*rows)
        rows = [row.roll(shift, 0) for shift, row in enumerate(rows)]
    return torch.cat(rows).add_(begin).bitwise_and_(_MASK)


def _check_length(counters: int) -> None:
    """Raise where counters would begin anew, and noise with them."""
    if counters > _MASK:
        raise ValueError(f"position {8 * counters}: a stream has fewer than 2^35 positions")


def _quarters(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
    """Return four quarter rounds, side by side."""
    for left, right in ((16, 12), (8, 7)):
        a = (a + b) & _MASK
        d = _rotated(d ^ a, left)
        c = (c + d) & _MASK
        b = _rotated(b ^ c, right)
    return [a, b, c, d]


def _rotated(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) & _MASK) | (x >> (32 - bits))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, which kernels are launched on, where it is not."""
    same = device.index is None or device.index == torch.cuda.current_device()
    return nullcontext() if same else torch.cuda.device(device)


@functools.cache
def triton_kernels() -> Any:
    """Return the module of the kernels; None where Triton is not installed."""
    try:
        from dpbnn.privacy import kernels
    except ImportError:
        return None
    return kernels
