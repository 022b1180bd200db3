"""Gaussian means of a mixture's components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.mixtures import GaussianMixture, log_normal
from dpbnn.posteriors.evaluate import Draws, Inputs, number_stream
from dpbnn.posteriors.posterior import Posterior


class MixturePosterior(Posterior):
    """Independent Gaussian means of the components, m_j ~ N(mean_j, V_j).

    `predict` tells which component a point belongs to: classes are components. Densities and
    new points are the mixture's, with the uncertainty of the means in them.

    Args:
        model: a `GaussianMixture` at the posterior means, with weights and covariances within
            components as they are known or were learned.
        likelihood: `likelihoods.Mixture`, or "mixture".
        spread: "covariance" is V, [J, D, D].
        **record: privacy, prior and settings; see `Posterior`.
    """

    kind = "mixture"
    parts = ("spread",)
    model: GaussianMixture

    def __init__(
        self, model: nn.Module, likelihood: object, spread: Mapping[str, Tensor], **record: Any
    ) -> None:
        super().__init__(model, likelihood, **record)
        if not isinstance(self.model, GaussianMixture):
            raise TypeError(
                f"the model is a {type(model).__name__}; a mixture posterior needs a "
                f"dpbnn.GaussianMixture."
            )
        components, dimensions = self.model.means.shape
        shape = (components, dimensions, dimensions)
        given = spread.get("covariance")
        if given is None or given.shape != shape:
            raise ValueError(
                f"spread has { ({k: list(v.shape) for k, v in spread.items()}) }; pass covariance "
                f"of shape {list(shape)}."
            )
        covariance = given.detach().clone().to(self.model.means)
        values = (covariance, self.model.means, self.model.log_weights, self.model.covariances)
        if not all(tensor.isfinite().all() for tensor in values):
            raise ValueError("means, weights and covariances must be finite; check the training.")
        lowest, highest = torch.linalg.eigvalsh(covariance).aminmax()
        tolerance = 1e-6 * highest.abs()
        if lowest < -tolerance or (covariance - covariance.mT).abs().max() > tolerance:
            raise ValueError(
                f"covariance must be symmetric and not negative; its lowest eigenvalue is "
                f"{lowest.item():.3g}."
            )
        self.spread = {"covariance": (covariance + covariance.mT) / 2}

    @property
    def covariance(self) -> Tensor:
        """Posterior covariances of the components' means, [J, D, D]."""
        return self.spread["covariance"]

    @property
    def means(self) -> Tensor:
        """Posterior means of the components' means, [J, D]."""
        return self.model.means

    @property
    def weights(self) -> Tensor:
        """Weights of the components, [J]."""
        return self.model.weights

    @property
    def _spread(self) -> Tensor:
        """Covariance of a point of each component: within the component plus that of its mean."""
        return self.model.covariances + self.covariance

    def log_prob(self, x: Any) -> Tensor:
        """Return the log density of points, log sum_j w_j N(x; mean_j, S_j + V_j), [N]."""
        return self._joint(x).logsumexp(-1)

    def responsibilities(self, x: Any) -> Tensor:
        """Return the probability that a point belongs to each component, [N, J].

        In closed form, w_j N(x; mean_j, S_j + V_j) up to a factor.
        """
        return self._joint(x).softmax(-1)

    def sample(self, k: int, *, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Return k new points [k, D] and the components they are from [k]."""
        generator = torch.Generator(self.device)
        generator.seed() if seed is None else generator.manual_seed(seed)
        labels = torch.multinomial(self.weights, k, replacement=True, generator=generator)
        noise = self.means.new_empty(k, self.model.dimensions).normal_(generator=generator)
        roots = torch.linalg.cholesky(self._spread)[labels]
        return self.means[labels] + (roots @ noise.unsqueeze(-1)).squeeze(-1), labels

    def _joint(self, x: Any) -> Tensor:
        (points,) = self._inputs(x)
        return self.model.log_weights + log_normal(points, self.means, self._spread)

    def _draws(
        self, samples: int, generator: torch.Generator, inputs: Inputs
    ) -> tuple[nn.Module, Draws]:
        values, axes = torch.linalg.eigh(self.covariance)
        roots = axes * values.clamp(min=0).sqrt().unsqueeze(-2)
        offsets = self.model.offsets
        stream = number_stream(offsets.numel(), "normal_", offsets, generator)

        def take(count: int) -> dict[str, Tensor]:
            noise = stream(count).view(count, *offsets.shape)
            return {"offsets": offsets + torch.einsum("jde,sje->sjd", roots, noise)}

        return self.model, Draws(count=samples, numbers=offsets.numel(), take=take)
