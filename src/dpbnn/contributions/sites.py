"""Sites: the released names that share one computation, and how their norms and sums are taken."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from dpbnn.contributions.rounding import (
    BLOCK,
    Bad,
    accurate,
    finite,
    position_sums,
    squares,
    sum_error,
    summed_rows,
    weighable,
    wide,
    without,
)

CHUNK = 1 << 21
"""Numbers held at once when per-example gradients are instantiated."""
KEPT = 1 << 22
"""Numbers up to which instantiated gradients are kept for the sum, where what they are made of is
smaller."""
CHANGED = "inputs or parameters were changed in place before their contributions were summed."


class Site(ABC):
    """A part of every example's contribution; a few examples at a time can be instantiated.

    Attributes:
        shapes: released names and their shapes.
        batch: number of examples.
        data_free: data-independent gradients D added to every example's contribution.
        wider: how often `CHUNK` is doubled, for GPUs, where few large kernels are faster.
        into: tensors that sums may be written to, by name.
    """

    shapes: dict[str, torch.Size]
    batch: int
    data_free: dict[str, Tensor]
    wider: int = 0
    into: Mapping[str, Tensor] = MappingProxyType({})

    @abstractmethod
    def instantiate(self, rows: slice) -> dict[str, Tensor]:
        """Return the contributions of some examples without the data-free part."""

    def flat(self, rows: slice) -> dict[str, Tensor]:
        """Return the same, [examples, numbers], the numbers in any order."""
        return {name: values.flatten(1) for name, values in self.instantiate(rows).items()}

    def slack(self) -> AnySlack:
        """Return a bound on the rounding error of an instantiated contribution, per example."""
        return 0.0

    @property
    def single(self) -> bool:
        """Whether sums are of contributions, not of terms that may be larger than these."""
        return not self.data_free

    def joined(self, others: Sequence[Site]) -> Site:
        """Return one site for this and others that release some of the same names."""
        return Merged([self, *others])

    def slices(self, size: int = 0) -> Iterator[slice]:
        """Yield runs of examples whose instantiated contributions fit the chunk."""
        size = size or max(1, sum(shape.numel() for shape in self.shapes.values()))
        step = max(1, (CHUNK << self.wider) // size)
        for start in range(0, self.batch, step):
            yield slice(start, min(start + step, self.batch))

    def squared_norms(self) -> dict[str, Tensor]:
        """Return |c_i|^2 per name, an upper bound up to a relative 1e-4 (float64, [batch])."""
        return with_slack(*self.measured())

    def measured(self) -> Measured:
        """Return what `squared_norms` is made of."""
        parts: dict[str, list[Tensor]] = {name: [] for name in self.shapes}
        for rows in self.slices():
            for name, values in self._whole(rows).items():
                parts[name].append(squares(values.flatten(1)))
        return {name: joined(part) for name, part in parts.items()}, self.slack()

    def weighted_sum(
        self, w: Mapping[str, Tensor], bad: Bad, exact: bool = False
    ) -> dict[str, Tensor]:
        """Return sum_i w_i c_i; `bad` are the examples that are not finite, their w is zero."""
        if exact and not self.single:
            return self._row_sum(self._whole, w, bad, exact)
        sums = self.raw_sum(w, bad, exact or bool(self.data_free))
        for name, constant in self.data_free.items():
            total = w[name].sum(dtype=torch.float64)
            sums[name] = torch.addcmul(sums[name].double(), constant.double(), total)
        return sums

    def raw_sum(self, w: Mapping[str, Tensor], bad: Bad, exact: bool) -> dict[str, Tensor]:
        """Return sum_i w_i c_i without the data-free part and without the bad examples.

        In float64 if `exact`, and wherever terms may be larger than contributions.
        """
        return self._row_sum(self.instantiate, w, bad, exact)

    def inner(self, other: Site, bad: Bad, other_bad: Bad) -> Tensor:
        """Return <c_i, d_j> between this site's and the same site's other examples (float64)."""

        def flat(site: Site, rows: slice) -> Tensor:
            return torch.cat([part.flatten(1) for part in site._whole(rows).values()], 1).double()

        parts = []
        for rows in self.slices():
            left = flat(self, rows)
            parts.append(torch.cat([left @ flat(other, c).T for c in other.slices()], 1))
        return without(without(torch.cat(parts), bad), other_bad, 1)

    def _whole(self, rows: slice) -> dict[str, Tensor]:
        """Return the contributions of some examples with the data-free part."""
        parts = self.instantiate(rows)
        for name, constant in self.data_free.items():
            parts[name] = parts[name] + constant.to(parts[name])
        return parts

    def _row_sum(
        self,
        parts: Callable[[slice], dict[str, Tensor]],
        w: Mapping[str, Tensor],
        bad: Bad,
        exact: bool,
    ) -> dict[str, Tensor]:
        """Return the sum of instantiated contributions, over runs of examples in float64."""
        sums: dict[str, Tensor] = {}
        for rows in self.slices():
            for name, part in parts(rows).items():
                flat = part.flatten(1)
                if bad is not None:
                    flat = flat.nan_to_num(0.0, 0.0, 0.0)
                weights = w[name][rows, None]
                if not exact or flat.dtype is torch.float64:
                    weights = weights.to(flat)
                value = summed_rows(weights, flat, exact)[0]
                if self.batch > BLOCK[torch.float32]:
                    value = value.double()
                sums[name] = sums[name] + value if name in sums else value
        return {name: value.view(self.shapes[name]) for name, value in sums.items()}


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts of a batch, in one tensor."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


class Slack(NamedTuple):
    """A bound on the rounding error of contributions, gamma times the root of `squared`."""

    gamma: float
    squared: Tensor

    def bound(self) -> Tensor:
        """Return the bound, for every example."""
        return self.gamma * self.squared.sqrt()


AnySlack = Slack | Tensor | float


def bound(slack: AnySlack) -> Tensor | float:
    """Return a bound on the rounding error, for every example; a float is 0."""
    return slack.bound() if isinstance(slack, Slack) else slack


def with_slack(squared: dict[str, Tensor], slack: AnySlack) -> dict[str, Tensor]:
    """Return (|c| + slack)^2 for every |c|^2."""
    if isinstance(slack, float):
        return squared
    own = bound(slack)
    return {name: (value.sqrt() + own).square() for name, value in squared.items()}


Measured = tuple[dict[str, Tensor], AnySlack]
"""|c_i|^2 per name as computed, and a bound on what rounding has lost of |c_i|."""


class Direct(Site):
    """Small tensors whose per-example gradients G are at hand: biases, norm layers.

    Terms are (G, k, slack): several uses or draws add up, sum_r k_r * G_r with k = 1 for the
    first name; slack bounds the rounding error of G. `squared` is |G|^2, where that is known.
    """

    @property
    def single(self) -> bool:
        """Whether sums are of contributions, not of terms that may be larger than these."""
        return super().single and len(self.terms) == 1

    def __init__(
        self,
        names: Sequence[str | None],
        terms: Sequence[tuple[Tensor, Tensor | None, AnySlack]],
        squared: Tensor | None = None,
    ) -> None:
        self.names, self.terms, self.data_free = list(names), list(terms), {}
        self.squared = None if any(names[1:]) else squared
        self.batch = terms[0][0].shape[0]
        self.shapes = {name: terms[0][0].shape[1:] for name in names if name}

    def instantiate(self, rows: slice) -> dict[str, Tensor]:
        """Return the contributions of some examples without the data-free part."""
        parts: dict[str, Tensor] = {}
        for index, name in enumerate(self.names):
            for gradient, scale, _ in self.terms:
                if name:
                    part = gradient[rows]
                    part = part * scale if index and scale is not None else part
                    parts[name] = parts[name] + part if name in parts else part
        return parts

    def slack(self) -> AnySlack:
        """Return a bound on the rounding error of an instantiated contribution, per example."""
        if len(self.terms) == 1 and self.terms[0][1] is None:
            return self.terms[0][2]
        total: Tensor | float = 0.0
        for _, scale, given in self.terms:
            slack = bound(given)
            if isinstance(slack, Tensor):
                largest = 1.0 if scale is None else scale.abs().max().clamp(min=1.0)
                total = slack * largest + total
        return total

    def measured(self) -> Measured:
        """Return what `squared_norms` is made of."""
        if self.squared is None or self.data_free:
            return super().measured()
        return dict.fromkeys(self.shapes, self.squared), 0.0

    def slices(self, size: int = 0) -> Iterator[slice]:
        """Yield all examples at once: they are instantiated already."""
        yield slice(None)

    def joined(self, others: Sequence[Site]) -> Site:
        """Return one site for this and others that release some of the same names."""
        alike = [s for s in others if isinstance(s, Direct) and s.names == self.names]
        if len(alike) < len(others):
            return super().joined(others)
        return Direct(self.names, [*self.terms, *(term for s in alike for term in s.terms)])

    def raw_sum(self, w: Mapping[str, Tensor], bad: Bad, exact: bool) -> dict[str, Tensor]:
        """Return sum_i w_i c_i without the data-free part and without the bad examples."""
        exact = exact or len(self.terms) > 1

        def summed(gradient: Tensor) -> Callable[[Tensor], Tensor]:
            flat = weighable(gradient.flatten(1), bad, exact)
            shape = gradient.shape[1:]
            return lambda w: summed_rows(w.to(flat).unsqueeze(1), flat, exact).view(shape)

        return scaled_sums(self.names, [(scale, summed(g)) for g, scale, _ in self.terms], w)


def scaled_sums(
    names: Sequence[str | None],
    terms: Sequence[tuple[Tensor | None, Callable[[Tensor], Tensor]]],
    w: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return sum_r S_r(w) for the first name, and sum_r k_r * S_r(w) for that of rho.

    Args:
        names: of the weight or mu, then of rho; None where frozen.
        terms: k_r, and S_r as a function of the weights. It is called once for the same weights.
        w: weights of the examples, by name.
    """
    sums: dict[str, Tensor] = {}
    for scale, summed in terms:
        done: dict[int, Tensor] = {}
        for index, name in enumerate(names):
            if name is not None:
                key = id(w[name])
                done[key] = done[key] if key in done else summed(w[name])
                value = done[key] * scale if index and scale is not None else done[key]
                sums[name] = sums[name] + value if name in sums else value
    return sums


