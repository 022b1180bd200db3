"""Metrics of predicted numbers and counts: error, density, intervals, CRPS.

All of them take a `RealPredictive` or a `CountPredictive`, and targets of the shape of its mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbnn.evaluation.checked import Floats, Targeted, array, finite
from dpbnn.evaluation.resampling import Sums
from dpbnn.predictive import CountPredictive, Predictive, RealPredictive
from dpbnn.predictive.counts import usual_counts

LEVELS = (0.5, 0.8, 0.9, 0.95)
_BLOCK = 1 << 17  # numbers in a temporary array, few enough for the cache
_WIDTHS = 2000  # largest number of records whose intervals are computed


def rmse(predictive: Any, y: Any) -> float:
    """Return the root of the mean squared error of the predictive mean.

    Args:
        predictive: a predictive distribution; or predictions [N] or [N, D].
        y: targets of the same shape.
    """
    return float(np.sqrt(np.mean(_errors(predictive, y)[0] ** 2)))


def mae(predictive: Any, y: Any) -> float:
    """Return the mean absolute error of the predictive mean.

    Args:
        predictive: a predictive distribution; or predictions [N] or [N, D].
        y: targets of the same shape.
    """
    return float(np.abs(_errors(predictive, y)[0]).mean())


def r2(predictive: Any, y: Any) -> float:
    """Return R^2 = 1 - sum (y - mean)^2 / sum (y - average of y)^2; averaged over outputs.

    1 is perfect, 0 is as good as the average of the test targets. NaN where they are all equal.

    Args:
        predictive: a predictive distribution; or predictions [N] or [N, D].
        y: targets of the same shape.
    """
    error, target = _errors(predictive, y)
    return float(r2s(error, target, Sums(len(target)))[0])


def log_likelihood(predictive: Any, y: Any) -> float:
    """Return the mean of log p(y_i | x_i), joint over a record's outputs."""
    t = Targeted.of(predictive, y)
    return float(log_densities(t).mean())


def pit(predictive: Any, y: Any) -> Floats:
    """Return the probability integral transform, F(y_i | x_i) of the mixture, shaped like y.

    Uniform on [0, 1] where the prediction is calibrated. Of a count, the middle between F(y_i - 1)
    and F(y_i).
    """
    low, high = ranks(Targeted.of(predictive, y))
    return (low + high) / 2


def ranks(t: Targeted) -> tuple[Floats, Floats]:
    """Return F of the mixture just below y_i and at y_i, shaped like y; equal for real numbers."""
    if isinstance(t.predictive, CountPredictive):
        y = torch.as_tensor(t.y)
        return array(t.predictive.cdf(y - 1), "y"), array(t.predictive.cdf(y), "y")

    def cdf(mean: Tensor, std: Tensor, target: Tensor) -> Tensor:
        return torch.special.ndtr((target - mean) / std).mean(0)

    found = _per_output(t, cdf)
    return found, found


