"""ADF: assumed-density filtering, which for these networks is probabilistic back-propagation."""

from __future__ import annotations

import dataclasses

import numpy as np

from dpbnn.methods.ep import Sequential, SequentialProcess, SequentialState
from dpbnn.methods.method import Problem
from dpbnn.moments.sequential import Array, Gamma, usable

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
        """Return the process that trains on a problem."""
        problem.refuse_frozen("expectation propagation")
        return ADFProcess(self, problem)


class ADFProcess(SequentialProcess):
    """Equations of `ADF`."""

    def record(self, state: SequentialState, noise: Gamma, index: int, x: Array, y: float) -> Gamma:
        """Move q on one record, in place, and return what becomes of the noise."""
        v = 1 / state.second
        m = v * state.first
        tilted = self.network.tilted(m, v, x, y, self.scale(noise))
        precision = state.second / (1 - v * tilted.curvature)
        first = (m + v * tilted.slope) * precision
        good = usable(precision)
        if good is not None:
            precision = np.where(good, precision, state.second)
            first = np.where(good, first, state.first)
        if np.isfinite(first.sum()):
            state.first[...], state.second[...] = first, precision
        return noise.tilted(tilted.squared, tilted.v) if self.moments.learned else noise
