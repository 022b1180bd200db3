"""Weights that multiply their input: gradients G = sum_t g_t a_t^T over positions t."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbnn.contributions.rounding import (
    BLOCK,
    Bad,
    accurate,
    squares,
    sum_error,
    summed_rows,
    weighable,
    weighted_factors,
    wide,
    without,
)
from dpbnn.contributions.sites import CHANGED, KEPT, Measured, Site, Slack, joined, scaled_sums
from dpbnn.contributions.tiles import tile_error, tile_squares, tile_sums, tiled

GRAM_COST = 3.0
"""Price of a float64 multiplication in the Gram form against a float32 one."""
MAX_PAIRED_DRAWS = 8
"""Draws of a linear layer up to which products of pairs are cheaper than instantiation."""


class LinearFactors:
    """One use of a weight W in z = x W^T: its inputs a, its output gradients g, and k for rho.

    Attributes:
        a, g: [batch, T, columns] and [batch, T, rows], without T where there is one position.
        a_squares, g_squares: |a|^2 and |g|^2 of every example.
        scale: k = e * d std / d rho of this draw, shaped like the weight; or None.
        groups, positions, columns, rows: G consists of `groups` blocks [rows, columns].
        version: of a, when it was recorded.
    """

    groups = 1

    def __init__(
        self, a: Tensor, g: Tensor, a_squares: Tensor, g_squares: Tensor, scale: Tensor | None
    ) -> None:
        self.a, self.g, self.a_squares, self.g_squares = a, g, a_squares, g_squares
        self.scale, self.version = scale, a._version
        self.positions = 1 if a.dim() == 2 else a.shape[1]
        self.columns, self.rows = a.shape[-1], g.shape[-1]

    def factors(self, examples: slice) -> tuple[Tensor, Tensor]:
        """Return a [batch * groups, T, columns] and g [batch * groups, T, rows]."""
        a, g = accurate(self.a[examples]), accurate(self.g[examples])
        return (a.unsqueeze(1), g.unsqueeze(1)) if a.dim() == 2 else (a, g)

    def summed(self, w: Tensor, bad: Bad, exact: bool, into: Tensor | None = None) -> Tensor:
        """Return sum_i w_i G_i, shaped like the weight, in float64 where positions are summed."""
        a, g = weighted_factors(accurate(self.a), accurate(self.g), w, bad)
        if a.dim() > 2:
            a, g = a.flatten(0, 1), g.flatten(0, 1)
        return summed_rows(g, a, exact or self.positions > 1, into)

    def magnitude(self) -> Tensor:
        """Return a bound on (sum_t |a_t| |g_t|)^2 per example (float64)."""
        return self.a_squares * self.g_squares

    def blocks(self, weights: Tensor) -> Tensor:
        """Return weight-shaped tensors in the order of a block's columns."""
        return weights

    def unblocked(self, blocks: Tensor) -> Tensor:
        """Return flat blocks in the weight's shape."""
        return torch.unflatten(blocks, -1, (self.rows, self.columns))

    @property
    def block_size(self) -> int:
        """Return how many numbers an instantiated example needs at once."""
        return self.groups * max(self.rows, self.positions) * self.columns

    @property
    def kept_size(self) -> int:
        """Return how many numbers a and g hold per example."""
        return (self.a.numel() + self.g.numel()) // max(1, self.g.shape[0])


