"""Norms of summed contributions: several rows of one unit, such as all records of a person.

    |sum_i c_i|^2 = sum_{i,j} <c_i, c_j>

For a weight that multiplies its input, c_i = g_i a_i^T and <c_i, c_j> = <a_i, a_j> <g_i, g_j>: the
rows of a unit are further positions of one example, and `Outer` takes the norm by its cross terms
or by the unit's own gradient, whichever is cheaper. The same holds for sequences, convolutions and
embeddings. Every other layer materialises its rows' gradients, a few at a time, and adds them up.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.contributions.outer import ConvFactors, LinearFactors, Outer
from dpbnn.contributions.rounding import squares, sum_error
from dpbnn.contributions.sites import Rows, Site, with_slack
from dpbnn.privacy.units import Groups, Padded

__all__ = ["unit_squares"]


def unit_squares(site: Site, groups: Groups, squared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return |sum_i c_i|^2 of every unit per name, an upper bound (float64, [units]).

    Args:
        site: a part of every row's contribution.
        groups: the units; rows that are not finite must be among those that are not used.
        squared: upper bounds on the rows' own |c_i|^2.
    """
    if site.data_free:
        raise UnsupportedModel(
            "units: a data-free part inside the clip would count once per record and not once per "
            "unit; use a method that adds it outside, such as BBP in weight space"
        )
    if isinstance(site, Outer) and all(len(term.g) == site.batch for term in site.terms):
        if len(site.terms) == 1 and site.terms[0].a.dim() == 2 and site.form is None:
            if not any(site.names[1:]):
                return _cross_terms(site, groups)
    elif not isinstance(site, Rows):
        return _added_up(site, groups, squared)
    result = {name: torch.zeros_like(squared[name][: groups.count]) for name in site.shapes}
    for same in groups.padded:
        if same.rows.shape[1] == 1:
            alone = {name: groups.of_used(squared[name])[same.rows[:, 0]] for name in site.shapes}
        else:
            alone = _as_examples(site, same).squared_norms()
        for name, values in alone.items():
            result[name][same.units] = values
    return result


def _cross_terms(site: Outer, groups: Groups) -> dict[str, Tensor]:
    """Return |sum_i g_i a_i^T|^2 = sum_{i,j} <a_i, a_j> <g_i, g_j> of one row each, in float32.

    An inner product errs by gamma |a_i| |a_j| and by an underflow in each of its terms, whatever
    cancels. So the sum errs by gamma (sum_i |a_i| |g_i|)^2, and by as much more for underflows.
    """
    term = site.terms[0]
    a, g, packed = term.a, term.g, groups.packed
    ends = torch.stack(
        [term.a_squares, term.g_squares, (term.a_squares * term.g_squares).sqrt()], 1
    )
    a_squares, g_squares, sizes = groups.sums(ends).unbind(1)
    value = torch.zeros_like(sizes)
    if packed is not None:
        left, right = packed.blocks(a), packed.blocks(g)
        products = torch.bmm(left, left.mT).double().mul_(torch.bmm(right, right.mT))
        own = torch.where(packed.same, products, 0.0).sum(2)
        value.index_add_(0, packed.units.flatten(), own.flatten())
    gamma = sum_error(term.columns + 1, a.dtype) + sum_error(term.rows + 1, g.dtype)
    tiny = torch.finfo(torch.float32).tiny * groups.sizes
    lost = (term.columns * g_squares + term.rows * a_squares).mul_(tiny)
    value = value.clamp_(min=0).addcmul_(sizes, sizes, value=gamma).add_(lost)
    for same in groups.large:
        (value[same.units],) = _as_examples(site, same).squared_norms().values()
    return dict.fromkeys(site.shapes, value)


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
    starts, of = groups.starts.tolist(), groups.owners
    begun: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {name: [] for name in site.shapes}
    for rows in site.slices():
        first, stop, _ = rows.indices(site.batch)
        low, high = of[first], of[stop - 1]
        used = None if groups.used is None else groups.used[first:stop]
        part = Groups(groups.of[first:stop] - low, groups.starts[: high - low + 2], used)
        for name, values in site.instantiate(slice(first, stop)).items():
            total = part.sums(values.flatten(1))
            if name in begun:  # the first unit has rows in the run before
                total[0] += begun.pop(name)
            if stop < starts[high + 1]:
                begun[name], total = total[-1], total[:-1]
            parts[name].append(squares(total))
    slack = site.slack()
    own = groups.sums(slack) if isinstance(slack, Tensor) else 0.0
    result = {}
    for name, values in parts.items():
        error = _gamma(groups.sizes).mul_(groups.sums(squared[name].sqrt())).add_(own)
        result |= with_slack({name: values[0] if len(values) == 1 else torch.cat(values)}, error)
    return result


def _gamma(sizes: Tensor) -> Tensor:
    """Return `sum_error` of float32 sums of so many terms each, and 0 for one term."""
    count = sizes.double()
    unit = torch.finfo(torch.float32).eps / 2
    return unit * torch.minimum(count, 8 + 4 * count.sqrt()) * (count > 1)
