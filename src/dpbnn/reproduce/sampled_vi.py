"""Bayesian DP: variational inference whose sampling noise is the privacy noise."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpbnn.methods.method import Method, Problem, Process
from dpbnn.methods.state import State
from dpbnn.posteriors import MeanFieldPosterior, Posterior
from dpbnn.privacy.checks import check_positive
from dpbnn.privacy.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledVI(Method):
    """Mean-field variational inference that releases only the drawn weights.

    With q = N(m, s^2) and s fixed in advance, a step draws the weights of the next one,

        w' ~ N( m - eta (1/b sum_i clip(grad nll_i(w)) + grad r(m)/n), s^2 ),
        m' = (1 - a) m + a w'

    The draw is a Gaussian release of the clipped sum: sigma = s b / (eta C) follows from the
    settings and no other noise is added. The next mean is computed from released draws alone. In
    the paper the mean keeps the exact gradients: the influence of a record adds up over the steps,
    which a cost per step does not cover.

    Attributes:
        learning_rate: eta.
        std: s, of every weight under q.
        clip: C.
        average: a, the share of a new draw in the mean; steps are of the size a eta.
    """

    learning_rate: float = 1.0
    std: float = 0.1
    clip: float = 1.0
    average: float = 0.05

    name = "sampled-vi"

    def __post_init__(self) -> None:
        check_positive(
            learning_rate=self.learning_rate, std=self.std, clip=self.clip, average=self.average
        )

    def noise_multiplier(self, batch_size: float) -> float:
        """Return sigma = s b / (eta C)."""
        return self.std * batch_size / (self.learning_rate * self.clip)

    def settled(self, plan: Plan) -> tuple[Plan, float]:
        """Return the plan as it is, and the clip."""
        if not plan.private:
            return plan, math.inf
        sigma = self.noise_multiplier(plan.batch_size)
        if any(abs(s / sigma - 1) > 1e-9 for s, _ in plan.noise_multipliers):
            raise ValueError(
                f"plan: its noise multiplier is {plan.noise_multiplier:.6g} and the sampling noise "
                f"gives {sigma:.6g}; plan with noise_multiplier=method.noise_multiplier(batch_size)"
            )
        return plan, self.clip

    def start(self, problem: Problem) -> SampledVIProcess:
        """Return the process that trains on a problem."""
        return SampledVIProcess(self, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledVIState(State):
    """State of `SampledVI`; the parameters are the last draw.

    Attributes:
        mean: m, by parameter.
    """

    mean: dict[str, Tensor]


class SampledVIProcess(Process[SampledVIState]):
    """Equations of `SampledVI`; the model's weights are the last draw."""

    def __init__(self, settings: SampledVI, problem: Problem) -> None:
        super().__init__(problem, problem.attach())
        self.settings = settings

    def begin(self) -> SampledVIState:
        """Return the state before the first step: the mean, and a draw."""
        parameters = self.problem.trainable()
        mean = {name: p.detach().clone() for name, p in parameters.items()}
        with torch.no_grad():
            for p in parameters.values():
                p.add_(torch.randn_like(p), alpha=self.settings.std)
        return SampledVIState(parameters=parameters, mean=mean)

    def update(self, state: SampledVIState, release: Mapping[str, Tensor]) -> SampledVIState:
        """Take the draw that the release stands for, and move the mean towards it."""
        problem, settings = self.problem, self.settings
        with torch.no_grad():
            for name, p in state.parameters.items():
                mean = state.mean[name]
                gradient = release[name].to(p) / problem.batch_size
                gradient += problem.prior.gradient(mean) / problem.n
                p.copy_(mean - settings.learning_rate * gradient)
                if not problem.private:
                    p.add_(torch.randn_like(p), alpha=settings.std)
                mean.lerp_(p, settings.average)
        return dataclasses.replace(state, steps=state.steps + 1)

    def posterior(self, state: SampledVIState, **record: Any) -> Posterior:
        """Return N(m, s^2)."""
        model = copy.deepcopy(self.model)
        model.load_state_dict({**self.model.state_dict(), **state.mean})
        std = {name: torch.full_like(v, self.settings.std) for name, v in state.mean.items()}
        return MeanFieldPosterior(model, self.problem.likelihood, std, **record)
