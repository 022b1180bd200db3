"""Selective prediction and out-of-distribution detection: does uncertainty rank records well?"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpbnn.evaluation.checked import Classified, Floats, array, finite
from dpbnn.evaluation.resampling import Resamples, Sums
from dpbnn.predictive import Predictive


@dataclasses.dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Error rate among the most certain records, against how many are kept.

    Attributes:
        coverage: share of records that are kept, from 1/N to 1.
        risk: share of them that are misclassified.
        aurc: mean of the risk over all coverages k/N; 0 is best.
    """

    coverage: Floats
    risk: Floats
    aurc: float


def risk_coverage(predictive: Any, y: Any, score: Any = "confidence") -> RiskCoverage:
    """Return the risk-coverage curve: records are dropped in order of uncertainty.

    Records of equal uncertainty count with their mean error, which is the expectation over their
    random order.

    Args:
        predictive: a `ClassPredictive`, or probabilities [N, K].
        y: labels [N], from 0 to K - 1.
        score: "confidence", "entropy", "epistemic" (for a predictive), or an uncertainty for every
            record, [N].
    """
    return risk_coverage_of(Classified.of(predictive, y), score)


def risk_coverage_of(c: Classified, score: Any) -> RiskCoverage:
    """Return the risk-coverage curve of checked probabilities."""
    scores = uncertainty(c, score)
    order = np.argsort(scores, kind="stable")
    tied = np.cumsum(np.diff(scores[order], prepend=scores[order[0]]) > 0)
    errors = 1.0 - c.hit[order]
    errors = (np.bincount(tied, errors) / np.bincount(tied))[tied]
    kept = np.arange(1, len(c) + 1)
    risk = errors.cumsum() / kept
    return RiskCoverage(kept / len(c), risk, float(risk.mean()))


def aurcs(c: Classified, sums: Sums) -> Floats:
    """Return the area under the risk-coverage curve of every resample.

    Resampled curves are computed at 200 points and interpolated linearly.
    """
    if not isinstance(sums, Resamples):
        return np.array([risk_coverage_of(c, "confidence").aurc])
    slots = min(len(c), 200)
    slot = np.empty(len(c), dtype=np.int64)
    slot[np.argsort(-c.confidence, kind="stable")] = np.arange(len(c)) * slots // len(c)
    counts = sums(np.ones(len(c)), slot, slots)
    risk = sums(1.0 - c.hit, slot, slots).cumsum(1) / np.maximum(counts.cumsum(1), 1)
    before = np.concatenate([risk[:, :1], risk[:, :-1]], 1)
    return (counts * (risk + before)).sum(1) / 2 / sums.total


def uncertainty(c: Classified, score: Any) -> Floats:
    """Return the uncertainty of every record."""
    if not isinstance(score, str):
        found = finite(score, "score")
        if found.shape != (len(c),):
            raise ValueError(f"score has shape {list(found.shape)}; give one per record, {len(c)}")
        return found
    if score == "confidence":
        return -c.confidence
    if score == "entropy":
        return c.entropy
    if score == "epistemic":
        if c.predictive is None:
            raise ValueError("score='epistemic': needs a predictive; pass posterior.predict(x)")
        return array(c.predictive.epistemic, "epistemic").astype(np.float64)
    raise ValueError(f"score={score!r}: must be 'confidence', 'entropy', 'epistemic' or an array")


def ood_auroc(inside: Any, outside: Any) -> float:
    """Return the probability that an outlier is more uncertain than an ordinary record.

        P(s_out > s_in) + P(s_out = s_in) / 2

    1 is perfect detection, 1/2 is guessing.

    Args:
        inside: uncertainties of ordinary records, or a predictive, whose epistemic uncertainty is
            taken.
        outside: the same of outliers.
    """
    ordinary, outlying = (
        finite(s.epistemic if isinstance(s, Predictive) else s, name).reshape(-1)
        for s, name in ((inside, "inside"), (outside, "outside"))
    )
    ordinary.sort()
    below = np.searchsorted(ordinary, outlying, "left").mean() / len(ordinary)
    upto = np.searchsorted(ordinary, outlying, "right").mean() / len(ordinary)
    return float((below + upto) / 2)
