"""Targets that are counts: Poisson distributions with a rate that cannot overflow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbnn.likelihoods.base import LikelihoodBase
from dpbnn.predictive import CountPredictive, Predictive


@dataclass(frozen=True)
class Poisson(LikelihoodBase, name="poisson"):
    """Counts, one output each: y ~ Poisson(r), log p(y | f) = y log r - r - log y!.

        r = typical exp(f)                  where that is at most `most`
        r = most (1 + f - log(most/typical))   beyond, which goes on as a straight line

    The line keeps the rate and its gradient finite at large outputs. An exponential would overflow
    there, and records would silently contribute nothing.

    Several outputs are several counts, which are independent given the weights of the network.

    Args:
        most: largest count that can occur, from public knowledge; rows with larger ones are bad
            rows, and predictions do not exceed it.
        typical: a usual count, from public knowledge; the rate at outputs of 0.
    """

    most: float = 1e6
    typical: float = 1.0

    never_raises = True

    def __post_init__(self) -> None:
        if not 0 < self.most <= 1e9:
            raise ValueError(f"most={self.most} must be a number > 0, 1e9 at most; try most=1000.")
        if not 0 < self.typical <= self.most:
            raise ValueError(
                f"typical={self.typical} must be a number > 0, at most most={self.most}."
            )

    def log_rate(self, outputs: Tensor) -> Tensor:
        """Return log r of every count."""
        top = math.log(self.most / self.typical)
        beyond = (outputs - top).clamp(min=0)
        return outputs.clamp(max=top) + torch.log1p(beyond) + math.log(self.typical)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        log_rate, y = self.log_rate(outputs), y.reshape(outputs.shape)
        return (y * log_rate - log_rate.exp() - torch.lgamma(y + 1)).flatten(1).sum(1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of raw outputs [S, N, D]; an axis of 1 is dropped."""
        log_rate = self.log_rate(outputs.double())
        if log_rate.dim() == 3 and log_rate.shape[-1] == 1:
            log_rate = log_rate[..., 0]
        return CountPredictive(log_rate, (0.0, self.most))

    def wrong(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return which targets are no counts, or larger than any can be."""
        if not y.is_floating_point():
            return (y < 0) | (y > self.most)
        return ~((y >= 0) & (y <= self.most) & (y == y.round()))

    def expected(self, outputs: Tensor) -> str:
        """Return what targets must be."""
        return f"counts must be whole numbers from 0 to most={self.most:g}"

    def columns(self, outputs: int) -> int:
        """Return one count an output."""
        return outputs


@dataclass(frozen=True)
class ScaledPoisson(Poisson, name="poisson, scaled"):
    """Counts whose gradients are divided by the spread of the counts.

    The log-probability is that of `Poisson`. Its gradient by the output is y - r, which is as large
    as the counts are: divided by `unit`, a clip means the same for large counts and for small ones.
    It is for point estimates and optimizers that scale every parameter's steps, such as Adam; a
    sampler would follow another posterior.

    Args:
        most: as in `Poisson`.
        typical: likewise.
        unit: about the standard deviation of the counts, public or released.
    """

    unit: float = 1.0

    never_raises = True

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        exact = super().log_prob(outputs, y)
        fixed = exact.detach()
        return fixed + (exact - fixed) / self.unit
