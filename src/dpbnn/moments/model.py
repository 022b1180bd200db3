"""Moment models: what expectation propagation needs to know about a model."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpbnn.posteriors import Posterior

__all__ = ["Factors", "MomentModel", "Moments", "Natural"]


@dataclasses.dataclass(frozen=True)
class Moments:
    """Means and covariances of independent Gaussian blocks, by name.

    Attributes:
        mean: by name, of any shape.
        covariance: by name; shaped like the mean it holds variances, with one more axis it holds a
            matrix over the mean's last axis.
    """

    mean: Mapping[str, Tensor]
    covariance: Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Natural:
    """Gaussian blocks in natural parameters: precision times mean, and precision.

    Attributes:
        first: precision times mean, by name.
        second: precision, by name; a vector of precisions or matrices, see `Moments`.
    """

    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]

    @classmethod
    def of(cls, moments: Moments) -> Natural:
        """Return the natural parameters of a mean and a covariance."""
        second = {name: _inverse(c, moments.mean[name]) for name, c in moments.covariance.items()}
        first = {name: applied(p, moments.mean[name]) for name, p in second.items()}
        return cls(first, second)

    def moments(self) -> Moments:
        """Return mean and covariance."""
        covariance = {name: _inverse(p, self.first[name]) for name, p in self.second.items()}
        mean = {name: applied(c, self.first[name]) for name, c in covariance.items()}
        return Moments(mean, covariance)

    def plus(self, other: Natural, scale: float = 1.0) -> Natural:
        """Return self + scale * other: the product of densities q(w) f(w)^scale."""
        return Natural(
            {name: value + scale * other.first[name] for name, value in self.first.items()},
            {name: value + scale * other.second[name] for name, value in self.second.items()},
        )

    def times(self, scale: float) -> Natural:
        """Return scale * self: the power q(w)^scale."""
        return Natural(
            {name: scale * value for name, value in self.first.items()},
            {name: scale * value for name, value in self.second.items()},
        )


@dataclasses.dataclass(frozen=True)
class Factors:
    """Every example's matched factor, f_n = matched - cavity, centred on the cavity mean m.

    Attributes:
        slope: f_n's first natural parameter about m, first - second m, [batch, *mean] by name.
        curvature: f_n's precision, [batch, *covariance] by name.
        extra: coordinates that are no Gaussian block, such as a learned noise, [batch, ...] by
            name; the method releases them beside the others and hands them to `moved_noise`.
    """

    slope: Mapping[str, Tensor]
    curvature: Mapping[str, Tensor]
    extra: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


class MomentModel(ABC):
    """A model whose tilted moments p(y | x, w) N(w; m, V) are known, exactly or nearly.

    Everything but the arguments x and y of `factors` is public.

    Attributes:
        noise: variance of the likelihood's noise.
    """

    noise: float

    @abstractmethod
    def prior(self) -> Natural:
        """Return the prior, which must not depend on data."""

    @abstractmethod
    def start(self) -> Natural:
        """Return the first approximation of the posterior, which must not depend on data."""

    @abstractmethod
    def factors(self, cavity: Moments, x: Tensor, y: Tensor) -> Factors:
        """Return every example's factor, all at once; an example may not see another.

        Memory is bounded by the caller, who splits large batches. What is not finite counts as a
        contribution of zero.
        """

    @abstractmethod
    def posterior(self, natural: Natural, **record: Any) -> Posterior:
        """Return the posterior of that approximation; `record` is for `Posterior`."""

    def extra(self) -> Mapping[str, torch.Size]:
        """Return the shapes of the extra coordinates of `Factors`."""
        return {}

    def moved_noise(self, extra: Mapping[str, Tensor], step: float) -> float:
        """Return the noise variance after a step, given the records' noisy mean of `extra`."""
        return self.noise

    def at(self, noise: float) -> Self:
        """Return the same model at another noise variance, which is public."""
        model = copy.copy(self)
        model.noise = noise
        return model


def applied(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix times vector over the last axes, or the product where it holds a diagonal."""
    if matrix.dim() == vector.dim():
        return matrix * vector
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _inverse(matrix: Tensor, vector: Tensor) -> Tensor:
    if matrix.dim() == vector.dim():
        return 1 / matrix
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))
