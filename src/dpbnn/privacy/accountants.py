"""Accountants: from privacy events to epsilon at a given delta.

Gaussian noise has closed forms and a fast grid, see `dpbnn.privacy.losses`. Every other event goes
to dp-accounting as the tree that `Event.dp_event` returns, or is refused where it has no analysis.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dpbnn.privacy.events import (
    Event,
    UnsupportedEvent,
    check_one_unit,
    check_relation,
    gaussian_mu,
)
from dpbnn.privacy.losses import expm1, loss_grid, self_composed
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import Participation, Sampler

Curve = Callable[[np.ndarray], np.ndarray]  # from epsilons to deltas

_DISTINCT_SIGMAS = 48


class Accountant(ABC):
    """Turns the events of one or several runs into epsilon.

    Attributes:
        name: what plans, statements and the command line call it.
        rigorous: whether the value is an upper bound on the true epsilon.
    """

    name: str
    rigorous: bool = True
    code = "dp-accounting"

    @property
    def version(self) -> str:
        """Name and version of the code that computes the value."""
        own = self.code == "dpbnn"
        return self.code if own else f"{self.code} {importlib.metadata.version(self.code)}"

    def supports(self, event: Event, relation: Relation) -> str | None:
        """Return None if `event` can be accounted for, otherwise the reason why not."""
        try:
            check_relation(event, relation)
        except UnsupportedEvent as error:
            return str(error)
        return self._refusal(event, relation)

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
        check_one_unit(events)
        for event in events:
            refusal = self.supports(event, relation)
            if refusal is not None:
                raise UnsupportedEvent(refusal)
        if any(event.noise_multiplier == 0 for event in events):
            return math.inf
        return max(0.0, float(self._epsilon(events, delta, relation))) if events else 0.0

    def curve(self, events: Iterable[Event], delta: float, relation: Relation) -> Curve:
        """Return delta as a function of epsilon, of events that have a finite epsilon at `delta`.

        By default it knows one point: delta at the epsilon of this accountant, and less for none.
        """
        epsilon = self.epsilon(events, delta, relation)
        return lambda epsilons: _from_one_point(epsilons, epsilon, delta)

    def _refusal(self, event: Event, relation: Relation) -> str | None:
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

    def _refusal(self, event: Event, relation: Relation) -> str | None:
        sampled = event.amplified or event.sampler.participation is Participation.OTHER
        replaced = sampled and relation is Relation.REPLACE_ONE  # has no analysis by pld
        if _on_grid(event) or (
            not replaced and _pld_accountant().supports(event.dp_event(relation))
        ):
            return None
        if event.gaussian:
            return (
                f"the pld accountant has no analysis of {_sampled(event)}; "
                f"use accountant='rdp', or sampling='poisson'"
            )
        return f"the pld accountant has no analysis of {_described(event)}"

    def _epsilon(self, events: list[Event], delta: float, relation: Relation) -> float:
        return _pld_epsilon(tuple(events), delta, relation)

    def curve(self, events: Iterable[Event], delta: float, relation: Relation) -> Curve:
        """Return delta as a function of epsilon; the allowance for rounding is added."""
        losses, rounding = _composed(tuple(events), delta, relation)
        return lambda epsilons: losses.get_delta_for_epsilon(epsilons) + rounding


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

        known = [e for e in events if _closed_form(e)]
        poisson, mu = _split(known, relation)
        parts: list[Any] = [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)),
                count,
            )
            for rate, sigma, count in poisson
        ]
        if mu > 0:
            parts.append(dp_accounting.GaussianDpEvent(1 / mu))
        parts += [event.dp_event(relation) for event in events if not _closed_form(event)]
        ledger = _rdp_accountant(relation)
        with _without_warnings():
            ledger.compose(dp_accounting.ComposedDpEvent(parts))
            return float(ledger.get_epsilon(delta))

    def _refusal(self, event: Event, relation: Relation) -> str | None:
        if _closed_form(event) or _rdp_accountant(relation).supports(event.dp_event(relation)):
            return None
        return f"the rdp accountant has no analysis of {_described(event)}"


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
    code = "dpbnn"

    def _refusal(self, event: Event, relation: Relation) -> str | None:
        if not event.gaussian:
            return f"the gdp-clt formula is for Gaussian noise, not for {event.mechanism} noise"
        if event.sampler.participation not in (Participation.INDEPENDENT, Participation.EVERY):
            return f"the gdp-clt formula is for Poisson batches, not for {event.sampling} sampling"
        return None

    def _epsilon(self, events: list[Event], delta: float, relation: Relation) -> float:
        squared = sum(
            e.count * e.chance**2 * expm1((relation.shift / e.noise_multiplier) ** 2)
            for e in events
        )
        return gaussian_epsilon(math.sqrt(squared), delta)


class Exact(Accountant):
    """Exact composition of Gaussian mechanisms without amplification.

        delta(epsilon) = Phi(-epsilon/mu + mu/2) - exp(epsilon) Phi(-epsilon/mu - mu/2)

    **Guarantee.** Equality, not a bound, for full batches; an upper bound that is attained for a
    partition. See `gaussian_mu` for mu.
    """

    name = "exact"
    code = "dpbnn"

    def _refusal(self, event: Event, relation: Relation) -> str | None:
        if not event.gaussian:
            return f"exact Gaussian composition does not cover {event.mechanism} noise"
        if event.amplified or not _on_grid(event):
            return (
                f"exact Gaussian composition does not cover {event.sampling} batches; "
                f"use accountant={'pld' if _on_grid(event) else 'rdp'!r}"
            )
        return None

    def _epsilon(self, events: list[Event], delta: float, relation: Relation) -> float:
        return gaussian_epsilon(gaussian_mu(events, relation), delta)

    def curve(self, events: Iterable[Event], delta: float, relation: Relation) -> Curve:
        """Return delta as a function of epsilon."""
        mu = gaussian_mu(list(events), relation)
        return lambda epsilons: gaussian_delta(mu, epsilons)


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

    That is the exact Gaussian curve where no release is amplified; pld, which would approximate it,
    otherwise; with fixed-size batches, rdp, the only one that knows them.
    """
    asked = [(event, event.sampler.relations[0]) for event in events]
    for name, known in ACCOUNTANTS.items():
        if known.rigorous and all(known._refusal(*one) is None for one in asked):
            return name
    return "rdp"


