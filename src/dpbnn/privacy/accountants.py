"""Accountants: from privacy events to epsilon at a given delta."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dpbnn.privacy.events import Event, UnsupportedEvent, check_relation, gaussian_mu
from dpbnn.privacy.relation import Relation

__all__ = ["ACCOUNTANTS", "Accountant", "accountant", "default_accountant", "gaussian_epsilon"]

_DISTINCT_SIGMAS = 48


class Accountant(ABC):
    """Turns the events of one or several runs into epsilon.

    Attributes:
        name: what plans, statements and the command line call it.
        rigorous: whether the value is an upper bound on the true epsilon.
    """

    name: str
    rigorous: bool = True

    @property
    def version(self) -> str:
        """Name and version of the code that computes the value."""
        return f"dp-accounting {importlib.metadata.version('dp-accounting')}"

    def supports(self, event: Event, relation: Relation) -> str | None:
        """Return None if `event` can be accounted for, otherwise the reason why not."""
        try:
            check_relation(event, relation)
        except UnsupportedEvent as error:
            return str(error)
        return self._refusal(event)

    def epsilon(
        self, events: Iterable[Event], delta: float, relation: Relation = Relation.ZERO_OUT
    ) -> float:
        """Return epsilon at `delta` of all events composed.

        Raises:
            UnsupportedEvent: if one of the events has no analysis here.
        """
        if not (0 < delta < 1):
            raise ValueError(f"delta={delta}: must lie in (0, 1); 1e-5 is common, below 1/n")
        events = [event for event in events if event.count > 0]
        for event in events:
            refusal = self.supports(event, relation)
            if refusal is not None:
                raise UnsupportedEvent(refusal)
        if any(event.noise_multiplier == 0 for event in events):
            return math.inf
        return max(0.0, float(self._epsilon(events, delta, relation))) if events else 0.0

    def _refusal(self, event: Event) -> str | None:
        return None

    @abstractmethod
    def _epsilon(self, events: list[Event], delta: float, relation: Relation) -> float: ...


class PLD(Accountant):
    """Privacy loss distributions, discretised pessimistically.

    The privacy loss of one Poisson-subsampled release is rounded to a grid by connecting the dots
    of its hockey-stick curve, which can only raise delta(epsilon), and convolved by FFT.

    **Guarantee.** An upper bound, tight up to the grid. The noise's far tails, 1e-5 delta in all,
    count as certain failure, and an allowance of 4 * 2^-52 per release is taken off delta for the
    floating-point error of the FFT.

    Reference: Doroshenko et al. 2022 (Connect the Dots), as implemented by dp-accounting.
    """

    name = "pld"

    def _refusal(self, event: Event) -> str | None:
        if event.sampling == "fixed-size" and event.amplified:
            return (
                "the pld accountant has no analysis of fixed-size sampling without replacement; "
                "use accountant='rdp', or sampling='poisson'"
            )
        return None

    def _epsilon(self, events: list[Event], delta: float, relation: Relation) -> float:
        return _pld_epsilon(tuple(events), delta, relation)


class RDP(Accountant):
    """Renyi differential privacy (the moments accountant), with the improved conversion.

    For Poisson sampling at integer order a, per release,

        RDP(a) = log( sum_k C(a,k) (1-q)^(a-k) q^k exp((k^2-k)/(2 sigma^2)) ) / (a-1),
        epsilon = min_a RDP(a) + log((a-1)/a) - (log delta + log a)/(a-1).

    **Guarantee.** An upper bound, some 10 % loose. The only analysis here of fixed-size batches
    (Wang, Balle, Kasiviswanathan 2019, replace-one, sensitivity 2C).

    Reference: Mironov, Talwar, Zhang 2019; Canonne, Kamath, Steinke 2020; by dp-accounting.
    """

    name = "rdp"

    def _epsilon(self, events: list[Event], delta: float, relation: Relation) -> float:
        import dp_accounting
        from dp_accounting import rdp

        poisson, mu = _split([e for e in events if e.sampling != "fixed-size"], relation)
        parts: list[Any] = [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)),
                count,
            )
            for rate, sigma, count in poisson
        ]
        if mu > 0:
            parts.append(dp_accounting.GaussianDpEvent(1 / mu))
        for event in events:
            if event.sampling == "fixed-size":
                noise = dp_accounting.GaussianDpEvent(event.noise_multiplier / relation.shift)
                sampled = dp_accounting.SampledWithoutReplacementDpEvent(
                    event.n, event.batch_size, noise
                )
                parts.append(dp_accounting.SelfComposedDpEvent(sampled, event.count))
        neighbours = (
            dp_accounting.NeighboringRelation.REPLACE_ONE
            if relation is Relation.REPLACE_ONE
            else dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        )
        ledger = rdp.RdpAccountant(neighboring_relation=neighbours)
        with _without_warnings():
            ledger.compose(dp_accounting.ComposedDpEvent(parts))
            return float(ledger.get_epsilon(delta))


class GDPCLT(Accountant):
    """Gaussian differential privacy by the central limit theorem: an approximation.

        mu = q sqrt(T (exp(1/sigma^2) - 1)),   delta(epsilon) as of one Gaussian mechanism.

    **No guarantee.** The value can lie below the true epsilon (at the DP-BNN paper's setting it
    is 0.834 where a rigorous lower bound is 0.847). Computed only to set published numbers beside
    ours; never a default, never part of a minimum.

    Reference: Bu, Dong, Long, Su 2020; the DP-BNN paper, Theorems 2 and 3.
    """

    name = "gdp-clt"
    rigorous = False

    @property
    def version(self) -> str:
        """Name and version of the code that computes the value."""
        return "dpbnn"

    def _refusal(self, event: Event) -> str | None:
        if event.sampling not in ("poisson", "full-batch"):
            return f"the gdp-clt formula is for Poisson batches, not for {event.sampling} sampling"
        return None

    def _epsilon(self, events: list[Event], delta: float, relation: Relation) -> float:
        squared = sum(
            e.count * e.rate**2 * _expm1((relation.shift / e.noise_multiplier) ** 2) for e in events
        )
        return gaussian_epsilon(math.sqrt(squared), delta)


class Exact(Accountant):
    """Exact composition of Gaussian mechanisms without amplification.

        delta(epsilon) = Phi(-epsilon/mu + mu/2) - exp(epsilon) Phi(-epsilon/mu - mu/2)

    **Guarantee.** Equality, not a bound, for full batches; an upper bound that is attained for a
    partition. See `gaussian_mu` for mu.
    """

    name = "exact"

    @property
    def version(self) -> str:
        """Name and version of the code that computes the value."""
        return "dpbnn"

    def _refusal(self, event: Event) -> str | None:
        if event.amplified:
            return (
                f"exact Gaussian composition does not cover {event.sampling} batches; "
                f"use accountant={'rdp' if event.sampling == 'fixed-size' else 'pld'!r}"
            )
        return None

    def _epsilon(self, events: list[Event], delta: float, relation: Relation) -> float:
        return gaussian_epsilon(gaussian_mu(events, relation), delta)


ACCOUNTANTS: dict[str, Accountant] = {a.name: a for a in (Exact(), PLD(), RDP(), GDPCLT())}


def accountant(name: str | Accountant) -> Accountant:
    """Return the accountant called `name`."""
    if isinstance(name, Accountant):
        return name
    if name not in ACCOUNTANTS:
        allowed = ", ".join(repr(a) for a in ACCOUNTANTS)
        raise ValueError(f"accountant={name!r}: must be one of {allowed}; the default is 'pld'")
    return ACCOUNTANTS[name]


def default_accountant(events: Iterable[Event]) -> str:
    """Return the tightest rigorous accountant that covers all events.

    That is pld; where no release is amplified, the exact Gaussian curve that pld would approximate;
    with fixed-size batches, rdp, the only one that knows them.
    """
    kinds = {event.sampling for event in events if event.amplified}
    if "fixed-size" in kinds:
        return "rdp"
    return "pld" if kinds else "exact"


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return delta(epsilon) of mu-Gaussian differential privacy."""
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    first = log_ndtr(-epsilon / mu + mu / 2)
    second = epsilon + log_ndtr(-epsilon / mu - mu / 2)
    return float(math.exp(first) * -math.expm1(min(0.0, second - first)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon at `delta` of mu-Gaussian differential privacy, rounded up to 1e-12."""
    from scipy.optimize import brentq

    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    upper = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-9
    root = brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, upper, xtol=1e-13, rtol=1e-13)
    return float(root) * (1 + 1e-12)


def _split(
    events: Sequence[Event], relation: Relation
) -> tuple[list[tuple[float, float, int]], float]:
    """Separate amplified releases, as (rate, sigma, count), from the mu of all others.

    Where one rate comes with very many sigmas (a schedule), each is lowered to the next of a
    geometric grid, which can only raise epsilon.
    """
    mu = gaussian_mu([e for e in events if not e.amplified], relation)
    counts: dict[tuple[float, float], int] = {}
    for event in events:
        if event.amplified:
            key = (event.rate, event.noise_multiplier)
            counts[key] = counts.get(key, 0) + event.count
    grouped: dict[tuple[float, float], int] = {}
    for rate in {rate for rate, _ in counts}:
        sigmas = sorted(sigma for r, sigma in counts if r == rate)
        ratio = (sigmas[-1] / sigmas[0]) ** (1 / _DISTINCT_SIGMAS)
        for sigma in sigmas:
            lowered = sigma
            if len(sigmas) > _DISTINCT_SIGMAS:
                cell = math.floor(math.log(sigma / sigmas[0]) / math.log(ratio))
                lowered = min(sigma, sigmas[0] * ratio**cell)
            grouped[rate, lowered] = grouped.get((rate, lowered), 0) + counts[rate, sigma]
    return [(rate, sigma, count) for (rate, sigma), count in sorted(grouped.items())], mu


def _expm1(x: float) -> float:
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
    spread = rate * math.sqrt(_expm1(1 / sigma**2))
    widest = _widest_loss(rate, sigma, tail)
    step = 1e-4
    while step > spread / 10 and step / 2 >= max(widest / 40_000, 1e-7):
        step /= 2
    while step < widest / 60_000:
        step *= 2
    return step


@functools.lru_cache(maxsize=256)
def _pld_epsilon(events: tuple[Event, ...], delta: float, relation: Relation) -> float:
    from dp_accounting.pld import privacy_loss_distribution

    amplified, mu = _split(list(events), relation)
    rounding = 4 * 2.0**-52 * sum(count for *_, count in amplified)
    if rounding > delta / 2:
        raise UnsupportedEvent(
            f"delta={delta} is too small for the pld accountant at so many releases; "
            f"use accountant='rdp' or a larger delta"
        )
    tails, interval = _grid(amplified, mu, delta)
    total = None
    for (rate, sigma, count), tail in zip(amplified, tails, strict=True):
        points = _widest_loss(rate, sigma, tail) / interval
        part = _self_compose(_poisson_pld(rate, sigma, interval, tail), count, points)
        total = part if total is None else total.compose(part)
    if mu > 0:
        part = privacy_loss_distribution.from_gaussian_mechanism(
            1 / mu, value_discretization_interval=interval
        )
        total = part if total is None else total.compose(part)
    assert total is not None
    return float(total.get_epsilon_for_delta(delta - rounding))


def _grid(
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
def _poisson_pld(rate: float, sigma: float, interval: float, tail: float) -> Any:
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


def _self_compose(pld: Any, count: int, points: float) -> Any:
    """Compose `count` times; in two stages where dp-accounting is slow (sparse, large count)."""
    stage = 64
    if count < 50_000 or points > 2_000:
        return pld.self_compose(count)
    repeats, rest = divmod(count, stage)
    total = pld.self_compose(stage, tail_mass_truncation=1e-22).self_compose(repeats)
    if rest:
        total = total.compose(pld.self_compose(rest, tail_mass_truncation=1e-22))
    return total


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence dp-accounting's note that it left out a Renyi order, which only loosens the bound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
