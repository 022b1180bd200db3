"""Gaussian weights of ReLU networks that predict by propagating moments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.likelihoods import full
from dpbnn.posteriors.mean_field import MeanFieldPosterior
from dpbnn.predictive import Predictive

_BLOCK = 2**22  # elements of a hidden layer's moments at once
_SMALLEST = 1e-24  # variance
FAR = 100.0  # standard deviations from zero beyond which a ReLU is linear or dead

Note = Callable[[str, Tensor, Tensor | None, Tensor, Tensor], None]


@dataclasses.dataclass(frozen=True)
class LinearMoments:
    """A linear layer with its bias as a last column, and the moments of its weights.

    Attributes:
        name: path of the layer in the network.
        linear: the layer.
        mean: means [out, in (+ 1)] of the weights divided by `scale`; None before `at`.
        variance: variances, likewise.
    """

    name: str
    linear: nn.Linear
    mean: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    variance: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))

    @property
    def bias(self) -> int:
        """Whether the last column is a bias."""
        return int(self.linear.bias is not None)

    @property
    def scale(self) -> float:
        """1 / sqrt(n), n the number of inputs with the bias."""
        return 1 / math.sqrt(self.linear.in_features + self.bias)

    def joined(self) -> Tensor:
        """Return the weights with the bias as last column."""
        weight = self.linear.weight.detach()
        if self.linear.bias is None:
            return weight
        return torch.cat([weight, self.linear.bias.detach().unsqueeze(1)], 1)

    def split(self, joined: Tensor) -> None:
        """Set weights and bias from `joined`."""
        with torch.no_grad():
            for own, value in self.named(joined).items():
                self.linear.get_parameter(own.rpartition(".")[2]).copy_(value)

    def named(self, joined: Tensor) -> dict[str, Tensor]:
        """Return the parts of a joined tensor by parameter name."""
        weight = self.linear.weight
        prefix = f"{self.name}." if self.name else ""
        parts = {f"{prefix}weight": joined[:, : weight.shape[1]]}
        if self.bias:
            parts[f"{prefix}bias"] = joined[:, -1]
        plain = torch.contiguous_format
        return {name: v.to(weight).clone(memory_format=plain) for name, v in parts.items()}

    def at(self, mean: Tensor, variance: Tensor) -> LinearMoments:
        """Return the layer with moments of its scaled weights, in the network's own dtype."""
        like = self.linear.weight
        return dataclasses.replace(self, mean=mean.to(like), variance=variance.to(like))


