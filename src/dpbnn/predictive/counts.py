"""Predictive distributions of counts: mixtures of Poisson distributions."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Callable, Iterator

_BLOCK = 2**21  # elements of a temporary
_RARE = 1e-12  # probability beyond which counts are left out of the entropy


class CountPredictive(NumberPredictive):
    """A mixture of Poisson distributions, 1/S sum_s Poisson(r_s).

    variance = variance over samples of the rate (epistemic) + mean rate (aleatoric). Quantiles,
    intervals, mode and entropy are those of each output by itself.

    Counts are whole numbers, so an interval of probability 0.9 holds at least 0.9, and often more.
    Mean, mode, quantiles, intervals and draws are clipped to public bounds of the counts, if
    there are any. Probabilities, variances and entropy stay those of the mixture.

    Args:
        log_rates: logarithms of the rates of every posterior sample, [S, N] or [S, N, D].
        bounds: (low, high), public range of the counts; None for no bounds.
    """

    def __init__(self, log_rates: Tensor, bounds: tuple[float, float] | None = None) -> None:
        self.log_rates, self.bounds = checked(log_rates, "log_rates", 2).double(), bounds
        if (self.log_rates > 700).any():
            raise ValueError("log_rates must be at most 700; check the inputs and the weights.")

    @property
    def means(self) -> Tensor:  # type: ignore[override]
        """Rates r_s, the means of every posterior sample, shaped like the logarithms."""
        return self.log_rates.exp()

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean variance of a count given its rate, mean_s[r_s]."""
        return self.means.mean(0)

    @cached_property
    def mode(self) -> Tensor:
        """The most probable count: the best of the components' modes, moved uphill."""
        return self._inside(self._per_output(_mode))

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of each count in nats, without counts beyond quantiles of 1e-12."""
        return self._per_output(_entropy)

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(count <= y), shaped like the mean; 0 below 0."""
        return _cdf(self._targets(y), self.means)

    def quantile(self, q: float) -> Tensor:
        """Return the smallest count k with P(count <= k) >= q."""
        check_quantile(q)
        if q in (0, 1):
            return self._inside(torch.full_like(self.mean, math.inf if q else 0.0))
        return self._inside(self._per_output(lambda log_rates: _quantile(log_rates.exp(), q)))

    def samples(self, k: int, generator: torch.Generator | None = None) -> Tensor:
        """Return k draws of the count for every input, [k, N] or [k, N, D]."""
        picked = pick(len(self.log_rates), k, generator, self.log_rates.device)
        return self._inside(torch.poisson(self.means[picked], generator=generator))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log 1/S sum_s prod_d Poisson(y_id; r_sid), [N]: of all counts of an example."""
        y = self._targets(y)
        bad = ~((y >= 0) & (y == y.round()) & y.isfinite())
        if bad.any():
            raise ValueError(
                f"{int(bad.sum())} targets are no counts; counts must be whole numbers, 0 or more."
            )
        parts = _log_poisson(y, self.log_rates)
        return log_mean_exp(parts.flatten(2).sum(2) if parts.dim() > 2 else parts)

    def take(self, rows: Any) -> CountPredictive:
        """Return the prediction of some inputs, by their positions."""
        index = torch.as_tensor(rows, device=self.log_rates.device)
        return CountPredictive(self.log_rates[:, index], self.bounds)

    def target(self, position: int) -> CountPredictive:
        """Return the prediction of one of several targets by itself."""
        return CountPredictive(self.log_rates[..., position], self.bounds)

    def _per_output(self, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return compute(log_rates [S, n]) -> [n] over all outputs, in blocks."""
        flat = self.log_rates.flatten(1)
        parts = [compute(part) for part in flat.split(max(1, _BLOCK // len(flat)), 1)]
        return torch.cat(parts).reshape(self.mean.shape)


def _log_poisson(y: Tensor, log_rates: Tensor) -> Tensor:
    """Return y log r - r - log y!; a rate that rounds to 0 keeps its logarithm."""
    logs = torch.where(y == 0, 0.0, y * log_rates)  # 0 log 0 = 0
    return logs - log_rates.exp() - torch.lgamma(y + 1)


def _cdf(y: Tensor, rates: Tensor) -> Tensor:
    """Return mean_s P(count <= y | r_s) = mean_s Q(y + 1, r_s)."""
    whole = y.floor().clamp(min=0).expand(rates.shape)
    found = torch.special.gammaincc(whole + 1, rates).mean(0)
    return torch.where(y < 0, 0.0, found)


def _quantile(rates: Tensor, q: float) -> Tensor:
    """Return the smallest k with mean_s Q(k + 1, r_s) >= q, by bisection."""
    high = rates.amax(0).ceil() + 1
    while (short := _cdf(high, rates) < q).any():
        high = torch.where(short, 2 * high, high)
    low = torch.full_like(high, -1.0)  # P(count <= low) < q <= P(count <= high)
    while (high - low > 1).any():
        middle = ((low + high) / 2).floor()
        enough = _cdf(middle, rates) >= q
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
    return high


def _mode(log_rates: Tensor) -> Tensor:
    def height(y: Tensor) -> Tensor:
        found = log_mean_exp(_log_poisson(y.clamp(min=0), log_rates))
        return torch.where(y < 0, -math.inf, found)

    starts = log_rates.exp().floor()
    heights = torch.stack([height(start) for start in starts])
    y = starts.gather(0, heights.argmax(0, keepdim=True)).squeeze(0)
    best = heights.amax(0)
    while True:
        moved = False
        for step in (1.0, -1.0):
            found = height(y + step)
            better = found > best
            y, best = torch.where(better, y + step, y), torch.where(better, found, best)
            moved = moved or bool(better.any())
        if not moved:
            return y


def _entropy(log_rates: Tensor) -> Tensor:
    total = torch.zeros_like(log_rates[0])
    for _, p, inside in usual_counts(log_rates):
        total += torch.where(inside, torch.special.entr(p), 0.0)
    return total


def usual_counts(log_rates: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield counts, their probabilities in the mixture, and whether they are usual, [n] each.

    Usual are all counts between the quantiles of 1e-12 and 1 - 1e-12. They come in order.

    Args:
        log_rates: [S, n].
    """
    rates = log_rates.exp()
    y, last = _quantile(rates, _RARE), _quantile(rates, 1 - _RARE)
    logs = _log_poisson(y, log_rates)
    for _ in range(int((last - y).max()) + 1):
        yield y, logs.exp().mean(0), y <= last
        y = y + 1
        logs += log_rates - y.log()
