"""Predictive distributions: what S posterior samples say about unseen inputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ClassPredictive", "Predictive", "PropagatedPredictive", "RealPredictive"]

_BLOCK = 2**23  # elements of a temporary


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


class ClassPredictive(Predictive):
    """A mixture of categorical distributions.

    entropy(mean) = expected entropy (aleatoric) + mutual information of label and weights
    (epistemic).

    Args:
        log_probabilities: log class probabilities of every posterior sample, [S, N, K]; further
            axes before the classes are positions of one example.
    """

    def __init__(self, log_probabilities: Tensor) -> None:
        self.log_probabilities = _checked(log_probabilities, "log_probabilities", 3)
        if self.log_probabilities.numel() and self.log_probabilities.amax() > 1e-3:
            raise ValueError(
                "log_probabilities must be at most 0; pass logits to from_logits and "
                "probabilities to from_probabilities."
            )

    @classmethod
    def from_logits(cls, logits: Tensor) -> ClassPredictive:
        """Return the predictive of network outputs [S, N, K], log p = f - logsumexp(f)."""
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return cls(logits.log_softmax(-1))

    @classmethod
    def from_probabilities(cls, probabilities: Tensor) -> ClassPredictive:
        """Return the predictive of class probabilities [S, N, K]."""
        probabilities = _checked(probabilities, "probabilities", 3)
        off = (probabilities.sum(-1) - 1).abs().amax().item() if probabilities.numel() else 0.0
        if (probabilities < 0).any() or off > 1e-3:
            raise ValueError(
                "probabilities must be non-negative and sum to 1 over the last axis. For raw "
                "network outputs use from_logits."
            )
        return cls(probabilities.log())

    @property
    def probabilities(self) -> Tensor:
        """Class probabilities of every posterior sample, [S, N, K]."""
        return self.log_probabilities.exp()

    @cached_property
    def _log_mean(self) -> Tensor:
        return _log_mean_exp(self.log_probabilities)

    @cached_property
    def mean(self) -> Tensor:
        """Class probabilities p = 1/S sum_s p_s, [N, K]."""
        return self._log_mean.exp()

    @property
    def mode(self) -> Tensor:
        """The class of highest mean probability, [N]."""
        return self._log_mean.argmax(-1)

    @property
    def variance(self) -> Tensor:
        """Variance of the one-hot label, p (1 - p) = Var_s[p_s] + mean_s[p_s (1 - p_s)], [N, K].

        The first part alone is `probabilities.var(0, correction=0)`.
        """
        return self.mean * (1 - self.mean)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the mean probabilities, -sum_k p_k log p_k, [N]."""
        return torch.special.entr(self.mean).sum(-1)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Expected entropy, 1/S sum_s entropy(p_s), [N]."""
        total = torch.zeros_like(self.entropy)
        for log_p in self.log_probabilities:
            total += torch.special.entr(log_p.exp()).sum(-1)
        return total / len(self.log_probabilities)

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights, entropy - expected entropy, [N]."""
        return (self.entropy - self.aleatoric).clamp(min=0)

    def interval(self, level: float = 0.9) -> Tensor:
        """Return the smallest set of classes of probability >= level, as a mask [N, K].

        Classes join in order of mean probability; ties join the one of lower index first.
        """
        _check_level(level)
        ordered, classes = self.mean.sort(dim=-1, descending=True, stable=True)
        needed = F.pad(ordered.cumsum(-1)[..., :-1], (1, 0)) < level
        return torch.zeros_like(needed).scatter(-1, classes, needed)

    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile over posterior samples of every class's probability, [N, K]."""
        _check_quantile(q)
        last = len(self.log_probabilities) - 1
        ordered = self.probabilities.sort(0).values
        lower = min(math.floor(q * last), max(last - 1, 0))
        return torch.lerp(ordered[lower], ordered[min(lower + 1, last)], q * last - lower)

    def samples(self, k: int, generator: torch.Generator | None = None) -> Tensor:
        """Return k draws of the label of every input, [k, N]."""
        picked = _pick(len(self.log_probabilities), k, generator, self.mean.device)
        drawn = [
            torch.multinomial(
                self.log_probabilities[s].exp().flatten(0, -2), 1, generator=generator
            )
            for s in picked
        ]
        return torch.stack(drawn).reshape(k, *self.mean.shape[:-1])

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log 1/S sum_s p_s(y_i), [N]; labels of one example are joint."""
        shape, classes = self.mean.shape[:-1], self.mean.shape[-1]
        y = torch.as_tensor(y, device=self.mean.device)
        if y.shape != shape or y.is_floating_point() or y.is_complex():
            raise ValueError(
                f"y has shape {list(y.shape)} and dtype {y.dtype}; labels must be integers of "
                f"shape {list(shape)}."
            )
        y = y.long()
        if y.numel() and not (y.min() >= 0 and y.max() < classes):
            wrong = int(((y < 0) | (y >= classes)).sum())
            raise ValueError(
                f"{wrong} labels are none of the {classes} classes; labels must be in "
                f"0..{classes - 1}."
            )
        index = y.unsqueeze(-1).expand(len(self.log_probabilities), *shape, 1)
        found = self.log_probabilities.gather(-1, index).squeeze(-1)
        return _log_mean_exp(found.flatten(2).sum(2) if found.dim() > 2 else found)


class RealPredictive(Predictive):
    """A mixture of Gaussians, 1/S sum_s N(m_s, v_s).

    variance = variance over samples of the mean (epistemic) + mean noise variance (aleatoric).
    Quantiles, intervals, mode and entropy are those of each output by itself.

    Mean, mode, quantiles, intervals and draws are clipped to public bounds of the target, if there
    are any. Density, variances and entropy stay those of the mixture, which knows no bounds.

    Args:
        means: means of every posterior sample, [S, N] or [S, N, D].
        variances: noise variances, broadcast to the means.
        bounds: (low, high), public range of the target; None for no bounds.
    """

    def __init__(
        self, means: Tensor, variances: Tensor | float, bounds: tuple[float, float] | None = None
    ) -> None:
        self.means, self.bounds = _checked(means, "means", 2), bounds
        variances = torch.as_tensor(variances, dtype=self.means.dtype, device=self.means.device)
        if not ((variances > 0) & variances.isfinite()).all():
            raise ValueError(
                "variances must be positive and finite. Bound the noise variance away from 0, as "
                "in variances.clamp(min=1e-6)."
            )
        if not self.means.isfinite().all():
            raise ValueError("means must be finite; check the inputs and the weights.")
        self.variances = variances.expand(self.means.shape)

    @cached_property
    def mean(self) -> Tensor:
        """Predictive mean 1/S sum_s m_s, inside the bounds."""
        return self._inside(self.means.mean(0))

    @property
    def variance(self) -> Tensor:
        """Total variance Var_s[m_s] + mean_s[v_s]."""
        return self.epistemic + self.aleatoric

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance over posterior samples of the mean, Var_s[m_s]."""
        return self.means.var(0, correction=0)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean noise variance, mean_s[v_s]."""
        return self.variances.mean(0)

    @cached_property
    def mode(self) -> Tensor:
        """The highest point of each output's density.

        The best component mean, moved uphill by x <- sum_s r_s m_s / v_s over sum_s r_s / v_s with
        r_s the responsibilities at x.
        """
        return self._inside(self._per_output(_mode))

    @cached_property
    def entropy(self) -> Tensor:
        """Differential entropy of each output, -1/S sum_s E_s[log p] by Gauss-Hermite quadrature.

        Exact for S = 1.
        """
        return self._per_output(_entropy)

    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile of each output: the root of 1/S sum_s Phi((y - m_s)/sqrt(v_s)) = q.

        Found to rounding, by Newton's method inside a shrinking bracket.
        """
        _check_quantile(q)
        if q in (0, 1):
            return self._inside(torch.full_like(self.mean, math.inf if q else -math.inf))
        return self._inside(self._per_output(lambda m, s: _quantile(m, s, q)))

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the ends of the equal-tailed interval of that probability."""
        _check_level(level)
        tail = (1 - level) / 2
        return self.quantile(tail), self.quantile(1 - tail)

    def samples(self, k: int, generator: torch.Generator | None = None) -> Tensor:
        """Return k draws of y for every input, [k, N] or [k, N, D]."""
        picked = _pick(len(self.means), k, generator, self.means.device)
        noise = torch.empty_like(self.means[picked]).normal_(generator=generator)
        return self._inside(self.means[picked] + self.variances[picked].sqrt() * noise)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log 1/S sum_s prod_d N(y_id; m_sid, v_sid), [N]: the joint density of outputs."""
        y = torch.as_tensor(y, dtype=self.means.dtype, device=self.means.device)
        if y.numel() != self.mean.numel() or y.shape[:1] != self.mean.shape[:1]:
            raise ValueError(
                f"y has shape {list(y.shape)}; the prediction has {list(self.mean.shape)}."
            )
        parts = _log_normal(y.reshape(self.mean.shape), self.means, self.variances)
        return _log_mean_exp(parts.flatten(2).sum(2) if parts.dim() > 2 else parts)

    def take(self, rows: Any) -> RealPredictive:
        """Return the prediction of some inputs, by their positions."""
        index = torch.as_tensor(rows, device=self.means.device)
        return RealPredictive(self.means[:, index], self.variances[:, index], self.bounds)

    def _inside(self, values: Tensor) -> Tensor:
        return values if self.bounds is None else values.clamp(*self.bounds)

    def _per_output(self, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return compute(means, stds) [S, n] -> [n] over all outputs, in float64 and in blocks."""
        means = self.means.flatten(1)
        variances = self.variances.flatten(1)
        size = max(1, _BLOCK // len(means))
        parts = [
            compute(m.double(), v.double().sqrt())
            for m, v in zip(means.split(size, 1), variances.split(size, 1), strict=True)
        ]
        return torch.cat(parts).reshape(self.mean.shape).to(self.means.dtype)


class PropagatedPredictive(RealPredictive):
    """One Gaussian per input whose variance is split into epistemic and aleatoric parts.

    Args:
        mean: predictive means [N] or [N, D].
        epistemic: variance of the network's output, likewise.
        noise: noise variance.
    """

    def __init__(self, mean: Tensor, epistemic: Tensor, noise: float) -> None:
        super().__init__(mean.unsqueeze(0), (epistemic + noise).unsqueeze(0))
        self._epistemic, self._noise = epistemic, noise

    @property
    def epistemic(self) -> Tensor:
        """Variance of the network's output."""
        return self._epistemic

    @property
    def aleatoric(self) -> Tensor:
        """Noise variance."""
        return torch.full_like(self._epistemic, self._noise)


def _checked(values: Tensor, name: str, axes: int) -> Tensor:
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


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level={level} must be between 0 and 1; try level=0.9.")


def _check_quantile(q: float) -> None:
    if not 0 <= q <= 1:
        raise ValueError(f"q={q} must be in [0, 1]; try q=0.5.")


def _log_mean_exp(values: Tensor) -> Tensor:
    """Return log mean_s exp(values_s) over the first axis."""
    return values[0] if len(values) == 1 else values.logsumexp(0) - math.log(len(values))


def _log_normal(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))