def crps(predictive: Any, y: Any) -> float:
    """Return the mean continuous ranked probability score, in units of y; averaged over outputs.

        1/S sum_s A(y - m_s, v_s) - 1/(2 S^2) sum_st A(m_s - m_t, v_s + v_t),
        A(d, v) = d (2 Phi(d/sqrt(v)) - 1) + 2 sqrt(v) phi(d/sqrt(v))

    Exact for a mixture of S Gaussians; takes time S^2 N. Of counts it is the ranked probability
    score, sum_k (F(k) - 1[y <= k])^2.

    Reference: Grimit et al., The continuous ranked probability score for circular variables, 2006.
    """
    return float(scores(Targeted.of(predictive, y)).mean())


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Nominal and observed coverage of intervals.

    Attributes:
        nominal: probability of the equal-tailed interval.
        observed: share of targets inside.
        low: lower end of the bootstrap interval of `observed`; NaN where there is none.
        high: its upper end.
        width: mean width of the intervals, over at most 2000 evenly spaced records.
    """

    nominal: float
    observed: float
    low: float
    high: float
    width: float


def interval_coverage(
    predictive: Any, y: Any, levels: Sequence[float] = LEVELS
) -> tuple[Coverage, ...]:
    """Return how many targets lie in the equal-tailed intervals of every level.

    Args:
        predictive: a predictive distribution.
        y: targets, shaped like the mean.
        levels: probabilities of the intervals.
    """
    t = Targeted.of(predictive, y)
    found = ranks(t)
    observed = (t.per_record(covered(found, level)).mean() for level in levels)
    return tuple(
        Coverage(level, float(share), math.nan, math.nan, width(t, level))
        for level, share in zip(levels, observed, strict=True)
    )


def covered(ranks: tuple[Floats, Floats], level: float) -> Floats:
    """Return 1 where the target is in the equal-tailed interval of this probability.

    A count y is in it where P(count <= y) >= (1 - level)/2 and P(count < y) < (1 + level)/2.
    """
    if not 0 < level < 1:
        raise ValueError(f"levels: {level} does not lie between 0 and 1; try 0.9")
    tail = (1 - level) / 2
    below, upto = ranks
    return ((upto >= tail) & (below <= 1 - tail)).astype(np.float64)


def width(t: Targeted, level: float) -> float:
    """Return the mean width of the intervals of at most 2000 evenly spaced records."""
    rows = torch.linspace(0, len(t) - 1, min(len(t), _WIDTHS), dtype=torch.float64).long()
    low, high = t.predictive.take(rows).interval(level)
    return float((high - low).double().mean())


def errors(t: Targeted) -> Floats:
    """Return predictive mean - target, shaped like y."""
    return array(t.predictive.mean, "mean").astype(np.float64) - t.y


def r2s(error: Floats, y: Floats, sums: Sums) -> Floats:
    """Return R^2 of every resample."""
    error, y = error.reshape(len(y), -1), y.reshape(len(y), -1)
    y = y - y.mean(0)
    found = []
    for k in range(y.shape[1]):
        left = sums(error[:, k] ** 2)[:, 0]
        whole = sums(y[:, k] ** 2)[:, 0] - sums(y[:, k])[:, 0] ** 2 / sums.total
        varies = whole > 1e-12 * np.maximum(sums(y[:, k] ** 2)[:, 0], left)
        found.append(np.where(varies, 1 - left / np.where(varies, whole, 1.0), np.nan))
    return np.mean(found, axis=0)


def _errors(predictive: Any, y: Any) -> tuple[Floats, Floats]:
    """Return prediction - target, and the targets, in the same shape."""
    if isinstance(predictive, Predictive):
        t = Targeted.of(predictive, y)
        return errors(t), t.y
    mean, target = finite(predictive, "predictions"), finite(y, "y")
    if mean.size != target.size or len(mean) != len(target):
        raise ValueError(
            f"y has shape {list(target.shape)} and the predictions {list(mean.shape)}; give one "
            f"target per prediction"
        )
    target = target.reshape(mean.shape)
    return mean - target, target


def log_densities(t: Targeted) -> Floats:
    """Return log p(y_i | x_i) of every record."""
    return array(t.predictive.log_prob(torch.as_tensor(t.y)), "y").astype(np.float64)


def scores(t: Targeted) -> Floats:
    """Return the continuous ranked probability score of every record."""
    if isinstance(t.predictive, CountPredictive):
        return t.per_record(_ranked_scores(t.predictive, t.y))
    return t.per_record(_per_output(t, _crps))


def _ranked_scores(predictive: CountPredictive, y: Floats) -> Floats:
    """Return sum_k (F(k) - 1[y <= k])^2 of every count, shaped like y."""
    logs = predictive.log_rates.flatten(1)
    target = torch.as_tensor(y, device=logs.device).flatten()
    size, parts = max(1, _BLOCK // len(logs)), []
    for log_rates, own in zip(logs.split(size, 1), target.split(size), strict=True):
        cdf = torch.zeros_like(own)
        first = last = total = torch.zeros_like(own)
        for step, (count, p, inside) in enumerate(usual_counts(log_rates)):
            first = count if step == 0 else first
            cdf = cdf + p
            last = torch.where(inside, count, last)
            total = total + torch.where(inside, (cdf - (own <= count).to(cdf)).square(), 0.0)
        parts.append(total + (first - own).clamp(min=0) + (own - 1 - last).clamp(min=0))
    return array(torch.cat(parts), "y").reshape(y.shape)


def _crps(mean: Tensor, std: Tensor, target: Tensor) -> Tensor:
    count, variance = len(mean), std.square()
    near = _spread(target - mean, variance).mean(0)
    own = std.sum(0) * (2 / math.sqrt(math.pi))  # A(0, 2 v_s)
    cross = torch.zeros_like(near)
    for s in range(count - 1):
        cross += _spread(mean[s] - mean[s + 1 :], variance[s] + variance[s + 1 :]).sum(0)
    return near - (own + 2 * cross) / (2 * count**2)


def _spread(distance: Tensor, variance: Tensor) -> Tensor:
    """Return E|X| of a normal variable X with that mean and variance."""
    std = variance.sqrt()
    z = distance / std
    bulk = distance * torch.erf(z * math.sqrt(0.5))
    return bulk + std * torch.exp(-0.5 * z.square()) * math.sqrt(2 / math.pi)


def _per_output(t: Targeted, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Floats:
    """Return compute(means, stds, targets) over all outputs, in float64 and in blocks."""
    predictive = t.predictive.plain
    assert isinstance(predictive, RealPredictive)
    means, variances = predictive.means.flatten(1), predictive.variances.flatten(1)
    target = torch.as_tensor(t.y, device=means.device).flatten()
    size = max(1, _BLOCK // len(means))
    parts = [
        compute(m.double(), v.double().sqrt(), y)
        for m, v, y in zip(
            means.split(size, 1), variances.split(size, 1), target.split(size), strict=True
        )
    ]
    return array(torch.cat(parts), "y").reshape(t.y.shape)
