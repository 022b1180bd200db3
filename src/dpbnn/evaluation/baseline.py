"""The baseline: one prediction for all records, the best that ignores the inputs.

It is made of the TEST truth alone: the shares of the classes, or mean and variance of the targets.
No training record is read for it, so it costs no privacy. It looks at the very records that it is
judged on, so it is slightly better than what anybody could have predicted before: a fair hurdle.
"""

from __future__ import annotations

import numpy as np
import torch

from dpbnn.evaluation import classification, ranking, regression
from dpbnn.evaluation.checked import Classified, Targeted
from dpbnn.evaluation.resampling import Sums
from dpbnn.predictive import RealPredictive


def of_classes(c: Classified, threshold: float, positive: int) -> dict[str, float]:
    """Return the metrics of the shares of the classes, the same for all records."""
    shares = np.bincount(c.y, minlength=c.classes) / len(c)
    constant = Classified(np.broadcast_to(shares, (len(c), c.classes)), c.y)
    plain = classification.metrics_of(constant)
    ranked = ranking.metrics_of(constant, threshold, positive)
    found = {name: plain[name] for name in ("accuracy", "nll", "brier")} | ranked
    return {name: float(metric(Sums(len(c)))[0]) for name, metric in found.items()}


def of_targets(t: Targeted) -> dict[str, float]:
    """Return the metrics of one Gaussian with mean and variance of the targets."""
    y = torch.as_tensor(t.y)
    variance = y.var(0, correction=0).clamp(min=torch.finfo(y.dtype).tiny)
    constant = Targeted(RealPredictive(y.mean(0).expand(1, *y.shape), variance), t.y)
    return {
        "rmse": regression.rmse(constant.predictive, t.y),
        "mae": regression.mae(constant.predictive, t.y),
        "r2": regression.r2(constant.predictive, t.y),
        "log_likelihood": float(regression.log_densities(constant).mean()),
        "crps": float(regression.scores(constant).mean()),
    }
