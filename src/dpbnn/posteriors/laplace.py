"""Kept iterates, and how far from them the truth may be by Laplace's approximation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dpbnn.likelihoods import full
from dpbnn.networks.inputs import each
from dpbnn.posteriors.evaluate import Draws, Inputs, evaluate
from dpbnn.posteriors.gaussian import check_like
from dpbnn.posteriors.iterate_file import IterateStore
from dpbnn.posteriors.iterates import IteratePosterior, evenly
from dpbnn.predictive import Deviations, Predictive, widened

_STEP = 1e-6  # of the differences


class LaplacePosterior(IteratePosterior):
    """Equal weight on every stored iterate, and draws of deviations from their mean.

        f_s(x) = mean prediction of the iterates + J(x) d_s,    J the derivative by the weights

    The network is linearised at its own weights, which are the mean of the iterates. What is
    predicted is as with the iterates alone; see `WidenedClassPredictive` and
    `WidenedRealPredictive` for what the deviations add. `methods/laplace.py` makes them.

    Args:
        model: the network, at the mean of the iterates.
        likelihood: see `Posterior`.
        iterates: see `IteratePosterior`.
        deviations: d by parameter, draws first; parameters that are left out do not deviate.
        **record: see `Posterior`.
    """

    kind = "laplace"
    parts = ("iterates", "deviations")

    @staticmethod
    def read(path: Path) -> Any:  # type: ignore[override]
        """Return a part of a saved posterior."""
        return IterateStore(path) if path.stem == "iterates" else load_file(path)

    def __init__(
        self,
        model: nn.Module,
        likelihood: object,
        iterates: Any,
        deviations: Mapping[str, Tensor],
        **record: Any,
    ) -> None:
        super().__init__(model, likelihood, iterates, **record)
        check_like(deviations, dict(self.model.named_parameters()), "deviations", axes=1)
        self.deviations = {n: tensor.to(self.device) for n, tensor in deviations.items()}

    def predict(self, x: Any, samples: int = 100, **options: Any) -> Predictive:
        """Return the predictive distribution; see `Posterior.predict`.

        The deviations are computed when they are asked for.
        """
        plain = super().predict(x, samples, **options)
        inputs = self._inputs(x)
        limits = {k: v for k, v in options.items() if k not in ("seed", "generator")}
        return widened(plain, Deviations(lambda: self._moved(inputs, samples, limits)))

    def _moved(self, inputs: Inputs, samples: int, limits: dict[str, Any]) -> Tensor:
        """Return J d for every draw, [S, N, ...], by differences in double precision."""
        model = copy.deepcopy(self.model).double()
        count = len(next(iter(self.deviations.values())))
        places = iter([None, *evenly(count, min(samples, count))])  # the first draw stays
        centre = {name: model.get_parameter(name) for name in self.deviations}

        def take(number: int) -> dict[str, Tensor]:
            rows = [next(places) for _ in range(number)]
            return {
                name: torch.stack([at if r is None else at + _STEP * away[r] for r in rows])
                for (name, away), at in zip(self.deviations.items(), centre.values(), strict=True)
            }

        size = sum(at.numel() for at in centre.values())
        draws = Draws(count=1 + min(samples, count), numbers=size, take=take)
        double = each(lambda t: t.double() if t.is_floating_point() else t, inputs)
        found = evaluate(model, draws, double, **limits)
        return full(self.likelihood).locations((found[1:] - found[:1]) / _STEP)
