"""EP and the SEP of Li et al. for any moment model, one record at a time; not private."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpbnn.methods.method import OpenProcess, Problem
from dpbnn.methods.state import State
from dpbnn.moments import MomentModel, Natural
from dpbnn.moments.model import applied

if TYPE_CHECKING:
    from dpbnn.methods.ep import EP
    from dpbnn.posteriors import Posterior

__all__ = ["BlockEPProcess"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockEPState(State):
    """State of `EP` on Gaussian blocks.

    Attributes:
        q: the approximation.
        sites: the factors of all records, by record first; none where they share one.
    """

    q: Natural
    sites: Natural


class BlockEPProcess(OpenProcess[BlockEPState]):
    """Equations of `EP` on Gaussian blocks, such as the means of a mixture.

        cavity = q - f_i,   f_i <- (1 - s) f_i + s (matched - cavity),   q <- cavity + f_i

    in natural parameters; with one shared factor f = (q - prior)/n, q <- q + s (matched - cavity -
    f). A record whose cavity or result has no covariance is passed over until the next visit. The
    prior stays as it is given.
    """

    def __init__(self, settings: EP, problem: Problem, moments: MomentModel) -> None:
        super().__init__(problem)
        self.settings, self.moments, self.prior = settings, moments, moments.prior()

    def begin(self) -> BlockEPState:
        """Return the state before the first step."""
        q, rows = self.moments.prior(), 0 if self.settings.shared else self.problem.n
        first, second = (
            {name: torch.zeros(rows, *value.shape).to(value) for name, value in part.items()}
            for part in (q.first, q.second)
        )
        return BlockEPState(q=q, sites=Natural(first, second))

    def visit(self, state: BlockEPState, x: Tensor, y: Tensor, records: Tensor) -> BlockEPState:
        """Visit the records once, in a new random order."""
        q = state.q
        with torch.no_grad():
            for i in torch.randperm(len(x)).tolist():
                q = self._record(state.sites, q, int(records[i]), x[i : i + 1], y[i : i + 1])
        return dataclasses.replace(state, steps=state.steps + 1, q=q)

    def _record(self, sites: Natural, q: Natural, index: int, x: Tensor, y: Tensor) -> Natural:
        """Return q after one record, whose factor is moved in place."""
        if self.settings.shared:
            site = q.plus(self.prior, -1.0).times(1 / self.problem.n)
        else:
            parts = ({n: v[index] for n, v in p.items()} for p in (sites.first, sites.second))
            site = Natural(*parts)
        outside = q.plus(site, -1.0)
        if not _valid(outside):
            return q
        cavity = outside.moments()
        found = self.moments.factors(cavity, x, y)
        second = {name: value[0] for name, value in found.curvature.items()}
        first = {n: v[0] + applied(second[n], cavity.mean[n]) for n, v in found.slope.items()}
        change = Natural(first, second).plus(site, -1.0).times(self.settings.damping)
        moved = q.plus(change)
        if not _valid(moved):
            return q
        if not self.settings.shared:
            for name in first:
                site.first[name].add_(change.first[name])
                site.second[name].add_(change.second[name])
        return moved

    def posterior(self, state: BlockEPState, **record: Any) -> Posterior:
        """Return the posterior of the moment model."""
        return self.moments.posterior(state.q, **record)


def _valid(natural: Natural) -> bool:
    """Say whether all precisions are positive."""
    for name, precision in natural.second.items():
        if not (precision.isfinite().all() and natural.first[name].isfinite().all()):
            return False
        if precision.dim() == natural.first[name].dim():
            if not (precision > 0).all():
                return False
        elif torch.linalg.cholesky_ex(precision).info.any():
            return False
    return True
