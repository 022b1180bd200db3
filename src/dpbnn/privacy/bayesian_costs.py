"""Bayesian differential privacy: per-step costs, their estimator, composition and distances.

Everything here is about one random future record x from the distribution of the data, not about
every record as differential privacy is. The accountant and its words are in `bayesian`.

Reference: Triastcyn and Faltings 2020, Bayesian Differential Privacy for Machine Learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def left_cost(order: int, rate: float, ratio: ArrayLike) -> Array:
    """Return lambda D_(lambda+1) of one subsampled release, for each ratio r = d / noise std.

        l(lambda, r) = log E_{k ~ Bin(lambda+1, q)} exp((k^2 - k) r^2 / 2)

    which is c_L of Theorem 3 before the expectation over x. The sum starts at k = 2, since the
    terms before it are exact: l = log(1 + sum_k P(k) (exp((k^2-k) r^2/2) - 1)), in logarithms.

    Args:
        order: lambda, a whole number >= 1.
        rate: q, the probability that a record is in the batch.
        ratio: distances between neighbouring releases in units of the noise's standard deviation.
    """
    from scipy.special import gammaln

    r = np.atleast_1d(np.asarray(ratio, dtype=np.float64))
    half = r**2 / 2
    if rate == 1:
        return np.asarray(order * (order + 1) * half)
    k = np.arange(2, order + 2, dtype=np.float64)
    choose = gammaln(order + 2) - gammaln(k + 1) - gammaln(order + 2 - k)
    log_p = choose + k * math.log(rate) + (order + 1 - k) * math.log1p(-rate)
    z = np.multiply.outer(half, k**2 - k)
    top = (z + log_p).max(axis=-1)
    total = (np.exp(z + log_p - top[..., None]) * -np.expm1(-z)).sum(axis=-1)
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(0.0, top + np.log(total)))


def upper_mean(
    log_values: ArrayLike,
    failure: float,
    counts: ArrayLike | None = None,
    starts: ArrayLike | None = None,
) -> Array:
    """Return the logarithm of an upper value for E v from samples of log v (Theorem 4).

        M + t_{1-failure, m-1} S / sqrt(m - 1)

    with M the mean of the m samples of v and S^2 the mean of (v - M)^2.

    **No guarantee.** Above the mean with probability 1 - failure where the mean of m samples is
    nearly Gaussian. v = exp(T l) seldom is: where a few samples hold most of E v, and they are not
    among those seen, the value is far too low. See docs/bayesian.md for how far.

    Args:
        log_values: samples of log v.
        failure: probability that the value is too low; 0 gives the plain mean M.
        counts: how often each sample occurs; once by default.
        starts: where each of several samples begins in `log_values`; one sample by default.
    """
    from scipy import stats

    a = np.asarray(log_values, dtype=np.float64)
    n = np.ones_like(a) if counts is None else np.asarray(counts, dtype=np.float64)
    first = np.zeros(1, dtype=np.int64) if starts is None else np.asarray(starts)
    lengths = np.diff([*first, len(a)])
    m = np.add.reduceat(n, first)
    top = np.maximum.reduceat(a, first)
    u = np.exp(a - np.repeat(top, lengths))
    mean = np.add.reduceat(n * u, first) / m
    if failure == 0:
        return np.asarray(top + np.log(mean))
    spread = np.add.reduceat(n * (u - np.repeat(mean, lengths)) ** 2, first) / m
    quantile = stats.t.isf(failure, m - 1)
    return np.asarray(top + np.log(mean + quantile * np.sqrt(spread / (m - 1))))


def step_cost(
    order: int,
    distances: ArrayLike,
    noise_std: float,
    rate: float,
    steps: int,
    failure: float = 0.0,
) -> float:
    """Return the cost of one of T steps at an order lambda, from samples of the distance d.

        c_t(lambda) = (1/T) log E_x[ exp(T l(lambda, d_x / noise_std)) ]

    The T-th power is Hoelder's (Theorem 1): the extra record x is the same at every step, so the
    expectation over x of a product of T factors is bounded by the product of their T-norms.

    Args:
        order: lambda.
        distances: at least two samples of d, the distance between neighbouring sums before noise.
        noise_std: standard deviation of the noise, absolute.
        rate: q.
        steps: T, the number of steps of the whole run, fixed in advance.
        failure: of the estimator; 0 takes the plain mean.
    """
    d = checked_distances(distances)
    logs = steps * left_cost(order, rate, d / noise_std)
    return float(upper_mean(logs, failure)[0]) / steps


def best_order(costs: ArrayLike, orders: ArrayLike, delta: float) -> tuple[float, int]:
    """Return (epsilon_mu, lambda) = min over lambda of (sum_t c_t(lambda) - log delta) / lambda.

    At a constant distance d = C it is the moments accountant's old conversion, at alpha = lambda+1.

    Args:
        costs: sum over the steps of c_t, one number per order.
        orders: the lambdas.
        delta: what is left of delta_mu after the estimator's failure.
    """
    order = np.asarray(orders)
    values = (np.asarray(costs, dtype=np.float64) - math.log(delta)) / order
    best = int(np.argmin(values))
    return float(values[best]), int(order[best])


def smallest(value: Callable[[int], float], orders: Sequence[int]) -> tuple[float, int]:
    """Return the smallest value and its order, without looking at all of them.

    The sum of costs is convex in lambda, so (cost + constant) / lambda falls, then rises: look at
    doubling positions until it rises, then narrow the bracket. Any order is as valid as another.

    Args:
        value: (cost + constant) / lambda at an order.
        orders: the lambdas, increasing.
    """
    known: dict[int, float] = {}

    def at(position: int) -> float:
        if position not in known:
            known[position] = value(orders[position])
        return known[position]

    last, low, high = len(orders) - 1, 0, min(1, len(orders) - 1)
    while high < last and at(high) <= at(low):
        low, high = high, min(2 * high + 1, last)
    low = low // 2
    while high - low > 2:
        middle = (low + high) // 2
        low, high = (low, middle + 1) if at(middle) <= at(middle + 1) else (middle, high)
    best = min(range(low, high + 1), key=at)
    return at(best), int(orders[best])


def moments_epsilon(
    ratio: float, rate: float, steps: int, delta: float, orders: Sequence[int] = range(1, 513)
) -> float:
    """Return epsilon by the moments accountant with its old conversion, for comparison.

    **Guarantee.** An upper bound under add/remove and zero-out, looser than `pld` by a factor of
    about two: what Bayesian accounting is compared with in the paper, since it converts likewise.

    Args:
        ratio: largest distance / noise std, so 1 / sigma.
        rate: q.
        steps: number of releases.
        delta: of the guarantee.
        orders: the lambdas, increasing.
    """

    def value(order: int) -> float:
        return best_order([steps * left_cost(order, rate, ratio)[0]], [order], delta)[0]

    return smallest(value, orders)[0]


def pair_distances(gram: Any, clip: float = math.inf, batches: Any = None) -> Array:
    """Return distances |g_i - g_j| between all pairs, from inner products alone.

    The paper's protocol: pairs of records, or with `batches` pairs of batches, as samples of the
    distance between neighbouring releases. `contributions.gram()` has the inner products without a
    second backward pass. Two batches that leave out one record each, of an otherwise equal sum,
    differ as these two records do. Under zero-out and add/remove the distance is the norm instead,
    which the gate has anyway.

    Args:
        gram: inner products <g_i, g_j> (tensor or array).
        clip: records are clipped to this norm first; infinite leaves them.
        batches: matrix [batches, records] of weights; row b stands for the sum of weighted records.
    """
    g = _numbers(gram)
    if g.ndim != 2 or g.shape[0] != g.shape[1] or not np.isfinite(g).all():
        raise ValueError(f"gram: has shape {g.shape}; give a square matrix of finite numbers")
    norms = np.sqrt(np.maximum(np.diag(g), 0.0))
    factor = np.minimum(1.0, clip / np.maximum(norms, np.finfo(float).tiny))
    g = g * np.outer(factor, factor)
    if batches is not None:
        weights = np.asarray(batches, dtype=np.float64)
        g = weights @ g @ weights.T
    squares = np.diag(g)
    i, j = np.triu_indices(len(g), 1)
    return np.asarray(np.sqrt(np.maximum(squares[i] + squares[j] - 2 * g[i, j], 0.0)))


def checked_distances(distances: Any) -> Array:
    """Return distances as a flat array, or raise where they are no sample of a distance."""
    d = _numbers(distances).ravel()
    if len(d) < 2:
        raise ValueError(
            f"distances: has {len(d)} samples; the estimator needs at least 2 at every step"
        )
    if not (np.isfinite(d).all() and (d >= 0).all()):
        raise ValueError(
            "distances: must be finite and >= 0; a release at infinite distance has no cost"
        )
    return d


def _numbers(values: Any) -> Array:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, np.float64)


def attack_probability(epsilon: float) -> float:
    """Return 1 / (1 + exp(-epsilon)), a reading aid.

    With an even prior, no test between two neighbouring datasets that obey epsilon with delta = 0
    is right with a higher probability. It says nothing about delta, and of epsilon_mu it says only
    what is true on average over records drawn from the distribution of the data.
    """
    return 1 / (1 + math.exp(-epsilon)) if epsilon > -700 else 0.0
