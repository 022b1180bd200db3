"""Predictive distributions: what S posterior samples say about unseen inputs.

One file for each kind of target.
"""

from dpbnn.predictive.base import Predictive
from dpbnn.predictive.classes import ClassPredictive, OrdinalPredictive
from dpbnn.predictive.counts import CountPredictive
from dpbnn.predictive.reals import PropagatedPredictive, RealPredictive
from dpbnn.predictive.widening import (
    Deviations,
    WidenedClassPredictive,
    WidenedRealPredictive,
    widened,
)

__all__ = [
    "ClassPredictive",
    "CountPredictive",
    "Deviations",
    "OrdinalPredictive",
    "Predictive",
    "PropagatedPredictive",
    "RealPredictive",
    "WidenedClassPredictive",
    "WidenedRealPredictive",
    "widened",
]
