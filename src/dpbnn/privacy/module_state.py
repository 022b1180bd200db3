"""The state of modules: everything that they hold, described by value and compared."""

from __future__ import annotations

import array
import collections
import enum
import functools
import gc
import hashlib
import itertools
import math
import numbers
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Change", "Found", "ModuleState", "change", "described", "differing", "origin"]

_PLAIN = (
    types.NoneType, types.EllipsisType, numbers.Number, np.generic, str, bytes, bytearray, slice,
    range, enum.Enum, PurePath, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_ARRAYS = (np.ndarray, memoryview, array.array)
_LIBRARIES = {"torch", "dpbnn", "numpy", *sys.stdlib_module_names}
_LOOKED_INTO = {"torch", "dpbnn", "collections", "types", "functools", "weakref"}
"""Libraries whose instances can hold what a user's code gives them."""
_REGISTERED = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}
_PYTHONS_OWN = {
    "__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "_abc_impl",
    "__slotnames__",
}  # fmt: skip
_ENTRIES = (list, tuple, set, frozenset, collections.deque)
_FIELDS: dict[Any, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    staticmethod | classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.partial: ("func", "args", "keywords"),
    types.BuiltinMethodType | types.MethodWrapperType: ("__self__",),
}
_DIGESTED = 4  # parts of a tensor's token: its class, type, shape and digest
_SMALL = 2**16  # bytes of an array that is compared in every step
_RELEASED = "released"  # instead of the digest of a tensor whose values releases decide


class Found(NamedTuple):
    """What is at one place of an object.

    Attributes:
        token: a description by value; equal states have equal tokens.
        owner: path of the module, the class or the root that the place belongs to.
        kind: "parameter", "buffer", "submodule" or "attribute".
        identity: of an object that is not looked into, else 0.
    """

    token: tuple[Any, ...]
    owner: str
    kind: str
    identity: int = 0

    @property
    def digest(self) -> bool:
        """Whether the place holds the numbers of a tensor or an array."""
        return len(self.token) == _DIGESTED


class Change(NamedTuple):
    """A place whose state is not what it was.

    Attributes:
        owner: the module, class or root that it belongs to, in words.
        kind: "parameter", "buffer", "submodule" or "attribute".
        attribute: its name within the owner.
    """

    owner: str
    kind: str
    attribute: str


def described(**roots: Any) -> dict[str, Found]:
    """Return the state of everything that can be reached from some objects, by path.

    Reached are attributes, slots, entries of containers, what functions close over, and the
    attributes of classes that are not Python's, torch's, numpy's or dpbnn's. Tensors and arrays are
    described by a digest of their bits.

    Args:
        **roots: the objects, by the name that their paths begin with.
    """
    return _Walk(roots, _digest).found


def differing(
    before: Mapping[str, Found], after: Mapping[str, Found], identities: bool = False
) -> list[str]:
    """Return the paths at which two descriptions differ, without those below them.

    Args:
        before: a description.
        after: another one.
        identities: whether objects that are not looked into must be the same ones.
    """
    found: list[str] = []
    for path in [*before, *(path for path in after if path not in before)]:
        one, two = before.get(path), after.get(path)
        same = one is not None and two is not None and one.token == two.token
        if same and not (identities and one != two):
            continue
        if not any(path.startswith((f"{above}.", f"{above}[")) for above in found):
            found.append(path)
    return found


