"""What an example contributes: norms and weighted sums, not matrices of gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dpbnn.contributions.rounding import (
    INFLATION,
    accurate,
    full_precision,
    rows_error,
    squares,
    summed_rows,
)
from dpbnn.privacy.units import Groups

Weights = Tensor | Mapping[str, Tensor]
"""One weight per example, or per released name one weight per example."""
Draws = Sequence[Mapping[str, Tensor]]
"""Per draw, the standard normal e of every drawn weight, by released weight path."""


class UnsupportedModel(ValueError):
    """A model or likelihood whose contributions cannot be taken per example."""


class Contributions(ABC):
    """Per-example vectors c_i that can be clipped and summed without being materialised.

    An example whose contribution is not finite, or whose squared norm exceeds float32, counts as
    zero: its norm is 0 and it is absent from every sum.

    Attributes:
        batch_size: number of examples.
        shapes: released names and shapes.
        device: of the sums.
        dtype: of what is released.
        summed_in: the precision of a chunk's sum over examples; more of them than a `BLOCK` are
            summed block by block, and the blocks' sums in float64.
        draws: standard normal draws of the weights that the batch was run at, if any.
    """

    batch_size: int
    shapes: Mapping[str, torch.Size]
    device: torch.device
    dtype: torch.dtype = torch.float32
    summed_in: torch.dtype = torch.float32
    draws: Draws = ()

    def sum_error(self, rows: int) -> float:
        """Return e: sums of `rows` contributions of norm <= C, by chunks, err by e C at most.

        A function of public settings; see `rows_error`.
        """
        return rows_error(rows, self.summed_in)

    @abstractmethod
    def squared_norms(self) -> dict[str, Tensor]:
        """Return |c_i|^2 per released name, never below the truth (float64, [batch])."""

    @abstractmethod
    def weighted_sum(self, w: Weights) -> dict[str, Tensor]:
        """Return sum_i w_i c_i per released name, in float32 or better."""

    @abstractmethod
    def inner(self, other: Contributions) -> Tensor:
        """Return the inner products <c_i, d_j> with another batch's contributions (float64)."""

    def norms(self) -> Tensor:
        """Return |c_i| over all released names, never below the truth (float64, [batch])."""
        return torch.stack(list(self.squared_norms().values())).sum(0).sqrt()

    def unit_squares(self, groups: Groups, names: Sequence[str]) -> Tensor:
        """Return |sum_i c_i|^2 over some names and the rows of each unit; never below it.

        Rows that are not used or not finite are left out (float64, [units]). A unit of one row may
        have less: its norm is that of the row.
        """
        raise UnsupportedModel(
            f"units: {type(self).__name__} has no norms of several records together; use dense or "
            f"network contributions"
        )

    def gram(self) -> Tensor:
        """Return the inner products <c_i, c_j> (float64, [batch, batch])."""
        return self.inner(self)

    def chunks(self) -> Iterator[Contributions]:
        """Yield contributions whose examples, in order, make up this batch."""
        yield self

    def unit_chunks(self, units: Tensor) -> Iterator[Contributions]:
        """Yield the same, cut between units alone; `units` has a number for every row."""
        yield self

    def per_name(self, w: Weights) -> dict[str, Tensor]:
        """Return the weights of every released name, checked for shape."""
        given = w if isinstance(w, Mapping) else dict.fromkeys(self.shapes, w)
        if given.keys() != self.shapes.keys():
            raise ValueError(
                f"weights for {sorted(given)} were given, contributions have "
                f"{sorted(self.shapes)}; give one weight tensor per name, or one for all."
            )
        for name, values in given.items():
            if values.shape != (self.batch_size,):
                raise ValueError(
                    f"weights of {name!r} have shape {tuple(values.shape)}; "
                    f"give one per example: ({self.batch_size},)."
                )
        return dict(given)


