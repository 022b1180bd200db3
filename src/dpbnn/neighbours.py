"""Neighbouring datasets for replays: the same data without one record, or without one person."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpbnn.likelihoods import Categorical, Likelihood
from dpbnn.units import numbered

__all__ = ["owned", "parts_of", "removed", "without"]


def parts_of(data: Any, record: int | None = None) -> list[Tensor]:
    """Return the tensors that the data is made of, which have this record."""
    parts = data if isinstance(data, tuple | list) else (data,)
    parts = [torch.as_tensor(part) for part in parts if part is not None]
    if record is not None and not 0 <= record < len(parts[0]):
        raise ValueError(f"neighbour={record}: the data has records 0 to {len(parts[0]) - 1}")
    return parts


def owned(units: Any, record: int) -> Tensor:
    """Return the record, or all records of its unit where there are units."""
    if units is None:
        return torch.tensor([record])
    numbers, _ = numbered(units)
    return (numbers == numbers[record]).nonzero()[:, 0]


def without(data: Any, records: Tensor, likelihood: str | Likelihood) -> Any:
    """Return the data with records that `fit` takes for bad ones; None where that is impossible."""
    parts = parts_of(data)
    real = [index for index, part in enumerate(parts) if part.is_floating_point()]
    if not real and not isinstance(likelihood, str | Categorical):
        return None
    index = next(iter(real), -1)
    parts[index] = parts[index].clone()
    parts[index][records] = math.nan if real else -1
    return tuple(parts) if len(parts) > 1 else parts[0]


def removed(data: Any, records: Tensor, units: Any = None) -> tuple[Any, Any]:
    """Return the data with records moved to its end, and without them; each with its labels."""
    parts = parts_of(data)
    stay = torch.ones(len(parts[0]), dtype=torch.bool)
    stay[records] = False
    order = torch.cat([stay.nonzero()[:, 0], records])
    labels = None if units is None else numbered(units)[0][order]

    def rows(count: int) -> Any:
        own = tuple(part[order][:count] for part in parts)
        return own if len(parts) > 1 else own[0], None if labels is None else labels[:count]

    return rows(len(order)), rows(len(order) - len(records))
