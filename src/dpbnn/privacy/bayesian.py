"""Bayesian differential privacy, observed while a run trains: an estimate, no epsilon."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dpbnn.privacy.bayesian_costs import (
    Array,
    best_order,
    checked_distances,
    left_cost,
    smallest,
    upper_mean,
)
from dpbnn.privacy.bayesian_estimate import BayesianPrivacyEstimate
from dpbnn.privacy.events import Event
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import Participation
from dpbnn.privacy.statement import PrivacyStatement

LEVELS = 2048
"""Clipped norms are kept as whole numbers c, rounded up: norm <= clip (c / LEVELS)^2."""

_BLOCK = 64  # releases whose norms are moved off the device at once

_Whole = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Distances of one step in units of the noise, how often each occurs, and their bound."""

    values: Array
    counts: _Whole
    rate: float
    largest: float


class BayesianAccountant:
    """Estimates (epsilon_mu, delta_mu) from distances seen while a mechanism runs.

        epsilon_mu = min_lambda ( sum_t c_t(lambda) - log(delta_mu - failure) ) / lambda,
        c_t(lambda) = (1/T) log E_x[ exp(T l(lambda, d_{x,t} / noise std)) ]

    with l as in `left_cost` and E_x by the estimator of Theorem 4 at every step and order.

    As an observer, `fit(..., observers=[observer])`, it gets the norms that the gate has after
    clipping. Under zero-out and add/remove the norm is the distance. A Poisson batch is a uniform
    sample of the records, so its norms are a sample of d over x where the records are themselves a
    sample of the data's distribution. They are records that training has seen, though, whose
    gradients tend to be smaller than those of records to come. A step whose batch has fewer than
    two records, and whatever was released before a resume, counts at the clip for every record.

    On its own, `add` takes distances from anywhere: held-out records, or pairs of records or of
    batches as in the paper (`pair_distances`), clipped or not.

    **No guarantee.** The result is an estimate under an assumed distribution, from one trajectory
    of training, by an estimator that is no bound for heavy tails. What is certain: a clipped norm
    is never above the clip, and the value never above the moments accountant's at delta - failure.
    The observer sees copies after a release was made, and can change nothing.

    Args:
        steps: T, the number of steps of the whole run; `fit` takes it from the plan.
        orders: the lambdas, whole numbers; by default all from 1 to 512.
    """

    def __init__(self, steps: int | None = None, *, orders: Sequence[int] | None = None) -> None:
        if steps is not None and (steps < 1 or steps != int(steps)):
            raise ValueError(f"steps={steps}: must be a whole number >= 1")
        given = range(1, 513) if orders is None else sorted(set(orders))
        if len(given) == 0 or given[0] < 1 or any(order != int(order) for order in given):
            raise ValueError(
                f"orders={list(given)[:5]}: must be whole numbers >= 1, at least one; leave it out "
                f"for 1 to 512"
            )
        self.steps = None if steps is None else int(steps)
        self.orders = given
        self._samples: list[_Sample] = []
        self._charges: dict[tuple[float, float], int] = {}
        self._waiting: list[tuple[Tensor, float, float]] = []
        self._observed = 0
        self._kind = ""
        self._plan: Plan | None = None
        self.dp: PrivacyStatement | None = None

    def __repr__(self) -> str:
        return f"BayesianAccountant(steps={self.steps}), {self._observed} steps observed"

    def add(self, distances: Any, *, noise_std: float, rate: float) -> None:
        """Take the distances of one step.

        Args:
            distances: at least two samples of the distance between neighbouring sums before noise.
            noise_std: standard deviation of the noise of that step, absolute.
            rate: q, the probability that a record is in the batch.
        """
        self._check_steps()
        if not (noise_std > 0 and math.isfinite(noise_std)):
            raise ValueError(f"noise_std={noise_std}: must be a finite number > 0")
        if not (0 < rate <= 1):
            raise ValueError(f"rate={rate}: must lie in (0, 1], the share of records in a batch")
        values, counts = np.unique(checked_distances(distances) / noise_std, return_counts=True)
        self._samples.append(_Sample(values, counts, rate, math.inf))
        self._observed += 1
        self._kind = self._kind or "as given"

    def begin(self, plan: Plan, before: Iterable[Event] = ()) -> None:
        """Get ready to observe a run on a plan; raises before anything is spent.

        Args:
            plan: of the run.
            before: what an interrupted run released already; it counts at the clip.
        """
        if self._plan is not None or self._observed:
            raise ValueError("observers: this one has observed a run already; make a new one")
        if not plan.private:
            raise ValueError(
                "observers: the plan is open, and without noise every cost is infinite; give a "
                "private plan, or leave observers out"
            )
        if self.steps not in (None, plan.steps):
            raise ValueError(
                f"observers: made for steps={self.steps} and the plan has {plan.steps}; leave "
                f"steps out, fit takes it from the plan"
            )
        if plan.relation is Relation.REPLACE_ONE:
            raise ValueError(
                "observers: under replace-one a norm is not the distance between neighbours; "
                "plan with relation='zero-out', or use BayesianAccountant.add with pair_distances"
            )
        unseen = [*plan.beside, *before]
        for event in (*plan.own_events, *unseen):
            if event.noise_multiplier == 0:
                raise ValueError(
                    "observers: an earlier release had no noise that counts, so every cost is "
                    "infinite; start a new run, without debug_seed"
                )
            if not event.gaussian:
                raise ValueError(
                    f"observers: there is no Bayesian analysis of {event.mechanism} noise here; "
                    f"use Gaussian noise"
                )
            if event.sampler.participation not in (Participation.INDEPENDENT, Participation.EVERY):
                raise ValueError(
                    f"observers: there is no Bayesian analysis of {event.sampling} sampling "
                    f"here; plan with sampling='poisson' or 'full-batch'"
                )
        self._plan, self.steps = plan, plan.steps
        self._kind = "norms of the clipped contributions of the records of each batch"
        for event in unseen:
            key = (event.chance, 1 / event.noise_multiplier)
            self._charges[key] = self._charges.get(key, 0) + event.count

    def watch(self, event: Event, clip: float, norms: Tensor) -> None:
        """Take the clipped norms of a release; a watcher of `Gate`.

        Kept is sqrt(norm / clip), rounded up to one of `LEVELS` values. Nothing here depends on the
        norms but what is kept.
        """
        codes = (norms / clip).clamp(0.0, 1.0).sqrt_().mul_(LEVELS).ceil_()
        self._waiting.append((codes, event.chance, event.noise_multiplier))
        self._observed += 1
        if len(self._waiting) == _BLOCK:
            self._unload()

    def _unload(self) -> None:
        for codes, rate, sigma in self._waiting:
            levels, counts = np.unique(codes.cpu().numpy(), return_counts=True)
            values = (levels.astype(np.float64) / LEVELS) ** 2 / sigma
            self._samples.append(_Sample(values, counts, rate, 1 / sigma))
        self._waiting.clear()

    def _check_steps(self) -> None:
        if self.steps is None:
            raise ValueError(
                "steps: the number of steps T is not fixed; the cost of every step depends on it, "
                "so pass BayesianAccountant(steps=T) before the first one"
            )
        if self._observed == self.steps:
            raise ValueError(
                f"steps={self.steps}: that many steps were observed already; T is fixed in "
                f"advance, make an accountant with more"
            )

    def raw_estimate(
        self, delta: float | None = None, *, failure: float | None = None
    ) -> BayesianPrivacyEstimate:
        """Return the estimate for the steps observed so far. It is raw: not noised, not released.

        Args:
            delta: delta_mu; the plan's delta by default.
            failure: probability, out of delta, that the estimator is too low at one of the steps or
                orders (it is shared out among all of them); a tenth of delta by default. 0 takes
                plain means instead.
        """
        if delta is None and self._plan is not None:
            delta = self._plan.delta
        if delta is None or not (0 < delta < 1):
            raise ValueError(f"delta={delta}: must lie in (0, 1), such as 1e-5")
        failure = delta / 10 if failure is None else failure
        if not (0 <= failure < delta):
            raise ValueError(f"failure={failure}: must be >= 0 and below delta={delta:g}")
        if self.steps is None or not (self._observed or self._charges):
            raise ValueError("no steps were observed; pass observers=[...] to fit, or use add")
        self._unload()
        steps, each = self.steps, failure / (self.steps * len(self.orders))
        enough = [s for s in self._samples if s.counts.sum() >= 2]
        charges = dict(self._charges)
        for sample in self._samples:
            if sample.counts.sum() < 2:
                key = (sample.rate, sample.largest)
                charges[key] = charges.get(key, 0) + 1
        groups = _groups(enough)

        def value(order: int) -> float:
            total = sum(group.cost(order, steps, each) for group in groups)
            for (rate, ratio), count in charges.items():
                total += count * float(left_cost(order, rate, ratio)[0])
            return best_order([total], [order], delta - failure)[0]

        best, order = smallest(value, self.orders)
        return BayesianPrivacyEstimate(
            epsilon_mu=best,
            delta_mu=delta,
            failure=failure,
            order=order,
            largest_order=self.orders[-1],
            steps=steps,
            observed=self._observed,
            charged=sum(charges.values()),
            samples=int(sum(s.counts.sum() for s in enough)),
            fewest=int(min((s.counts.sum() for s in enough), default=0)),
            distances=self._kind,
            dp=self.dp,
        )


