"""A Gaussian of low rank plus diagonal, the small summary of many iterates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.posteriors.evaluate import Draws, Inputs
from dpbnn.posteriors.gaussian import check_like, gaussian_draws
from dpbnn.posteriors.posterior import Posterior


class LowRankPosterior(Posterior):
    """Gaussian weights of covariance diag(variance)/2 + D^T D / (2 (R - 1)).

    D holds the deviations of R iterates from the mean (Maddox et al. 2019, "A simple baseline for
    Bayesian uncertainty in deep learning").

    Args:
        model: a network whose parameters are the means.
        likelihood: see `Posterior`.
        variance: variances by parameter name; parameters left out are points.
        deviations: R deviations from the mean by parameter name, [R, ...].
        **record: privacy, prior and settings; see `Posterior`.
    """

    kind = "low-rank"
    parts = ("variance", "deviations")

    def __init__(
        self,
        model: nn.Module,
        likelihood: object,
        variance: Mapping[str, Tensor],
        deviations: Mapping[str, Tensor],
        **record: Any,
    ) -> None:
        super().__init__(model, likelihood, **record)
        like = dict(self.model.named_parameters())
        check_like(variance, like, "variance")
        check_like(deviations, like, "deviations", axes=1)
        ranks = {len(tensor) for tensor in deviations.values()}
        if deviations.keys() != variance.keys() or len(ranks) != 1 or min(ranks) < 2:
            raise ValueError(
                f"deviations must have the names of variance and one number of rows, 2 or more; "
                f"the numbers of rows are {sorted(ranks)}."
            )
        names = [name for name in like if name in variance]
        self.variance = {n: variance[n].detach().clone().to(self.device) for n in names}
        self.deviations = {n: deviations[n].detach().clone().to(self.device) for n in names}

    def _draws(
        self, samples: int, generator: torch.Generator, inputs: Inputs
    ) -> tuple[nn.Module, Draws]:
        mean = {name: self.model.get_parameter(name) for name in self.variance}
        std = {name: (tensor / 2).sqrt() for name, tensor in self.variance.items()}
        rank = len(next(iter(self.deviations.values())))
        scale = 1 / math.sqrt(2 * (rank - 1))
        factors = {name: scale * tensor for name, tensor in self.deviations.items()}
        return self.model, gaussian_draws(samples, mean, std, generator, factors)
