"""Accuracy, log-loss, Brier score and calibration errors of class probabilities.

All of them take a `ClassPredictive`, or probabilities [N, K], and labels [N] from 0 to K - 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpbnn.evaluation.checked import Classified, Floats, Integers
from dpbnn.evaluation.resampling import Sums, Whole

__all__ = [
    "Reliability",
    "accuracy",
    "brier",
    "classwise_ece",
    "ece",
    "global_gap",
    "mce",
    "nll",
    "reliability",
]


def accuracy(predictive: Any, y: Any) -> float:
    """Return the share of records whose most probable class is the label."""
    return _value(accuracies, Classified.of(predictive, y))


def nll(predictive: Any, y: Any) -> float:
    """Return the mean of -log p(y_i); infinite where a label has probability 0."""
    return _value(nlls, Classified.of(predictive, y))


def brier(predictive: Any, y: Any) -> float:
    """Return the mean of sum_k (p_ik - 1[y_i = k])^2, from 0 to 2."""
    return _value(briers, Classified.of(predictive, y))


def ece(predictive: Any, y: Any, bins: int = 15, kind: str = "width") -> float:
    """Return the expected calibration error of the top class.

        sum_b n_b/N |accuracy_b - confidence_b|

    Bins are [a, b), the last one [a, 1], so that confidences of exactly 0 and 1 are in bins.

    Args:
        predictive: probabilities.
        y: labels.
        bins: number of bins.
        kind: "width" for bins of equal width on [0, 1]; "mass" for bins of (nearly) equally many
            records, between quantiles of the confidence. Equal confidences share a bin.
    """
    c = Classified.of(predictive, y)
    return _value(lambda c, sums: eces(c, sums, edges_of(c.confidence, bins, kind)), c)


def mce(predictive: Any, y: Any, bins: int = 15, kind: str = "width") -> float:
    """Return the maximum calibration error, max_b |accuracy_b - confidence_b|, without empty bins.

    Args:
        predictive: probabilities.
        y: labels.
        bins: number of bins.
        kind: "width" or "mass", as in `ece`.
    """
    c = Classified.of(predictive, y)
    return _value(lambda c, sums: mces(c, sums, edges_of(c.confidence, bins, kind)), c)


def classwise_ece(predictive: Any, y: Any, bins: int = 15) -> float:
    """Return the mean over classes of the calibration error of p_k against 1[y = k].

    Reference: Kull et al., Beyond temperature scaling, 2019.

    Args:
        predictive: probabilities.
        y: labels.
        bins: number of bins of equal width.
    """
    c = Classified.of(predictive, y)
    return _value(lambda c, sums: classwise_eces(c, sums, bins), c)


def global_gap(predictive: Any, y: Any) -> float:
    """Return |accuracy - mean confidence|, which the DP-BNN paper's code reports as "ECE"."""
    return _value(global_gaps, Classified.of(predictive, y))


@dataclasses.dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence against accuracy by bin.

    Attributes:
        edges: ends of the bins, [bins + 1].
        counts: records in every bin.
        confidence: mean confidence in every bin; NaN where it is empty.
        accuracy: share of right predictions in every bin; NaN where it is empty.
    """

    edges: Floats
    counts: Integers
    confidence: Floats
    accuracy: Floats


def reliability(predictive: Any, y: Any, bins: int = 15, kind: str = "width") -> Reliability:
    """Return the data of a reliability diagram.

    Args:
        predictive: probabilities.
        y: labels.
        bins: number of bins.
        kind: "width" or "mass", as in `ece`.
    """
    c = Classified.of(predictive, y)
    return reliability_of(c, edges_of(c.confidence, bins, kind))


def reliability_of(c: Classified, edges: Floats) -> Reliability:
    """Return the data of a reliability diagram with these bins."""
    sums, slot, slots = Whole(len(c)), slots_of(c.confidence, edges), len(edges) - 1
    counts = sums(np.ones(len(c)), slot, slots)[0]
    with np.errstate(invalid="ignore"):
        confidence = sums(c.confidence, slot, slots)[0] / counts
        right = sums(c.hit, slot, slots)[0] / counts
    return Reliability(edges, counts.astype(np.int64), confidence, right)


def accuracies(c: Classified, sums: Sums) -> Floats:
    """Return the accuracy of every resample."""
    return sums.mean(c.hit)


def nlls(c: Classified, sums: Sums) -> Floats:
    """Return the log-loss of every resample."""
    return -sums.mean(c.log_prob)


def briers(c: Classified, sums: Sums) -> Floats:
    """Return the Brier score of every resample, |p|^2 - 2 p_y + 1."""
    return sums.mean(c.squared_norm - 2 * c.label_probability + 1)


def eces(c: Classified, sums: Sums, edges: Floats) -> Floats:
    """Return the expected calibration error of every resample; the bins are fixed."""
    gap = sums(c.hit - c.confidence, slots_of(c.confidence, edges), len(edges) - 1)
    return np.abs(gap).sum(1) / sums.total


def mces(c: Classified, sums: Sums, edges: Floats) -> Floats:
    """Return the maximum calibration error of every resample."""
    slot, slots = slots_of(c.confidence, edges), len(edges) - 1
    gap, counts = sums(c.hit - c.confidence, slot, slots), sums(np.ones(len(c)), slot, slots)
    return np.where(counts > 0, np.abs(gap) / np.maximum(counts, 1), 0.0).max(1)


def classwise_eces(c: Classified, sums: Sums, bins: int) -> Floats:
    """Return the classwise calibration error of every resample."""
    edges = even_edges(bins)
    total = np.zeros(1)
    for k in range(c.classes):
        p = c.probabilities[:, k].astype(np.float64)
        total = total + np.abs(sums((c.y == k) - p, slots_of(p, edges), bins)).sum(1)
    return total / c.classes / sums.total


def global_gaps(c: Classified, sums: Sums) -> Floats:
    """Return |accuracy - mean confidence| of every resample."""
    return np.abs(sums.mean(c.hit - c.confidence))


def even_edges(bins: int) -> Floats:
    """Return the ends of bins of equal width on [0, 1], each the nearest number to j / bins."""
    if not (bins >= 1 and bins == int(bins)):
        raise ValueError(f"bins={bins}: must be a whole number >= 1; try 15")
    return np.arange(int(bins) + 1) / int(bins)


def edges_of(confidence: Floats, bins: int, kind: str) -> Floats:
    """Return the ends of bins of equal width on [0, 1], or between quantiles."""
    if kind == "width":
        return even_edges(bins)
    if kind == "mass":
        bins = len(even_edges(bins)) - 1
        inner = np.quantile(confidence, np.arange(1, bins) / bins, method="inverted_cdf")
        above = np.nextafter(inner, 2.0)  # a quantile belongs to the bin below it
        return np.unique(np.concatenate([[0.0], above[above < confidence.max()], [1.0]]))
    raise ValueError(f"kind={kind!r}: must be 'width' or 'mass'")


def slots_of(values: Floats, edges: Floats) -> Integers:
    """Return the bin of every value: [a, b), the last one [a, 1] and beyond, for rounding."""
    return np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)


def _value(metric: Any, c: Classified) -> float:
    return float(metric(c, Whole(len(c)))[0])
