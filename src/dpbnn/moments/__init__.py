"""Moment models: what expectation propagation needs to know about a model."""

from dpbnn.moments.coordinates import Coordinates, FactorContributions, Raw, Whitened
from dpbnn.moments.model import Factors, MomentModel, Moments, Natural
from dpbnn.moments.relu_network import NetworkMoments
from dpbnn.moments.tilted_mixture import MixtureMoments

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
