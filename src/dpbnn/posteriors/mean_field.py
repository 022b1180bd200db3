"""Independent Gaussian weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbnn.networks import GaussianLayer, to_plain
from dpbnn.posteriors.evaluate import Draws, Inputs
from dpbnn.posteriors.gaussian import check_like, gaussian_draws
from dpbnn.posteriors.posterior import Posterior


class MeanFieldPosterior(Posterior):
    """Independent Gaussian weights, w = mean + std * e, e ~ N(0, 1).

    Args:
        model: a network of plain layers whose parameters are the means.
        likelihood: see `Posterior`.
        std: standard deviations by parameter name; parameters left out are points.
        **record: privacy, prior and settings; see `Posterior`.
    """

    kind = "mean-field"
    parts = ("std",)

    def __init__(
        self, model: nn.Module, likelihood: object, std: Mapping[str, Tensor], **record: Any
    ) -> None:
        super().__init__(model, likelihood, **record)
        check_like(std, dict(self.model.named_parameters()), "std")
        for name, tensor in std.items():
            if not ((tensor >= 0) & tensor.isfinite()).all():
                raise ValueError(f"std[{name!r}] must be finite and at least 0 everywhere.")
        self.std = {
            name: std[name].detach().clone().to(self.device)
            for name, _ in self.model.named_parameters()
            if name in std
        }

    @classmethod
    def of(cls, model: nn.Module, likelihood: object, **record: Any) -> Self:
        """Return the posterior of a network with Gaussian layers, std = softplus(rho).

        Args:
            model: as made by `to_gaussian` and trained.
            likelihood: see `Posterior`.
            **record: privacy, prior and settings; see `Posterior`.
        """
        std = {
            f"{prefix}.{name}".removeprefix("."): F.softplus(getattr(layer, f"{name}_rho"))
            for prefix, layer in model.named_modules()
            if isinstance(layer, GaussianLayer)
            for name in layer.drawn_names()
        }
        if not std:
            raise ValueError("the model has no Gaussian layers; make it with to_gaussian(model).")
        plain = to_plain(model)
        for layer in plain.modules():
            if isinstance(layer, GaussianLayer):
                raise TypeError(
                    f"{type(layer).__name__} has no plain version here; pass "
                    f"MeanFieldPosterior(model, likelihood, std) with a network of plain layers."
                )
        return cls(plain, likelihood, std, **record)

    def _draws(
        self, samples: int, generator: torch.Generator, inputs: Inputs
    ) -> tuple[nn.Module, Draws]:
        mean = {name: self.model.get_parameter(name) for name in self.std}
        return self.model, gaussian_draws(samples, mean, self.std, generator)