@dataclass(frozen=True)
class Window:
    """How a convolution moves over its (already padded, unless zero padded) input."""

    shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class ConvFactors(LinearFactors):
    """A convolution: a and g are the patches and the output gradients at every position."""

    def __init__(self, *recorded: Any, window: Window) -> None:
        super().__init__(*recorded)
        self.window, self.groups = window, window.groups
        self.positions = self.g[0, 0].numel()
        self.columns, self.rows = window.shape[1:].numel(), window.shape[0] // window.groups

    def factors(self, examples: slice) -> tuple[Tensor, Tensor]:
        """Return a [batch * groups, T, columns] and g [batch * groups, T, rows]."""
        return self._factors(self.a[examples], self.g[examples])

    def _factors(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        window = self.window
        if any(window.padding):
            a = F.pad(a, [side for pad in reversed(window.padding) for side in (pad, pad)])
        channels = a.shape[1] // self.groups
        a = torch.unflatten(a, 1, (self.groups, channels)).movedim(2, -1).contiguous()
        steps = a.stride()[2:-1]
        patches = a.as_strided(
            [len(a), self.groups, *g.shape[2:], *window.shape[2:], channels],
            [
                *a.stride()[:2],
                *(step * s for step, s in zip(steps, window.stride, strict=True)),
                *(step * d for step, d in zip(steps, window.dilation, strict=True)),
                1,
            ],
        )
        count = len(g) * self.groups
        return (
            patches.reshape(count, self.positions, self.columns),
            g.reshape(count, self.rows, self.positions).mT,
        )

    def blocks(self, weights: Tensor) -> Tensor:
        """Return weight-shaped tensors with channels last, as the patches have them."""
        return weights.movedim(-len(self.window.shape) + 1, -1)

    @property
    def block_size(self) -> int:
        """Return how many numbers an instantiated example needs at once, copies included."""
        return 4 * super().block_size

    def unblocked(self, blocks: Tensor) -> Tensor:
        """Return flat blocks in the weight's shape."""
        shape = self.window.shape
        return torch.unflatten(blocks, -1, (shape[0], *shape[2:], shape[1])).movedim(
            -1, -len(shape) + 1
        )

    def summed(self, w: Tensor, bad: Bad, exact: bool, into: Tensor | None = None) -> Tensor:
        """Return sum_i w_i G_i, in float64, a few examples at a time."""
        whole_a, whole_g = weighted_factors(self.a, self.g, w, bad)
        total = whole_a.new_zeros(self.groups, self.rows, self.columns, dtype=torch.float64)
        step = max(1, BLOCK[torch.float64] // self.positions)
        for first in range(0, len(whole_g), step):
            a, g = (
                torch.unflatten(part.double(), 0, (-1, self.groups)).transpose(0, 1).flatten(1, 2)
                for part in self._factors(
                    whole_a[first : first + step], whole_g[first : first + step]
                )
            )
            total.baddbmm_(g.mT, a)
        return self.unblocked(total.view(-1)).contiguous()

    def magnitude(self) -> Tensor:
        """Return a bound on (sum_t |a_t| |g_t|)^2 per example (float64).

        A pixel lies in at most prod ceil(kernel / stride) patches (all taps if dilated).
        """
        window = self.window
        overlap = math.prod(
            size if d > 1 else -(-size // s)
            for size, s, d in zip(window.shape[2:], window.stride, window.dilation, strict=True)
        )
        return overlap * self.a_squares * self.g_squares


class Outer(Site):
    """A weight with gradient sum_r G_r over its uses and draws r, and its rho: sum_r k_r * G_r.

    Args:
        names: the released name of the weight or mu, then that of rho; None where frozen.
        shape: of the weight.
        terms: its uses.
        form: "gram" or "instantiated" to overrule the choice by cost.
    """

    form: str | None = None

    def __init__(
        self, names: Sequence[str | None], shape: torch.Size, terms: Sequence[LinearFactors]
    ) -> None:
        self.names, self.shape, self.terms, self.data_free = list(names), shape, list(terms), {}
        self.batch = terms[0].g.shape[0]
        self.wider = 4 if terms[0].g.is_cuda else 0
        self.shapes = {name: shape for name in names if name}
        self._kept: Tensor | None = None  # all examples' gradients, flat
        self._slack: Slack | None = None

    def joined(self, others: Sequence[Site]) -> Site:
        """Return one site for this and others that release some of the same names."""
        alike = [s for s in others if isinstance(s, Outer) and s.names == self.names]
        if len(alike) < len(others):
            return super().joined(others)
        return Outer(self.names, self.shape, [*self.terms, *(t for s in alike for t in s.terms)])

    @property
    def single(self) -> bool:
        """Whether sums are of contributions, not of terms that may be larger than these."""
        terms = sum(term.positions for term in self.terms) if self._kept is None else 1
        return terms == 1 and super().single

    def slices(self, size: int = 0) -> Iterator[slice]:
        """Yield runs of examples whose instantiated contributions fit the chunk, or are kept."""
        if self._kept is not None:
            return iter([slice(0, self.batch)])
        return super().slices(size or max(term.block_size for term in self.terms))

    @property
    def _scaled(self) -> bool:
        return len(self.names) > 1 and self.names[1] is not None

    @property
    def _rank_one(self) -> bool:
        return all(term.a.dim() == 2 for term in self.terms)

    @property
    def _tiled(self) -> bool:
        alone = len(self.terms) == 1 and not self._scaled and not self.data_free
        return alone and self.form is None and tiled(self.terms[0].g)

    def _choose(self) -> str:
        special = self._scaled or bool(self.data_free)
        if self._tiled:
            return "tiles"
        if self.form is not None and not (special and self.form == "gram"):
            return self.form
        if self._rank_one and (len(self.terms) == 1 or special):
            return "pairs" if len(self.terms) <= MAX_PAIRED_DRAWS else "instantiated"
        if special:
            return "instantiated"
        first, positions = self.terms[0], sum(term.positions for term in self.terms)
        gram = GRAM_COST * positions * (first.columns + first.rows)
        return "gram" if gram < first.columns * first.rows else "instantiated"

    def measured(self) -> Measured:
        """Return what `squared_norms` is made of."""
        forms = {
            "pairs": self._pairs, "gram": self._gram, "instantiated": self._instantiated,
            "tiles": self._squared_tiles,
        }  # fmt: skip
        return forms[self._choose()]()

    def _squared_tiles(self) -> Measured:
        value = tile_squares(self.terms[0].g, self.terms[0].a)
        return dict.fromkeys(self.shapes, value), self.slack()

    def slack(self) -> Slack:
        """Return gamma sum_t |a_t| |g_t|, the rounding error of sums over positions.

        A data-free part is one more term: it may cancel the others and leave their rounding.
        """
        if self._slack is None:
            count = sum(term.positions for term in self.terms) + bool(self.data_free)
            kind = wide(self.terms[0].g.dtype)
            gamma = tile_error(count) if self._tiled else sum_error(count, kind)
            parts = [term.magnitude() for term in self.terms]
            for part, term in zip(parts, self.terms, strict=True):
                if term.scale is not None:
                    largest = torch.linalg.vector_norm(term.scale, math.inf).double()
                    part *= largest.clamp(min=1.0).square()
            whole = torch.stack(parts).sqrt_().sum(0).square_() if len(parts) > 1 else parts[0]
            self._slack = Slack(gamma, whole)
        return self._slack

    def _pairs(self) -> Measured:
        """Return norms of rank-one gradients without forming them.

        |sum_r k_r * g_r a_r^T|^2 = sum_{r,s} (g_r * g_s)^T (k_r * k_s) (a_r * a_s); with a
        data-free D it gains 2 sum_r g_r^T (k_r * D) a_r + |D|^2 and a bound on their rounding.
        """
        result, first = {}, self.terms[0]
        product = first.a_squares * first.g_squares
        for index, name in enumerate(self.names):
            if name is None:
                continue
            total = self._alone(index, product) if len(self.terms) == 1 else self._paired(index)
            if name in self.data_free:
                constant = self.data_free[name]
                size = squares(constant.flatten()[None])
                error = sum_error(first.columns + 1, first.g.dtype) + sum_error(
                    first.rows + 1, first.g.dtype
                )
                error_bound = error * (total.sqrt() + size.sqrt()).square()
                total = (total + 2 * self._cross(index, constant) + size).clamp(min=0) + error_bound
            result[name] = total
        return result, self.slack() if len(self.terms) > 1 else 0.0

    def _alone(self, index: int, product: Tensor) -> Tensor:
        term = self.terms[0]
        if not index or term.scale is None:
            return product
        a, g = term.a, term.g
        scaled = (a.square() @ term.scale.square().T).mul_(g).mul_(g).sum(1).double()
        return scaled + 64 * torch.finfo(torch.float32).tiny * (1 + product)

    def _paired(self, index: int) -> Tensor:
        total = torch.zeros(self.batch, dtype=torch.float64, device=self.terms[0].g.device)
        for (r, one), (s, two) in combinations_with_replacement(enumerate(self.terms), 2):
            a = one.a.double() * two.a
            g = one.g.double() * two.g
            if index and one.scale is not None and two.scale is not None:
                value = (a @ (one.scale.double() * two.scale).T * g).sum(1)
            else:
                value = a.sum(1) * g.sum(1)
            total = total + value * (1 if r == s else 2)
        return total.clamp(min=0)

    def _cross(self, index: int, constant: Tensor) -> Tensor:
        total = torch.zeros(self.batch, dtype=torch.float64, device=constant.device)
        for term in self.terms:
            a, g = term.a, term.g
            d = constant.to(g)
            if index and term.scale is not None:
                d = d * term.scale
            total = total + (a @ d.T).mul_(g).sum(1).double()
        return total

    def _gram(self) -> Measured:
        """Return |sum_t g_t a_t^T|^2 = sum_{s,t} (a_s . a_t)(g_s . g_t), in float64."""
        positions = sum(term.positions for term in self.terms)
        first = self.terms[0]
        size = first.groups * positions * (positions + first.columns + first.rows)
        parts = []
        for rows in self.slices(2 * size):
            pairs = [term.factors(rows) for term in self.terms]
            a = torch.cat([pair[0].double() for pair in pairs], 1)
            g = torch.cat([pair[1].double() for pair in pairs], 1)
            products = torch.bmm(a, a.mT).mul_(torch.bmm(g, g.mT))
            parts.append(products.view(rows.stop - rows.start, -1).sum(1))
        value = torch.cat(parts).clamp(min=0)
        return dict.fromkeys(self.shapes, value), self.slack()

    def _accumulate(self, rows: slice, into: Tensor | None = None) -> Tensor:
        if self._kept is not None:
            return self._kept[rows]
        a, g = self.terms[0].factors(rows)
        out = None if into is None else into[rows].view(len(a), g.shape[2], a.shape[2])
        total = torch.bmm(g.mT, a, out=out)
        for term in self.terms[1:]:
            a, g = term.factors(rows)
            total.baddbmm_(g.mT, a)
        return total.view(rows.stop - rows.start, -1)

    def _rho(self, rows: slice, weight: Tensor) -> Tensor:
        if len(self.terms) == 1:
            scale = self.terms[0].scale
            return weight if scale is None else weight * self._flat(scale)
        total = torch.zeros_like(weight)
        for term in self.terms:
            a, g = term.factors(rows)
            part = torch.bmm(g.mT, a).view_as(weight)
            total += part if term.scale is None else part * self._flat(term.scale)
        return total

    def _flat(self, weights: Tensor) -> Tensor:
        return self.terms[0].blocks(weights).reshape(-1)

    def _instantiated(self) -> Measured:
        first = self.terms[0]
        keep = (
            len(self.terms) == 1
            and not self._rank_one
            and self.shape.numel() <= max(first.kept_size, (KEPT << self.wider // 2) // self.batch)
        )
        parts: dict[str, list[Tensor]] = {name: [] for name in self.shapes}
        slack, kept = self.slack(), None
        if keep:
            kept = first.g.new_empty(self.batch, self.shape.numel(), dtype=wide(first.g.dtype))
        for rows in self.slices():
            weight = self._accumulate(rows, kept)
            for index, name in enumerate(self.names):
                if name:
                    values = self._rho(rows, weight) if index else weight
                    if name in self.data_free:
                        values = values + self._flat(self.data_free[name]).to(values)
                    parts[name].append(squares(values))
        if keep:
            self._kept = kept
            first.a, first.g = first.a.new_empty(0), first.g.new_empty(0)
        return {name: joined(values) for name, values in parts.items()}, slack

    def flat(self, rows: slice) -> dict[str, Tensor]:
        """Return the same as `instantiate`, flat, in the order of the blocks."""
        rows = slice(*rows.indices(self.batch))
        weight = self._accumulate(rows)
        return {
            name: self._rho(rows, weight) if index else weight
            for index, name in enumerate(self.names)
            if name
        }

    def instantiate(self, rows: slice) -> dict[str, Tensor]:
        """Return the contributions of some examples without the data-free part."""
        return {name: self.terms[0].unblocked(v) for name, v in self.flat(rows).items()}

    def raw_sum(self, w: Mapping[str, Tensor], bad: Bad, exact: bool) -> dict[str, Tensor]:
        """Return sum_i w_i c_i without the data-free part and without the bad examples."""
        exact = exact or len(self.terms) > 1

        def summed(term: LinearFactors) -> Callable[[Tensor], Tensor]:
            return lambda w: self._summed(term, w, bad, exact)

        return scaled_sums(self.names, [(term.scale, summed(term)) for term in self.terms], w)

    def _summed(self, term: LinearFactors, w: Tensor, bad: Bad, exact: bool) -> Tensor:
        """Return sum_i w_i G_i of one use, from instantiated G_i where that is the cheaper way."""
        if self._kept is None:
            if term.a._version != term.version:
                raise RuntimeError(CHANGED)
            if self._tiled and not exact:
                return tile_sums(term.g, term.a, w)
            alone = len(self.terms) == 1 and term.positions > 1
            if not (alone and self._choose() == "instantiated"):
                one = len(self.terms) == len(self.shapes) == 1
                return term.summed(w, bad, exact, self.into.get(*self.shapes) if one else None)
        total: Tensor | None = None
        for rows in self.slices():
            kept = weighable(self._accumulate(rows), bad, exact)
            part = summed_rows(w[rows].to(kept)[:, None], kept, exact)[0]
            if total is not None and self.batch > BLOCK[torch.float32]:
                total = total.double()
            total = part if total is None else total.add_(part)
        assert total is not None
        return term.unblocked(total).contiguous()

    def inner(self, other: Site, bad: Bad, other_bad: Bad) -> Tensor:
        """Return <c_i, d_j> between this site's and the same site's other examples (float64)."""
        plain = self._rank_one and len(self.terms) == 1 and not self._scaled and not self.data_free
        if not plain or not isinstance(other, Outer):
            return super().inner(other, bad, other_bad)
        one, two = self.terms[0], other.terms[0]
        a = one.a.double() @ two.a.double().T
        g = one.g.double() @ two.g.double().T
        return without(without(a.mul_(g), bad), other_bad, 1)
