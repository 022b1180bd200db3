"""Sums of privacy losses by one FFT: a quick look at epsilon that bounds nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Losses", "near_epsilon"]

Losses = tuple[NDArray[np.float64], int, int]
"""Probabilities of a release's loss, the first one's grid point, the number of releases."""

_MOST = 1 << 21  # grid points of the sum
_SHARE = 1e-3  # of delta, that may lie beyond the grid


def near_epsilon(parts: Sequence[Losses], mu: float, step: float, delta: float) -> float | None:
    """Return a number near epsilon at `delta` of independent losses added up, or None.

    The losses of all releases, and one of N(mu^2/2, mu^2), are added on a circle of grid points

        F(p) = exp(-i w mu^2/2 - w^2 mu^2/2) prod_k F(p_k)^count_k

    that is as long as a Chernoff bound says the sum needs, so nothing here is an upper bound.

    Args:
        parts: the losses of releases, on one grid.
        mu: of all Gaussian releases beside them.
        step: distance of the grid points.
        delta: of the guarantee.
    """
    from scipy.fft import irfft, next_fast_len, rfft

    low, high = _range(parts, mu, step, _SHARE * delta)
    if not (high - low) / step < _MOST:
        return None
    first = math.floor(low / step)
    size = next_fast_len(math.ceil(high / step) - first + 1, real=True)
    frequency = 2 * np.pi * np.arange(size // 2 + 1) / (size * step)
    start = sum(count * lowest for _, lowest, count in parts)
    turn = (start - first) % size * step
    total = np.exp(-1j * frequency * (turn + mu**2 / 2) - (frequency * mu) ** 2 / 2)
    for probabilities, _, count in parts:
        total = total * rfft(_folded(probabilities, size)) ** count
    losses = (first + np.arange(size)) * step
    return _epsilon(losses[losses >= 0], irfft(total, size)[losses >= 0], delta)


def _range(parts: Sequence[Losses], mu: float, step: float, mass: float) -> tuple[float, float]:
    """Return between which losses the sum lies, but for about `mass` on either side."""
    mean, variance = mu**2 / 2, mu**2
    grids = [(p, step * (lowest + np.arange(len(p))), count) for p, lowest, count in parts]
    for p, losses, count in grids:
        own = float(p @ losses)
        mean += count * own
        variance += count * float(p @ (losses - own) ** 2)
    needed = math.sqrt(-2 * math.log(mass))
    ends = []
    for sign in (-1, 1):
        orders = sign * needed / math.sqrt(variance) * np.geomspace(2.0**-9, 1, 12)
        generated = orders * mu**2 / 2 + (orders * mu) ** 2 / 2
        farthest = sign * math.inf if mu > 0 else 0.0
        for p, losses, count in grids:
            edge = losses[-1 if sign > 0 else 0]
            powers = np.exp(np.outer(orders, losses - edge)) @ p
            generated = generated + count * (np.log(powers) + orders * edge)
            farthest += count * edge
        bounds = sign * (generated - math.log(mass)) / orders
        ends.append(sign * min(float(np.min(bounds)), sign * farthest))
    return ends[0], ends[1]


def _folded(probabilities: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return the probabilities on a circle of grid points."""
    places = np.arange(len(probabilities)) % size
    return np.bincount(places, probabilities, minlength=size).astype(np.float64)


def _epsilon(
    losses: NDArray[np.float64], probabilities: NDArray[np.float64], delta: float
) -> float | None:
    """Return where the hockey-stick curve of losses that rise from 0 on passes delta."""
    upper = np.cumsum(probabilities[::-1])[::-1]
    lower = np.cumsum((probabilities * np.exp(-losses))[::-1])[::-1]
    above = np.flatnonzero(upper > delta + np.exp(np.minimum(losses, 700.0)) * lower)
    if not len(above):
        return 0.0
    after = int(above[-1]) + 1
    if after == len(losses) or not lower[after] > 0 or not upper[after] > delta:
        return None
    return math.log((upper[after] - delta) / lower[after])
