"""What layer rules record with: each way to use a parameter, as sites for norms and sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.contributions.outer import ConvFactors, LinearFactors, Outer, Window
from dpbnn.contributions.rounding import accurate, squares
from dpbnn.contributions.sites import Direct, Rows, Site, summed_positions
from dpbnn.contributions.tape import Discovery, Tape
from dpbnn.contributions.tiles import tiled
from dpbnn.networks.gaussian import GaussianLayer
from dpbnn.networks.layers import Forward, Rule


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that is recorded as a whole.

    Attributes:
        path: dotted path in the model.
        rule: makes the recording forward; None for a module that is replayed.
        names: by the layer's own parameter its released name; for Gaussian layers in the space of
            parameters those of mu and rho, None where frozen. All frozen ones are absent.
    """

    path: str
    rule: Rule | None
    names: dict[str, list[str | None]]


@dataclass(frozen=True)
class Recording:
    """What a rule records the calls of one layer with, in one run of the network.

    Every method returns the output that is to be passed on instead of z. Parameters are named as in
    the layer; frozen ones are left out here. g is the gradient at z.

    Attributes:
        layer: as its rule sees it.
        unit: its path and released names.
        tape: where its calls are noted.
        scales: k of weight and bias, where rho is released.
    """

    layer: Any
    unit: Unit
    tape: Tape | Discovery
    scales: Mapping[str, Tensor]

    def linear(
        self, x: Tensor, z: Tensor, *, weight: str = "weight", bias: str = "bias", at: str = ""
    ) -> Tensor:
        """Record z = x W^T + b, over the last axis; `at` names a part of the layer."""

        def build(a: Tensor, g: Tensor) -> list[Site]:
            a, g = _rows(a), _rows(g)
            if tiled(g) and weight not in self.scales:
                a, g = a.to(g.dtype).contiguous(), g.contiguous()
            else:
                a, g = accurate(a), accurate(g)
            shape = torch.Size([g.shape[-1], a.shape[-1]])
            over = (g.unsqueeze(1) if g.dim() == 2 else g, 1)
            return self._affine(a, g, over, LinearFactors, shape, weight, bias)

        return self.tape.tap(f"{self.unit.path}.{at}".rstrip("."), x, z, build, low=True)

    def convolution(
        self,
        x: Tensor,
        z: Tensor,
        shape: torch.Size,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> Tensor:
        """Record a convolution with weights of this shape, and a bias."""
        window = Window(shape, stride, padding, dilation, groups)
        factors = partial(ConvFactors, window=window)

        def build(a: Tensor, g: Tensor) -> list[Site]:
            return self._affine(accurate(a), g, (_pixels(g), 2), factors, shape, "weight", "bias")

        return self.tape.tap(self.unit.path, x, z, build, alone=True)

    def _affine(
        self,
        a: Tensor,
        g: Tensor,
        over: tuple[Tensor, int],
        factors: Callable[..., LinearFactors],
        shape: torch.Size,
        weight: str,
        bias: str,
    ) -> list[Site]:
        """Return the sites of G = sum_t g_t a_t^T and of the bias sum_t g_t.

        `over` is g with its positions on one axis, and which axis that is.
        """
        sites: list[Site] = []
        if bias in self.unit.names:
            gradient, slack, g_squares = summed_positions(*over)
            term = (gradient, self.scales.get(bias), slack)
            single = g_squares if over[0].shape[over[1]] == 1 else None
            sites.append(Direct(self.unit.names[bias], [term], single))
        else:
            g_squares = squares(g)
        if weight in self.unit.names:
            use = factors(a, g, squares(a), g_squares, self.scales.get(weight))
            sites.append(Outer(self.unit.names[weight], shape, [use]))
        return sites

    def lookup(self, indices: Tensor, z: Tensor, padding: int | None) -> Tensor:
        """Record z = W[indices]; the index `padding` contributes nothing."""

        def build(a: Tensor, g: Tensor) -> list[Site]:
            g = g.reshape(len(g), -1, g.shape[-1])
            a = a.reshape(len(g), -1).long()
            if padding is not None:
                g = g.masked_fill((a == padding).unsqueeze(-1), 0.0)
            (name,) = self.unit.names["weight"]
            assert name is not None
            return [Rows(name, self.layer.weight.shape, a, g)]

        return self.tape.tap(self.unit.path, indices, z, build)

    def direct(
        self,
        x: Tensor,
        z: Tensor,
        gradients: Mapping[str, Callable[[Tensor, Tensor], Tensor]],
        channels: bool = False,
    ) -> Tensor:
        """Record small parameters, whose gradients are functions of x and g at every position.

        Args:
            x: [batch, ...].
            z: [batch, ..., width], or [batch, channels, ...] with `channels`.
            gradients: by parameter p, (x, g) -> g * dz/dp, shaped [batch, positions...] and then
                like p; it is summed over the positions. A new tensor, g, or a part of g.
            channels: whether p has one entry per channel, the second axis.
        """

        def build(a: Tensor, g: Tensor) -> list[Site]:
            sites: list[Site] = []
            for own, gradient in gradients.items():
                if own in self.unit.names:
                    h = gradient(accurate(a), g)
                    if not channels:
                        h = h.reshape(len(h), -1, *getattr(self.layer, own).shape)
                    over = (_pixels(h), 2) if channels else (h, 1)
                    total, slack, _ = summed_positions(*over)
                    term = (total, self.scales.get(own), slack)
                    sites.append(Direct(self.unit.names[own], [term]))
            return sites

        return self.tape.tap(self.unit.path, x, z, build, alone=channels, early=True)

    def refuse(self, reason: str) -> NoReturn:
        """Raise for a layer or a call whose gradients are not taken per example."""
        raise UnsupportedModel(f"{self.unit.path!r} ({type(self.layer).__name__}) {reason}")


def _rows(t: Tensor) -> Tensor:
    """Return [batch, T, width], or [batch, width] where T = 1."""
    if t.dim() == 2:
        return t
    rows = t.flatten(1, -2)
    return rows[:, 0] if rows.shape[1] == 1 else rows


def _pixels(t: Tensor) -> Tensor:
    """Return [batch, channels, T]."""
    return t.flatten(2) if t.dim() > 2 else t.unsqueeze(2)


class _Drawn:
    """A Gaussian layer as its rule sees it: with the weights of one draw."""

    def __init__(self, module: GaussianLayer, weights: Mapping[str, Tensor]) -> None:
        self.module, self.weight, self.bias = module, weights["weight"], weights.get("bias")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def recorded(module: nn.Module, unit: Unit, tape: Tape | Discovery) -> Forward:
    """Return a forward that records by the unit's rule, a Gaussian layer at the tape's draw."""
    assert unit.rule is not None
    if not isinstance(module, GaussianLayer):
        return unit.rule(module, Recording(module, unit, tape, {}))
    draw = tape.draw[unit.path]
    with torch.no_grad():
        if any(name is not None for names in unit.names.values() for name in names[1:]):
            weights, scales = module.at_with_scale(draw)
        else:
            weights, scales = module.at(draw), {}
    layer = _Drawn(module, weights)
    forward = unit.rule(layer, Recording(layer, unit, tape, scales))
    return lambda x, sample=True: forward(x)
