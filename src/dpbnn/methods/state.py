"""The state of a method: all that changes while it trains, as data, and how it is saved.

`flat` and `restored` are the only code that turns a state into tensors of a checkpoint, and back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from dpbnn.privacy.chacha import shared_flat

__all__ = ["UNSAVED", "Average", "State", "apart", "flat", "restored", "together"]

UNSAVED = {"saved": False}  # metadata of a field that checkpoints leave out
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """All that changes while a method trains; a method adds fields of its own.

    A field holds a tensor, an array, a number, a `torch.optim` optimizer, or a mapping, list or
    dataclass of these; with `metadata=UNSAVED` it is left out of checkpoints. Tensors are moved in
    place, for speed, so an update uses up the state that it gets.

    Attributes:
        parameters: the tensors of the network that updates move, by name. They are the network's
            own, not copies: contributions are taken at their values.
        steps: how many updates were made.
        drawn: what the step under way has drawn without the data, such as weights.
    """

    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    steps: int = 0
    drawn: Any = dataclasses.field(default=None, metadata=UNSAVED)


@dataclasses.dataclass(frozen=True)
class Average:
    """An average over the last steps; a post-processing of releases, so it is free.

    Attributes:
        values: by name; empty before the first step that counts.
        count: how many steps are in it.
    """

    values: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    count: int = 0

    def add(
        self,
        values: Mapping[str, Tensor],
        steps: int,
        total: int,
        *,
        share: float = 0.5,
        decay: float | None = None,
    ) -> Average:
        """Return the average with the values after so many steps of a total.

        It is the mean over the last `share` of the steps, or with `decay` an exponential one.
        """
        if steps <= (1 - share) * total:
            return self
        count = self.count + 1
        weight = 1 / count if decay is None else 1 - decay
        known = [name for name in values if name in self.values]
        if known:
            with torch.no_grad():
                torch._foreach_lerp_(
                    [self.values[n] for n in known], [values[n] for n in known], weight
                )
        new = {n: v.detach().clone() for n, v in values.items() if n not in self.values}
        return Average({**self.values, **new}, count)


def together(
    parameters: Mapping[str, Tensor], release: Mapping[str, Tensor], *, alike: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return both as one tensor each, where they are views of one buffer each; else as they are.

    That is so on a GPU, where a few large kernels take less time than many small ones. The buffers
    are longer than their tensors; what lies between these has no meaning.

    Args:
        parameters: by name.
        release: likewise.
        alike: whether all parameters are moved alike.
    """
    released = {name: release[name] for name in parameters}
    if alike and any(value.is_cuda for value in released.values()):
        moving, given = (shared_flat(list(t.values())) for t in (parameters, released))
        if moving is not None and given is not None:
            return {"": moving}, {"": given}
    return dict(parameters), released


def apart(values: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return values that were computed of `together` by the names of the parameters."""
    if values.keys() != {""}:
        return values
    first = next(iter(parameters.values())).storage_offset()
    return {
        name: values[""].as_strided(p.shape, p.stride(), p.storage_offset() - first)
        for name, p in parameters.items()
    }


def flat(value: Any, name: str = "") -> dict[str, Tensor]:
    """Return copies of all tensors and numbers of a state, by the path of their fields."""
    if value is None:
        return {}
    if isinstance(value, Tensor):
        return {name: value.detach().clone().contiguous()}
    if isinstance(value, np.ndarray):
        return {name: torch.from_numpy(value.copy())}
    if isinstance(value, int | float):
        dtype = torch.float64 if isinstance(value, float) else None
        return {name: torch.tensor(value, dtype=dtype)}
    found: dict[str, Tensor] = {}
    for key, part in _parts(value):
        found |= flat(part, _joined(name, key))
    return found


def restored(value: Value, tensors: Mapping[str, Tensor], name: str = "") -> Value:
    """Return a first state at the values that `flat` has returned; tensors change in place.

    A mapping that is empty takes all that was saved of it, others take their own names alone; None
    takes a tensor. It raises KeyError or RuntimeError for tensors of another state.
    """
    made: Any = tensors[name].clone() if value is None and name in tensors else value
    if isinstance(value, Tensor | np.ndarray):
        saved, own = tensors[name], torch.as_tensor(value)
        if (saved.shape, saved.dtype) != (own.shape, own.dtype):
            raise RuntimeError(f"{name} has another shape or dtype")
        with torch.no_grad():
            own.copy_(saved)
    elif isinstance(value, int | float):
        made = tensors[name].item()  # it may have become a float since the first state
    elif isinstance(value, Optimizer):
        inner: dict[int, dict[str, Tensor]] = {}
        for path, saved in _under(tensors, name).items():
            index, _, key = path.partition(".")
            inner.setdefault(int(index), {})[key] = saved
        value.load_state_dict({**value.state_dict(), "state": inner})
    elif isinstance(value, Mapping) and not value:
        made = _under(tensors, name)
    elif value is not None:
        parts = {key: restored(part, tensors, _joined(name, key)) for key, part in _parts(value)}
        if dataclasses.is_dataclass(value):
            made = dataclasses.replace(made, **parts)
        else:
            made = parts if isinstance(value, Mapping) else type(value)(parts.values())
    return made  # type: ignore[no-any-return]


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return [(f.name, getattr(value, f.name)) for f in fields if f.metadata != UNSAVED]
    if isinstance(value, Optimizer):
        inner = value.state_dict()["state"]
        held = [part for own in inner.values() for part in own.values()]
        if any(isinstance(part, Mapping | list | tuple) for part in held):
            raise TypeError(
                f"a {type(value).__name__} holds mappings or lists, which cannot be saved; leave "
                f"out=None, or use an optimizer that holds a tensor or number by name"
            )
        return inner.items()
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    raise TypeError(
        f"a state holds a {type(value).__name__}, which cannot be saved; hold tensors, numbers, "
        f"and mappings, lists or dataclasses of them"
    )


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _under(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return copies of the tensors below a path, by the rest of theirs."""
    start = _joined(name, "")
    return {n[len(start) :]: v.clone() for n, v in tensors.items() if n.startswith(start)}
