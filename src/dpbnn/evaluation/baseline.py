"""The baseline: one prediction for all records, the best that ignores the inputs.

It is made of the TEST truth alone: the shares of the classes, or mean and variance of the targets.
No training record is read for it, so it costs no privacy. It looks at the very records that it is
judged on, so it is slightly better than what anybody could have predicted before: a fair hurdle.
"""

from __future__ import annotations

import numpy as np
import torch

from dpbnn.evaluation import classification, ordinal, ranking, regression
from dpbnn.evaluation.checked import Classified, Targeted
from dpbnn.evaluation.resampling import Sums
from dpbnn.predictive import CountPredictive, RealPredictive


def of_classes(c: Classified, threshold: float, positive: int) -> dict[str, float]:
    """Return the metrics of the shares of the classes, the same for all records."""
    shares = np.bincount(c.y, minlength=c.classes) / len(c)
    constant = Classified(np.broadcast_to(shares, (len(c), c.classes)), c.y, ordered=c.ordered)
    plain = classification.metrics_of(constant)
    ranked = ranking.metrics_of(constant, threshold, positive)
    found = {name: plain[name] for name in ("accuracy", "nll", "brier")} | ranked
    found |= ordinal.metrics_of(constant)
    return {name: float(metric(Sums(len(c)))[0]) for name, metric in found.items()}


def of_targets(t: Targeted) -> dict[str, float]:
    """Return the metrics of one Gaussian with mean and variance of the targets.

    Of counts, of one Poisson distribution with their mean.
    """
    y = torch.as_tensor(t.y)
    if isinstance(t.predictive, CountPredictive):
        rate = y.mean(0).clamp(min=torch.finfo(y.dtype).tiny).log()
        return _of_numbers(Targeted(CountPredictive(rate.expand(1, *y.shape)), t.y))
    variance = y.var(0, correction=0).clamp(min=torch.finfo(y.dtype).tiny)
    return _of_numbers(Targeted(RealPredictive(y.mean(0).expand(1, *y.shape), variance), t.y))


def _of_numbers(constant: Targeted) -> dict[str, float]:
    predictive, y = constant.predictive, constant.y
    return {
        "rmse": regression.rmse(predictive, y),
        "mae": regression.mae(predictive, y),
        "r2": regression.r2(predictive, y),
        "log_likelihood": float(regression.log_densities(constant).mean()),
        "crps": float(regression.scores(constant).mean()),
    }
