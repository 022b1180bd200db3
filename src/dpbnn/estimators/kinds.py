"""Kinds of targets: which likelihood an estimator has, by its setting or by its schema.

Everything here follows from public settings, but for the values of the targets themselves.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dpbnn.data.target import can_bound_counts
from dpbnn.estimators import frames
from dpbnn.estimators.held_out import TRAINING
from dpbnn.likelihoods import Poisson, ScaledPoisson
from dpbnn.methods.method import Method

if TYPE_CHECKING:
    from dpbnn.estimators.estimator import PrivateBayes

__all__ = ["Counts", "likelihood_of", "steepness", "temperature_of"]

_NAMES = {True: ("gaussian", "poisson"), False: ("categorical", "bernoulli", "ordinal")}
_BY_SCHEMA = {"count": "poisson", "ordinal": "ordinal"}
_ROOM = (4.0, 6.0)  # standard deviations in the unit of gradients: by the squared skewness, most
_ONE_KIND = ("moments", "noiseaware", "sep", "ep", "adf")  # methods for the first likelihood alone


def likelihood_of(estimator: PrivateBayes) -> str:
    """Return the name of an estimator's likelihood, or raise where its settings contradict.

    Args:
        estimator: its settings `likelihood`, `schema` and `method`.
    """
    names = _NAMES[estimator._regression]
    given = estimator.likelihood
    if given is not None and given not in names:
        raise ValueError(
            f"likelihood={given!r}: must be one of {', '.join(map(repr, names))}, or None for "
            f"{names[0]!r}"
        )
    schema = estimator.schema_
    if schema is None:
        schema = frames.schema_of(estimator.schema, estimator._regression, private=False)
    stated = None if schema is None else _BY_SCHEMA.get(schema.target.kind)
    if stated is not None and given not in (None, stated):
        raise ValueError(
            f"likelihood={given!r}: the schema says kind = {schema.target.kind!r} of its target; "  # type: ignore[union-attr]
            f"leave one of the two out"
        )
    if schema is not None and stated is None and given in _BY_SCHEMA.values():
        kind = next(kind for kind, name in _BY_SCHEMA.items() if name == given)
        raise ValueError(
            f"likelihood={given!r}: with a schema write kind = {kind!r} under [target] in its place"
        )
    found = stated or given or names[0]
    method = estimator.method
    named = method.name if isinstance(method, Method) else method
    if found != names[0] and named in _ONE_KIND:
        raise ValueError(
            f"method={named!r}: is not for likelihood={found!r}; pass method='auto' or 'sgld'"
        )
    return found


def temperature_of(estimator: PrivateBayes, tempered: bool) -> Any:
    """Return how a temperature is found, or None; raise where one is asked for and there is none.

    Args:
        estimator: its settings `recalibrate` and `likelihood`.
        tempered: whether training rows decide one by default.
    """
    share = estimator.recalibrate
    count = likelihood_of(estimator) == "poisson"
    if share == TRAINING and (count or not tempered):
        return None
    if count and share is not None:
        raise ValueError(
            f"recalibrate={share}: counts have no temperature; pass recalibrate=None, and "
            f"conformal=0.1 for intervals that hold the truth"
        )
    return share


class Counts:
    """Counts as a network sees them: their public bounds, and a usual size.

    Counts differ in size more than their square roots do, so these are what is standardised.

    Attributes:
        low: public lower bound.
        high: public upper bound.
    """

    def __init__(self, bounds: tuple[float, float]) -> None:
        self.low, self.high = bounds
        if not (can_bound_counts(self.low, self.high) and self.low < self.high):
            raise ValueError(
                f"target_bounds=({self.low:g}, {self.high:g}): the bounds of a count are whole "
                f"numbers from 0 to 1000000, such as (0, 40)"
            )

    def clipped(self, y: np.ndarray, on_bad_rows: str) -> np.ndarray:
        """Return counts clipped to the bounds; -1 for numbers that are none, or raise.

        Args:
            y: numbers.
            on_bad_rows: as in `dpbnn.fit`; "zero" lets those rows contribute nothing.
        """
        bad = ~((y >= 0) & (y == np.rint(y)) & np.isfinite(y))
        if bad.any() and on_bad_rows != "zero":
            raise ValueError(
                f"y: {int(bad.sum())} values are not counts; counts are whole numbers, 0 or more: "
                f"correct them, or pass on_bad_rows='zero' to let these rows contribute nothing"
            )
        return np.where(bad, -1.0, np.clip(y, self.low, self.high))

    def rooted(self, y: np.ndarray) -> np.ndarray:
        """Return square roots of counts, scaled to [-1, 1]; NaN for what is no count."""
        low, width = self._range
        return 2 * (np.sqrt(np.where(y < 0, np.nan, y)) - low) / width - 1

    @property
    def likelihood(self) -> Poisson:
        """The likelihood where nothing is known of the counts but their bounds."""
        return Poisson(self.high, math.sqrt(max(self.low, 1.0) * self.high))

    def learned(self, centre: float, spread: float, scaled: bool) -> Poisson:
        """Return the likelihood for a released mean and spread of `rooted`.

        With square roots of mean m and variance s^2 the mean count is m^2 + s^2. Where the roots
        are normal, its variance is v = 4 m^2 s^2 + 2 s^4 and its skewness (24 m^2 s^4 + 8 s^6)
        v^-1.5. Clipped gradients of skewed counts are biased, so the unit of gradients is one
        standard deviation for counts that are not skewed, and up to six for those that are: chosen
        on five generated tables of 3000 rows at epsilon 1, by the log-likelihood.

        Args:
            centre: the mean.
            spread: the standard deviation.
            scaled: whether gradients are to be divided by the spread of the counts.
        """
        low, width = self._range
        mean, std = max(low + width * (centre + 1) / 2, 0.0), width * spread / 2
        typical = float(np.clip(mean**2 + std**2, max(self.low, 1e-3), self.high))
        if not scaled:
            return Poisson(self.high, typical)
        variance = 4 * mean**2 * std**2 + 2 * std**4
        skew = (24 * mean**2 * std**4 + 8 * std**6) / variance**1.5
        room = min(max(1.0, _ROOM[0] * skew**2), _ROOM[1])
        return ScaledPoisson(self.high, typical, room * max(1.0, math.sqrt(variance)))

    @property
    def _range(self) -> tuple[float, float]:
        low, high = math.sqrt(self.low), math.sqrt(self.high)
        return low, high - low


def steepness(likelihood: Any) -> float | None:
    """Return the noise of a Gaussian with the curvature of a likelihood, where that is known.

    A Poisson distribution of rate r has curvature r by log r.
    """
    if isinstance(likelihood, Poisson):
        return 1 / math.sqrt(likelihood.typical)
    found: float | None = getattr(likelihood, "noise_std", None)
    return found
