"""Privacy losses of Poisson-subsampled Gaussian releases on a grid, for the pld accountant."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any


def expm1(x: float) -> float:
    """Return exp(x) - 1, infinite where a float cannot hold it."""
    return math.expm1(x) if x < 700 else math.inf


def _tail(rate: float, count: int, delta: float) -> float:
    """Return the log mass cut off each release's noise: 1e-5 delta over all releases.

    Rounded down to a multiple of four, so that nearby counts share a distribution.
    """
    return 4 * math.floor(min(-20.0, math.log(1e-5 * delta / (rate * count))) / 4)


def _widest_loss(rate: float, sigma: float, tail: float) -> float:
    """Return the largest privacy loss of one release whose noise is cut off at log mass `tail`."""
    exponent = (1 + 2 * math.sqrt(-2 * tail) * sigma) / (2 * sigma**2)
    return math.log1p(rate * math.expm1(exponent)) if exponent < 700 else exponent


def _interval(rate: float, sigma: float, tail: float) -> float:
    """Return the grid step of the privacy loss: 1e-4, halved or doubled as the release asks.

    The extra variance of rounding is about (step / loss std)^2 of the true one, so the step goes
    below a tenth of the std q sqrt(exp(1/sigma^2) - 1) as far as 40 000 grid points allow, and
    above 1e-4 only where 60 000 would not suffice.
    """
    spread = rate * math.sqrt(expm1(1 / sigma**2))
    widest = _widest_loss(rate, sigma, tail)
    step = 1e-4
    while step > spread / 10 and step / 2 >= max(widest / 40_000, 1e-7):
        step /= 2
    while step < widest / 60_000:
        step *= 2
    return step


def loss_grid(
    amplified: Sequence[tuple[float, float, int]], mu: float, delta: float
) -> tuple[list[float], float]:
    """Return the log mass cut off each release's noise, and the step of the common grid.

    Losses are rounded so that epsilon can only rise: by a relative 2e-4 at most where the step is
    one of 25 parts of q/sigma, about the standard deviation of a loss, for every release; so it is
    not made smaller than that.
    """
    tails = [_tail(rate, count, delta) for rate, _, count in amplified]
    steps = (_interval(r, s, tail) for (r, s, _), tail in zip(amplified, tails, strict=True))
    step = max(steps, default=1e-4)
    least = min([*(rate / sigma for rate, sigma, _ in amplified), mu or math.inf])
    while 2 * 25 * step <= least < math.inf:
        step *= 2
    return tails, step


@functools.lru_cache(maxsize=256)
def poisson_losses(rate: float, sigma: float, interval: float, tail: float) -> Any:
    """Return what dp-accounting's from_gaussian_mechanism returns, without its loop over cells."""
    from dp_accounting.pld import privacy_loss_distribution
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

    return privacy_loss_distribution.PrivacyLossDistribution(
        _side(rate, sigma, interval, tail, AdjacencyType.REMOVE),
        _side(rate, sigma, interval, tail, AdjacencyType.ADD),
    )


def _side(rate: float, sigma: float, interval: float, tail: float, adjacency: Any) -> Any:
    """Return the losses on a grid, rounded up, for a record removed or for one added."""
    import numpy as np
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    release = GaussianPrivacyLoss(
        sigma, log_mass_truncation_bound=tail, sampling_prob=rate, adjacency_type=adjacency
    )
    bounds = release.connect_dots_bounds()
    low = math.floor(bounds.epsilon_lower / interval)
    high = math.ceil(bounds.epsilon_upper / interval)
    epsilons = np.arange(low, high + 1) * interval
    deltas = _hockey_stick(release, epsilons, adjacency is AdjacencyType.REMOVE)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)


def _hockey_stick(release: Any, epsilons: Any, remove: bool) -> Any:
    """Return delta at each epsilon of one Poisson-subsampled release, on one side.

    The loss passes epsilon at x, and delta is upper(x) - exp(epsilon) lower(x) with the two
    distribution functions, where for a record removed, or added (signs below),

        x = -+ 1/2 -+ sigma^2 log(1 + (exp(+- epsilon) - 1)/q);

    with no such x delta is 1 - exp(epsilon), or 0.
    """
    import numpy as np

    rate, sign = release.sampling_prob, 1 if remove else -1
    signed = sign * epsilons
    inside = np.expm1(np.minimum(signed, 1.0)) / rate
    reached = inside > -1
    deltas = np.where(reached | (not remove), 0.0, -np.expm1(np.minimum(epsilons, 0.0)))
    large = signed - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(signed, 1.0)))
    loss = np.where(signed > 1.0, large, np.log1p(np.maximum(inside, -1 + 2.0**-53)))[reached]
    x = -sign * (0.5 + release.standard_deviation**2 * loss)
    lower = np.exp(epsilons[reached] + release.mu_lower_log_cdf(x))
    deltas[reached] = release.mu_upper_cdf(x) - lower
    return np.clip(deltas, 0.0, 1.0)


def self_composed(rate: float, sigma: float, count: int, interval: float, tail: float) -> Any:
    """Return the losses of `count` Poisson-subsampled releases.

    In two stages where dp-accounting is slow: few points on the grid and a large count.
    """
    one, stage = poisson_losses(rate, sigma, interval, tail), 64
    if count < 50_000 or _widest_loss(rate, sigma, tail) / interval > 2_000:
        return one.self_compose(count)
    repeats, rest = divmod(count, stage)
    total = one.self_compose(stage, tail_mass_truncation=1e-22).self_compose(repeats)
    if rest:
        total = total.compose(one.self_compose(rest, tail_mass_truncation=1e-22))
    return total
