"""The register of layers: for each class how it is recorded, made Gaussian, saved and rebuilt.

A layer is added by one call of `register`, from any file; nothing else in the library names it.
Rules know nothing of clipping or noise: they say what the gradients of a layer are made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dpbnn.networks.gaussian import GaussianLayer

__all__ = [
    "arguments",
    "attributes",
    "is_whole",
    "multiplied",
    "normalized",
    "register",
    "registered",
    "rule_of",
    "rules_in",
]

Forward = Callable[..., Any]


Rule = Callable[[Any, Any], Forward]
"""(layer, record) -> a forward that computes the output and records it.

The layer has the settings and parameters of the module; of a Gaussian version, `weight` and `bias`
are the drawn ones. `layer.forward` cannot be called: it is what is replaced. `record` is told what
the output is made of, by `linear`, `convolution`, `lookup` or `direct`, and returns the output to
pass on; see `Recording` in contributions/rules.py."""


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


def multiplied(x: Tensor) -> Tensor:
    """Return x as autocast multiplies it, so that it is held once, by the tape and by autograd."""
    kind = x.device.type
    low = torch.is_autocast_enabled(kind) and x.dtype is torch.float32
    return x.to(torch.get_autocast_dtype(kind)) if low else x


def normalized(x: Tensor) -> Tensor:
    """Return x as autocast normalises it on a GPU, in float32, so that it is held once."""
    low = x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if low and x.is_cuda and torch.is_autocast_enabled("cuda") else x


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
    always: bool = False
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
    always: bool = False,
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
        always: whether the rule is used even where no parameter is released.
        usual: whether the rule is right for a module of this class; it always is by default.
    """
    found = [Layer(kind, rule, gaussian, None, saved, whole, always, usual)]
    if gaussian is not None:
        found.append(Layer(gaussian, rule, None, kind, saved, whole, True, usual))
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
