"""A method of one's own, all of it: settings, state, equations. Registered nowhere."""

import dataclasses
import math

import torch
from torch import Tensor

from dpbnn.methods import Method, Process, State
from dpbnn.posteriors import PointPosterior


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignDescent(Method):
    """Steps of one size along the sign of an average of releases.

        v <- m v + (1 - m) (release/b + grad r/n),   w <- w - eta sign(v)

    An example contributes its gradient, so the sensitivity is the clip.
    """

    learning_rate: float = 0.01
    clip: float = 1.0
    momentum: float = 0.5

    name = "sign"

    def settled(self, plan):
        return plan, self.clip if plan.private else math.inf

    def start(self, problem):
        return SignProcess(self, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignState(State):
    velocity: dict[str, Tensor]


class SignProcess(Process[SignState]):
    def __init__(self, settings, problem):
        super().__init__(problem, problem.attach())
        self.settings = settings

    def begin(self):
        parameters = self.problem.trainable()
        velocity = {name: torch.zeros_like(p) for name, p in parameters.items()}
        return SignState(parameters=parameters, velocity=velocity)

    def update(self, state, release):
        problem, settings = self.problem, self.settings
        with torch.no_grad():
            for name, weights in state.parameters.items():
                gradient = release[name] / problem.batch_size
                gradient = gradient + problem.prior.gradient(weights) / problem.n
                velocity = state.velocity[name].lerp_(gradient, 1 - settings.momentum)
                weights -= settings.learning_rate * velocity.sign()
        return dataclasses.replace(state, steps=state.steps + 1)

    def posterior(self, state, **record):
        model = self.problem.rebuilt(state.parameters)
        return PointPosterior(model, self.problem.likelihood, **record)
