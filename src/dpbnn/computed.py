"""A digest of what a run computes: settings, functions, networks, as they were before any data.

Noise that was drawn for one function may never serve another one: the difference of the two
releases would show the data. So the keys of a run are bound to this digest. A function can refer
to anything, also to the data; so the digest has a secret key, and says nothing to others.
"""

from __future__ import annotations

import builtins
import copyreg
import functools
import hashlib
import secrets
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["arithmetic", "code", "digest", "repeats"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_WRAPPED = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinMethodType: ("__name__", "__self__"),
    types.MethodWrapperType: ("__name__", "__self__"),
}
_OF_CLASSES = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__slotnames__", "_abc_impl",
    "__firstlineno__", "__static_attributes__",
}  # fmt: skip
_HEAP = 1 << 9  # flag of classes that were made by Python code
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parent), "<frozen"}
)


def arithmetic(device: torch.device) -> list[Any]:
    """Return what decides how torch rounds on a device, beside the operations of a run."""
    kind, cuda = device.type, device.type == "cuda"
    return [
        torch.__version__,
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability(),
    ]


@functools.cache
def code(folder: Path = Path(__file__).parent) -> str:
    """Return a digest of Python sources, by default of this library: versions round differently."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0")
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def repeats(device: torch.device) -> bool:
    """Return whether sums come out the same, bit for bit, when they are computed again.

    On other devices than the CPU some operations, such as `index_add_`, add in any order.
    """
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def digest(value: Any, key: bytes, trained: Iterable[Tensor] = ()) -> str:
    """Return a keyed digest of a value: equal where the same is computed, in another process too.

    Functions count by their code, what they close over and the globals they read, nested ones too;
    objects by their classes, with what these inherit, and their attributes. The code of installed
    packages counts by name. What cannot be read makes a digest that never comes again.

    Args:
        value: anything.
        key: secret, up to 64 bytes.
        trained: tensors whose values are trained: they count by shape alone.
    """
    return _Digest(key, {id(tensor) for tensor in trained}).of(value)


class _Digest:
    """Feeds values to a hash; what was seen before is fed as a reference."""

    def __init__(self, key: bytes, trained: set[int]) -> None:
        self._key, self._trained = key, trained
        self._hash = hashlib.blake2b(key=key, digest_size=16)
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> str:
        try:
            self._feed(value)
        except RecursionError:
            self._unknown()
        return self._hash.hexdigest()

    def _unknown(self) -> None:
        self._text("unknown", secrets.token_hex(16))

    def _text(self, *words: object) -> None:
        for word in words:
            data = str(word).encode("utf-8", "surrogatepass")
            self._hash.update(len(data).to_bytes(8, "big") + data)

    def _feed(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._text(kind.__name__, repr(value))
            return
        if isinstance(value, _NAMED):
            self._text(value)
            return
        if id(value) in self._seen:
            self._text("again", self._seen[id(value)][0])
            return
        self._seen[id(value)] = len(self._seen), value  # with the value, which so stays alive
        wrapped = next((names for own, names in _WRAPPED.items() if isinstance(value, own)), None)
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
            self._text(value.dtype, value.shape, hashlib.sha256(value.tobytes()).hexdigest())
        elif isinstance(value, Mapping) and kind.__module__ in ("builtins", "collections"):
            self._all("mapping", (part for pair in value.items() for part in pair))
        elif kind in (list, tuple):
            self._all(kind.__name__, value)
        elif kind in (set, frozenset):
            parts = (_Digest(self._key, self._trained).of(part) for part in value)
            self._all(kind.__name__, sorted(parts))
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, types.ModuleType):
            self._text("module", value.__name__)
        elif isinstance(value, type):
            self._class(value)
        elif wrapped is not None:
            self._all(kind.__name__, (getattr(value, name) for name in wrapped))
        else:
            self._object(value)

    def _all(self, name: str, parts: Iterable[Any]) -> None:
        self._text(name)
        for part in parts:
            self._feed(part)
        self._text("end")

    def _tensor(self, value: Tensor) -> None:
        self._text("tensor", value.dtype, tuple(value.shape), value.requires_grad)
        if id(value) not in self._trained:
            flat = value.detach().cpu().reshape(-1).contiguous()
            self._text(hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest())

    def _class(self, value: type) -> None:
        self._text("class", value.__module__, value.__qualname__)
        if _installed(value):
            return
        for kind in value.__mro__:
            if not _installed(kind):
                own = {k: v for k, v in vars(kind).items() if k not in _OF_CLASSES}
                self._all(kind.__qualname__, (part for pair in own.items() for part in pair))

    def _function(self, value: types.FunctionType) -> None:
        self._text("function", value.__qualname__)
        if _installed(value):
            self._text(value.__module__)
            return
        names = list(_names(value.__code__))
        self._all("code", (value.__code__, value.__defaults__, value.__kwdefaults__, vars(value)))
        for cell in value.__closure__ or ():
            try:
                self._feed(cell.cell_contents)
            except ValueError:
                self._text("empty cell")
        for name in dict.fromkeys(names):
            found = value.__globals__.get(name, getattr(builtins, name, None))
            self._feed(found)
            if isinstance(found, types.ModuleType) and not _installed(found):
                self._all(
                    name, (getattr(found, n) for n in dict.fromkeys(names) if hasattr(found, n))
                )

    def _code(self, code: types.CodeType) -> None:
        self._text(code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars)
        self._all("constants", code.co_consts)

    def _object(self, value: Any) -> None:
        """Feed an object by its class, its attributes, and what a copy is made from."""
        self._feed(type(value))
        slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
        own = {**slots, **getattr(value, "__dict__", {})}
        self._all("attributes", (part for pair in own.items() for part in pair))
        if isinstance(value, nn.Module):
            return
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            made = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception:
            self._unknown()
            return
        parts = made if isinstance(made, str) else made[:2] + tuple(map(_listed, made[2:]))
        self._feed(parts)


def _listed(part: Any) -> Any:
    return list(part) if isinstance(part, Iterator) else part


def _slots(kind: type) -> list[str]:
    found = []
    for own in kind.__mro__:
        given = vars(own).get("__slots__", ())
        for name in [given] if isinstance(given, str) else given:
            mangled = name.startswith("__") and not name.endswith("__")
            found.append(f"_{own.__name__.lstrip('_')}{name}" if mangled else name)
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global and attribute names that code reads, in nested functions too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _installed(value: Any) -> bool:
    """Say whether code belongs to an installed package or to dpbnn, told by its files."""
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename.startswith(_INSTALLED)
    if isinstance(value, type):
        functions = (f for f in vars(value).values() if isinstance(f, types.FunctionType))
        own = [function.__code__.co_filename for function in functions]
        if not value.__flags__ & _HEAP:
            return True
        module = sys.modules.get(value.__module__)
        ours = all(file.startswith((*_INSTALLED, "<")) for file in own)
        return module is not None and ours and _installed(module)
    file = getattr(value, "__file__", None)
    if file is None:
        return value.__name__ in sys.builtin_module_names
    return bool(file.startswith(_INSTALLED))
