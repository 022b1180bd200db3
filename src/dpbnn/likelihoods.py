"""Per-example log-likelihoods of a network's outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from dpbnn.predictive import Predictive


@runtime_checkable
class Likelihood(Protocol):
    """Anything with a per-example log-probability."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        ...


@dataclass(frozen=True)
class Categorical:
    """Class labels: log p(y | f) = f_y - logsumexp(f).

    Further axes of the outputs (one label per position, classes last) are summed per example.
    """

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        scores = outputs.movedim(-1, 1) if outputs.dim() > 2 else outputs
        nll = F.cross_entropy(scores, y, reduction="none")
        return -nll.flatten(1).sum(1) if nll.dim() > 1 else -nll


@dataclass(frozen=True)
class Gaussian:
    """Real targets: log p(y | f) = sum_k log N(y_k; f_k, noise_std^2).

    Args:
        noise_std: standard deviation of the observation noise; None lets `fit` learn it.
    """

    noise_std: float | None = 1.0

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


@dataclass(frozen=True)
class HeteroscedasticGaussian:
    """Real targets whose noise the network predicts: outputs are (mean, log-variance), halves.

        log p(y | m, s) = sum_k log N(y_k; m_k, exp(s_k))

    Log-variances are kept within [-lowest, lowest], so that no example's density is unbounded.

    Args:
        lowest: bound on the absolute log-variance.
    """

    lowest: float = 12.0

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
        from dpbnn.predictive import RealPredictive

        mean, log_variance = self.split(outputs)
        if mean.shape[-1] == 1:
            mean, log_variance = mean[..., 0], log_variance[..., 0]
        return RealPredictive(mean, log_variance.exp())


@dataclass(frozen=True)
class Mixture:
    """Points without targets: outputs are log w_j + log p_j(x), log p(x) = logsumexp of them."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(x_i), one number per example; the targets are not used."""
        return outputs.logsumexp(-1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of the components, of raw outputs [S, N, J]."""
        from dpbnn.predictive import ClassPredictive

        return ClassPredictive.from_logits(outputs)


_NAMES: dict[str, Likelihood] = {
    "categorical": Categorical(),
    "gaussian": Gaussian(),
    "heteroscedastic": HeteroscedasticGaussian(),
    "mixture": Mixture(),
}


def likelihood(name: str) -> Likelihood:
    """Return the likelihood of that name: categorical, gaussian (std 1), heteroscedastic, mixture.

    The last one is for points without targets.
    """
    try:
        return _NAMES[name]
    except KeyError:
        allowed = ", ".join(map(repr, _NAMES))
        raise ValueError(
            f"likelihood={name!r} is not one of {allowed}; pass one of them."
        ) from None