def given_observers(
    observers: Sequence[BayesianAccountant], accountants: Sequence[BayesianAccountant] | None
) -> Sequence[BayesianAccountant]:
    """Return the observers of `fit`, which were an argument called accountants before."""
    if accountants is None:
        return observers
    if observers:
        raise ValueError("observers and accountants: two names of one argument; give observers")
    warnings.warn(
        "accountants= of fit is called observers= now; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    return accountants


@dataclasses.dataclass(frozen=True)
class _Group:
    """Steps of one sampling rate and one bound: every ratio that occurs, and where."""

    ratios: Array
    where: _Whole
    counts: _Whole
    starts: _Whole
    rate: float
    largest: float

    def cost(self, order: int, steps: int, failure: float) -> float:
        """Return sum_t c_t(lambda), each at most what the bound on the ratios gives."""
        logs = steps * left_cost(order, self.rate, self.ratios)
        upper = upper_mean(logs[self.where], failure, self.counts, self.starts) / steps
        if math.isfinite(self.largest):
            upper = np.minimum(upper, left_cost(order, self.rate, self.largest))
        return float(upper.sum())


def _groups(samples: list[_Sample]) -> list[_Group]:
    kinds: dict[tuple[float, float], list[_Sample]] = {}
    for sample in samples:
        kinds.setdefault((sample.rate, sample.largest), []).append(sample)
    groups = []
    for (rate, largest), members in kinds.items():
        ratios, where = np.unique(np.concatenate([s.values for s in members]), return_inverse=True)
        starts = np.cumsum([0, *(len(s.values) for s in members[:-1])])
        counts = np.concatenate([s.counts for s in members])
        groups.append(_Group(ratios, where, counts, starts, rate, largest))
    return groups
