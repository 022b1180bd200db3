"""Networks as JSON: standard modules described by class name and arguments, and rebuilt."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.mixtures import GaussianMixture
from dpbnn.networks import (
    GaussianConv2d,
    GaussianLayer,
    GaussianLinear,
    LearnedNoise,
    SharedDropout,
)

__all__ = ["build", "describe", "named_tensors"]

_CONTAINERS: tuple[type[nn.Module], ...] = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LEAVES: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Bilinear, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Upsample,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardswish,
    nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Softmax, nn.LogSoftmax,
)  # fmt: skip


def _same(module: nn.Module, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments that the module keeps as attributes of the same name."""
    found = {}
    for name, parameter in names.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in ("device", "dtype") or name.startswith("_"):
            continue
        if name == "bias" and "bias" in module._parameters:
            found[name] = module._parameters[name] is not None
        else:
            found[name] = getattr(module, name)
    return found


def _attention(module: nn.Module) -> dict[str, Any]:
    assert isinstance(module, nn.MultiheadAttention)
    if module.bias_k is not None or module.add_zero_attn:
        raise TypeError("MultiheadAttention with add_bias_kv or add_zero_attn")
    return {
        "embed_dim": module.embed_dim,
        "num_heads": module.num_heads,
        "dropout": module.dropout,
        "bias": module.in_proj_bias is not None,
        "kdim": module.kdim,
        "vdim": module.vdim,
        "batch_first": module.batch_first,
    }


def _encoder_layer(module: nn.Module) -> dict[str, Any]:
    assert isinstance(module, nn.TransformerEncoderLayer)
    named = {nn.functional.relu: "relu", nn.functional.gelu: "gelu"}
    if module.activation not in named:
        raise TypeError("TransformerEncoderLayer with an activation other than relu and gelu")
    return {
        "d_model": module.linear1.in_features,
        "nhead": module.self_attn.num_heads,
        "dim_feedforward": module.linear1.out_features,
        "dropout": module.dropout.p,
        "activation": named[module.activation],
        "layer_norm_eps": module.norm1.eps,
        "batch_first": module.self_attn.batch_first,
        "norm_first": module.norm_first,
        "bias": module.linear1.bias is not None,
    }


def _attributes(*names: str) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda module: {name: getattr(module, name) for name in names}


def _gaussian(module: nn.Module) -> dict[str, Any]:
    assert isinstance(module, GaussianLayer)
    rows, columns, *kernel = module.weight_mu.shape
    if not kernel:
        sizes = {"in_features": columns, "out_features": rows}
    else:
        names = ("kernel_size", "stride", "padding", "dilation", "groups")
        sizes = {name: getattr(module, name) for name in names}
        sizes |= {"in_channels": columns * sizes["groups"], "out_channels": rows}
    return sizes | {"bias": module.bias_mu is not None}


_ARGUMENTS: dict[type[nn.Module], Callable[[nn.Module], dict[str, Any]]] = {
    nn.Embedding: _attributes(
        "num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type"
    ),
    nn.Hardtanh: _attributes("min_val", "max_val", "inplace"),
    nn.PReLU: _attributes("num_parameters"),
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_layer,
    GaussianLinear: _gaussian,
    GaussianConv2d: _gaussian,
    SharedDropout: _attributes("p", "inplace"),
    LearnedNoise: lambda module: {"outputs": len(module.log_variance)},
    GaussianMixture: _attributes("components", "dimensions", "noise_std"),
}
_KNOWN: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (*_CONTAINERS, *_LEAVES, *_ARGUMENTS)
}


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
    if name not in _KNOWN:
        raise ValueError(
            f"the architecture names a module {name!r} that is not one of the known classes; pass "
            f"model= with an instance of the network."
        )
    kind = _KNOWN[name]
    if kind in _CONTAINERS:
        children = [(n, _build(child)) for n, child in description["children"]]
        if kind is nn.Sequential:
            return nn.Sequential(OrderedDict(children))
        return kind(dict(children)) if kind is nn.ModuleDict else kind(m for _, m in children)
    values = {n: _value(v) for n, v in description["arguments"].items()}
    return kind(**values)


def _describe(module: nn.Module) -> dict[str, Any]:
    kind = type(module)
    if _KNOWN.get(kind.__name__) is not kind or _hooked(module):
        raise TypeError(f"{kind.__name__} is not one of the known modules")
    if kind in _CONTAINERS:
        children = [[name, _describe(child)] for name, child in module.named_children()]
        if len(children) != len(module._modules):
            raise TypeError("a module that is used twice")
        return {"class": kind.__name__, "children": children}
    if kind in _ARGUMENTS:
        values = _ARGUMENTS[kind](module)
    else:
        values = _same(module, inspect.signature(kind).parameters)
    return {"class": kind.__name__, "arguments": {n: _plain(v) for n, v in values.items()}}


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