def summed_positions(h: Tensor, axis: int) -> tuple[Tensor, AnySlack, Tensor]:
    """Return the sum of h over the axis of positions t, a bound on its rounding error, and |h|^2.

    The bound is gamma sum_t |h_t| <= gamma sqrt(T) |h|.
    """
    positions, kind = h.shape[axis], wide(h.dtype)
    if positions == 1:
        return accurate(h.squeeze(axis)), 0.0, squares(h)
    gamma = sum_error(positions, kind) * math.sqrt(positions)
    at_once = position_sums(h) if axis == 1 else None
    total, squared = at_once or (h.sum(axis, dtype=kind), squares(h))
    return total, Slack(gamma, squared), squared


class Rows(Site):
    """An embedding: every position t adds g_t to the row of its index.

    Terms are (indices [batch, T], g [batch, T, width]) with g zero at the padding index.
    """

    def __init__(self, name: str, shape: torch.Size, indices: Tensor, g: Tensor) -> None:
        self.shapes, self.data_free = {name: shape}, {}
        self.name, self.indices, self.g, self.batch = name, indices, g, len(g)
        self._version = indices._version

    def measured(self) -> Measured:
        """Return what |c_i|^2 is made of: positions with the same index are added up."""
        if self.data_free:
            return super().measured()
        return {self.name: squares(self._added()[1])}, self.slack()

    def _added(self) -> tuple[Tensor, Tensor]:
        """Return indices [batch, T], those in use first, and what each gets [batch, T, width]."""
        order = self.indices.sort(1)
        starts = torch.zeros_like(order.values)
        starts[:, 1:] = (order.values[:, 1:] != order.values[:, :-1]).long()
        slots = torch.empty_like(starts).scatter_(1, order.indices, starts.cumsum(1))
        added = torch.zeros_like(self.g).scatter_add_(
            1, slots.unsqueeze(-1).expand_as(self.g), self.g
        )
        return torch.zeros_like(slots).scatter_(1, slots, self.indices), added

    def slack(self) -> Slack:
        """Return gamma sqrt(T) |g|, a bound on the rounding error of the added rows."""
        positions = self.indices.shape[1]
        gamma = sum_error(positions, self.g.dtype) * math.sqrt(positions)
        return Slack(gamma, squares(self.g))

    def raw_sum(self, w: Mapping[str, Tensor], bad: Bad, exact: bool) -> dict[str, Tensor]:
        """Return sum_i w_i c_i without the data-free part and without the bad examples."""
        if self.indices._version != self._version:
            raise RuntimeError(CHANGED)
        indices, added = self._added()
        g = finite(added * w[self.name].double()[:, None, None], bad)
        total = g.new_zeros(self.shapes[self.name])
        return {self.name: total.index_add_(0, indices.flatten(), g.flatten(0, 1))}

    def instantiate(self, rows: slice) -> dict[str, Tensor]:
        """Return the contributions of some examples without the data-free part."""
        g, indices = self.g[rows], self.indices[rows]
        full = g.new_zeros(len(g), *self.shapes[self.name])
        return {self.name: full.scatter_add_(1, indices.unsqueeze(-1).expand_as(g), g)}


