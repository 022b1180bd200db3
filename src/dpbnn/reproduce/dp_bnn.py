"""DP-BNN: what the paper's code computes in its own way."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpbnn.evaluation import reliability

__all__ = ["mce_dropped_bins"]


def mce_dropped_bins(predictive: Any, y: Any, bins: int = 20, *, signed: bool = False) -> float:
    """Return what the paper's code reports as "MCE": max_b |centre_b - accuracy_b|.

    Bins that are empty are left out, and so are those in which no prediction is right; NaN if none
    is left. The centre of a bin stands for its confidence.

    Args:
        predictive: a `ClassPredictive`, or probabilities [N, K].
        y: labels [N], from 0 to K - 1.
        bins: number of bins of equal width.
        signed: max_b (centre_b - accuracy_b), over-confidence alone, as in the paper's BBP code.
    """
    found = reliability(predictive, y, bins)
    gap = (found.edges[1:] + found.edges[:-1]) / 2 - found.accuracy
    kept = gap[found.accuracy > 0]
    return float((kept if signed else np.abs(kept)).max()) if len(kept) else float("nan")
