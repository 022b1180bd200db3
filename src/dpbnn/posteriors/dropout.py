"""Random dropout masks on one set of weights."""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from dpbnn.likelihoods import full
from dpbnn.networks.inputs import called, each
from dpbnn.posteriors.evaluate import Draws, Inputs, evaluation, number_stream
from dpbnn.posteriors.posterior import Posterior, predictive_from
from dpbnn.predictive import Predictive

_ELEMENTS, _CHANNELS = nn.Dropout, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d
_UNMASKED = nn.AlphaDropout | nn.FeatureAlphaDropout | nn.MultiheadAttention | nn.RNNBase


class DropoutPosterior(Posterior):
    """One set of weights under dropout masks, p(y | x) = E_mask[p(y | x, w, mask)].

    One draw is one mask of every dropout module, used for all inputs, so that a draw is a
    function. Nothing else of the network is in training mode.

    Args:
        model: a network with dropout modules.
        likelihood: see `Posterior`.
        precision: tau; the noise variance of a Gaussian likelihood is then 1/tau, so that the
            predictive variance is that over masks plus 1/tau.
        **record: privacy, prior and settings; see `Posterior`.
    """

    kind = "dropout"

    def __init__(
        self,
        model: nn.Module,
        likelihood: object,
        *,
        precision: float | None = None,
        **record: Any,
    ) -> None:
        super().__init__(model, likelihood, **record)
        self.precision, self._noisy = precision, None
        if precision is not None and precision > 0:
            self._noisy = full(self.likelihood).with_noise(1 / math.sqrt(precision))
        if precision is not None and self._noisy is None:
            raise ValueError(
                f"precision={precision} must be positive and needs a Gaussian likelihood; leave "
                f"it out otherwise."
            )
        self._masked: dict[tuple[torch.Size, ...], tuple[nn.Module, dict[str, torch.Size]]] = {}
        found = False
        for name, module in self.model.named_modules():
            rate = getattr(module, "p", getattr(module, "dropout", 0.0))
            if isinstance(module, _ELEMENTS | _CHANNELS):
                found |= module.p > 0
            elif isinstance(module, _UNMASKED) and rate:
                raise ValueError(
                    f"{name}: {type(module).__name__} has dropout {rate} of its own, which cannot "
                    f"be masked; set it to 0 and use nn.Dropout."
                )
        if not found:
            raise ValueError("the model has no active dropout module; use PointPosterior.")

    def _options(self) -> dict[str, Any]:
        return {"precision": self.precision}

    def _predictive(self, outputs: Tensor) -> Predictive:
        return predictive_from(self._noisy or self.likelihood, outputs)

    def _draws(
        self, samples: int, generator: torch.Generator, inputs: Inputs
    ) -> tuple[nn.Module, Draws]:
        model, shapes = self._masks(inputs)
        rates = {name: model.get_submodule(name).rate for name in shapes}
        sizes = [math.prod(shape) for shape in shapes.values()]
        like = torch.empty((), device=self.device)
        stream = number_stream(sum(sizes), "uniform_", like, generator)

        def take(count: int) -> dict[str, Tensor]:
            parts = stream(count).split(sizes, 1)
            return {
                f"{name}.mask": _keep(part.reshape(count, *shape), rates[name])
                for (name, shape), part in zip(shapes.items(), parts, strict=True)
            }

        return model, Draws(count=samples, numbers=sum(sizes), take=take, masks=True)

    def to(self, device: torch.device | str) -> Self:
        """Move the posterior to a device, in place."""
        self._masked.clear()
        return super().to(device)

    def _masks(self, inputs: Inputs) -> tuple[nn.Module, dict[str, torch.Size]]:
        """Return the network with masks and their shapes, made once per shape of input."""
        shapes = tuple(part.shape[1:] for part in inputs)
        if shapes not in self._masked:
            model = _masked(self.model)
            self._masked[shapes] = model, _mask_shapes(model, inputs)
        return self._masked[shapes]


class _Mask(nn.Module):
    """Multiplies by a mask that is set from outside."""

    mask: Tensor

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        assert isinstance(dropout, _ELEMENTS | _CHANNELS)
        self.rate, self.channels = dropout.p, isinstance(dropout, _CHANNELS)
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask.to(x.dtype)


def _keep(uniform: Tensor, rate: float) -> Tensor:
    """Return masks: 0 with probability p, else 1/(1 - p)."""
    return (uniform >= rate) / (1 - rate) if rate < 1 else torch.zeros_like(uniform)


def _mask_shapes(model: nn.Module, inputs: Inputs) -> dict[str, torch.Size]:
    """Return the shape of the mask of every module that is reached, from one public example."""
    shapes: dict[str, torch.Size] = {}

    def record(name: str, module: _Mask, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[0] != 1:
            raise ValueError(
                f"dropout module {name} sees a tensor of shape {list(x.shape)} for one example; "
                f"masks need the examples on the first axis."
            )
        if name in shapes:
            raise ValueError(
                f"dropout module {name} is called twice in one pass; give each call its own module."
            )
        shapes[name] = torch.Size(
            (x.shape[1], *[1] * (x.dim() - 2)) if module.channels else x.shape[1:]
        )

    hooks = [
        module.register_forward_pre_hook(lambda m, args, name=name: record(name, m, args[0]))
        for name, module in model.named_modules()
        if isinstance(module, _Mask)
    ]
    with torch.no_grad(), evaluation(model):
        called(model, each(lambda part: torch.zeros_like(part[:1]), inputs))
    for hook in hooks:
        hook.remove()
    return shapes


def _masked(model: nn.Module) -> nn.Module:
    """Return the network with masks for dropout modules, sharing all tensors."""
    shared = (*model.parameters(), *model.buffers())
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, _ELEMENTS | _CHANNELS) and child.p > 0:
                setattr(parent, name, _Mask(child))
    return model
