"""What a process holds on to: the tensors and arrays that can be reached from it."""

import collections
import functools
import types
import weakref

import numpy as np
import torch

_LIBRARIES = ("torch.", "dpbnn.", "builtins", "numpy", "abc", "typing", "collections")
_LEAVES = (type, types.ModuleType, types.CodeType, str, bytes, int, float, complex, torch.dtype)


def _parts(value):
    """What an object holds: entries, attributes, class attributes, what a function closes over."""
    if isinstance(value, dict | types.MappingProxyType):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.CellType):
        return [value.cell_contents]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, types.FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ()), value.__dict__]
    names = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    own = [vars(kind) for kind in type(value).__mro__ if not kind.__module__.startswith(_LIBRARIES)]
    return [getattr(value, "__dict__", None), *own, *(getattr(value, n, None) for n in names)]


def reachable(root):
    """Yield every tensor and array that can be reached from an object."""
    seen, waiting = {}, [root]
    while waiting:
        value = waiting.pop()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen[id(value)] = value  # alive, so that no other object gets its identity
        if isinstance(value, torch.Tensor | np.ndarray):
            yield value
        waiting += _parts(value)


def assert_holds_no_data(process, *data):
    """Assert that nothing in reach has a row per record, or two values of the data's own.

    One value alone may be chance: two float32 numbers agree once in about 10^7.
    """
    count = len(data[0])
    values = torch.cat([part.detach().double().flatten() for part in data]).unique()
    values = values[values != values.round()]
    found = 0
    for held in reachable(process):
        found += 1
        tensor = torch.as_tensor(held).detach()
        assert not tensor.dim() or tensor.shape[0] != count, f"{tuple(tensor.shape)} is held"
        same = tensor.double().unique()
        assert torch.isin(same, values).sum() < 2, "a value is held"
    assert found
