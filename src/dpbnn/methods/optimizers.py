"""Optimizers by name: one update of all parameters, as functions of tensors.

They compute what those of `torch.optim` compute with their defaults. The first object of
`torch.optim` in a process imports torch's compiler, which takes longer than many a fit; nothing
here does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["RULES", "SCHEDULES", "Rule"]

Tensors = Sequence[Tensor]
Buffers = dict[str, list[Tensor]]
_BETAS, _EPS = (0.9, 0.999), 1e-8  # of Adam
_DECAY = 0.99  # of RMSprop
_TINY = 1e-10  # of Adagrad


def _sgd(
    moved: Tensors, given: Tensors, held: Buffers, rate: float, momentum: float, count: int
) -> None:
    """Step by w <- w - eta v,   v <- momentum v + g."""
    if momentum:
        torch._foreach_mul_(held["momentum_buffer"], momentum)
        torch._foreach_add_(held["momentum_buffer"], given)
        given = held["momentum_buffer"]
    torch._foreach_add_(moved, given, alpha=-rate)


def _adam(
    moved: Tensors, given: Tensors, held: Buffers, rate: float, momentum: float, count: int
) -> None:
    """Step by w <- w - eta m^ / (sqrt(v^) + eps), where m and v average g and g^2."""
    first, second = _BETAS
    torch._foreach_lerp_(held["exp_avg"], given, 1 - first)
    torch._foreach_mul_(held["exp_avg_sq"], second)
    torch._foreach_addcmul_(held["exp_avg_sq"], given, given, 1 - second)
    below = torch._foreach_sqrt(held["exp_avg_sq"])
    torch._foreach_div_(below, math.sqrt(1 - second**count))
    torch._foreach_add_(below, _EPS)
    torch._foreach_addcdiv_(moved, held["exp_avg"], below, -rate / (1 - first**count))


def _rmsprop(
    moved: Tensors, given: Tensors, held: Buffers, rate: float, momentum: float, count: int
) -> None:
    """Step by w <- w - eta u,   u <- momentum u + g / (sqrt(v) + eps), where v averages g^2."""
    torch._foreach_mul_(held["square_avg"], _DECAY)
    torch._foreach_addcmul_(held["square_avg"], given, given, 1 - _DECAY)
    below = torch._foreach_sqrt(held["square_avg"])
    torch._foreach_add_(below, _EPS)
    if not momentum:
        torch._foreach_addcdiv_(moved, given, below, -rate)
        return
    torch._foreach_mul_(held["momentum_buffer"], momentum)
    torch._foreach_addcdiv_(held["momentum_buffer"], given, below)
    torch._foreach_add_(moved, held["momentum_buffer"], alpha=-rate)


def _adagrad(
    moved: Tensors, given: Tensors, held: Buffers, rate: float, momentum: float, count: int
) -> None:
    """Step by w <- w - eta g / (sqrt(v) + eps), with v the sum of g^2."""
    torch._foreach_addcmul_(held["sum"], given, given, 1.0)
    below = torch._foreach_sqrt(held["sum"])
    torch._foreach_add_(below, _TINY)
    torch._foreach_addcdiv_(moved, given, below, -rate)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How an optimizer moves parameters.

    Attributes:
        update: moves all parameters, given their gradients, the buffers by name, the learning rate,
            the momentum, and which step it is, from 1.
        buffers: names of what is kept for every parameter, as in `torch.optim`.
        has_momentum: whether there is a buffer more with momentum.
        fixed: whether an update is the same in every step, for the same rate.
    """

    update: Callable[[Tensors, Tensors, Buffers, float, float, int], None]
    buffers: tuple[str, ...] = ()
    has_momentum: bool = False
    fixed: bool = True

    def memory(self, parameters: Tensors, momentum: float) -> dict[str, Tensor]:
        """Return what is kept before the first step: zeros, by parameter number and name.

        Args:
            parameters: that will be moved.
            momentum: of the settings.
        """
        names = [*self.buffers, *(["momentum_buffer"] if self.has_momentum and momentum else [])]
        return {
            f"{number}.{name}": torch.zeros_like(parameter, requires_grad=False)
            for number, parameter in enumerate(parameters)
            for name in names
        }

    def __call__(
        self,
        parameters: Tensors,
        gradients: Tensors,
        memory: dict[str, Tensor],
        *,
        rate: float,
        momentum: float,
        count: int,
    ) -> None:
        """Move parameters and memory in place.

        Args:
            parameters: are moved.
            gradients: of them.
            memory: from `memory`.
            rate: the learning rate of this step.
            momentum: of the settings.
            count: which step it is, from 1.
        """
        held: Buffers = {}
        for name, tensor in memory.items():
            held.setdefault(name.partition(".")[2], []).append(tensor)
        with torch.no_grad():
            self.update(parameters, gradients, held, rate, momentum, count)


RULES = {
    "sgd": Rule(_sgd, has_momentum=True),
    "adam": Rule(_adam, ("exp_avg", "exp_avg_sq"), fixed=False),
    "rmsprop": Rule(_rmsprop, ("square_avg",), has_momentum=True),
    "adagrad": Rule(_adagrad, ("sum",)),
}
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(done * math.pi)),
    "linear": lambda done: 1 - done,
}
