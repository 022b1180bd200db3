"""What training leaves behind: distributions over weights that predict, and are saved."""

from dpbnn.posteriors.drawn import DrawnPosterior
from dpbnn.posteriors.dropout import DropoutPosterior
from dpbnn.posteriors.folder import load
from dpbnn.posteriors.iterate_file import IterateStore, IterateWriter
from dpbnn.posteriors.iterates import IteratePosterior
from dpbnn.posteriors.laplace import LaplacePosterior
from dpbnn.posteriors.low_rank import LowRankPosterior
from dpbnn.posteriors.mean_field import MeanFieldPosterior
from dpbnn.posteriors.mixture_means import MixturePosterior
from dpbnn.posteriors.natural import NaturalPosterior
from dpbnn.posteriors.point import PointPosterior
from dpbnn.posteriors.posterior import Posterior, predictive_from

__all__ = [
    "DrawnPosterior",
    "DropoutPosterior",
    "IteratePosterior",
    "IterateStore",
    "IterateWriter",
    "LaplacePosterior",
    "LowRankPosterior",
    "MeanFieldPosterior",
    "MixturePosterior",
    "NaturalPosterior",
    "PointPosterior",
    "Posterior",
    "load",
    "predictive_from",
]
