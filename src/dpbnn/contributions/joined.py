"""Norms of summed contributions: several rows of one unit, such as all records of a person.

    |sum_i c_i|^2 = sum_{i,j} <c_i, c_j>

For a weight that multiplies its input, c_i = g_i a_i^T and <c_i, c_j> = <a_i, a_j> <g_i, g_j>: the
rows of a unit are further positions of one example, and `Outer` takes the norm by its cross terms
or by the unit's own gradient, whichever is cheaper. The same holds for sequences, convolutions and
embeddings. Every other layer materialises its rows' gradients, a few at a time, and adds them up.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.contributions.outer import ConvFactors, LinearFactors, Outer
from dpbnn.contributions.rounding import squares, sum_error
from dpbnn.contributions.sites import Direct, Rows, Site, bound, with_slack
from dpbnn.privacy.units import BLOCK, Groups, Packed, Padded

__all__ = ["unit_squares"]


def unit_squares(
    sites: Sequence[Site], groups: Groups, squared: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return |sum_i c_i|^2 of every unit per name, an upper bound (float64, [units]).

    Args:
        sites: parts of every row's contribution.
        groups: the units; rows that are not finite must be among those that are not used.
        squared: upper bounds on the rows' own |c_i|^2.
    """
    if any(site.data_free for site in sites):
        raise UnsupportedModel(
            "units: a data-free part inside the clip would count once per record and not once per "
            "unit; use a method that adds it outside, such as BBP in weight space"
        )
    large = bool(groups.large)
    flat = {site: factors for site in sites if (factors := _of_one_row(site, large))}
    result = _cross_terms(flat, groups, squared) if flat else {}
    for site in sites:
        held = isinstance(site, Outer) and all(len(term.g) == site.batch for term in site.terms)
        if site in flat:
            _put(site, groups.large, result)
        elif held or isinstance(site, Rows):
            for name in site.shapes:
                result[name] = groups.sums(squared[name])  # right where there is one row
            _put(site, [same for same in groups.padded if same.rows.shape[1] > 1], result)
        else:
            result |= _added_up(site, groups, squared)
    return result


def _put(site: Site, padded: Sequence[Padded], result: dict[str, Tensor]) -> None:
    """Replace the results of some units by those of a site whose examples are units."""
    for same in padded:
        for name, values in _as_examples(site, same).squared_norms().items():
            result[name][same.units] = values


def _of_one_row(site: Site, large: bool) -> tuple[Tensor, ...]:
    """Return g, and a if there is one, where a row's gradient is g or g a^T; else nothing.

    With units that are `large` for a block, a gradient g is added up.
    """
    if isinstance(site, Outer) and site.form is None and not any(site.names[1:]):
        term = site.terms[0]
        if len(site.terms) == 1 and term.a.dim() == 2:
            return term.g, term.a
    if isinstance(site, Direct) and not large and len(site.terms) == 1 and not any(site.names[1:]):
        g, _, slack = site.terms[0]
        if g.dim() == 2 and isinstance(slack, float):
            return (g,)
    return ()


def _cross_terms(
    sites: Mapping[Site, tuple[Tensor, ...]], groups: Groups, squared: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return |sum_i g_i a_i^T|^2 = sum_{i,j} <a_i, a_j> <g_i, g_j>, of float32 inner products.

    Each of these errs by gamma times its factors' norms, whatever cancels, and by an underflow in
    every term; so do their products and the sums of these. So a unit's value errs by gamma (sum_i
    |a_i| |g_i|)^2 and that loss. Units that are larger than a block are left out of the sum.
    """
    names = [name for site in sites for name in site.shapes]
    value = torch.zeros(groups.count, len(names), dtype=torch.float64, device=groups.of.device)
    if (packed := groups.packed) is not None:
        ends: dict[Any, Tensor] = {}
        rows = []
        for g, *a in sites.values():
            key = (g.data_ptr(), g.shape, g.stride())  # a layer's weight and bias share g
            if key not in ends:
                ends[key] = _gram(packed, groups, g).mul_(packed.same)
            product = _gram(packed, groups, *a).mul_(ends[key]) if a else ends[key]
            rows.append(product.sum(2).flatten())
        value.index_add_(0, packed.units, torch.stack(rows, 1).double())
    own = torch.stack([squared[name] for name in names], 1)
    both = torch.stack([_ends(site, squared) for site in sites], 1)
    sizes, lost = groups.sums(torch.cat([own.sqrt_(), both], 1)).tensor_split(2, 1)
    widths = tuple(tuple(t.shape[1] for t in factors) for factors in sites.values())
    gamma, tiny = _errors(widths, value.device)
    lost = lost.add_(groups.sizes[:, None]).mul_(groups.sizes[:, None]).mul_(tiny)
    value = value.clamp_(min=0).add_(sizes.square_().mul_(gamma)).add_(lost)
    return dict(zip(names, value.unbind(1), strict=True))


def _gram(packed: Packed, groups: Groups, t: Tensor) -> Tensor:
    blocks = packed.blocks(groups.of_used(t))
    return torch.bmm(blocks, blocks.mT)


@functools.lru_cache(maxsize=64)
def _errors(widths: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return gamma, and what underflows may lose, of products of so long inner products each."""
    tiny = torch.finfo(torch.float32).tiny
    terms = [(*own, BLOCK, 2) for own in widths]  # the sum over a block, and a product
    gamma = [sum(sum_error(width + 1, torch.float32) for width in own) for own in terms]
    return torch.tensor(
        [gamma, [tiny * sum(own) for own in terms]], dtype=torch.float64, device=device
    )


