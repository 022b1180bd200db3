"""Accuracy, log-loss, Brier score and calibration errors of class probabilities.

All of them take a `ClassPredictive`, or probabilities [N, K], and labels [N] from 0 to K - 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dpbnn.evaluation.checked import Classified, Floats, Integers
from dpbnn.evaluation.resampling import Sums


def accuracy(predictive: Any, y: Any) -> float:
    """Return the share of records whose most probable class is the label."""
    return _value("accuracy", predictive, y)


def nll(predictive: Any, y: Any) -> float:
    """Return the mean of -log p(y_i); infinite where a label has probability 0."""
    return _value("nll", predictive, y)


def brier(predictive: Any, y: Any) -> float:
    """Return the mean of sum_k (p_ik - 1[y_i = k])^2, from 0 to 2."""
    return _value("brier", predictive, y)


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
    return _value("ece", predictive, y, bins, kind)


def mce(predictive: Any, y: Any, bins: int = 15, kind: str = "width") -> float:
    """Return the maximum calibration error, max_b |accuracy_b - confidence_b|, without empty bins.

    Args:
        predictive: probabilities.
        y: labels.
        bins: number of bins.
        kind: "width" or "mass", as in `ece`.
    """
    return _value("mce", predictive, y, bins, kind)


def classwise_ece(predictive: Any, y: Any, bins: int = 15) -> float:
    """Return the mean over classes of the calibration error of p_k against 1[y = k].

    Reference: Kull et al., Beyond temperature scaling, 2019.

    Args:
        predictive: probabilities.
        y: labels.
        bins: number of bins of equal width.
    """
    return _value("classwise_ece", predictive, y, bins)


def global_gap(predictive: Any, y: Any) -> float:
    """Return |accuracy - mean confidence|, which the DP-BNN paper's code reports as "ECE"."""
    return _value("global_gap", predictive, y)


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
    sums, slot, slots = Sums(len(c)), slots_of(c.confidence, edges), len(edges) - 1
    counts = sums(np.ones(len(c)), slot, slots)[0]
    with np.errstate(invalid="ignore"):
        confidence = sums(c.confidence, slot, slots)[0] / counts
        right = sums(c.hit, slot, slots)[0] / counts
    return Reliability(edges, counts.astype(np.int64), confidence, right)


def metrics_of(
    c: Classified, bins: int = 15, kind: str = "width"
) -> dict[str, Callable[[Sums], Floats]]:
    """Return the metrics by name, each one number per resample; the bins are those of all records.

    Args:
        c: probabilities and labels.
        bins: number of bins.
        kind: of the bins of ece and mce.
    """
    edges = edges_of(c.confidence, bins, kind)
    slot, slots = slots_of(c.confidence, edges), len(edges) - 1

    def mce(sums: Sums) -> Floats:
        gap, counts = sums(c.hit - c.confidence, slot, slots), sums(np.ones(len(c)), slot, slots)
        return np.where(counts > 0, np.abs(gap) / np.maximum(counts, 1), 0.0).max(1)

    def classwise(sums: Sums) -> Floats:
        even, total = even_edges(bins), np.zeros(1)
        for k in range(c.classes):
            p = c.probabilities[:, k].astype(np.float64)
            total = total + np.abs(sums((c.y == k) - p, slots_of(p, even), bins)).sum(1)
        return total / c.classes / sums.total

    return {
        "accuracy": lambda sums: sums.mean(c.hit),
        "nll": lambda sums: -sums.mean(c.log_prob),
        "brier": lambda sums: sums.mean(c.squared_norm - 2 * c.label_probability + 1),
        "ece": lambda sums: np.abs(sums(c.hit - c.confidence, slot, slots)).sum(1) / sums.total,
        "mce": mce,
        "classwise_ece": classwise,
        "global_gap": lambda sums: np.abs(sums.mean(c.hit - c.confidence)),
    }


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


def _value(name: str, predictive: Any, y: Any, bins: int = 15, kind: str = "width") -> float:
    c = Classified.of(predictive, y)
    return float(metrics_of(c, bins, kind)[name](Sums(len(c)))[0])
