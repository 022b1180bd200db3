"""Real targets: Gaussian noise that is known, learned, or predicted by the network."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpbnn.likelihoods.base import Likelihood, LikelihoodBase, Outcomes
from dpbnn.predictive import Predictive, PropagatedPredictive, RealPredictive

_NODES = 9  # of the quadrature over targets
_WIDER = (1.15, 1.15)  # see `Outcomes`; chosen by coverage


@dataclass(frozen=True)
class Gaussian(LikelihoodBase, name="gaussian"):
    """Real targets: log p(y | f) = sum_k log N(y_k; f_k, noise_std^2).

    Args:
        noise_std: standard deviation of the observation noise; None lets `fit` learn it.
    """

    noise_std: float | None = 1.0

    never_raises = True

    def __post_init__(self) -> None:
        if self.noise_std is not None and not self.noise_std > 0:
            raise ValueError(f"noise_std={self.noise_std} must be positive; try noise_std=1.0.")

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        if self.noise_std is None:
            raise ValueError("noise_std=None: a learned noise needs `fit`, which adds it.")
        residual = (y.reshape(outputs.shape) - outputs).flatten(1) / self.noise_std
        constant = math.log(self.noise_std) + 0.5 * math.log(2 * math.pi)
        return -(0.5 * residual.square() + constant).sum(1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of means [S, N, D]; a last axis of 1 is dropped."""
        if self.noise_std is None:
            raise ValueError("noise_std=None: the noise is not known yet; give its noise_std.")
        means = outputs.squeeze(-1) if outputs.dim() == 3 else outputs
        return RealPredictive(means, self.noise_std**2)

    def columns(self, outputs: int) -> int:
        """Return one column an output."""
        return outputs

    def outcomes(self, outputs: Tensor) -> Outcomes | None:
        """Return nodes of a quadrature about the mean; None where there is more than one."""
        if outputs.shape[1:] != (1,) or self.noise_std is None:
            return None
        return _nodes(outputs, torch.full_like(outputs, self.noise_std**2))

    def locations(self, changes: Tensor) -> Tensor:
        """Return changes of means, without a last axis of 1."""
        return changes.squeeze(-1) if changes.dim() == 3 else changes

    def with_learned_noise(self) -> Likelihood | None:
        """Return the likelihood of means and log-variances, where the noise is not known."""
        return HeteroscedasticGaussian() if self.noise_std is None else None

    def with_noise(self, noise_std: float) -> Gaussian:
        """Return the likelihood at another noise."""
        return dataclasses.replace(self, noise_std=noise_std)

    def from_moments(self, mean: Tensor, variance: Tensor) -> Predictive | None:
        """Return one Gaussian an input, the noise added to the variance."""
        if self.noise_std is None:
            return None
        noise = self.noise_std**2
        if not torch.isfinite(variance + noise).all():
            mean, variance = mean.double(), variance.double()
        return PropagatedPredictive(mean, variance, noise)


@dataclass(frozen=True)
class HeteroscedasticGaussian(LikelihoodBase, name="heteroscedastic"):
    """Real targets whose noise the network predicts: outputs are (mean, log-variance), halves.

        log p(y | m, s) = sum_k log N(y_k; m_k, exp(s_k))

    Log-variances are kept within [-lowest, lowest], so that no example's density is unbounded.

    Args:
        lowest: bound on the absolute log-variance.
    """

    lowest: float = 12.0

    never_raises = True

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance."""
        if outputs.shape[-1] % 2:
            raise ValueError(
                f"the network has {outputs.shape[-1]} outputs, which cannot be means and "
                f"log-variances; give it twice as many outputs as targets."
            )
        mean, log_variance = outputs.chunk(2, -1)
        return mean, log_variance.clamp(-self.lowest, self.lowest)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        mean, log_variance = self.split(outputs)
        squared = (y.reshape(mean.shape) - mean).square() * torch.exp(-log_variance)
        return -0.5 * (squared + log_variance + math.log(2 * math.pi)).flatten(1).sum(1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of raw outputs [S, N, 2D]."""
        mean, log_variance = self.split(outputs)
        if mean.shape[-1] == 1:
            mean, log_variance = mean[..., 0], log_variance[..., 0]
        return RealPredictive(mean, log_variance.exp())

    def columns(self, outputs: int) -> int:
        """Return one column for each two outputs."""
        return outputs // 2

    def outcomes(self, outputs: Tensor) -> Outcomes | None:
        """Return nodes of a quadrature about the mean; None where there is more than one."""
        if outputs.shape[1:] != (2,):
            return None
        mean, log_variance = self.split(outputs)
        found = _nodes(mean, log_variance.exp())
        both = (F.pad(part, (0, 1)) for part in (found.scores, found.slopes))
        return dataclasses.replace(found, **dict(zip(("scores", "slopes"), both, strict=True)))

    def locations(self, changes: Tensor) -> Tensor:
        """Return changes of means, without a last axis of 1."""
        found = changes.chunk(2, -1)[0]
        return found[..., 0] if found.shape[-1] == 1 else found


@dataclass(frozen=True)
class LearnedNoiseGaussian(HeteroscedasticGaussian, name="gaussian, learned noise"):
    """Real targets with a learned noise whose size does not scale the gradient of the mean.

    The log-probability is that of `HeteroscedasticGaussian`. The gradient by the mean is that of
    noise 1, so that a clip means the same at every noise; that by the log-variance is a tenth of
    its own, so that a target far from its mean is not clipped for the noise's sake. Both are zero
    where they would be, if the noise is the same for all inputs. It is for point estimates and
    optimizers that scale every parameter's steps, such as Adam; a sampler would follow another
    posterior.

    Args:
        lowest: bound on the absolute log-variance.
        start: log-variance at which learning begins.
        sloped: whether the noise may rise or fall with the mean; see `networks.SlopedNoise`.
    """

    start: float = 0.0
    sloped: bool = False

    never_raises = True

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        mean, log_variance = self.split(outputs)
        squared = (y.reshape(mean.shape) - mean).square()
        known, fixed = squared.detach(), log_variance.detach()
        log_variance = fixed + 0.1 * (log_variance - fixed)
        noise = known * torch.exp(-log_variance) + log_variance + math.log(2 * math.pi)
        return -0.5 * (noise + squared - known).flatten(1).sum(1)

    def with_learned_noise(self) -> Likelihood:
        """Return itself: the noise is learned."""
        return self

    def outcomes(self, outputs: Tensor) -> Outcomes | None:
        """Return the same as at noise 1 for the slopes."""
        found = super().outcomes(outputs)
        if found is None:
            return None
        variance = self.split(outputs)[1].exp()
        return dataclasses.replace(found, slopes=found.scores * variance)


def _nodes(mean: Tensor, variance: Tensor) -> Outcomes:
    """Return Gauss-Hermite nodes of N(mean, variance), [Q, N, 1]."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    z = mean.new_tensor(nodes)[:, None, None]
    chances = mean.new_tensor(weights / weights.sum())[:, None].expand(-1, len(mean))
    scores = -z / variance.sqrt()
    total = float(mean.var(correction=0) + variance.mean())
    return Outcomes(mean + variance.sqrt() * z, chances, scores, scores, total, _WIDER)