class Merged(Site):
    """Sites of different kinds that release the same names, such as tied weights."""

    single = False

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites, self.batch, self.data_free = list(sites), sites[0].batch, {}
        self.shapes = {}
        for site in sites:
            self.shapes |= site.shapes

    def instantiate(self, rows: slice) -> dict[str, Tensor]:
        """Return the contributions of some examples without the data-free part."""
        parts: dict[str, Tensor] = {}
        for site in self.sites:
            for name, part in site.instantiate(rows).items():
                parts[name] = parts[name] + part if name in parts else part
        return {name: parts[name] for name in self.shapes}

    def slack(self) -> Tensor | float:
        """Return the sites' own rounding errors and that of adding them up."""
        total: Tensor | float = 0.0
        for site in self.sites:
            norms = torch.stack(list(site.squared_norms().values())).sum(0).sqrt()
            own = bound(site.slack())
            total = total + own + norms * sum_error(len(self.sites), torch.float32)
        return total

    def raw_sum(self, w: Mapping[str, Tensor], bad: Bad, exact: bool) -> dict[str, Tensor]:
        """Return sum_i w_i c_i without the data-free part and without the bad examples."""
        sums: dict[str, Tensor] = {}
        for site in self.sites:
            for name, value in site.raw_sum(w, bad, exact=True).items():
                sums[name] = sums[name] + value if name in sums else value
        return sums


def merge(sites: Sequence[Site]) -> list[Site]:
    """Return sites with disjoint names: those that share a name become one."""
    names = [name for site in sites for name in site.shapes]
    if len(set(names)) == len(names):
        return list(sites)
    groups: dict[int, list[Site]] = {}
    home: dict[str, int] = {}
    for index, site in enumerate(sites):
        shared = {home[name] for name in site.shapes if name in home}
        groups[index] = [*(s for other in sorted(shared) for s in groups.pop(other)), site]
        home |= {name: index for s in groups[index] for name in s.shapes}
    return [g[0].joined(g[1:]) if len(g) > 1 else g[0] for g in groups.values()]
