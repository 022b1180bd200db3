"""Moment models: what expectation propagation needs to know about a model."""

from dpbnn.moments.base import Factors, MomentModel, Moments, Natural
from dpbnn.moments.coordinates import Coordinates, FactorContributions, Raw, Whitened
from dpbnn.moments.mixture import MixtureMoments
from dpbnn.moments.network import NetworkMoments

__all__ = [
    "Coordinates",
    "FactorContributions",
    "Factors",
    "MixtureMoments",
    "MomentModel",
    "Moments",
    "Natural",
    "NetworkMoments",
    "Raw",
    "Whitened",
]