class NaturalPosterior(MeanFieldPosterior):
    """Independent Gaussian weights of a ReLU network, from expectation propagation.

    `predict` propagates mean and variance through the network and gives one Gaussian per input, as
    the EP papers do; `predict(x, propagate=False)` and `outputs` draw weights.

    Args:
        model: Linear and ReLU layers whose parameters are the means.
        likelihood: Gaussian with a known noise.
        std: standard deviations of all parameters, by name.
        **record: privacy, prior and settings; see `Posterior`.
    """

    kind = "natural"

    def __init__(
        self, model: nn.Module, likelihood: object, std: Mapping[str, Tensor], **record: Any
    ) -> None:
        super().__init__(model, likelihood, std, **record)
        self._layers = linear_layers(self.model)

    def predict(
        self, x: Any, samples: int = 100, *, propagate: bool = True, **options: Any
    ) -> Predictive:
        """Return the predictive distribution at inputs x, by moments or by weight draws.

        Args:
            x: inputs, examples first.
            samples: number of weight draws, without propagation.
            propagate: whether moments are propagated; the predictive is then one Gaussian per
                input, whose epistemic part is the propagated variance.
            **options: of `Posterior.predict`, without propagation.
        """
        if propagate:
            (inputs,) = self._inputs(x)
            found = full(self.likelihood).from_moments(*self.moments(inputs))
            if found is not None:
                return found
        return super().predict(x, samples, **options)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the network's outputs by propagation, [N] or [N, D].

        They are in the network's precision, or in double precision where they are too large for it.
        """
        for dtype in (self.model.get_parameter(next(iter(self.std))).dtype, torch.float64):
            mean, variance = self._moments(x, dtype)
            if torch.isfinite(mean).all() and torch.isfinite(variance).all():
                return mean, variance
        bad = ~x.flatten(1).isfinite().all(1)
        if bad.any():
            raise ValueError(
                f"{int(bad.sum())} inputs hold NaN or infinity; remove or correct them"
            )
        raise ValueError(
            "some inputs are larger than moments can be computed of; standardise them, before "
            "fitting and before predicting"
        )

    def _moments(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        placed = {}
        for name, layer in self._layers.items():
            prefix = f"{name}." if name else ""
            std = self.std[f"{prefix}weight"]
            if layer.bias:
                std = torch.cat([std, self.std[f"{prefix}bias"].unsqueeze(1)], 1)
            placed[name] = dataclasses.replace(
                layer,
                mean=layer.joined().to(dtype) / layer.scale,
                variance=(std.to(dtype) / layer.scale).square().clamp(min=1e-30),
            )
        widest = max(layer.linear.out_features for layer in placed.values())
        blocks = x.flatten(1).to(dtype).split(max(1, _BLOCK // widest))
        parts = [propagate(placed, part) for part in blocks]
        mean, variance = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        one = mean.shape[1] == 1
        return (mean[:, 0], variance[:, 0]) if one else (mean, variance)


def linear_layers(model: nn.Module) -> dict[str, LinearMoments]:
    """Return the linear layers of a network by path, or refuse the network, naming the module."""
    layers: dict[str, LinearMoments] = {}
    expected: type[nn.Module] = nn.Linear
    leaves = [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module) not in (nn.Sequential, nn.Flatten, nn.Identity)
    ]
    for path, module in leaves:
        if type(module) is not expected:
            raise ValueError(
                f"{path or 'the network'} is {type(module).__name__} where expectation propagation "
                f"needs {expected.__name__}: use Linear and ReLU in turn, as in dpbnn.mlp(8, "
                f"(50,), 1)"
            )
        if isinstance(module, nn.Linear):
            if any(module is layer.linear for layer in layers.values()):
                raise ValueError(f"{path}: is used twice; give every layer its own weights")
            layers[path] = LinearMoments(path, module)
        expected = nn.ReLU if expected is nn.Linear else nn.Linear
    if not layers or expected is nn.Linear:
        raise ValueError("the network must end in a Linear layer, as in dpbnn.mlp(8, (50,), 1)")
    return layers


def propagate(
    layers: Mapping[str, LinearMoments], x: Tensor, note: Note | None = None
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of a network's output, [N, D] each.

    Args:
        layers: with their moments, in order.
        x: inputs [N, features].
        note: called for every layer with its name, its input's mean and variance (bias column
            included, None for no variance) and its output's mean and variance.
    """
    z, z_variance = x, None
    *_, last = layers
    for name, layer in layers.items():
        if layer.bias:
            z = torch.cat([z, z.new_ones(len(z), 1)], 1)
            if z_variance is not None:
                z_variance = torch.cat([z_variance, z.new_zeros(len(z), 1)], 1)
        mean, variance, scale = layer.mean, layer.variance, layer.scale
        m = scale * (z @ mean.T)
        v = scale**2 * (z.square() @ variance.T)
        if z_variance is not None:
            v = v + scale**2 * (z_variance @ (variance + mean.square()).T)
        v = v.clamp(min=_SMALLEST)
        if note is not None:
            note(name, z, z_variance, m, v)
        if name != last:
            z, z_variance = rectified(m, v)
    return m, v


def rectified(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of max(0, a), a ~ N(m, v).

    With r = m / sqrt(v): mean sqrt(v) (phi + r Phi) and variance
    v (Phi + r^2 Phi Phi' + r phi (Phi' - Phi) - phi^2), Phi' = 1 - Phi, which does not cancel for
    large r.
    """
    std = v.sqrt()
    r = (m / std).clamp(-FAR, FAR)
    density = torch.exp(-0.5 * r.square()) / math.sqrt(2 * math.pi)
    upper, lower = (0.5 * torch.erfc(s * r / math.sqrt(2)) for s in (-1, 1))
    mean = (std * density + m * upper).clamp(min=0)
    share = upper + r.square() * upper * lower + r * density * (lower - upper) - density.square()
    return mean, v * share.clamp(min=0)