class ModuleState:
    """The state of modules and other objects at one time, to which a later one is compared.

    **Guarantee.** `differences` names every buffer, attribute, entry of a container, hook,
    submodule, flag, closure and class attribute that was added, removed, replaced by another value
    or changed in place. It compares the bits of tensors that releases have moved. Of all others it
    looks by default at identities and at torch's version counters, which do not see writes through
    `.data` or into large numpy arrays; `thorough=True` compares bits and sees those too. What
    functions in C are bound to, and what weak references point to, belongs to the state. Global
    variables, and what is inside objects of other libraries, are not
    part of the state.

    Args:
        **roots: the objects, by the name that they have in `differences`.

    Attributes:
        before: the description of the state; see `described`.
    """

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self._walk = _Walk(roots, _digest)
        self.before = self._walk.found
        self._released: dict[int, tuple[Tensor, tuple[int, int], Tensor]] = {}
        self._note()

    def differences(self, thorough: bool = False) -> list[Change]:
        """Return what differs; of released tensors, those written to since they were released.

        Args:
            thorough: compare the bits of all other tensors.
        """
        walk = self._walk
        same = [*map(id, walk.held())] == self._identities and walk.sums() == self._sums
        moved = {
            id(tensor)
            for tensor, version, value in self._released.values()
            if _version(tensor) != version or not _same_bits(tensor, value)
        }
        if same and walk.versions() == self._versions and not (thorough or moved):
            return []
        known = dict(zip(map(id, walk.tensors), self._versions, strict=True))

        def digest(tensor: Tensor) -> Any:
            if id(tensor) in self._released:
                return _RELEASED
            if not thorough and known.get(id(tensor)) == _version(tensor):
                return walk.digests[id(tensor)]
            return _digest(tensor)

        now = _Walk(self._roots, digest)
        before = dict(self.before)
        for path, tensor in walk.places.items():
            if id(tensor) in self._released:
                token = (*before[path].token[:-1], _RELEASED)
                before[path] = before[path]._replace(token=token)
        paths = differing(before, now.found, identities=True)
        paths += [path for path, tensor in now.places.items() if id(tensor) in moved]
        if not paths:
            self._walk = now
            self._note()
        return [change(path, {**now.found, **self.before}) for path in paths]

    def _note(self) -> None:
        walk = self._walk
        self._held = walk.held()  # alive, so that no other object gets the identity of one
        self._identities = [*map(id, self._held)]
        self._sums, self._versions = walk.sums(), walk.versions()

    def paths(self, tensors: Iterable[Tensor]) -> set[str]:
        """Return where some tensors are."""
        wanted = {id(tensor) for tensor in tensors}
        return {path for path, tensor in self._walk.places.items() if id(tensor) in wanted}

    def released(self, tensors: Iterable[Tensor]) -> None:
        """Take over the present values of tensors that a release has moved."""
        for tensor in tensors:
            known = self._released.get(id(tensor))
            if known is None or known[2].shape != tensor.shape:
                value = tensor.detach().clone(memory_format=torch.contiguous_format)
            else:
                value = known[2].copy_(tensor.detach())
            self._released[id(tensor)] = (tensor, _version(tensor), value)
        pairs = zip(self._walk.tensors, self._versions, strict=True)
        self._versions = [self._released.get(id(t), (t, version))[1] for t, version in pairs]


def change(path: str, found: Mapping[str, Found]) -> Change:
    """Return the place of a path in words."""
    _, owner, kind, _ = found[path]
    root, _, inner = owner.partition(".")
    words = owner
    if not owner.startswith("class "):
        words = f"{inner or f'the {root}'!r} ({found[owner].token[0].rpartition('.')[2]})"
    return Change(words, kind, path[len(owner) :].removeprefix("."))


