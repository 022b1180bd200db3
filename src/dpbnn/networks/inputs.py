"""Inputs of a network: one tensor, several by position, or several by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["Arguments", "Keywords", "arguments", "called", "each"]

Arguments = tuple[Tensor, ...]


class Keywords(tuple[Tensor, ...]):
    """Inputs that a network takes by name, such as input_ids and attention_mask.

    Args:
        values: the tensors.
        names: of the network's arguments, in the same order.
    """

    names: tuple[str, ...]

    def __new__(cls, values: Iterable[Tensor], names: Iterable[str]) -> Keywords:
        """Return the inputs with their names."""
        made = super().__new__(cls, values)
        made.names = tuple(names)
        return made


def arguments(x: Any) -> Arguments:
    """Return inputs as a tuple; those of a mapping keep their names."""
    if isinstance(x, Mapping):
        return Keywords(x.values(), x.keys())
    return x if isinstance(x, tuple) else (x,)


def each(change: Callable[[Any], Any], inputs: Arguments) -> Arguments:
    """Return the inputs, each of them changed by a function; names stay."""
    changed = (change(part) for part in inputs)
    return Keywords(changed, inputs.names) if isinstance(inputs, Keywords) else tuple(changed)


def called(model: nn.Module | Callable[..., Any], inputs: Arguments) -> Any:
    """Return what the network returns for the inputs."""
    if isinstance(inputs, Keywords):
        return model(**dict(zip(inputs.names, inputs, strict=True)))
    return model(*inputs)
