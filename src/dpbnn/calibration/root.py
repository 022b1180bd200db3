"""Where a rising function of log T crosses zero, from noised values of it. Sees releases only."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

__all__ = ["LEVELS", "Crossing"]

LEVELS = {"regression": 0.9, "uncounted": 0.9, "most": 0.75, "half": 0.5}  # of real intervals
_STEEPNESS = {"classification": (0.05, 1.2), "top class": (0.07, 0.9)}  # from, to
_REAL = (0.4, 1.2)  # likewise of real targets
_SPAN = (math.log(10), math.log(100))  # of log T, for classes and for real targets
_PRIOR = (1.0, 1.8)  # standard deviation of log T, likewise
_POINTS = 161
_SPREAD = 0.5  # by which the shapes below are off, relative to their values


class Crossing:
    """A posterior of the log T at which the mean of records' contributions is zero.

    The mean at log T = t, with the crossing at t*, is modelled as

        classes:  c (t - t*),                              c from 0.05 to 1.2
        real:     2 Phi(z exp(a (t - t*)/2)) - 1 - level,  a from 0.4 to 1.2

    with z = Phi^-1((1 + level)/2), up to an error of half its value (c from 0.07 to 0.9 for the top
    class), and a release adds Gaussian noise of known variance. The prior of t* is normal about 0,
    so noise that hides the crossing leaves the temperature near 1. A value far from the crossing
    says little more than a direction, one near it says where it is.

    Args:
        asked: "classification", "top class", or a key of LEVELS; see `recalibrate`.
        noise: standard deviation of the noise of a mean.
    """

    def __init__(self, asked: str, noise: float) -> None:
        self.level, self.noise = LEVELS.get(asked), noise
        real = self.level is not None
        span, count = _SPAN[real], 5 if real else 9
        self.places = torch.linspace(-span, span, _POINTS, dtype=torch.float64)
        ends = _REAL if real else _STEEPNESS[asked]
        logs = torch.linspace(math.log(ends[0]), math.log(ends[1]), count, dtype=torch.float64)
        self.steepness = logs.exp()[:, None]
        self.log_density = (-0.5 * (self.places / _PRIOR[real]).square()).repeat(count, 1)

    @property
    def mean(self) -> float:
        """The posterior mean of log T."""
        weights = self.log_density.flatten().softmax(0).view_as(self.log_density)
        return float((weights.sum(0) * self.places).sum())

    def update(self, place: float, value: float) -> None:
        """Take in a noised mean.

        Args:
            place: the log T at which it was released.
            value: the released sum over n.
        """
        expected = self._expected(place - self.places)
        variance = self.noise**2 + (_SPREAD * expected).square() + 1e-10
        self.log_density -= 0.5 * ((value - expected).square() / variance + variance.log())

    def _expected(self, distance: Tensor) -> Tensor:
        if self.level is None:
            return self.steepness * distance
        z = statistics.NormalDist().inv_cdf((1 + self.level) / 2)
        z = z * (self.steepness * distance / 2).exp()
        return torch.erf(z / math.sqrt(2)) - self.level
