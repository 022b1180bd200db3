"""Tilted moments of a mixture of Gaussians with unknown means."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from dpbnn.likelihoods import Mixture
from dpbnn.mixtures import GaussianMixture
from dpbnn.moments.model import Factors, MomentModel, Moments, Natural
from dpbnn.posteriors import MixturePosterior, Posterior
from dpbnn.priors import Gaussian, Prior

__all__ = ["MixtureMoments"]

_NAME = "means"


class MixtureMoments(MomentModel):
    """The means of a mixture as J independent Gaussian blocks with full covariances.

    With the cavity N(m, V), V = Q diag(l) Q^T, L = Q diag(sqrt l), of component k, and the noise
    s^2 of a point x,

        r = w_k N(x; m, V + s^2 I) / sum_j ...      u = L^-1 V (V + s^2 I)^-1 (x - m)
        W = I - r diag(l / (l + s^2)) + r (1 - r) u u^T,

    the tilted distribution has mean m + r L u and covariance L W L^T, so the factor of x has, in
    whitened coordinates, the slope r W^-1 u and the curvature W^-1 - I. All of W but a rank-one
    term that is never negative is diagonal, and its diagonal is at least s^2/(l + s^2): the
    moments are exact and always those of a Gaussian, so nothing needs a cap as in networks.

    Args:
        mixture: the model; its covariances must be noise_std^2 I.
        prior: of the means about the mixture's centres; a Gaussian of mean 0.
        start_variance: variance of the first approximation, as a share of the prior's.
    """

    def __init__(
        self,
        mixture: GaussianMixture,
        prior: Prior,
        *,
        start_variance: float = 1.0,
    ) -> None:
        if not isinstance(prior, Gaussian):
            raise ValueError(f"prior={prior}: must be dpbnn.Gaussian for a mixture's means")
        noise = mixture.noise_std**2 * torch.eye(mixture.dimensions).to(mixture.covariances)
        if not torch.allclose(mixture.covariances, noise.expand_as(mixture.covariances)):
            raise ValueError(
                "the mixture's covariances are not noise_std^2 I, which moment matching needs; "
                "make a new GaussianMixture with the noise_std that you want"
            )
        self.mixture = mixture
        self._prior, self._start_variance = prior, start_variance
        self.noise = mixture.noise_std**2

    def prior(self) -> Natural:
        """Return N(centre_j + prior mean, std^2 I) for every component."""
        return self._about_centres(self._prior.std**2)

    def start(self) -> Natural:
        """Return the prior, narrowed by start_variance."""
        return self._about_centres(self._start_variance * self._prior.std**2)

    def _about_centres(self, variance: float) -> Natural:
        centres = self.mixture.centres + self._prior.mean
        eye = torch.eye(self.mixture.dimensions).to(centres)
        covariance = variance * eye.repeat(self.mixture.components, 1, 1)
        return Natural.of(Moments({_NAME: centres}, {_NAME: covariance}))

    def factors(self, cavity: Moments, x: Tensor, y: Tensor) -> Factors:
        """Return every point's factor, [batch, J, D] and [batch, J, D, D]; `y` is not used."""
        mean, covariance = cavity.mean[_NAME], cavity.covariance[_NAME]
        spread, axes = torch.linalg.eigh(covariance)
        logs, u = _tilt(x.to(mean), mean, spread, axes, self.mixture.log_weights, self.noise)
        r = logs.softmax(-1).unsqueeze(-1)
        share = r * spread / (spread + self.noise)
        inverse = 1 / (1 - share).clamp(min=torch.finfo(mean.dtype).eps)
        towards = inverse * u
        both = r * (1 - r)
        # (D + b u u^T)^-1 = D^-1 - b (D^-1 u)(D^-1 u)^T / (1 + b u^T D^-1 u)
        divisor = 1 + both * (u * towards).sum(-1, keepdim=True)
        rank_one = (both / divisor).sqrt() * towards
        # slope = L^-T r W^-1 u, curvature = L^-T (W^-1 - I) L^-1, L^-T = Q diag(l^-1/2)
        unwhitened = axes * spread.rsqrt().unsqueeze(-2)
        slope = torch.einsum("jde,bje->bjd", unwhitened, r * towards / divisor)
        removed = torch.einsum("jde,bje->bjd", unwhitened, rank_one)
        added = (axes * (share * inverse / spread).unsqueeze(-2)) @ axes.transpose(-1, -2)
        curvature = added - removed.unsqueeze(-1) * removed.unsqueeze(-2)
        return Factors({_NAME: slope}, {_NAME: curvature})

    def posterior(self, natural: Natural, **record: Any) -> Posterior:
        """Return the mixture with these means."""
        moments = natural.moments()
        model = copy.deepcopy(self.mixture)
        with torch.no_grad():
            model.offsets.copy_(moments.mean[_NAME] - model.centres)
        spread = {"covariance": moments.covariance[_NAME]}
        return MixturePosterior(model, Mixture(), spread, **record)


def _tilt(
    x: Tensor, mean: Tensor, spread: Tensor, axes: Tensor, log_weights: Tensor, variance: float
) -> tuple[Tensor, Tensor]:
    """Return log w_j + log N(x_i; m_j, V_j + s^2 I) and u = diag(sqrt l / (l + s^2)) Q^T (x - m).

    Of shapes [batch, J] and [batch, J, D], for V = Q diag(l) Q^T.
    """
    z = torch.einsum("jde,bjd->bje", axes, x.unsqueeze(1) - mean)
    total = spread + variance
    logs = -0.5 * (z.square() / total + total.log() + math.log(2 * math.pi)).sum(-1)
    return log_weights + logs, spread.sqrt() / total * z
