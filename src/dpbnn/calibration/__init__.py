"""What held-out data decides privately: temperatures, conformal thresholds, the best model."""

from dpbnn.calibration.conformal import ConformalPosterior, conformalize
from dpbnn.calibration.selection import Selection, select
from dpbnn.calibration.split import calibration_split
from dpbnn.calibration.temperature import RecalibratedPosterior, recalibrate, tempered

__all__ = [
    "ConformalPosterior",
    "RecalibratedPosterior",
    "Selection",
    "calibration_split",
    "conformalize",
    "recalibrate",
    "select",
    "tempered",
]
