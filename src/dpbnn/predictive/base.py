"""What all predictive distributions have, and the checks that they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property

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

    @property
    def plain(self) -> Predictive:
        """The prediction without the draws that widen it; see `WidenedClassPredictive`."""
        return self

    def __len__(self) -> int:
        return self.mean.shape[0]


class NumberPredictive(Predictive):
    """A mixture over posterior samples of a number, or of several; clipped to public bounds."""

    means: Tensor
    """The mean of every posterior sample, [S, N] or [S, N, D]."""
    bounds: tuple[float, float] | None
    """Public range of the target; None for no bounds."""

    @cached_property
    def mean(self) -> Tensor:
        """Predictive mean 1/S sum_s m_s, inside the bounds."""
        return self._inside(self.means.mean(0))

    @property
    def variance(self) -> Tensor:
        """Total variance: epistemic and aleatoric."""
        return self.epistemic + self.aleatoric

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance over posterior samples of the mean, Var_s[m_s]."""
        return self.means.var(0, correction=0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the ends of the equal-tailed interval: either tail has (1 - level)/2 at most."""
        check_level(level)
        tail = (1 - level) / 2
        return self.quantile(tail), self.quantile(1 - tail)

    def _inside(self, values: Tensor) -> Tensor:
        return values if self.bounds is None else values.clamp(*self.bounds)

    def _targets(self, y: Tensor) -> Tensor:
        """Return targets shaped like the mean, or raise where there are more or fewer."""
        y = torch.as_tensor(y, dtype=self.mean.dtype, device=self.mean.device)
        if y.numel() != self.mean.numel() or y.shape[:1] != self.mean.shape[:1]:
            raise ValueError(
                f"y has shape {list(y.shape)}; the prediction has {list(self.mean.shape)}."
            )
        return y.reshape(self.mean.shape)


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
