"""One set of weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpbnn.posteriors.evaluate import Draws, Inputs
from dpbnn.posteriors.posterior import Posterior


class PointPosterior(Posterior):
    """All mass on one set of weights, p(y | x) = p(y | x, w); epistemic uncertainty is zero."""

    kind = "point"

    def _draws(
        self, samples: int, generator: torch.Generator, inputs: Inputs
    ) -> tuple[nn.Module, Draws]:
        weights: dict[str, Tensor] = {n: p[None] for n, p in self.model.named_parameters()}
        return self.model, Draws(count=1, numbers=0, take=lambda count: weights)
