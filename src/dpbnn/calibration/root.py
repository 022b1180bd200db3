"""Where a rising function of log T crosses zero, from noised values of it. Sees releases only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Crossing"]

_SPAN = {"classification": math.log(10), "regression": math.log(100)}
_PRIOR = {"classification": 1.0, "regression": 1.2}  # standard deviation of log T
_POINTS = 161
_SPREAD = 0.5  # by which the shapes below are off, relative to their values


class Crossing:
    """A posterior of the log T at which the mean of records' contributions is zero.

    The mean at log T = t, with the crossing at t*, is modelled as

        classes:  c (t - t*),                                   c from 0.05 to 1.2
        real:     2 Phi(1.645 exp(a (t - t*)/2)) - 1.9,         a from 0.4 to 1.2

    up to an error of half its value, and a release adds Gaussian noise of known variance. The prior
    of t* is normal about 0, so noise that hides the crossing leaves the temperature near 1. A value
    far from the crossing says little more than a direction, one near it says where it is.

    Args:
        task: "classification" or "regression".
        noise: standard deviation of the noise of a mean.
    """

    def __init__(self, task: str, noise: float) -> None:
        self.task, self.noise = task, noise
        span = _SPAN[task]
        self.places = torch.linspace(-span, span, _POINTS, dtype=torch.float64)
        ends, count = ((0.05, 1.2), 9) if task == "classification" else ((0.4, 1.2), 5)
        logs = torch.linspace(math.log(ends[0]), math.log(ends[1]), count, dtype=torch.float64)
        self.steepness = logs.exp()[:, None]
        self.log_density = (-0.5 * (self.places / _PRIOR[task]).square()).repeat(count, 1)

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
        if self.task == "classification":
            return self.steepness * distance
        z = 1.645 * (self.steepness * distance / 2).exp()
        return torch.erf(z / math.sqrt(2)) - 0.9