def _ends(site: Site, squared: Mapping[str, Tensor]) -> Tensor:
    """Return |a_i|^2 + |g_i|^2 of every row, or |g_i|^2 + 1 where there is no a."""
    if isinstance(site, Outer):
        return site.terms[0].a_squares + site.terms[0].g_squares
    return squared[next(iter(site.shapes))] + 1


def _as_examples(site: Site, same: Padded) -> Site:
    """Return a site whose examples are units, and their rows positions of these."""
    if isinstance(site, Rows):
        indices, g = site.indices[same.rows], _gathered(site.g, same)
        return Rows(site.name, site.shapes[site.name], indices.flatten(1), g.flatten(1, 2))
    assert isinstance(site, Outer)
    joined = Outer(site.names, site.shape, [_joined(term, same) for term in site.terms])
    joined.form = site.form
    return joined


def _gathered(t: Tensor, same: Padded) -> Tensor:
    """Return the rows of every unit [units, rows, ...], zero where there is none."""
    missing = ~same.there.view(*same.there.shape, *[1] * (t.dim() - 1))
    return t[same.rows].masked_fill_(missing, 0.0)


def _joined(term: LinearFactors, same: Padded) -> LinearFactors:
    """Return one use of a weight with units as examples."""
    joined = copy.copy(term)
    joined.a, joined.g = _gathered(term.a, same), _gathered(term.g, same)
    joined.a_squares, joined.g_squares = (
        _gathered(values, same).sum(1) for values in (term.a_squares, term.g_squares)
    )
    joined.positions, joined.version = same.rows.shape[1] * term.positions, joined.a._version
    if isinstance(term, ConvFactors):
        joined.__class__ = _JoinedConv
        joined.one = term  # type: ignore[attr-defined]
    elif term.positions > 1 or term.a.dim() > 2:
        joined.a, joined.g = joined.a.flatten(1, 2), joined.g.flatten(1, 2)
    return joined


class _JoinedConv(ConvFactors):
    """A convolution whose examples have several images: a and g are [units, rows, ...]."""

    one: ConvFactors

    def factors(self, examples: slice) -> tuple[Tensor, Tensor]:
        """Return a [units * groups, T, columns] and g [units * groups, T, rows]."""
        a, g = self.a[examples], self.g[examples]
        parts = self.one._factors(a.flatten(0, 1), g.flatten(0, 1))
        shape = (len(a), a.shape[1], self.groups)
        both = [torch.unflatten(part, 0, shape).transpose(1, 2) for part in parts]
        return both[0].flatten(2, 3).flatten(0, 1), both[1].flatten(2, 3).flatten(0, 1)


def _added_up(site: Site, groups: Groups, squared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the norms of units whose rows' gradients are materialised and added up.

    The sum of a unit's m rows errs by gamma_m sum_i |c_i| and by the rows' own errors.
    """
    starts = groups.starts
    begun: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {name: [] for name in site.shapes}
    for rows in site.slices():
        first, stop, _ = rows.indices(site.batch)
        low, high = (int(np.searchsorted(starts, row, "right")) - 1 for row in (first, stop - 1))
        used = None if groups.used is None else groups.used[first:stop]
        part = Groups(groups.of[first:stop] - low, starts[: high - low + 2], used)
        for name, values in site.instantiate(slice(first, stop)).items():
            total = part.sums(values.flatten(1))
            if name in begun:  # the first unit has rows in the run before
                total[0] += begun.pop(name)
            if stop < starts[high + 1]:
                begun[name], total = total[-1], total[:-1]
            parts[name].append(squares(total))
    slack = bound(site.slack())
    own = groups.sums(slack) if isinstance(slack, Tensor) else 0.0
    result: dict[str, Tensor] = {}
    for name, found in parts.items():
        error = _gamma(groups.sizes).mul_(groups.sums(squared[name].sqrt())).add_(own)
        result |= with_slack({name: found[0] if len(found) == 1 else torch.cat(found)}, error)
    return result


def _gamma(count: Tensor) -> Tensor:
    """Return `sum_error` of float32 sums of so many terms each, and 0 for one term."""
    unit = torch.finfo(torch.float32).eps / 2
    return torch.minimum(count, 4 * count.sqrt() + 8).mul_(unit).mul_(count > 1)