class _Walk:
    """One pass over everything that can be reached from some objects.

    Args:
        roots: the objects, by name.
        digest: describes the bits of a tensor.

    Attributes:
        found: descriptions by path.
        places: tensors by path.
        tensors: every tensor once.
        digests: of the tensors, by identity.
    """

    def __init__(self, roots: Mapping[str, Any], digest: Callable[[Tensor], Any]) -> None:
        self.found: dict[str, Found] = {}
        self.places: dict[str, Tensor] = {}
        self.tensors: list[Tensor] = []
        self.digests: dict[int, Any] = {}
        self._digest = digest
        self._objects: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._hooks: list[collections.OrderedDict[Any, Any]] = []
        self._others: list[Any] = []
        self._arrays: list[Any] = []
        self._paths: dict[int, tuple[str, Any]] = {}  # with the object, which so stays alive
        self._waiting = [(name, name, "attribute", value) for name, value in roots.items()][::-1]
        while self._waiting:
            self._visit(*self._waiting.pop())

    def held(self) -> list[Any]:
        """Return everything that an object or a container holds, and its keys."""
        dicts = [*map(vars, self._objects), *self._dicts]
        held = gc.get_referents(*dicts, *self._hooks, *self._others)
        return [*held, *itertools.chain.from_iterable(dicts)]

    def sums(self) -> list[int]:
        """Return checksums of small arrays."""
        return [zlib.crc32(a.tobytes()) for a in self._arrays if getattr(a, "nbytes", 0) <= _SMALL]

    def versions(self) -> list[tuple[int, int]]:
        """Return how often every tensor was written to, and where it lies."""
        return [_version(tensor) for tensor in self.tensors]

    def _visit(self, path: str, owner: str, kind: str, value: Any) -> None:
        token: tuple[Any, ...] = (_name(type(value)),)
        parts: list[tuple[str, str, Any]] | None = []
        if isinstance(value, Tensor):
            own = getattr(value, "_local_tensor", value)  # of a tensor that is spread over ranks
            token += (own.dtype, own.shape, self._bits(path, own))
            parts = [(f".{name}", "attribute", part) for name, part in vars(value).items()]
        elif isinstance(value, _PLAIN) and not hasattr(value, "__dict__"):
            token += (repr(value),)
        elif isinstance(value, _ARRAYS):
            self._arrays.append(value)
            form = getattr(value, "dtype", None) or getattr(value, "typecode", None)
            token += (str(form), getattr(value, "shape", None), _hash(value.tobytes()))
        elif id(value) in self._paths and not isinstance(value, tuple | frozenset):
            token = ("the same as", self._paths[id(value)][0])
        else:
            self._paths[id(value)] = (path, value)
            parts = _parts(value)
            if parts is not None:
                self._watch(value)
            if isinstance(value, types.FunctionType):
                token += (value.__qualname__, value.__code__)
            elif isinstance(value, functools._lru_cache_wrapper):
                token += (value.cache_info().misses, value.cache_info().currsize)
            elif isinstance(value, _PLAIN):
                token += (repr(value),)
            elif parts is None:
                token += _shown(value)
        identity = id(value) if parts is None else 0
        self.found[path] = Found(token, owner, kind, identity)
        if isinstance(value, nn.Module):
            owner = path
        self._waiting += [
            (f"{path}{suffix}", owner, kind, part) for suffix, kind, part in parts or ()
        ][::-1]

    def _bits(self, path: str, tensor: Tensor) -> Any:
        self.places[path] = tensor
        if id(tensor) not in self.digests:
            self.tensors.append(tensor)
            self._objects.append(tensor)
            self.digests[id(tensor)] = self._digest(tensor)
        return self.digests[id(tensor)]

    def _watch(self, value: Any) -> None:
        """Note an object whose parts can change, and look at its classes."""
        if isinstance(value, type):
            self._dicts += gc.get_referents(vars(value))
            return
        if type(value) is collections.OrderedDict:
            self._hooks.append(value)
        elif isinstance(value, dict):
            self._dicts.append(value)
        elif isinstance(value, list | set | collections.deque) or not hasattr(value, "__dict__"):
            self._others.append(value)
        if hasattr(value, "__dict__") and type(value) is not collections.OrderedDict:
            self._objects.append(value)
        if isinstance(value, nn.Module):
            self._dicts += [part for n, part in vars(value).items() if n in _REGISTERED]
        if isinstance(value, types.FunctionType):
            self._others += value.__closure__ or ()
        for kind in type(value).__mro__:
            path = f"class {kind.__qualname__}"
            if not _library(kind) and id(kind) not in self._paths:
                while path in self.found:
                    path += "'"
                self._visit(path, path, "attribute", kind)