class ChunkedContributions(Contributions):
    """Contributions that exist one chunk of examples at a time, made when they are asked for.

    Args:
        part: gives the contributions of examples first to last - 1, each time the same ones.
        batch_size: number of examples.
        size: most examples in a chunk.
        shapes: released names and shapes.
        device: of the sums.
        dtype: of what is released.
        summed_in: the precision of a chunk's sum over examples.
        draws: standard normal draws of the weights.
    """

    def __init__(
        self,
        part: Callable[[int, int], Contributions],
        batch_size: int,
        size: int,
        shapes: Mapping[str, torch.Size],
        device: torch.device,
        dtype: torch.dtype,
        summed_in: torch.dtype = torch.float64,
        draws: Draws = (),
    ) -> None:
        self.part, self.batch_size, self.size = part, batch_size, max(1, size)
        self.shapes, self.device, self.dtype = shapes, device, dtype
        self.summed_in, self.draws = summed_in, draws

    def chunks(self) -> Iterator[Contributions]:
        """Yield contributions whose examples, in order, make up this batch; at least one."""
        for first in range(0, max(1, self.batch_size), self.size):
            chunk = self.part(first, min(first + self.size, self.batch_size))
            chunk.summed_in = self.summed_in
            yield chunk

    def unit_chunks(self, units: Tensor) -> Iterator[Contributions]:
        """Yield chunks of whole units; one that has more rows than a chunk may is a chunk alone."""
        first = 0
        ends = [*(units.diff() != 0).nonzero()[:, 0].add(1).tolist(), self.batch_size]
        for end, following in zip(ends, [*ends[1:], math.inf], strict=True):
            if following - first > self.size:
                chunk = self.part(first, end)
                chunk.summed_in, first = self.summed_in, end
                yield chunk

    def squared_norms(self) -> dict[str, Tensor]:
        """Return |c_i|^2 per released name, never below the truth (float64, [batch])."""
        parts = [chunk.squared_norms() for chunk in self.chunks()]
        return {name: torch.cat([part[name] for part in parts]) for name in self.shapes}

    def weighted_sum(self, w: Weights) -> dict[str, Tensor]:
        """Return sum_i w_i c_i per released name, in float32 or better."""
        weights = self.per_name(w)
        once = {id(values): values for values in weights.values()}
        total: dict[str, Tensor] = {}
        first = 0
        for chunk in self.chunks():
            rows = slice(first, first + chunk.batch_size)
            pieces = {key: values[rows] for key, values in once.items()}
            part = chunk.weighted_sum({name: pieces[id(v)] for name, v in weights.items()})
            total = {name: total[name] + v if name in total else v for name, v in part.items()}
            first = rows.stop
        return total

    def inner(self, other: Contributions) -> Tensor:
        """Return the inner products <c_i, d_j> with another batch's contributions (float64)."""
        return torch.cat(
            [torch.cat([a.inner(b) for b in other.chunks()], 1) for a in self.chunks()]
        )


def masked(values: Tensor, finite: Tensor) -> Tensor:
    """Return the values with the rows of non-finite examples replaced by zero."""
    return values.masked_fill(~finite.view(-1, *[1] * (values.dim() - 1)), 0.0)


class DenseContributions(Contributions):
    """Contributions that are plain tensors; their sums are float64.

    Args:
        values: [batch, ...], or one such tensor per released name.
    """

    summed_in = torch.float64

    def __init__(self, values: Tensor | Mapping[str, Tensor]) -> None:
        named = dict(values) if isinstance(values, Mapping) else {"value": values}
        if not named:
            raise ValueError("no values were given; give at least one tensor [batch, ...].")
        sizes = {name: len(tensor) for name, tensor in named.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"batch sizes {sizes} differ; every tensor needs the same first axis.")
        self.batch_size = next(iter(sizes.values()))
        self.shapes = {name: tensor.shape[1:] for name, tensor in named.items()}
        self.device = next(iter(named.values())).device
        flat = {
            name: accurate(tensor.detach()).reshape(self.batch_size, self.shapes[name].numel())
            for name, tensor in named.items()
        }
        double = any(tensor.dtype == torch.float64 for tensor in flat.values())
        self.dtype = torch.float64 if double else torch.float32
        raw = {name: squares(tensor) for name, tensor in flat.items()}
        finite = torch.stack(list(raw.values())).sum(0).isfinite()
        self._flat = {name: masked(tensor, finite) for name, tensor in flat.items()}
        self._squares = {
            name: masked(tensor, finite) * INFLATION**2 for name, tensor in raw.items()
        }

    def squared_norms(self) -> dict[str, Tensor]:
        """Return |c_i|^2 per released name, never below the truth (float64, [batch])."""
        return dict(self._squares)

    def unit_squares(self, groups: Groups, names: Sequence[str]) -> Tensor:
        """Return |sum_i c_i|^2 over some names and the rows of each unit, summed in float64."""
        found = [squares(groups.sums(self._flat[name].double())) for name in names]
        return torch.stack(found).sum(0).mul_(INFLATION**2)

    def weighted_sum(self, w: Weights) -> dict[str, Tensor]:
        """Return sum_i w_i c_i per released name, in float64."""
        sums: dict[str, Tensor] = {}
        with full_precision(self.device):
            for name, values in self.per_name(w).items():
                weights = values.detach().to(self.device, torch.float64)[:, None]
                total = summed_rows(weights, self._flat[name], exact=True)
                sums[name] = total.view(self.shapes[name])
        return sums

    def inner(self, other: Contributions) -> Tensor:
        """Return the inner products <c_i, d_j> with another batch's contributions (float64)."""
        if not isinstance(other, DenseContributions) or other.shapes != self.shapes:
            raise TypeError("inner products need contributions of the same kind and shapes.")
        total = torch.zeros(
            self.batch_size, other.batch_size, dtype=torch.float64, device=self.device
        )
        for name, values in self._flat.items():
            total += values.double() @ other._flat[name].double().T
        return total
