"""DP-SGD: a point estimate (the maximum of the posterior) by any optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpbnn.methods import laplace
from dpbnn.methods.descent import Descent, DescentProcess, DescentState
from dpbnn.methods.method import Problem
from dpbnn.methods.state import apart, together
from dpbnn.posteriors import IteratePosterior, LaplacePosterior, PointPosterior, Posterior
from dpbnn.privacy.checks import check_count

if TYPE_CHECKING:
    from dpbnn.priors import Prior
    from dpbnn.privacy.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Descent):
    """Algorithm 1 of the DP-BNN paper, with any optimizer.

        g = (1/b) (sum_i clip(grad nll_i) + noise) + (1/n) grad r(w),   r = -log prior

    The prior sits outside the clip, once, and is scaled by the library. An example contributes the
    gradient of its negative log-likelihood, so the sensitivity is the clip.

    Attributes:
        keep: how many iterates of the last half are kept, evenly spaced; the posterior has equal
            weight on each of them. 0 returns one point. They are held in memory.
        inputs: function of a number that returns so many public inputs, distributed as the data
            are believed to be. Never pass rows of the data: the guarantee does not cover what this
            returns, and the statement says so. With it, and `keep`, the posterior says how far the
            function may be from the truth: bands then include what the data leave open, the privacy
            noise and the clip (`methods/laplace.py`). That is post-processing. It is for one
            target, classes or a number, and networks whose weights are in Linear layers.
    """

    keep: int = 0
    inputs: Callable[[int], Tensor] | None = None

    name = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(0, keep=self.keep)
        if self.keep and self.average is not None:
            raise ValueError(
                f"keep={self.keep}, average={self.average!r}: iterates are kept or averaged, not "
                f"both; leave one of them out"
            )
        if self.inputs is not None and not self.keep:
            raise ValueError("inputs: bands need iterates; pass keep=25 too")

    def caveats(self, plan: Plan, prior: Prior) -> tuple[str, ...]:
        """Return nothing where bands know the noise."""
        return () if self.inputs is not None else super().caveats(plan, prior)

    def start(self, problem: Problem) -> SGDProcess:
        """Return the process that trains on a problem."""
        if self.inputs is not None:
            laplace.check(problem, self.inputs)
        kind = PathProcess if self.keep else SGDProcess
        return kind(self, problem, problem.attach())


class SGDProcess(DescentProcess):
    """Equations of `SGD`."""

    def gradient(self, state: DescentState, release: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return release / b + grad r / n."""
        problem, parameters = self.problem, state.parameters
        moving, released = together(parameters, release, alike=not problem.own_priors)
        found = {
            name: (released[name] / problem.batch_size).add_(
                problem.prior_of(name).gradient(p), alpha=1 / problem.n
            )
            for name, p in moving.items()
        }
        return apart(found, parameters)

    def posterior(self, state: DescentState, **record: Any) -> Posterior:
        """Return the last iterate, or the average."""
        return PointPosterior(self.final(state), self.problem.likelihood, **record)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PathState(DescentState):
    """State of `SGD` that keeps iterates.

    Attributes:
        kept: iterates by parameter, [keep, ...]; those that are still to come are zero.
    """

    kept: dict[str, Tensor]


class PathProcess(SGDProcess):
    """Equations of `SGD` that keeps iterates."""

    settings: SGD

    def begin(self) -> PathState:
        """Return the state before the first step."""
        state = super().begin()
        count = self._stored(self.problem.steps)
        kept = {n: p.new_zeros(count, *p.shape) for n, p in state.parameters.items()}
        return PathState(**vars(state), kept=kept)

    def update(self, state: DescentState, release: Mapping[str, Tensor]) -> DescentState:
        """Take an optimizer step, and keep the iterate when its turn has come."""
        state = super().update(state, release)
        assert isinstance(state, PathState)
        stored = self._stored(state.steps)
        if stored > self._stored(state.steps - 1):
            for name, kept in state.kept.items():
                kept[stored - 1] = state.parameters[name].detach()
        return state

    def posterior(self, state: DescentState, **record: Any) -> Posterior:
        """Return the iterates that were kept; a point where there are none yet."""
        assert isinstance(state, PathState)
        count = self._stored(state.steps)
        if not count:
            return super().posterior(state, **record)
        draws = {name: kept[:count] for name, kept in state.kept.items()}
        inputs, likelihood = self.settings.inputs, self.problem.likelihood
        if inputs is None:
            model = self.problem.rebuilt(state.parameters)
            return IteratePosterior.of_draws(model, likelihood, draws, **record)
        model = self.problem.rebuilt({name: kept.mean(0) for name, kept in draws.items()})
        away = laplace.deviations(model, self.problem, self.settings.clip, inputs)
        return LaplacePosterior.of_draws(model, likelihood, draws, deviations=away, **record)

    def _stored(self, steps: int) -> int:
        """Return how many iterates have been kept after so many steps."""
        first = self.problem.steps // 2
        last = self.problem.steps - first
        return max(0, steps - first) * min(self.settings.keep, last) // max(1, last)
