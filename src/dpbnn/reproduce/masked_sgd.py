"""SGD that updates a random part of the weights at every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpbnn.contributions.dense import Contributions
from dpbnn.contributions.masked import masked
from dpbnn.methods.method import DescentState, Problem
from dpbnn.methods.sgd import SGD, SGDProcess


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedSGD(SGD):
    """DP-SGD on a fresh random part of the weights at every step.

        an example contributes m * grad nll_i,  m_j ~ Bernoulli(fraction), drawn without the data

    so its norm and clip are those of the part that is updated. The sensitivity is the clip, as for
    every contribution, and the noise of the other weights is thrown away: the accounting is that of
    SGD, unchanged. At the same clip, a tenth of the weights have about a third of the norm.

    Attributes:
        fraction: expected share of the weights that a step updates.
    """

    fraction: float = 0.1

    name = "masked-sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.fraction <= 1):
            raise ValueError(f"fraction={self.fraction}: must lie in (0, 1]")

    def start(self, problem: Problem) -> MaskedSGDProcess:
        """Return the process that trains on a problem."""
        return MaskedSGDProcess(self, problem, problem.attach())


class MaskedSGDProcess(SGDProcess):
    """Equations of `MaskedSGD`."""

    settings: MaskedSGD

    def draw(self, state: DescentState) -> DescentState:
        """Return the state with fresh masks."""
        masks = {
            name: (torch.rand_like(p) < self.settings.fraction).to(p)
            for name, p in state.parameters.items()
        }
        return dataclasses.replace(state, drawn=masks)

    def contribute(self, state: DescentState, x: Any, y: Tensor) -> Contributions:
        """Return what the examples contribute to the weights that the masks let pass."""
        return masked(super().contribute(state, x, y), state.drawn)

    def gradient(self, state: DescentState, release: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return m * (release / b + grad r / n)."""
        whole = super().gradient(state, release)
        return {name: value * state.drawn[name] for name, value in whole.items()}
