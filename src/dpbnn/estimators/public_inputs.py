"""Inputs that stand for the data where none may be looked at: drawn from released moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor, nn

from dpbnn.data.standardising import Standardisation
from dpbnn.estimators.recipes import Recipe
from dpbnn.estimators.scaling import Scaling
from dpbnn.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.methods.laplace import LARGEST
from dpbnn.methods.method import Method

__all__ = ["PublicInputs", "with_bands"]

_ROOM = 0.98  # largest variance, relative to that of a column of -1 and 1 with the same mean
_BANDS = (Bernoulli, Categorical, GaussianNoise, HeteroscedasticGaussian)


@dataclasses.dataclass(frozen=True, repr=False)
class PublicInputs:
    """Standardised columns, drawn independently of each other and of the data.

    Each has a Beta distribution on [-1, 1] with the centre and the spread that were released. It is
    standardised and cut off as the data are.

    Attributes:
        standard: centres and spreads.
        limit: largest standardised value.
    """

    standard: Standardisation
    limit: float
    released = True  # so that the statement need not name them as public

    def __call__(self, number: int) -> Tensor:
        """Return inputs [number, columns]."""
        centre = np.clip(self.standard.centre, -0.999, 0.999)
        room = 1 - centre**2
        size = room / np.minimum(self.standard.spread**2, _ROOM * room) - 1  # of both parameters
        chances = np.random.default_rng(0).uniform(size=(number, len(centre)))
        values = 2 * betaincinv(size * (1 + centre) / 2, size * (1 - centre) / 2, chances) - 1
        found = (values - self.standard.centre) / self.standard.spread
        return torch.from_numpy(np.clip(found, -self.limit, self.limit))

    def __repr__(self) -> str:
        return "independent columns of the released moments"


def with_bands(
    recipe: Recipe,
    method: Method,
    scaling: Scaling,
    likelihood: object,
    network: Callable[[], nn.Module],
) -> Method:
    """Return a method whose posterior has bands, where it can have them; see `dpbnn.SGD`.

    Args:
        recipe: of the fit.
        method: its settings.
        scaling: of its inputs.
        likelihood: of its targets.
        network: builds the network.
    """
    if not (recipe.bands and isinstance(likelihood, _BANDS)) or scaling.standard is None:
        return method
    with torch.random.fork_rng(devices=[]):
        size = sum(parameter.numel() for parameter in network().parameters())
    if size > LARGEST:
        return method
    drawn = PublicInputs(scaling.standard, scaling.limit)
    return dataclasses.replace(method, inputs=drawn)  # type: ignore[call-arg]
