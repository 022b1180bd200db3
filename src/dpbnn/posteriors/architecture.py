"""Networks as JSON: standard modules described by class name and arguments, and rebuilt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.networks.layers import SAVED, registered
from dpbnn.networks.standard import Beside

_CONTAINERS: tuple[type[nn.Module], ...] = (nn.Sequential, Beside, nn.ModuleList, nn.ModuleDict)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once."""
    kept = model.state_dict(keep_vars=True)
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if name in kept}


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Return a JSON description from which `build` makes the model again, or None.

    None means that some module is not one of the known classes, or that parameters are tied.
    """
    if len(list(model.named_parameters(remove_duplicate=False))) != len(
        list(model.named_parameters())
    ):
        return None
    try:
        found = _describe(model)
        again = build(found)
    except (TypeError, ValueError, AttributeError):
        return None
    return found if _shapes(again) == _shapes(model) and _describe(again) == found else None


def build(description: Mapping[str, Any]) -> nn.Module:
    """Return the network of a description, without weights (on torch's meta device).

    Only the classes known here can be built, whatever the description says.
    """
    with torch.device("meta"):
        return _build(description)


def _build(description: Mapping[str, Any]) -> nn.Module:
    name = description.get("class")
    known = {kind.__name__: kind for kind in _CONTAINERS} | SAVED
    if name not in known:
        raise ValueError(
            f"the architecture names a module {name!r} that is not one of the known classes; pass "
            f"model= with an instance of the network."
        )
    kind = known[name]
    if kind in _CONTAINERS:
        children = [(n, _build(child)) for n, child in description["children"]]
        if issubclass(kind, nn.Sequential):
            return kind(OrderedDict(children))
        return kind(dict(children)) if kind is nn.ModuleDict else kind(m for _, m in children)
    values = {n: _value(v) for n, v in description["arguments"].items()}
    return kind(**values)


def _describe(module: nn.Module) -> dict[str, Any]:
    kind, saved = type(module), registered(module).saved
    if (saved is None and kind not in _CONTAINERS) or _hooked(module):
        raise TypeError(f"{kind.__name__} is not one of the known modules")
    if kind in _CONTAINERS:
        children = [[name, _describe(child)] for name, child in module.named_children()]
        if len(children) != len(module._modules):
            raise TypeError("a module that is used twice")
        return {"class": kind.__name__, "children": children}
    assert saved is not None
    values = {name: _plain(value) for name, value in saved(module).items()}
    return {"class": kind.__name__, "arguments": values}


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list | torch.Size):
        return [_plain(item) for item in value]
    raise TypeError(f"an argument of type {type(value).__name__}")


def _value(value: object) -> object:
    return tuple(_value(item) for item in value) if isinstance(value, list) else value


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
