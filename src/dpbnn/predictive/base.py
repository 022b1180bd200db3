"""What all predictive distributions have, and the checks that they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Predictive(ABC):
    """The equal-weight mixture p(y | x) = 1/S sum_s p(y | x, w_s) over S posterior samples.

    The first axis of everything stored is the posterior sample, the second the input. All
    quantities are computed when they are asked for.
    """

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """Class probabilities [N, K], or predictive means [N] or [N, D]."""

    @property
    @abstractmethod
    def mode(self) -> Tensor:
        """The most probable class [N], or the highest point of each output's density."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """Total variance, shaped like the mean."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """The part of the uncertainty that more data would remove."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """The part of the uncertainty that stays however much data there is."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropy of the mixture in nats."""

    @abstractmethod
    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile, shaped like the mean."""

    @abstractmethod
    def interval(self, level: float = 0.9) -> Tensor | tuple[Tensor, Tensor]:
        """Return the smallest set of classes, or the equal-tailed interval, of that probability."""

    @abstractmethod
    def samples(self, k: int, generator: torch.Generator | None = None) -> Tensor:
        """Return k draws of y for every input, [k, N] or [k, N, D].

        One draw uses one posterior sample for all inputs, so that draws are functions and
        dependence between inputs is kept.
        """

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Return log 1/S sum_s p(y_i | x_i, w_s) for every input, [N]; further axes are joint."""

    @property
    def std(self) -> Tensor:
        """Square root of the variance."""
        return self.variance.sqrt()

    def __len__(self) -> int:
        return self.mean.shape[0]


def checked(values: Tensor, name: str, axes: int) -> Tensor:
    """Return what posterior samples predict, without NaN, in single precision or better."""
    if values.dim() < axes or not len(values):
        raise ValueError(
            f"{name} has shape {list(values.shape)}; it needs a first axis of at least one "
            f"posterior sample and {axes} axes or more."
        )
    values = values.detach()
    if not values.is_floating_point():
        raise ValueError(f"{name} has dtype {values.dtype}; pass floating-point numbers.")
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    bad = values.isnan()
    if bad.any():
        raise ValueError(f"{name} holds {int(bad.sum())} NaN; check the inputs and the weights.")
    return values


def check_level(level: float) -> None:
    """Raise where the probability of an interval is none."""
    if not 0 < level < 1:
        raise ValueError(f"level={level} must be between 0 and 1; try level=0.9.")


def check_quantile(q: float) -> None:
    """Raise where q is no probability."""
    if not 0 <= q <= 1:
        raise ValueError(f"q={q} must be in [0, 1]; try q=0.5.")


def log_mean_exp(values: Tensor) -> Tensor:
    """Return log mean_s exp(values_s) over the first axis."""
    return values[0] if len(values) == 1 else values.logsumexp(0) - math.log(len(values))


def pick(size: int, k: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Return the numbers of k posterior samples, drawn with replacement."""
    return torch.randint(size, (k,), generator=generator, device=device)
