"""Networks: the papers' ones, layers with Gaussian weights, and the register of all layers."""

from dpbnn.networks import attention as _attention  # noqa: F401  (registers its layers)
from dpbnn.networks import recurrent as _recurrent  # noqa: F401  (registers its layers)
from dpbnn.networks.gaussian import (
    GaussianConv2d,
    GaussianLayer,
    GaussianLinear,
    IntegratedLinear,
    to_gaussian,
    to_plain,
)
from dpbnn.networks.layers import arguments, attributes, register
from dpbnn.networks.papers import cnn, mlp, training_mode
from dpbnn.networks.scattering import Scattering
from dpbnn.networks.standard import (
    Beside,
    First,
    LearnedNoise,
    SharedDropout,
    SlopedNoise,
    SteepTanh,
    Steps,
)

__all__ = [
    "Beside",
    "First",
    "GaussianConv2d",
    "GaussianLayer",
    "GaussianLinear",
    "IntegratedLinear",
    "LearnedNoise",
    "Scattering",
    "SharedDropout",
    "SlopedNoise",
    "SteepTanh",
    "Steps",
    "arguments",
    "attributes",
    "cnn",
    "mlp",
    "register",
    "to_gaussian",
    "to_plain",
    "training_mode",
]
