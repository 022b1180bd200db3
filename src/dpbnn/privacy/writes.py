"""What code writes to: seen in the operations themselves, before a CUDA graph repeats them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Writes"]

_UNSAID = ("running_mean", "running_var")  # written by batch norm, whose schema does not say so


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation of torch while it is entered, also in the backward pass.

    A replay of a CUDA graph runs no Python and moves no version counters, so that later nobody sees
    what it writes. But it repeats the operations that it was captured with, and those are seen
    here.

    **Guarantee.** `foreign` names an operation that has written to a tensor that is neither one of
    `allowed` nor made by an earlier operation in here, or that was given a tensor with a dispatch
    of its own, whose memory is not known, or that runs functions; it is None where there was none.
    Kernels that are launched past torch's dispatcher are not seen, as version counters do not see
    them, nor are other threads.

    Args:
        allowed: tensors that may be written to.

    Attributes:
        foreign: the name of the operation.
        read: all other tensors that were used. A graph has their addresses: who keeps it keeps
            these.
    """

    supports_higher_order_operators = True  # without it torch raises an error for these

    def __init__(self, allowed: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.foreign: str | None = None
        self.read: dict[int, Tensor] = {}
        self._own = {_memory(tensor) for tensor in allowed} | {0}

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note what an operation reads, writes and makes, and run it."""
        kwargs = kwargs or {}
        if isinstance(function, HigherOrderOperator):  # runs functions, as flex_attention does
            self.foreign = str(function)
            return function(*args, **kwargs)
        used = {_memory(tensor): tensor for tensor in _tensors((args, kwargs))}
        outside = {place: one for place, one in used.items() if place not in self._own}
        self.read |= outside
        hidden = any(map(_hides_memory, tree_leaves((args, kwargs))))
        if hidden or not _memories(_written(function, args, kwargs)) <= self._own:
            self.foreign = function.name()
        result = function(*args, **kwargs)
        made = _memories(_tensors(result)) - used.keys()
        if outside and any(value.alias_info is not None for value in function._schema.returns):
            made = set()  # such as the values of a sparse tensor, which are memory of its own
        self._own |= made
        return result


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes, by its schema."""
    found = []
    for position, argument in enumerate(function._schema.arguments):
        said = argument.alias_info is not None and argument.alias_info.is_write
        if said or argument.name in _UNSAID:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += _tensors(given)
    return found


def _hides_memory(value: Any) -> bool:
    """Return whether a value is bare memory, or a tensor of a class with a dispatch of its own."""
    if isinstance(value, Tensor):
        return type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return isinstance(value, torch.UntypedStorage)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _memories(tensors: Iterable[Tensor]) -> set[int]:
    return set(map(_memory, tensors))


def _memory(tensor: Tensor) -> int:
    """Return where the memory of a tensor and of its views begins; 0 where it has none."""
    if tensor.layout is not torch.strided or _hides_memory(tensor):
        return id(tensor)  # its parts are tensors of their own
    return tensor.untyped_storage().data_ptr()
