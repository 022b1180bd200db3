"""A digest of what a run computes: settings, functions, networks, as they were before any data.

Noise that was drawn for one function may never serve another one: the difference of the two
releases would show the data. So the keys of a run are bound to this digest. A function can refer
to anything, also to the data; so the digest has a secret key, and says nothing to others.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["digest"]

_OF_MODULES = set(vars(nn.Module()))  # parameters, buffers, submodules and hooks, by torch's names
_LEFT_OUT = {"folder"}  # settings that say where files go, and nothing of what is computed


def digest(value: Any, key: bytes) -> str:
    """Return a keyed digest of a value: equal where the same is computed, in another process too.

    Functions count by their code, what they close over and the globals they read; objects by their
    class and attributes; networks by their modules, frozen tensors and buffers, and the names and
    shapes of their trainable parameters (whose values are trained).

    Args:
        value: anything.
        key: secret, up to 64 bytes.
    """
    return _Digest(key).of(value)


class _Digest:
    """Feeds values to a hash; what was seen before is fed as a reference."""

    def __init__(self, key: bytes) -> None:
        self._hash = hashlib.blake2b(key=key, digest_size=16)
        self._seen: dict[int, Any] = {}

    def of(self, value: Any) -> str:
        self._feed(value)
        return self._hash.hexdigest()

    def _text(self, *words: object) -> None:
        for word in words:
            data = str(word).encode()
            self._hash.update(len(data).to_bytes(8, "big") + data)

    def _feed(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes):
            self._text(kind.__name__, repr(value))
            return
        if id(value) in self._seen:
            self._text("again", list(self._seen).index(id(value)))
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._feed(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
            self._text(value.dtype, tuple(value.shape))
        elif isinstance(value, np.ndarray | np.generic):
            self._text(value.dtype, value.shape, hashlib.sha256(value.tobytes()).hexdigest())
        elif isinstance(value, nn.Module):
            self._network(value)
        elif isinstance(value, Mapping):
            self._text("mapping", len(value))
            for key, item in value.items():
                self._feed(key)
                self._feed(item)
        elif isinstance(value, list | tuple | set | frozenset):
            ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            self._text(kind.__name__, len(value))
            for item in ordered:
                self._feed(item)
        elif isinstance(value, types.MethodType):
            self._feed((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._feed((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            self._named(value)
        elif dataclasses.is_dataclass(value):
            self._named(kind)
            self._feed({f.name: getattr(value, f.name) for f in dataclasses.fields(value)
                        if f.name not in _LEFT_OUT})  # fmt: skip
        else:
            self._named(kind)
            self._feed(getattr(value, "__dict__", None))

    def _named(self, value: Any) -> None:
        """Feed a class, module or built-in by name; a user's class with its functions too."""
        module = getattr(value, "__module__", None) or ""
        self._text("name", module, getattr(value, "__qualname__", getattr(value, "__name__", "")))
        if isinstance(value, type) and not _installed(module):
            self._feed({k: v for k, v in vars(value).items() if isinstance(v, types.FunctionType)})

    def _function(self, value: types.FunctionType) -> None:
        self._text("function", value.__module__, value.__qualname__)
        if _installed(value.__module__):
            return
        self._code(value.__code__)
        self._feed(value.__defaults__)
        self._feed(value.__kwdefaults__)
        for cell in value.__closure__ or ():
            try:
                self._feed(cell.cell_contents)
            except ValueError:
                self._text("empty cell")
        for name in value.__code__.co_names:
            found = value.__globals__.get(name)
            if not isinstance(found, types.ModuleType):
                self._feed(found)

    def _code(self, code: types.CodeType) -> None:
        self._text(code.co_code.hex(), code.co_names, code.co_varnames)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self._text(repr(constant))

    def _network(self, network: nn.Module) -> None:
        for path, module in network.named_modules():
            self._text("module", path)
            self._named(type(module))
            self._feed({k: v for k, v in vars(module).items() if k not in _OF_MODULES})
        for name, parameter in network.named_parameters():
            self._text(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            if not parameter.requires_grad:
                self._feed(parameter)
        for name, buffer in network.named_buffers():
            self._text(name)
            self._feed(buffer)


def _installed(module: str | None) -> bool:
    """Say whether a module belongs to a library, whose code does not change between two runs."""
    return (module or "").partition(".")[0] in ("torch", "numpy", "scipy", "dpbnn", "builtins")
