"""Metrics of classes with an order: how far off predictions are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpbnn.evaluation.checked import Classified, Floats
from dpbnn.evaluation.resampling import Sums


def rps(predictive: Any, y: Any) -> float:
    """Return the mean ranked probability score, sum_k (P(class <= k) - 1[y <= k])^2.

    Like the Brier score, but a class further from the truth costs more. The classes are taken in
    the order of their numbers.

    Reference: Epstein, A scoring system for probability forecasts of ranked categories, 1969.
    """
    c = Classified.of(predictive, y)
    return float(_metrics(c)["rps"](Sums(len(c)))[0])


def metrics_of(c: Classified) -> dict[str, Callable[[Sums], Floats]]:
    """Return the metrics by name, each one number per resample; none for classes without order."""
    return _metrics(c) if c.ordered else {}


def _metrics(c: Classified) -> dict[str, Callable[[Sums], Floats]]:
    cumulative = c.probabilities.astype(np.float64).cumsum(1)[:, :-1]
    score = ((cumulative - (c.y[:, None] <= np.arange(c.classes - 1))) ** 2).sum(1)
    apart = np.abs((cumulative < 0.5).sum(1) - c.y).astype(np.float64)
    return {"rps": lambda sums: sums.mean(score), "mae": lambda sums: sums.mean(apart)}
