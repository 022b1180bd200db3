"""Bayesian DP: SGD that updates a random part of the weights at every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpbnn.contributions.dense import ChunkedContributions, Contributions, UnsupportedModel
from dpbnn.contributions.outer import Outer
from dpbnn.contributions.recorded import NetworkContributions
from dpbnn.contributions.sites import Direct, Site
from dpbnn.methods.descent import DescentState
from dpbnn.methods.method import Problem
from dpbnn.methods.sgd import SGD, SGDProcess

__all__ = ["MaskedSGD", "masked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedSGD(SGD):
    """DP-SGD on a fresh random part of the weights at every step.

        an example contributes m * grad nll_i,  m_j ~ Bernoulli(fraction), drawn without the data

    so its norm and clip are those of the part that is updated. The sensitivity is the clip, as for
    every contribution, and the noise of the other weights is discarded: the accounting is that of
    SGD. At the same clip, a tenth of the weights have about a third of the norm.

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


def masked(contributions: Contributions, masks: Mapping[str, Tensor]) -> Contributions:
    """Return m * c_i for every example: norms and sums of the masked coordinates alone.

    A mask takes the place that k has in a Gaussian layer (|m * g a^T|^2 = (g*g)^T m (a*a) for m of
    zeros and ones), so no further gradient is instantiated. The masks must not depend on the
    data. The given contributions cannot be used again.

    Args:
        contributions: of a network made of Linear and convolution layers, and biases.
        masks: zeros and ones by released name, shaped like the weights.
    """
    whole = contributions
    if isinstance(whole, ChunkedContributions):
        part = whole.part
        return ChunkedContributions(
            lambda first, last: masked(part(first, last), masks), whole.batch_size, whole.size,
            whole.shapes, whole.device, whole.dtype, whole.summed_in, whole.draws,
        )  # fmt: skip
    if not isinstance(whole, NetworkContributions):
        raise UnsupportedModel(f"{type(whole).__name__} cannot be masked; mask its values before")
    sites = [_site(site, masks) for site in whole._sites]
    return NetworkContributions(
        sites, whole.batch_size, whole.shapes, whole.device, whole.dtype, {}, whole.draws
    )


def _site(site: Site, masks: Mapping[str, Tensor]) -> Site:
    names = list(site.shapes)
    plain = isinstance(site, (Outer, Direct)) and len(site.names) == 1 and not site.data_free
    if not plain or len(names) != 1:
        raise UnsupportedModel(
            f"{names} cannot be masked weight by weight; use Linear and convolution layers"
        )
    mask = masks[names[0]]
    if isinstance(site, Outer):
        for term in site.terms:
            term.scale = mask.to(term.g)
        return Outer([None, names[0]], site.shape, site.terms)
    assert isinstance(site, Direct)
    return Direct([None, names[0]], [(g, mask.to(g), slack) for g, _, slack in site.terms])
