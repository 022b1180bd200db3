"""ADF: assumed-density filtering, which for these networks is probabilistic back-propagation."""

from __future__ import annotations

import dataclasses

import numpy as np

from dpbnn.methods.ep import Sequential, SequentialProcess
from dpbnn.methods.method import Problem
from dpbnn.moments.sequential import Array, usable

__all__ = ["ADF"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ADF(Sequential):
    """Assumed-density filtering: probabilistic back-propagation; not private.

        m <- m + v d log Z/dm,   v <- v - v^2 ((d log Z/dm)^2 - 2 d log Z/dv)

    for one record after the other (Hernandez-Lobato and Adams 2015). Records are forgotten, so that
    every pass counts them again.
    """

    name = "adf"

    def start(self, problem: Problem) -> ADFProcess:
        """Return a process at its first step."""
        problem.refuse_frozen("expectation propagation")
        return ADFProcess(self, problem)


class ADFProcess(SequentialProcess):
    """State and updates of `ADF`."""

    def record(self, index: int, x: Array, y: float) -> None:
        """Update on one record."""
        v = 1 / self.second
        m = v * self.first
        tilted = self.network.tilted(m, v, x, y, self.scale)
        precision = self.second / (1 - v * tilted.curvature)
        first = (m + v * tilted.slope) * precision
        good = usable(precision)
        if good is not None:
            precision = np.where(good, precision, self.second)
            first = np.where(good, first, self.first)
        if np.isfinite(first.sum()):
            self.first[...], self.second[...] = first, precision
        if self.learned:
            self.noise = self.noise.tilted(tilted.squared, tilted.v)
