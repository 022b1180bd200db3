"""A layer of one's own in one file: its rule, its Gaussian version, and how it is saved."""

import torch
from torch import nn

from dpbnn.networks import GaussianLayer, register


class Scale(nn.Module):
    """z = weight * x + bias, with a weight and a bias for every feature."""

    def __init__(self, features, bias=True):
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features)) if bias else None

    def forward(self, x):
        return scaled(x, self.weight, self.bias)


def scaled(x, weight, bias):
    return x * weight if bias is None else x * weight + bias


def rule(layer, record):
    """A position contributes x * g to the gradient of the weight, and g to that of the bias."""

    def forward(x):
        z = scaled(x, layer.weight, layer.bias)
        return record.direct(x, z, {"weight": lambda x, g: x * g, "bias": lambda x, g: g})

    return forward


class GaussianScale(GaussianLayer):
    """A `Scale` with Gaussian weights."""

    def __init__(self, features, bias=True, rho=-5.0, generator=None):
        plain = Scale(features, bias)
        super().__init__(plain.weight, plain.bias, rho, generator)
        self.features = features

    def apply_weights(self, x, weight, bias):
        return scaled(x, weight, bias)


register(Scale, rule, gaussian=GaussianScale)
