"""Releases on a public grid: the sum and the noise are rounded to it before they meet.

    release = g (Round(S / g) + Round(Z / g)),   Z ~ N(0, std^2),   g = 2^(floor(log2 std) - k)

with k = 19 where the noise is drawn in float32 and k = 40 in float64. g depends on std alone, so
it is public.

**Guarantee.** Let s = g Round(S / g), a multiple of g. Rounding commutes with the addition of
multiples, s + g Round(Z / g) = g Round((s + Z) / g), so the release is post-processing of s + Z:
the Gaussian mechanism, whose sensitivity is that of s. Rounding moves a coordinate by g / 2 at
most, so neighbouring s of d coordinates are further apart than neighbouring S by at most

    g sqrt(d) <= std sqrt(d) 2^-k,

which the gate takes off its clip. No bit of the release depends on S but through s:

- g is a power of two, so S / g is exact, as is s / g, whatever the size of S; s is a multiple of
  g in every coordinate.
- Z is rounded by itself. It does not matter in which order, or with which fused operations, it
  was computed.
- s and the rounded noise meet in one IEEE addition, whose rounding (where a float is too short for
  the sum) is a function of their exact sum. Adding +0 at the end takes the sign off a zero.
- Every multiple of g within 16 std has float32 noise that is rounded to it: spacings of float32
  are g or less there. So no value of the release is possible under one dataset and impossible
  under its neighbour, but beyond the ends of the sampler (`NoiseSource` says where).

What this rests on: g is a normal number (`spacing` refuses a smaller std), the processor rounds to
nearest, and Z is Gaussian up to the resolution of its dtype. The last is no exact statement about
the probability of single grid points, as a sampler of discrete Gaussians would give.

References: Mironov, On significance of the least significant bits for differential privacy, 2012;
Haney et al., Precision-based attacks and interval refining, 2022; Canonne, Kamath and Steinke, The
discrete Gaussian for differential privacy, 2020.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["RESOLUTION", "add_on_grid", "spacing"]

_BITS = {torch.float32: 19, torch.float64: 40}
_SMALLEST = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}
_ZERO = torch.zeros((), device="cpu")
RESOLUTION = {dtype: 2.0**-bits for dtype, bits in _BITS.items()}
"""Largest spacing of the grid in units of the noise's standard deviation, by the noise's dtype."""


def spacing(std: float, dtype: torch.dtype) -> float:
    """Return g, the spacing of releases with noise of this standard deviation, drawn in `dtype`.

    **Guarantee.** A power of two between std RESOLUTION / 2 and std RESOLUTION.
    """
    if std < _SMALLEST[dtype]:
        raise ValueError(
            f"std={std:g}: noise in {dtype} needs {_SMALLEST[dtype]:.0e} or more; "
            f"use larger contributions and a larger clip"
        )
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _BITS[dtype])


def add_on_grid(sums: Tensor, noise: Tensor, g: float) -> None:
    """Replace sums by g (Round(sums / g) + Round(noise)), one code for all devices.

    Args:
        sums: float32 or float64.
        noise: in units of g, of the same precision or less; rounded in place.
        g: a power of two, see `spacing`.
    """
    sums.mul_(1 / g).round_().add_(noise.floor_())
    torch.add(_ZERO, sums, alpha=g, out=sums)
