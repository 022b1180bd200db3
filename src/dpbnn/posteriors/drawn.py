"""Weights that were drawn when training ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.posteriors.evaluate import Draws, Inputs
from dpbnn.posteriors.gaussian import check_like
from dpbnn.posteriors.posterior import Posterior

__all__ = ["DrawnPosterior"]


class DrawnPosterior(Posterior):
    """Equal weight on every draw; draws are independent of each other, or nearly so.

    `predict(x, samples)` uses all draws if there are no more than `samples`, and otherwise the
    first ones; nothing is random.

    Args:
        model: the network; its own values are used for parameters that are not drawn.
        likelihood: see `Posterior`.
        draws: parameters by name, draws first.
        **record: privacy, prior and settings; see `Posterior`.
    """

    kind = "draws"
    parts = ("draws",)

    def __init__(
        self, model: nn.Module, likelihood: object, draws: Mapping[str, Tensor], **record: Any
    ) -> None:
        super().__init__(model, likelihood, **record)
        check_like(draws, dict(self.model.named_parameters()), "draws", axes=1)
        if len({len(tensor) for tensor in draws.values()}) > 1 or not len(
            next(iter(draws.values()))
        ):
            raise ValueError(
                "draws: the tensors differ in length, or are empty; give as many of each"
            )
        self.draws = {name: tensor.detach().clone() for name, tensor in draws.items()}

    def interval(self, name: str, mass: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the ends of central intervals of a parameter.

        Args:
            name: of the parameter, such as "weight".
            mass: posterior probability of an interval.
        """
        ends = torch.tensor([(1 - mass) / 2, (1 + mass) / 2]).to(self.draws[name])
        low, high = torch.quantile(self.draws[name], ends, dim=0)
        return low, high

    def _draws(
        self, samples: int, generator: torch.Generator, inputs: Inputs
    ) -> tuple[nn.Module, Draws]:
        like = {name: self.model.get_parameter(name) for name in self.draws}
        count = min(samples, len(next(iter(self.draws.values()))))
        taken = 0

        def take(number: int) -> dict[str, Tensor]:
            nonlocal taken
            begin, taken = taken, taken + number
            return {n: t[begin:taken].to(like[n]) for n, t in self.draws.items()}

        return self.model, Draws(count, sum(p.numel() for p in like.values()), take)
