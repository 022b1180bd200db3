"""The papers' networks, and layers whose weights are Gaussian."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbnn.privacy.stream import fill_normal


def mlp(
    inputs: int = 784,
    hidden: Sequence[int] = (1200, 1200),
    outputs: int = 10,
    dropout: float = 0.0,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Return a multilayer perceptron; the default is the papers' 784-1200-1200-10 with ReLU.

    Args:
        inputs: number of features (further axes are flattened).
        hidden: widths of the hidden layers.
        outputs: number of outputs.
        dropout: probability of dropping a hidden unit, 0 for no dropout layers.
        activation: builds the nonlinearity between layers.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for rows, columns in pairwise((inputs, *hidden)):
        layers += [nn.Linear(rows, columns), activation()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], outputs))


def cnn(activation: Callable[[], nn.Module] = nn.ReLU, outputs: int = 10) -> nn.Sequential:
    """Return the papers' convolutional network for 28 x 28 grey images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        activation(),
        nn.Linear(32, outputs),
    )


class GaussianLayer(nn.Module):
    """A layer with independent Gaussian weights w = mu + softplus(rho) * e, e ~ N(0, 1).

    Weights and biases are held as `weight_mu`, `weight_rho`, `bias_mu`, `bias_rho`. Every call
    draws one set of weights, shared by the batch.

    Args:
        weight: initial mean of the weights.
        bias: initial mean of the biases, or None.
        rho: initial value of every rho.
        generator: draws the weights; None is torch's global generator.
    """

    weight_mu: nn.Parameter
    bias_mu: nn.Parameter | None
    generator: torch.Generator | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None, rho: float, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.generator = generator
        for name, mean in (("weight", weight), ("bias", bias)):
            if mean is None:
                self.register_parameter(f"{name}_mu", None)
                self.register_parameter(f"{name}_rho", None)
            else:
                value = mean.detach().clone()
                setattr(self, f"{name}_mu", nn.Parameter(value))
                setattr(self, f"{name}_rho", nn.Parameter(torch.full_like(value, rho)))

    def __deepcopy__(self, memo: dict[int, object]) -> GaussianLayer:
        """Copy the layer; the copy draws from the same generator."""
        if self.generator is not None:
            memo[id(self.generator)] = self.generator
        reduced = self.__class__.__new__(self.__class__)
        memo[id(self)] = reduced
        reduced.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return reduced

    def drawn_names(self) -> list[str]:
        """Return which of weight and bias this layer draws."""
        return ["weight"] if self.bias_mu is None else ["weight", "bias"]

    def draw(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return standard normal draws e for the weights and biases."""
        return self._drawn(fill_normal, generator if generator is not None else self.generator)

    def _drawn(
        self,
        fill: Callable[[Tensor, torch.Generator | None], Tensor],
        generator: torch.Generator | None,
    ) -> dict[str, Tensor]:
        names = self.drawn_names()
        return {n: fill(torch.empty_like(getattr(self, f"{n}_mu")), generator) for n in names}

    def at(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights and biases mu + softplus(rho) * e."""
        return {
            name: torch.addcmul(
                getattr(self, f"{name}_mu"), F.softplus(getattr(self, f"{name}_rho")), e
            )
            for name, e in draw.items()
        }

    @torch.no_grad()
    def at_with_scale(self, draw: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the weights and `rho_scale`, sharing memory where they can."""
        weights, scales = {}, {}
        for name, e in draw.items():
            mu, rho = getattr(self, f"{name}_mu"), getattr(self, f"{name}_rho")
            std = F.softplus(rho)
            weights[name] = torch.addcmul(mu, std, e)
            scales[name] = torch.sigmoid(rho, out=std).mul_(e)
        return weights, scales

    def rho_scale(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return k = e * d softplus(rho) / d rho, so that d/d rho = k * d/d w."""
        return {
            name: torch.sigmoid(getattr(self, f"{name}_rho").detach()).mul_(e)
            for name, e in draw.items()
        }

    def apply_weights(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output for given weights."""
        raise NotImplementedError

    def forward(self, x: Tensor, sample: bool = True) -> Tensor:
        """Return the output at a fresh draw, or at the mean with `sample=False`."""
        if sample:  # torch's own generator, which runs under torch.func too
            weights = self.at(
                self._drawn(lambda t, source: t.normal_(generator=source), self.generator)
            )
            return self.apply_weights(x, weights["weight"], weights.get("bias"))
        return self.apply_weights(x, self.weight_mu, self.bias_mu)


class GaussianLinear(GaussianLayer):
    """A linear layer with Gaussian weights; see `GaussianLayer`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        rho: float = -5.0,
        generator: torch.Generator | None = None,
    ) -> None:
        like = nn.Linear(in_features, out_features, bias)
        super().__init__(like.weight, like.bias, rho, generator)

    def apply_weights(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x weight^T + bias."""
        return F.linear(x, weight, bias)


class GaussianConv2d(GaussianLayer):
    """A convolution with Gaussian weights; see `GaussianLayer`.

    Arguments are those of `torch.nn.Conv2d` with zero padding, and rho and generator.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        rho: float = -5.0,
        generator: torch.Generator | None = None,
    ) -> None:
        like = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias
        )
        super().__init__(like.weight, like.bias, rho, generator)
        self.stride, self.padding, self.dilation = like.stride, like.padding, like.dilation
        self.kernel_size, self.groups, self.padding_mode = like.kernel_size, groups, "zeros"

    def apply_weights(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of x with the weights."""
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


def _gaussian(module: nn.Module, rho: float, generator: torch.Generator | None) -> nn.Module:
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return module
    if type(module) is nn.Linear:
        layer: GaussianLayer = GaussianLinear.__new__(GaussianLinear)
    elif type(module) is nn.Conv2d:
        if module.padding_mode != "zeros":
            raise ValueError(
                f"padding_mode={module.padding_mode!r} has no Gaussian version; use 'zeros'."
            )
        layer = GaussianConv2d.__new__(GaussianConv2d)
    else:
        return module
    GaussianLayer.__init__(layer, module.weight, module.bias, rho, generator)
    for name in ("stride", "padding", "dilation", "groups", "kernel_size", "padding_mode"):
        if isinstance(module, nn.Conv2d):
            setattr(layer, name, getattr(module, name))
    return layer.train(module.training)


def to_gaussian(
    model: nn.Module, rho: float = -5.0, generator: torch.Generator | None = None
) -> nn.Module:
    """Return a copy of the model whose Linear and Conv2d layers have Gaussian weights.

    The means start at the model's weights and every standard deviation at softplus(rho); other
    modules, and layers with a frozen weight or bias, are copied as they are.

    Args:
        model: any network; other parameters stay points, and frozen ones stay frozen.
        rho: initial rho.
        generator: draws the weights; None is torch's global generator.
    """
    if not math.isfinite(rho):
        raise ValueError(f"rho={rho} must be finite; try rho=-5.0.")
    model = copy.deepcopy(model)
    replaced: dict[int, nn.Module] = {}
    for parent in list(model.modules()):
        if isinstance(parent, nn.MultiheadAttention):
            continue
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if id(child) not in replaced:
                replaced[id(child)] = _gaussian(child, rho, generator)
            setattr(parent, name, replaced[id(child)])
    return _gaussian(model, rho, generator)


def training_mode(network: nn.Module) -> None:
    """Put a network in training mode, but for modules that were given in evaluation mode and fixed.

    Fixed are modules whose parameters are all frozen, such as a pretrained backbone, with all that
    is in them; and BatchNorm and InstanceNorm layers that normalise by stored statistics.
    """
    fixed = [module for module in network.modules() if not module.training and _fixed(module)]
    modes = {module: module.training for outer in fixed for module in outer.modules()}
    network.train()
    for module, mode in modes.items():
        module.training = mode


def _fixed(module: nn.Module) -> bool:
    flags = [parameter.requires_grad for parameter in module.parameters()]
    stored = isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
    return stored or (bool(flags) and not any(flags))


class SharedDropout(nn.Dropout):
    """Dropout with one mask for the whole batch, as Algorithm 4 of the DP-BNN paper prints it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x with the same units dropped in every example."""
        if not self.training or self.p == 0:
            return x
        return x * F.dropout(torch.ones_like(x[:1]), self.p)


class IntegratedLinear(nn.Module):
    """A Gaussian linear layer as the mean and the variance of its output, side by side.

    With w ~ N(mu, std^2): E f = mu x + mu_b and Var f = std^2 x^2 + std_b^2, std = softplus(rho).

    Args:
        layer: the layer whose parameters are taken over, under the same names.
    """

    def __init__(self, layer: GaussianLinear) -> None:
        super().__init__()
        for name, parameter in layer.named_parameters():
            setattr(self, name, parameter)
        if layer.bias_mu is None:
            self.bias_mu = self.bias_rho = None

    def drawn_names(self) -> list[str]:
        """Return which of weight and bias this layer has."""
        return ["weight"] if self.bias_mu is None else ["weight", "bias"]

    def forward(self, x: Tensor) -> Tensor:
        """Return (E f, Var f)."""
        bias = None if self.bias_rho is None else F.softplus(self.bias_rho).square()
        variance = F.linear(x.square(), F.softplus(self.weight_rho).square(), bias)
        return torch.cat([F.linear(x, self.weight_mu, self.bias_mu), variance], -1)


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
