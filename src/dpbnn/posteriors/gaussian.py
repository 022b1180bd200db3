"""Gaussian draws of many tensors, one stream per posterior."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dpbnn.posteriors.evaluate import Draws, number_stream

_ALIGN = 64  # elements, so that every tensor of a draw starts where matrix kernels are fast


def gaussian_draws(
    count: int,
    mean: Mapping[str, Tensor],
    std: Mapping[str, Tensor],
    generator: torch.Generator,
    factors: Mapping[str, Tensor] | None = None,
) -> Draws:
    """Return draws w = mean + std * e + e' factors, with e and e' standard normal.

    Args:
        count: number of draws.
        mean: means by name.
        std: standard deviations by name.
        generator: source of e and e'.
        factors: R rows by name, [R, ...], each with its own coefficient e'.
    """
    sizes = [math.ceil(t.numel() / _ALIGN) * _ALIGN for t in mean.values()]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    total, first = sum(sizes), next(iter(mean.values()))
    rank = 0 if factors is None else len(next(iter(factors.values())))

    def flat(tensors: Mapping[str, Tensor], rows: int) -> Tensor:
        whole = first.new_zeros(rows, total)
        for name, start in zip(mean, starts, strict=True):
            values = tensors[name].reshape(rows, -1)
            whole[:, start : start + values.shape[1]] = values
        return whole

    centre, scale = flat(mean, 1), flat(std, 1)
    across = None if factors is None else flat(factors, rank)
    stream = number_stream(total + rank, "normal_", first, generator)

    def take(number: int) -> dict[str, Tensor]:
        noise = stream(number)
        weights = noise[:, :total]
        torch.addcmul(centre, scale, weights, out=weights)
        if across is not None:
            weights.addmm_(noise[:, total:], across)
        return {
            name: weights[:, start : start + t.numel()].view(number, *t.shape)
            for (name, t), start in zip(mean.items(), starts, strict=True)
        }

    return Draws(count=count, numbers=total + rank, take=take)


def check_like(
    given: Mapping[str, Tensor], like: Mapping[str, Tensor], what: str, axes: int = 0
) -> None:
    """Refuse tensors whose names or shapes (after the first axes) are not those of parameters."""
    for name, tensor in given.items():
        if name not in like or tensor.shape[axes:] != like[name].shape:
            expected = list(like[name].shape) if name in like else "no such parameter"
            raise ValueError(
                f"{what}[{name!r}] has shape {list(tensor.shape)}, the model has {expected}; pass "
                f"tensors that belong to the model."
            )
    if not given:
        raise ValueError(f"{what} is empty; pass at least one tensor.")
