"""The register of layers: for each class how it is recorded, made Gaussian, saved and rebuilt.

A layer is added by one call of `register`, from any file; nothing else in the library names it.
Rules know nothing of clipping or noise: they say what the gradients of a layer are made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dpbnn.networks.gaussian import GaussianLayer

__all__ = [
    "Recorder",
    "arguments",
    "attributes",
    "is_whole",
    "register",
    "registered",
    "rule_of",
    "rules_in",
]

Forward = Callable[..., Any]
PerPosition = Callable[[Tensor, Tensor], Tensor]


class Recorder(Protocol):
    """What a rule records the calls of one layer with; g is the gradient at the output z.

    Every method returns the output that is to be passed on instead of z. Parameters are named as
    in the layer; frozen ones are left out by the recorder.
    """

    def linear(
        self, x: Tensor, z: Tensor, *, weight: str = "weight", bias: str = "bias", at: str = ""
    ) -> Tensor:
        """Record z = x W^T + b, over the last axis; `at` names a part of the layer."""

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

    def lookup(self, indices: Tensor, z: Tensor, padding: int | None) -> Tensor:
        """Record z = W[indices]; the index `padding` contributes nothing."""

    def refuse(self, reason: str) -> NoReturn:
        """Raise for a layer or a call whose gradients are not taken per example."""

    def direct(
        self, x: Tensor, z: Tensor, gradients: Mapping[str, PerPosition], channels: bool = False
    ) -> Tensor:
        """Record small parameters, whose gradients are functions of x and g at every position.

        Args:
            x: [batch, ...].
            z: [batch, ..., width], or [batch, channels, ...] with `channels`.
            gradients: by parameter p, (x, g) -> g * dz/dp, shaped [batch, positions...] and then
                like p; it is summed over the positions. A new tensor, g, or a part of g.
            channels: whether p has one entry per channel, the second axis.
        """


Rule = Callable[[Any, Recorder], Forward]
"""(layer, recorder) -> a forward that computes the output and records it.

The layer has the settings and parameters of the module; of a Gaussian version, `weight` and `bias`
are the drawn ones. `layer.forward` cannot be called: it is what is replaced."""


def arguments(module: nn.Module) -> dict[str, Any]:
    """Return the constructor's arguments, from attributes of the same names."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in ("device", "dtype", *getattr(module, "unsaved", ())) or name.startswith("_"):
            continue
        own = next((n for n in (name, f"{name}_mu") if n in module._parameters), None)
        found[name] = getattr(module, name) if own is None else module._parameters[own] is not None
    return found


def attributes(*names: str) -> Callable[[nn.Module], dict[str, Any]]:
    """Return a saved form: the constructor's arguments are these attributes."""
    return lambda module: {name: getattr(module, name) for name in names}


@dataclass(frozen=True)
class Layer:
    """What is known of a class of modules; subclasses are other classes. See `register`."""

    kind: type[nn.Module]
    rule: Rule | None = None
    gaussian: type[GaussianLayer] | None = None
    plain: type[nn.Module] | None = None
    saved: Callable[[Any], dict[str, Any]] | None = arguments
    whole: bool = False
    usual: Callable[[Any], bool] | None = None


_LAYERS: dict[type[nn.Module], Layer] = {}
SAVED: dict[str, type[nn.Module]] = {}
"""Classes that networks can be rebuilt of, by name."""


def register(
    kind: type[nn.Module],
    rule: Rule | None = None,
    *,
    gaussian: type[GaussianLayer] | None = None,
    saved: Callable[[Any], dict[str, Any]] | None = arguments,
    whole: bool = False,
    usual: Callable[[Any], bool] | None = None,
) -> None:
    """Register a layer, and its Gaussian version with it.

    Args:
        kind: the class; subclasses are not meant.
        rule: records the layer's calls. Without one, a layer that has parameters is replayed per
            example by torch.func, which is slower.
        gaussian: what `to_gaussian` makes of the layer: a class with the same arguments.
        saved: gives the constructor's arguments, for saving; they must be JSON values. By default
            attributes of the same names; None if the layer cannot be saved.
        whole: whether the rule speaks for the modules within the layer too.
        usual: whether the rule is right for a module of this class; it always is by default.
    """
    found = [Layer(kind, rule, gaussian, None, saved, whole, usual)]
    if gaussian is not None:
        found.append(Layer(gaussian, rule, None, kind, saved, whole, usual))
    for layer in found:
        other = SAVED.get(layer.kind.__name__, layer.kind)
        if saved is not None and _path(other) != _path(layer.kind):
            raise ValueError(
                f"{_path(layer.kind)}: saved networks name their layers, and {_path(other)} has "
                f"this name; give the class another one"
            )
        _LAYERS[layer.kind] = layer
        if saved is not None:
            SAVED[layer.kind.__name__] = layer.kind


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def registered(module: nn.Module) -> Layer:
    """Return what is known of a module: nothing but its class, where it is not registered."""
    return _LAYERS.get(type(module)) or Layer(type(module), saved=None)


def is_whole(module: nn.Module) -> bool:
    """Whether a module is recorded with all that is in it; subclasses of such layers are too."""
    return any(kind in _LAYERS and _LAYERS[kind].whole for kind in type(module).__mro__)


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule of a module, or None where it does not hold for this one."""
    layer = registered(module)
    if layer.usual is not None and not layer.usual(module):
        return None
    replaced = "forward" in module.__dict__ or bool(module._forward_pre_hooks)
    return None if replaced and not layer.whole else layer.rule


def rules_in(model: nn.Module) -> list[Rule]:
    """Return the rules of a model's modules; they see the data, so their state is watched."""
    found = (registered(module).rule for module in model.modules())
    return list(dict.fromkeys(rule for rule in found if rule is not None))