def _pick(size: int, k: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    return torch.randint(size, (k,), generator=generator, device=device)


def _quantile(mean: Tensor, std: Tensor, q: float) -> Tensor:
    """Return the root y of mean_s Phi((y - m_s)/s_s) = q, in the smaller of the two tails."""
    reach = mean + std * NormalDist().inv_cdf(q)
    low, high = reach.amin(0), reach.amax(0)
    sign, target = (1.0, q) if q <= 0.5 else (-1.0, 1 - q)
    y, step, accurate = (low + high) / 2, high - low, 1e-10 * std.amin(0)
    done = torch.zeros_like(y, dtype=torch.bool)
    while not done.all():
        z = (y - mean) / std
        excess = sign * (torch.erfc(z * (-sign / math.sqrt(2))).mean(0) / 2 - target)
        high = torch.where(excess > 0, y, high)
        low = torch.where(excess > 0, low, y)
        density = (torch.exp(-0.5 * z.square()) / std).mean(0) / math.sqrt(2 * math.pi)
        newton = y - excess / density
        good = (newton >= low) & (newton <= high) & ((newton - y).abs() <= 0.5 * step)
        following = torch.where(good, newton, low + (high - low) / 2)
        step = (following - y).abs()
        y = torch.where(done, y, following)
        done |= (good & (step <= accurate)) | (high - low <= 4e-16 * y.abs() + 1e-6 * accurate)
    return y


def _mode(mean: Tensor, std: Tensor) -> Tensor:
    precision = std.reciprocal()

    def log_parts(y: Tensor) -> Tensor:
        return precision.log() - 0.5 * ((y - mean) * precision).square()

    heights = torch.stack([log_parts(m).logsumexp(0) for m in mean])
    y = mean.gather(0, heights.argmax(0, keepdim=True)).squeeze(0)
    for _ in range(200):
        pull = (log_parts(y) + 2 * precision.log()).softmax(0)
        following = (pull * mean).sum(0)
        moved, y = (following - y).abs(), following
        if (moved <= 1e-12 * std.amin(0)).all():
            break
    return y


def _entropy(mean: Tensor, std: Tensor) -> Tensor:
    nodes, weights = np.polynomial.hermite_e.hermegauss(32)
    total = torch.zeros_like(mean[0])
    for node, weight in zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True):
        for y in mean + node * std:
            total -= weight * _log_mean_exp(_log_normal(y, mean, std.square()))
    return total / len(mean)
