"""Releases on a public grid: the sum and the noise are rounded to it before they meet.

    release = g (Trunc(S / g) + Floor(Z / g)),   Z ~ N(0, std^2),   g = 2^(floor(log2 std) - k)

with k = 19 for float32 noise and k = 40 for float64. g depends on std alone, so it is public.

**Guarantee.** Let s = g Trunc(S / g), a multiple of g. Then s + g Floor(Z / g) = g Floor((s + Z) /
g), so the release is post-processing of s + Z: the Gaussian mechanism, with the sensitivity of s.
Rounding towards zero brings numbers of opposite signs closer together, and takes numbers of one
sign less than g further apart. So neighbouring s of d coordinates are further apart than
neighbouring S by at most

    g sqrt(d) <= std sqrt(d) 2^-k,

which the gate takes off its clip. No bit of the release depends on S but through s:

- g is a power of two, so S / g is exact, as are s / g and s, whatever the size of S.
- Z is rounded by itself. It does not matter in which order, or with which fused operations, it was
  computed.
- s and the rounded noise meet in one IEEE addition, whose own rounding (where a float is too short
  for the sum) is a function of their exact sum. Adding +0 at the end takes the sign off a zero.

The noise that runs is not a real number but a float, and the argument needs its whole steps of g to
be as likely as those of a real one. float32 noise has 16 or more floats within a step for |Z| <
std, 4 or more for |Z| < 4 std and one at least for |Z| < 16 std. Each of them is as likely as the
next, because Z is the product of two floats of 24 bits each, rounded once, at the end. It goes
*down* to the grid, so that every step owns equally many floats: to the nearest point, halfway cases
(some 1 in 16) would all go to even points, and 0.52 of the coordinates would show whether their sum
was even. In 10^8 draws the last four bits are uniform to 1e-3, as exact ones would be. This is no
exact statement about single grid points, as a sampler of discrete Gaussians has. The mean of the
noise is -g / 2.

What else this rests on: g is a normal number (`spacing` refuses a smaller std), and the processor
rounds to nearest.

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
    """Replace sums by g (Trunc(sums / g) + Floor(noise)), one code for all devices.

    Args:
        sums: float32 or float64.
        noise: in units of g, float32 or float64; rounded in place.
        g: a power of two, see `spacing`.
    """
    torch.div(sums, g, rounding_mode="trunc", out=sums).add_(noise.floor_())
    torch.add(_ZERO, sums, alpha=g, out=sums)
