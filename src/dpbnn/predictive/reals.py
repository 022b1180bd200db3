"""Predictive distributions of real numbers: mixtures of Gaussians."""

from __future__ import annotations

import math
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpbnn.predictive.base import (
    NumberPredictive,
    check_quantile,
    checked,
    log_mean_exp,
    pick,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK = 2**23  # elements of a temporary


class RealPredictive(NumberPredictive):
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
        self.means, self.bounds = checked(means, "means", 2), bounds
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
        check_quantile(q)
        if q in (0, 1):
            return self._inside(torch.full_like(self.mean, math.inf if q else -math.inf))
        return self._inside(self._per_output(lambda m, s: _quantile(m, s, q)))

    def samples(self, k: int, generator: torch.Generator | None = None) -> Tensor:
        """Return k draws of y for every input, [k, N] or [k, N, D]."""
        picked = pick(len(self.means), k, generator, self.means.device)
        noise = torch.empty_like(self.means[picked]).normal_(generator=generator)
        return self._inside(self.means[picked] + self.variances[picked].sqrt() * noise)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log 1/S sum_s prod_d N(y_id; m_sid, v_sid), [N]: the joint density of outputs."""
        parts = _log_normal(self._targets(y), self.means, self.variances)
        return log_mean_exp(parts.flatten(2).sum(2) if parts.dim() > 2 else parts)

    def take(self, rows: Any) -> RealPredictive:
        """Return the prediction of some inputs, by their positions."""
        index = torch.as_tensor(rows, device=self.means.device)
        return RealPredictive(self.means[:, index], self.variances[:, index], self.bounds)

    def target(self, position: int) -> RealPredictive:
        """Return the prediction of one of several targets by itself."""
        return RealPredictive(self.means[..., position], self.variances[..., position], self.bounds)

    def tempered(self, temperature: float) -> RealPredictive:
        """Return the prediction with m_s <- m + sqrt(T) (m_s - m) and v_s <- T v_s.

        m is the predictive mean, so that the variance becomes T times what it was.
        """
        spread = (self.means - self.mean) * math.sqrt(temperature)
        return RealPredictive(self.mean + spread, self.variances * temperature)

    def moved(
        self, scale: float, shift: float, bounds: tuple[float, float] | None
    ) -> RealPredictive:
        """Return the prediction of scale y + shift, in double precision, with its bounds."""
        means, variances = self.means.double(), self.variances.double()
        return RealPredictive(means * scale + shift, variances * scale**2, bounds)

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


def _log_normal(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))


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
            total -= weight * log_mean_exp(_log_normal(y, mean, std.square()))
    return total / len(mean)
