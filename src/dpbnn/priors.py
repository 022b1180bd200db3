"""Priors of weights: densities that factorise over the weights."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

__all__ = ["Flat", "Gaussian", "Laplace", "Prior", "ScaleMixture", "prior"]


class Prior(ABC):
    """A density p(w) = prod_j p(w_j); methods scale it against the data, the user does not."""

    @abstractmethod
    def log_prob(self, w: Tensor) -> Tensor:
        """Return log p(w), summed over all weights."""

    @abstractmethod
    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradient of -log p(w)."""

    def cross_entropy(self, mean: Tensor, std: Tensor) -> Tensor | None:
        """Return E[-log p(w)], w ~ N(mean, std^2), summed; None where it has no closed form."""
        return None

    def cross_entropy_gradient(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the gradient of the cross-entropy with respect to mean and std, or None."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the prior as plain values."""
        return {"prior": type(self).__name__, **dataclasses.asdict(self)}  # type: ignore[call-overload]


def _positive(name: str, value: float) -> None:
    if not (0 < value < math.inf):
        raise ValueError(f"{name}={value}: must be a finite number > 0")


@dataclasses.dataclass(frozen=True)
class Gaussian(Prior):
    """Independent Gaussian weights: p(w_j) = N(mean, std^2)."""

    std: float = 1.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        _positive("std", self.std)

    def log_prob(self, w: Tensor) -> Tensor:
        """Return log p(w), summed over all weights."""
        constant = math.log(self.std) + 0.5 * math.log(2 * math.pi)
        return -(0.5 * ((w - self.mean) / self.std).square() + constant).sum()

    def gradient(self, w: Tensor) -> Tensor:
        """Return (w - mean) / std^2."""
        return (w - self.mean if self.mean else w) / self.std**2

    def cross_entropy(self, mean: Tensor, std: Tensor) -> Tensor:
        """Return log std_p + log(2 pi)/2 + (std^2 + (mean - mean_p)^2) / (2 std_p^2), summed."""
        constant = math.log(self.std) + 0.5 * math.log(2 * math.pi)
        spread = std.square() + (mean - self.mean).square()
        return (0.5 * spread / self.std**2 + constant).sum()

    def cross_entropy_gradient(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Return (mean - mean_p) / std_p^2 and std / std_p^2."""
        return self.gradient(mean), std / self.std**2


@dataclasses.dataclass(frozen=True)
class Laplace(Prior):
    """Independent Laplace weights: p(w_j) = exp(-|w_j|/scale) / (2 scale)."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    def log_prob(self, w: Tensor) -> Tensor:
        """Return log p(w), summed over all weights."""
        return -(w.abs() / self.scale + math.log(2 * self.scale)).sum()

    def gradient(self, w: Tensor) -> Tensor:
        """Return sign(w) / scale."""
        return w.sign() / self.scale

    def cross_entropy(self, mean: Tensor, std: Tensor) -> Tensor:
        """Return E|w|/scale + log(2 scale), summed.

        E|w| = std sqrt(2/pi) exp(-mean^2/(2 std^2)) + mean erf(mean/(std sqrt 2)).
        """
        ratio = mean / std
        folded = std * math.sqrt(2 / math.pi) * torch.exp(-0.5 * ratio.square())
        folded = folded + mean * torch.erf(ratio / math.sqrt(2))
        return (folded / self.scale + math.log(2 * self.scale)).sum()

    def cross_entropy_gradient(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Return erf(mean/(std sqrt 2)) / scale and sqrt(2/pi) exp(-mean^2/(2 std^2)) / scale."""
        ratio = mean / std
        by_std = torch.exp(-0.5 * ratio.square()) * (math.sqrt(2 / math.pi) / self.scale)
        return torch.erf(ratio / math.sqrt(2)) / self.scale, by_std


@dataclasses.dataclass(frozen=True)
class Flat(Prior):
    """No preference: a constant, improper density."""

    def log_prob(self, w: Tensor) -> Tensor:
        """Return 0."""
        return w.new_zeros(())

    def gradient(self, w: Tensor) -> Tensor:
        """Return 0."""
        return torch.zeros_like(w)

    def cross_entropy(self, mean: Tensor, std: Tensor) -> Tensor:
        """Return 0."""
        return mean.new_zeros(())

    def cross_entropy_gradient(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Return 0 and 0."""
        return torch.zeros_like(mean), torch.zeros_like(std)


@dataclasses.dataclass(frozen=True)
class ScaleMixture(Prior):
    """Two Gaussians around zero: share N(0, wide^2) + (1 - share) N(0, narrow^2).

    Reference: Blundell et al., Weight uncertainty in neural networks, 2015.
    """

    share: float = 0.5
    wide: float = 1.0
    narrow: float = 0.0025

    def __post_init__(self) -> None:
        _positive("wide", self.wide)
        _positive("narrow", self.narrow)
        if not (0 < self.share < 1):
            raise ValueError(f"share={self.share}: must lie in (0, 1)")

    def _logs(self, w: Tensor) -> tuple[Tensor, Tensor]:
        def log_normal(std: float, share: float) -> Tensor:
            constant = math.log(share / std) - 0.5 * math.log(2 * math.pi)
            return constant - 0.5 * (w / std).square()

        return log_normal(self.wide, self.share), log_normal(self.narrow, 1 - self.share)

    def log_prob(self, w: Tensor) -> Tensor:
        """Return log p(w), summed over all weights."""
        return torch.logaddexp(*self._logs(w)).sum()

    def gradient(self, w: Tensor) -> Tensor:
        """Return w (r / wide^2 + (1 - r) / narrow^2), r the probability of the wide part."""
        wide, narrow = self._logs(w)
        r = torch.sigmoid(wide - narrow)
        return w * (r / self.wide**2 + (1 - r) / self.narrow**2)


def prior(values: dict[str, Any]) -> Prior:
    """Rebuild a prior from `to_dict`."""
    fields = dict(values)
    kinds = {kind.__name__: kind for kind in (Gaussian, Laplace, Flat, ScaleMixture)}
    return kinds[fields.pop("prior")](**fields)
