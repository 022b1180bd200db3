"""A likelihood in one file: counts, y ~ Poisson(exp f). Importing the file registers it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpbnn.likelihoods import LikelihoodBase
from dpbnn.predictive import Predictive, RealPredictive


@dataclass(frozen=True)
class ToyCounts(LikelihoodBase, name="toy-counts"):
    """Counts: log p(y | f) = y f - exp(f) - log y!, with the log-rate f kept in [-most, most].

    Args:
        most: bound on the absolute log-rate, so that no example's gradient is unbounded.
    """

    most: float = 8.0

    never_raises = True

    def log_rate(self, outputs: Tensor) -> Tensor:
        """Return the log-rate of every count."""
        return outputs.clamp(-self.most, self.most)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        rate, y = self.log_rate(outputs), y.reshape(outputs.shape)
        return (y * rate - rate.exp() - torch.lgamma(y + 1)).flatten(1).sum(1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return Gaussians with mean and variance of the counts, of raw outputs [S, N, D]."""
        rate = self.log_rate(outputs).exp()
        rate = rate.squeeze(-1) if rate.dim() == 3 else rate
        return RealPredictive(rate, rate)

    def wrong(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return which targets are no counts."""
        return ~(y.isfinite() & (y >= 0) & (y == y.round()))

    def expected(self, outputs: Tensor) -> str:
        """Return what targets must be."""
        return "counts must be whole numbers, 0 or more"

    def columns(self, outputs: int) -> int:
        """Return one count an output."""
        return outputs
