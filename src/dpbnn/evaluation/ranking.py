"""How well probabilities separate classes: AUROC, average precision, recall, confusion matrix.

With two classes one of them is the positive one. With more, every class is compared with the rest,
and the mean over classes is returned. Classes for which a number is not defined, such as those
without a record, are left out of that mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpbnn.evaluation.checked import Classified, Floats, Integers
from dpbnn.evaluation.resampling import Resamples, Sums

_SLOTS = 100  # distinct ranks of a resampled curve


def auroc(predictive: Any, y: Any) -> float:
    """Return the area under the ROC curve.

        P(p_k of a record of class k > p_k of another record) + P(equal) / 2

    1 is a perfect order, 1/2 is guessing. NaN where all records have one class.
    """
    c = Classified.of(predictive, y)
    return float(metrics_of(c)["auroc"](Sums(len(c)))[0])


def average_precision(predictive: Any, y: Any, positive: int = 1) -> float:
    """Return the average precision, sum_t (recall_t - recall_{t-1}) precision_t.

    Thresholds t run over the different probabilities from the highest; nothing is interpolated.

    Args:
        predictive: probabilities.
        y: labels.
        positive: number of the positive class; used with two classes only.
    """
    c = Classified.of(predictive, y)
    return float(metrics_of(c, positive=positive)["average_precision"](Sums(len(c)))[0])


def recall(predictive: Any, y: Any, threshold: float = 0.5, positive: int = 1) -> float:
    """Return the share of the records of a class to which it gives at least this probability.

    Args:
        predictive: probabilities.
        y: labels.
        threshold: probability from which a record counts as found.
        positive: number of the positive class; used with two classes only.
    """
    c = Classified.of(predictive, y)
    return float(metrics_of(c, threshold, positive)["recall"](Sums(len(c)))[0])


def confusion_matrix(predictive: Any, y: Any) -> Integers:
    """Return the number of records by true class (rows) and most probable class (columns)."""
    return confusion_of(Classified.of(predictive, y))


def confusion_of(c: Classified) -> Integers:
    """Return the confusion matrix of checked probabilities."""
    cell = c.y * c.classes + c.probabilities.argmax(1)
    return np.bincount(cell, minlength=c.classes**2).reshape(c.classes, c.classes)


def metrics_of(
    c: Classified, threshold: float = 0.5, positive: int = 1
) -> dict[str, Callable[[Sums], Floats]]:
    """Return the metrics by name, each one number per resample.

    Resampled curves are computed from 100 groups of neighbouring ranks.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}: must lie above 0 and be at most 1; try 0.5")
    if c.classes == 2 and positive not in (0, 1):
        raise ValueError(f"positive={positive}: must be 0 or 1, the number of a class")
    chosen = [positive] if c.classes == 2 else list(range(c.classes))

    def over_classes(curve: Callable[[Floats, Floats], Floats]) -> Callable[[Sums], Floats]:
        def mean(sums: Sums) -> Floats:
            return _mean([curve(*_counts(c, k, sums)) for k in chosen])

        return mean

    def recalls(sums: Sums) -> Floats:
        found = []
        for k in chosen:
            own = c.y == k
            share = sums((own & (c.probabilities[:, k] >= threshold)).astype(np.float64))[:, 0]
            found.append(_ratio(share, sums(own.astype(np.float64))[:, 0]))
        return _mean(found)

    return {
        "auroc": over_classes(_area),
        "average_precision": over_classes(_precision),
        "recall": recalls,
    }


def _counts(c: Classified, k: int, sums: Sums) -> tuple[Floats, Floats]:
    """Return counts of records of class k and of others, by rank of p_k, [resamples, ranks]."""
    p, n = c.probabilities[:, k], len(c)
    slots = min(n, _SLOTS) if isinstance(sums, Resamples) else n
    slot = np.searchsorted(np.sort(p), p) * slots // n  # equal probabilities share a slot
    found = sums(np.ones(n), 2 * slot + (c.y == k), 2 * slots)
    return found[:, 1::2], found[:, ::2]


def _area(own: Floats, other: Floats) -> Floats:
    below = other.cumsum(1) - other / 2
    return _ratio((own * below).sum(1), own.sum(1) * other.sum(1))


def _precision(own: Floats, other: Floats) -> Floats:
    own, other = own[:, ::-1], other[:, ::-1]
    found, taken = own.cumsum(1), (own + other).cumsum(1)
    return _ratio((own * found / np.maximum(taken, 1)).sum(1), own.sum(1))


def _ratio(above: Floats, below: Floats) -> Floats:
    """Return above / below; NaN where that is 0."""
    fine = below > 0
    return np.where(fine, above / np.where(fine, below, 1.0), np.nan)


def _mean(found: list[Floats]) -> Floats:
    """Return the mean over classes without NaN; NaN where nothing is left."""
    values = np.stack(found)
    known = np.isfinite(values)
    return _ratio(np.where(known, values, 0.0).sum(0), known.sum(0).astype(np.float64))