def _parts(value: Any) -> list[tuple[str, str, Any]] | None:
    """Return what an object holds: how its place is written, its kind and its value.

    None is an object that is not looked into.
    """
    if isinstance(value, nn.Module):
        found = []
        for name, part in vars(value).items():
            kind = _REGISTERED.get(name)
            entries = part if kind and isinstance(part, dict) else {name: part}
            found += [(f".{key}", kind or "attribute", item) for key, item in entries.items()]
        return found
    held = _held(value)
    return None if held is None else [(place, "attribute", part) for place, part in held]


def _held(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, type):
        own = [(f".{n}", part) for n, part in vars(value).items() if n not in _PYTHONS_OWN]
        return None if _library(value) else own
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        held = [(f".{name}", part) for name, cell in cells for part in gc.get_referents(cell)]
        held += [(f".{n}", getattr(value, n)) for n in ("__defaults__", "__kwdefaults__")]
        return None if _library(value) else held + _attributes(value)
    for kinds, names in _FIELDS.items():
        if isinstance(value, kinds):
            parts = [(f".{name}", getattr(value, name, None)) for name in names]
            return [(name, part) for name, part in parts if not isinstance(part, types.ModuleType)]
    if isinstance(value, functools._lru_cache_wrapper):
        cached = sorted(gc.get_referents(value), key=id)  # a hit changes their order
        parts = [(f".cache[{i}]", p) for i, p in enumerate(cached) if p is not vars(value)]
        return parts + _attributes(value)
    if isinstance(value, weakref.ReferenceType):
        return [("()", value()), *_attributes(value)]
    held = []
    if isinstance(value, dict):
        for index, (key, part) in enumerate(value.items()):
            plain = isinstance(key, _PLAIN)
            held += [] if plain else [(f".keys()[{index}]", key)]
            held.append((f"[{key!r}]" if plain else f".values()[{index}]", part))
    elif isinstance(value, _ENTRIES):
        held = [(f"[{index}]", part) for index, part in enumerate(value)]
    elif not _looked_into(type(value)) or not (hasattr(value, "__dict__") or _slots(value)):
        return None
    return held + _attributes(value)


def _slots(value: Any) -> list[str]:
    """Return the slots of an object, as Python writes their names within it."""
    own = [vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    return [n for names in own for n in names if isinstance(names[n], types.MemberDescriptorType)]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    held = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return [(f".{name}", part) for name, part in (held | getattr(value, "__dict__", {})).items()]


def _shown(value: Any) -> tuple[str, ...]:
    """Return what an object that is not looked into shows of itself, unless that is an address."""
    text = repr(value)
    return () if " at 0x" in text else (text,)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def origin(value: Any) -> str:
    """Return the module that an object's code is in.

    Not by `__module__` of a function or an instance, which `functools.wraps` copies from others.
    """
    if isinstance(value, types.MethodType):
        return origin(value.__func__)
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__"))
    return (value if isinstance(value, type) else type(value)).__module__


def _library(value: Any) -> bool:
    return origin(value).partition(".")[0] in _LIBRARIES


def _looked_into(kind: type) -> bool:
    return not _library(kind) or kind.__module__.partition(".")[0] in _LOOKED_INTO


def _version(tensor: Tensor) -> tuple[int, int]:
    try:
        return tensor._version, tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # inference and sparse tensors have none
        return -1, 0


def _digest(tensor: Tensor) -> bytes | int:
    """Return a hash of a tensor's bits; its identity where it has none that can be read."""
    try:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return _hash(flat.view(torch.uint8).numpy().data)
    except (RuntimeError, NotImplementedError, TypeError):
        return 0 if tensor.is_meta else id(tensor)


def _same_bits(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype or one.device != two.device:
        return False
    a, b = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, two))
    if a.device.type != "cpu":
        return torch.equal(a, b)
    width = math.gcd(8, len(a)) or 1  # numpy is faster at wide integers
    return np.array_equal(a.numpy().view(f"u{width}"), b.numpy().view(f"u{width}"))


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
