"""The layers of torch and of this library, one declaration per family of layers.

A rule states the gradient of a layer's parameters as a sum over positions t, of the input a_t and
the gradient g_t at the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbnn.networks.gaussian import GaussianConv2d, GaussianLinear
from dpbnn.networks.layers import Forward, attributes, multiplied, normalized, register
from dpbnn.networks.pooling import pooling

KNOTS = (-1.0, 0.0, 1.0)  # of `Steps`
_RISEN = math.tanh(2.0)  # of a step, from one knot to the next

__all__ = [
    "Beside", "First", "LearnedNoise", "SharedDropout", "SlopedNoise", "SteepTanh", "Steps",
]  # fmt: skip


def _linear(layer: Any, record: Any) -> Forward:
    """G = sum_t g_t a_t^T, bias sum_t g_t."""

    def forward(input: Tensor) -> Tensor:
        x = multiplied(input)
        return record.linear(x, F.linear(x, layer.weight, layer.bias))

    return forward


register(nn.Linear, _linear, gaussian=GaussianLinear)
register(nn.modules.linear.NonDynamicallyQuantizableLinear, _linear, saved=None)


def _convolution(layer: Any, record: Any) -> Forward:
    """G = sum_t g_t a_t^T over output positions t with patches a_t."""
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(layer.stride)]

    def forward(input: Tensor) -> Tensor:
        x, padding = _padded(layer, input)
        window = (layer.stride, padding, layer.dilation, layer.groups)
        z = function(x, layer.weight, layer.bias, *window)
        return record.convolution(x, z, layer.weight.shape, *window)

    return forward


def _padded(layer: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input and the zero padding left to do; other padding is done here."""
    if layer.padding == "valid":
        return x, (0,) * len(layer.stride)
    if layer.padding == "same":
        totals = [d * (size - 1) for size, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        pairs = [(total // 2, total - total // 2) for total in totals]
    elif layer.padding_mode == "zeros":
        return x, layer.padding
    else:
        pairs = [(pad, pad) for pad in layer.padding]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    sides = [side for pair in reversed(pairs) for side in pair]
    return F.pad(x, sides, mode=mode), (0,) * len(layer.stride)


register(nn.Conv1d, _convolution)
register(nn.Conv2d, _convolution, gaussian=GaussianConv2d)
register(nn.Conv3d, _convolution)


def _embedding(layer: Any, record: Any) -> Forward:
    """Every position adds g_t to the row of its index."""
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        record.refuse(
            "uses max_norm, scale_grad_by_freq or sparse, whose gradients are not taken per "
            "example; use an Embedding without them."
        )

    def forward(input: Tensor) -> Tensor:
        z = F.embedding(input, layer.weight, layer.padding_idx)
        return record.lookup(input, z, layer.padding_idx)

    return forward


register(
    nn.Embedding,
    _embedding,
    saved=attributes("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type"),
)


def _trailing_norm(normal: Callable[..., Tensor], layer: Any, record: Any) -> Forward:
    """LayerNorm and RMSNorm: weight sum_t g_t * xhat_t, bias sum_t g_t."""

    def forward(input: Tensor) -> Tensor:
        eps = torch.finfo(input.dtype).eps if layer.eps is None else layer.eps
        input = normalized(input) if normal is F.layer_norm else input

        def by_weight(x: Tensor, g: Tensor) -> Tensor:
            return normal(x, layer.normalized_shape, eps=eps).mul_(g)

        z = type(layer).forward(layer, input)
        return record.direct(input, z, {"bias": lambda x, g: g, "weight": by_weight})

    return forward


register(nn.LayerNorm, partial(_trailing_norm, F.layer_norm))
register(nn.RMSNorm, partial(_trailing_norm, F.rms_norm))


def _channel_norm(layer: Any, record: Any) -> Forward:
    """GroupNorm and InstanceNorm: weight sum_t g_t * xhat_t, bias sum_t g_t, per channel."""

    def by_weight(x: Tensor, g: Tensor) -> Tensor:
        groups = getattr(layer, "num_groups", x.shape[1])
        return F.group_norm(x, groups, eps=layer.eps).mul_(g)

    def forward(input: Tensor) -> Tensor:
        z = type(layer).forward(layer, input)
        gradients = {"bias": lambda x, g: g, "weight": by_weight}
        return record.direct(input, z, gradients, channels=True)

    return forward


register(nn.GroupNorm, _channel_norm)
register(nn.InstanceNorm1d, _channel_norm, saved=None)
register(nn.InstanceNorm2d, _channel_norm, saved=None)
register(nn.InstanceNorm3d, _channel_norm, saved=None)


class LearnedNoise(nn.Module):
    """Appends a learned log-variance to a network's outputs, the same for all inputs.

    Args:
        outputs: number of outputs.
        log_variance: initial value.
    """

    def __init__(self, outputs: int, log_variance: float = 0.0) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.full((outputs,), float(log_variance)))

    def forward(self, x: Tensor) -> Tensor:
        """Return (x, log-variance), side by side."""
        return torch.cat([x, self.log_variance.expand(*x.shape[:-1], -1)], -1)


def _learned_noise(layer: Any, record: Any) -> Forward:
    """sum_t g_t over the outputs that hold the log-variance."""
    width = len(layer.log_variance)

    def forward(x: Tensor) -> Tensor:
        z = LearnedNoise.forward(layer, x)
        return record.direct(x, z, {"log_variance": lambda x, g: g[..., -width:]})

    return forward


register(LearnedNoise, _learned_noise, saved=lambda m: {"outputs": len(m.log_variance)})


class SlopedNoise(LearnedNoise):
    """Appends a learned log-variance that rises or falls with the network's outputs x.

        s = log_variance + slope asinh(2 x)

    It moves slowly where outputs are large. The outputs do not learn through it.

    Args:
        outputs: number of outputs.
        log_variance: initial value; the slope begins at 0.
    """

    def __init__(self, outputs: int, log_variance: float = 0.0) -> None:
        super().__init__(outputs, log_variance)
        self.slope = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return (x, log-variance), side by side."""
        return torch.cat([x, self.log_variance + self.slope * torch.asinh(2 * x.detach())], -1)


def _sloped_noise(layer: Any, record: Any) -> Forward:
    """Of the log-variances' part of g_t: its sum, and its sum times asinh(2 x_t)."""
    width = len(layer.log_variance)

    def forward(x: Tensor) -> Tensor:
        z = SlopedNoise.forward(layer, x)
        gradients = {
            "log_variance": lambda x, g: g[..., -width:],
            "slope": lambda x, g: g[..., -width:] * torch.asinh(2 * x),
        }
        return record.direct(x, z, gradients)

    return forward


register(SlopedNoise, _sloped_noise, saved=lambda m: {"outputs": len(m.log_variance)})


class Beside(nn.Sequential):
    """Layers with their input beside their output: x becomes (layers(x), x), side by side.

    A Linear layer that follows has a linear path to the inputs, beside that through the layers.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return (layers(x), x)."""
        return torch.cat([super().forward(x), x], -1)


class Steps(nn.Module):
    """Appends smooth steps of the last columns at fixed places, which look at no data.

        x becomes (x, size tanh(2 (x_j - k))),   k = -1, 0, 1, for the last columns j

    A Linear layer that follows has a curve of its own for every one of them. For inputs of about
    mean 0 and variance 1.

    Args:
        columns: number of last columns.
        size: of a step.
    """

    def __init__(self, columns: int, size: float = 1.0) -> None:
        super().__init__()
        self.columns, self.size = columns, size

    def forward(self, x: Tensor) -> Tensor:
        """Return x and its steps, side by side."""
        middle = torch.tanh(2 * x[..., x.shape[-1] - self.columns :])
        part = _RISEN * middle  # tanh(u + v) = (tanh u + tanh v)/(1 + tanh u tanh v): 3 x as fast
        steps = [(middle + _RISEN) / (1 + part), middle, (middle - _RISEN) / (1 - part)]
        return torch.cat([x, *(self.size * step for step in steps)], -1)


register(Steps, saved=attributes("columns", "size"))


class First(nn.Module):
    """Keeps the first columns.

    Args:
        columns: their number.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        """Return the first columns."""
        return x[..., : self.columns]


register(First, saved=attributes("columns"))


class SteepTanh(nn.Module):
    """tanh(slope x): weights before it move it faster, and under less noise, than before tanh(x).

    Args:
        slope: at 0.
    """

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        """Return tanh(slope x)."""
        return torch.tanh(self.slope * x)


register(SteepTanh, saved=attributes("slope"))


class SharedDropout(nn.Dropout):
    """Dropout with one mask for the whole batch, as Algorithm 4 of the DP-BNN paper prints it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x with the same units dropped in every example."""
        if not self.training or self.p == 0:
            return x
        return x * F.dropout(torch.ones_like(x[:1]), self.p)


register(SharedDropout, saved=attributes("p", "inplace"))
register(nn.MaxPool2d, pooling, always=True)
register(nn.PReLU, saved=attributes("num_parameters"))
register(nn.Hardtanh, saved=attributes("min_val", "max_val", "inplace"))
for _kind in (
    nn.Bilinear, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.MaxPool1d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Upsample,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardswish,
    nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Softmax, nn.LogSoftmax,
):  # fmt: skip
    register(_kind)