def gaussian_delta(mu: float, epsilon: Any) -> Any:
    """Return delta(epsilon) of mu-Gaussian differential privacy, for one epsilon or an array."""
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0 * epsilon
    first = log_ndtr(-epsilon / mu + mu / 2)
    second = epsilon + log_ndtr(-epsilon / mu - mu / 2)
    return np.exp(first) * -np.expm1(np.minimum(0.0, second - first))


def _from_one_point(epsilons: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
    """Return what (epsilon, delta)-DP says of smaller epsilons.

    A test's total variation is at most (e^epsilon - 1 + 2 delta)/(e^epsilon + 1), so

        delta(e) <= 1 - (1 - delta) (1 + e^e)/(1 + e^epsilon).
    """
    ratio = np.exp(-np.logaddexp(0.0, epsilon) + np.logaddexp(0.0, epsilons))
    return np.where(epsilons >= epsilon, delta, 1 - (1 - delta) * ratio)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon at `delta` of mu-Gaussian differential privacy, rounded up to 1e-12.

    Beyond mu = 1e6, where the terms of `gaussian_delta` cancel, it is the upper bound
    mu^2/2 + mu sqrt(2 log(1/delta)).
    """
    from scipy.optimize import brentq

    upper = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-9
    if mu > 1e6:
        return upper * (1 + 1e-12)
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    root = brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, upper, xtol=1e-13, rtol=1e-13)
    return float(root) * (1 + 1e-12)


def _closed_form(event: Event) -> bool:
    return event.gaussian and event.sampler.participation is not Participation.OTHER


def _on_grid(event: Event) -> bool:
    """Whether the grid here holds the event.

    At rate 1 that is so for other samplers too, where they say what a full batch says.
    """
    if _closed_form(event) or not event.gaussian or event.amplified:
        return _closed_form(event)
    one: Any = event.noise.dp_event(1.0)
    return bool(event.sampler.dp_event(event, one) == Sampler.dp_event(event, one))


def _sampled(event: Event) -> str:
    return event.sampler.words or f"{event.sampling} sampling"


def _described(event: Event) -> str:
    return f"{event.mechanism} noise with {_sampled(event)}; use another accountant or sampling"


def _pld_accountant(interval: float = 1e-4) -> Any:
    """Return dp-accounting's, for events whose noise is already that of the relation's shift."""
    from dp_accounting import NeighboringRelation, pld

    return pld.PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, interval)


def _rdp_accountant(relation: Relation) -> Any:
    from dp_accounting import NeighboringRelation, rdp

    replaced = relation is Relation.REPLACE_ONE
    kind = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.REPLACE_SPECIAL
    return rdp.RdpAccountant(neighboring_relation=kind)


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


@functools.lru_cache(maxsize=256)
def _pld_epsilon(events: tuple[Event, ...], delta: float, relation: Relation) -> float:
    losses, rounding = _composed(events, delta, relation)
    return float(losses.get_epsilon_for_delta(delta - rounding))


def _composed(events: tuple[Event, ...], delta: float, relation: Relation) -> tuple[Any, float]:
    """Return the privacy losses of all events composed, and the allowance for rounding in delta."""
    from dp_accounting.pld import privacy_loss_distribution

    others = [event for event in events if not _on_grid(event)]
    amplified, mu = _split([event for event in events if _on_grid(event)], relation)
    composed = [*(count for *_, count in amplified), *(event.count for event in others)]
    rounding = 4 * 2.0**-52 * sum(composed)
    if rounding > delta / 2:
        raise UnsupportedEvent(
            f"delta={delta} is too small for the pld accountant at so many releases; "
            f"use accountant='rdp' or a larger delta"
        )
    tails, interval = loss_grid(amplified, mu, delta)
    parts: list[Any] = [
        self_composed(rate, sigma, count, interval, tail)
        for (rate, sigma, count), tail in zip(amplified, tails, strict=True)
    ]
    if mu > 0:
        parts.append(
            privacy_loss_distribution.from_gaussian_mechanism(
                1 / mu, value_discretization_interval=interval
            )
        )
    for event in others:
        accountant = _pld_accountant(interval)
        accountant.compose(event.dp_event(relation))
        parts.append(accountant._pld)
    return functools.reduce(lambda one, two: one.compose(two), parts), rounding


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
