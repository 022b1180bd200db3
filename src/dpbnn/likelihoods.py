"""Per-example log-likelihoods of a network's outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor


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
        nll = F.cross_entropy(outputs.movedim(-1, 1), y, reduction="none")
        return -nll.flatten(1).sum(1) if nll.dim() > 1 else -nll


@dataclass(frozen=True)
class Gaussian:
    """Real targets: log p(y | f) = sum_k log N(y_k; f_k, noise_std^2).

    Args:
        noise_std: fixed standard deviation of the observation noise.
    """

    noise_std: float = 1.0

    def __post_init__(self) -> None:
        if not self.noise_std > 0:
            raise ValueError(f"noise_std={self.noise_std} must be positive; try noise_std=1.0.")

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        residual = (y.reshape(outputs.shape) - outputs).flatten(1) / self.noise_std
        constant = math.log(self.noise_std) + 0.5 * math.log(2 * math.pi)
        return -(0.5 * residual.square() + constant).sum(1)


_NAMES: dict[str, Likelihood] = {"categorical": Categorical(), "gaussian": Gaussian()}


def likelihood(name: str) -> Likelihood:
    """Return the likelihood of that name: "categorical" or "gaussian" (noise_std = 1)."""
    try:
        return _NAMES[name]
    except KeyError:
        allowed = ", ".join(map(repr, _NAMES))
        raise ValueError(
            f"likelihood={name!r} is not one of {allowed}; pass one of them."
        ) from None
