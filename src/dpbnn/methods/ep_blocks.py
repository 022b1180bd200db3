"""EP and the SEP of Li et al. for any moment model, one record at a time; not private."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpbnn.methods.method import OpenProcess, Problem
from dpbnn.moments import MomentModel, Natural
from dpbnn.moments.model import applied

if TYPE_CHECKING:
    from dpbnn.methods.ep import EP
    from dpbnn.posteriors import Posterior

__all__ = ["BlockEPProcess"]


class BlockEPProcess(OpenProcess):
    """State and updates of `EP` on Gaussian blocks, such as the means of a mixture.

        cavity = q - f_i,   f_i <- (1 - s) f_i + s (matched - cavity),   q <- cavity + f_i

    in natural parameters; with one shared factor f = (q - prior)/n, q <- q + s (matched - cavity -
    f). A record whose cavity or result has no covariance is passed over until the next visit. The
    prior stays as it is given.
    """

    def __init__(self, settings: EP, problem: Problem, moments: MomentModel) -> None:
        self.settings, self.problem, self.model = settings, problem, problem.model
        self.moments, self.prior, self.q = moments, moments.prior(), moments.prior()
        rows = 0 if settings.shared else problem.n
        self.sites = [
            {name: torch.zeros(rows, *value.shape).to(value) for name, value in part.items()}
            for part in (self.q.first, self.q.second)
        ]
        self.steps = 0

    def visit(self, x: Tensor, y: Tensor, records: Tensor) -> None:
        """Visit the records once, in a new random order."""
        with torch.no_grad():
            for i in torch.randperm(len(x)).tolist():
                self._record(int(records[i]), x[i : i + 1], y[i : i + 1])
        self.steps += 1

    def _site(self, index: int) -> Natural:
        if self.settings.shared:
            return self.q.plus(self.prior, -1.0).times(1 / self.problem.n)
        first, second = ({n: value[index] for n, value in part.items()} for part in self.sites)
        return Natural(first, second)

    def _record(self, index: int, x: Tensor, y: Tensor) -> None:
        site = self._site(index)
        outside = self.q.plus(site, -1.0)
        if not _valid(outside):
            return
        cavity = outside.moments()
        found = self.moments.factors(cavity, x, y)
        second = {name: value[0] for name, value in found.curvature.items()}
        first = {n: v[0] + applied(second[n], cavity.mean[n]) for n, v in found.slope.items()}
        change = Natural(first, second).plus(site, -1.0).times(self.settings.damping)
        moved = self.q.plus(change)
        if not _valid(moved):
            return
        self.q = moved
        if not self.settings.shared:
            for part, values in zip(self.sites, (change.first, change.second), strict=True):
                for name, value in values.items():
                    part[name][index] += value

    def posterior(self, **record: Any) -> Posterior:
        """Return the posterior of the moment model."""
        return self.moments.posterior(self.q, **record)

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to go on from here, as tensors."""
        found = {f"q.first.{n}": v for n, v in self.q.first.items()}
        found |= {f"q.second.{n}": v for n, v in self.q.second.items()}
        for kind, part in zip(("first", "second"), self.sites, strict=True):
            found |= {f"sites.{kind}.{n}": v for n, v in part.items()}
        found["steps"] = torch.tensor(self.steps)
        return {name: value.clone().contiguous() for name, value in found.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        parts = {
            kind: {n[len(kind) + 1 :]: v.clone() for n, v in state.items() if n.startswith(kind)}
            for kind in ("q.first", "q.second", "sites.first", "sites.second")
        }
        self.q = Natural(parts["q.first"], parts["q.second"])
        self.sites = [parts["sites.first"], parts["sites.second"]]
        self.steps = int(state["steps"])


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
