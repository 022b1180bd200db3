"""DP-SGD: a point estimate (the maximum of the posterior) by any optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dpbnn.methods.method import Descent, DescentProcess, DescentState, Problem
from dpbnn.methods.state import apart, together
from dpbnn.posteriors import PointPosterior, Posterior


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Descent):
    """Algorithm 1 of the DP-BNN paper, with any optimizer.

        g = (1/b) (sum_i clip(grad nll_i) + noise) + (1/n) grad r(w),   r = -log prior

    The prior sits outside the clip, once, and is scaled by the library. An example contributes the
    gradient of its negative log-likelihood, so the sensitivity is the clip.
    """

    name = "sgd"

    def start(self, problem: Problem) -> SGDProcess:
        """Return the process that trains on a problem."""
        return SGDProcess(self, problem, problem.attach())


class SGDProcess(DescentProcess):
    """Equations of `SGD`."""

    def gradient(self, state: DescentState, release: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return release / b + grad r / n."""
        problem, parameters = self.problem, state.parameters
        moving, released = together(parameters, release)
        found = {
            name: (released[name] / problem.batch_size).add_(
                problem.prior.gradient(p), alpha=1 / problem.n
            )
            for name, p in moving.items()
        }
        return apart(found, parameters)

    def posterior(self, state: DescentState, **record: Any) -> Posterior:
        """Return the last iterate, or the average."""
        return PointPosterior(self.final(state), self.problem.likelihood, **record)
