"""Metrics of predictions: accuracy, calibration, selective prediction; chain diagnostics.

Nothing here is private in the test data.
"""

from dpbnn.evaluation.classification import (
    Reliability,
    accuracy,
    brier,
    classwise_ece,
    ece,
    global_gap,
    mce,
    nll,
    reliability,
)
from dpbnn.evaluation.diagnostics import Diagnostics, chain_diagnostics, diagnose
from dpbnn.evaluation.groups import Group
from dpbnn.evaluation.ordinal import rps
from dpbnn.evaluation.ranking import auroc, average_precision, confusion_matrix, recall
from dpbnn.evaluation.regression import (
    Coverage,
    crps,
    interval_coverage,
    log_likelihood,
    mae,
    pit,
    r2,
    rmse,
)
from dpbnn.evaluation.resampling import Metric, bootstrap
from dpbnn.evaluation.selective import RiskCoverage, ood_auroc, risk_coverage
from dpbnn.evaluation.summary import Evaluation, Histogram, evaluate, evaluate_each

__all__ = [
    "Coverage",
    "Diagnostics",
    "Evaluation",
    "Group",
    "Histogram",
    "Metric",
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "auroc",
    "average_precision",
    "bootstrap",
    "brier",
    "chain_diagnostics",
    "classwise_ece",
    "confusion_matrix",
    "crps",
    "diagnose",
    "ece",
    "evaluate",
    "evaluate_each",
    "global_gap",
    "interval_coverage",
    "log_likelihood",
    "mae",
    "mce",
    "nll",
    "ood_auroc",
    "pit",
    "r2",
    "recall",
    "reliability",
    "risk_coverage",
    "rmse",
    "rps",
]
