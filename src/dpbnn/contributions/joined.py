"""Norms of summed contributions: several rows of one unit, such as all records of a person.

    |sum_i c_i|^2 = sum_{i,j} <c_i, c_j>

For a weight that multiplies its input, c_i = g_i a_i^T and <c_i, c_j> = <a_i, a_j> <g_i, g_j>: the
rows of a unit are further positions of one example, and `Outer` takes the norm by its cross terms
or by the unit's own gradient, whichever is cheaper. The same holds for sequences, convolutions and
embeddings. Every other layer materialises its rows' gradients, a few at a time, and adds them up.
The way depends on the unit's own number of rows, and not on other units.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.contributions.outer import ConvFactors, LinearFactors, Outer
from dpbnn.contributions.rounding import row_squares, squares, sum_error
from dpbnn.contributions.sites import Direct, Rows, Site, bound
from dpbnn.privacy.units import REACH, Groups, Padded

__all__ = ["unit_squares"]


def unit_squares(
    sites: Sequence[Site], groups: Groups, names: Collection[str], squared: Tensor
) -> Tensor:
    """Return |sum_i c_i|^2 over some names of every unit of several rows, an upper bound.

    Args:
        sites: parts of every row's contribution.
        groups: the units; rows that are not finite must be among those that are not used.
        names: released names.
        squared: upper bounds on the rows' own |c_i|^2 over these names.
    """
    if any(site.data_free for site in sites):
        raise UnsupportedModel(
            "units: a data-free part inside the clip would count once per record and not once per "
            "unit; use a method that adds it outside, such as BBP in weight space"
        )
    layers, others = _layers([s for s in sites if not s.shapes.keys().isdisjoint(names)])
    total, added = _cross_terms(layers, groups, squared), list[Site]()
    for same in groups.large:
        total[same.units] = 0.0
    for layer in layers:
        for site in layer.sites:
            _put(site, groups.large, names, total)
    for site in others:
        held = isinstance(site, Outer) and all(len(term.g) == site.batch for term in site.terms)
        if held or isinstance(site, Rows):
            _put(site, groups.padded, names, total)
        else:
            added.append(site)
    return total.add_(_added_up(added, groups, names, squared)) if added else total


def _put(site: Site, padded: Sequence[Padded], names: Collection[str], total: Tensor) -> None:
    """Add the results of some units, which are the examples of a site made for it."""
    for same in padded:
        for name, values in _as_examples(site, same).squared_norms().items():
            if name in names:
                total.index_add_(0, same.units, values)


@dataclasses.dataclass
class _Layer:
    """Weights and biases whose gradients are g a^T and g, for one g of every row.

    Attributes:
        sites: all of them.
        inputs: of the weights; each has g too.
        biases: how many there are.
    """

    sites: list[Site] = dataclasses.field(default_factory=list)
    inputs: list[LinearFactors] = dataclasses.field(default_factory=list)
    biases: int = 0


def _layers(sites: Sequence[Site]) -> tuple[list[_Layer], list[Site]]:
    """Return layers of one position, and all other sites."""
    found: dict[object, _Layer] = {}
    others: list[Site] = []
    for site in sites:
        if isinstance(site, Outer) and _of_one_position(site):
            term = site.terms[0]
            layer = found.setdefault(_identity(term.g), _Layer())
            layer.sites.append(site)
            layer.inputs.append(term)
        else:
            others.append(site)
    for site in [s for s in others if isinstance(s, Direct) and s.squared is not None]:
        if (own := found.get(_identity(site.terms[0][0]))) is not None:
            own.sites.append(site)
            own.biases += 1
            others.remove(site)
    return list(found.values()), others


def _of_one_position(site: Outer) -> bool:
    alone = len(site.terms) == 1 and site.form is None and not any(site.names[1:])
    return alone and site.terms[0].a.dim() == 2


def _identity(g: Tensor) -> object:
    return g.data_ptr(), g.shape, g.stride()


def _cross_terms(layers: Sequence[_Layer], groups: Groups, squared: Tensor) -> Tensor:
    """Return sum_{i,j} <g_i, g_j> (<a_i, a_j> + 1) over layers, of float32 inner products.

    Each of these errs by gamma times its factors' norms, whatever cancels; so do their products and
    the sums of these. So a pair of rows errs by gamma |c_i| |c_j|. Every term may underflow too,
    which a product makes larger by its other factor: that loses at most
    tiny (|a_i| |a_j| + |g_i| |g_j| + 1) over all layers. Together that is less than r_i r_j, and
    over all pairs of a unit less than (sum_i r_i)^2, where

        r_i^2 = gamma |c_i|^2 + tiny (|a_i|^2 + |g_i|^2 + 1).

    Args:
        layers: of one position.
        groups: the units; what is returned for those of more than `REACH` rows means nothing.
        squared: |c_i|^2 of every row.
    """
    if not layers:
        return squared.new_zeros(groups.count)
    inputs = [term for layer in layers for term in layer.inputs]
    windows, total = groups.windows(inputs[0].g.dtype), squared.new_zeros(0)
    for layer in layers:
        own, whole = windows.gram(layer.inputs[0].g), windows.gram(layer.inputs[0].a)
        whole.add_(layer.biases)
        for term in layer.inputs[1:]:
            whole += windows.gram(term.a)
        total = own.mul_(whole) if layer is layers[0] else total.addcmul_(own, whole)
    value = groups.sums(windows.sums(total).double())
    count = sum(len(layer.sites) for layer in layers)
    widths = [max(t.columns for t in inputs), max(t.rows for t in inputs), count, REACH, 2]
    gamma = sum(sum_error(width + 1, torch.float32) for width in widths)
    tiny = sum(widths) * torch.finfo(torch.float32).tiny
    lengths = torch.stack([part for t in inputs for part in (t.a_squares, t.g_squares)]).sum(0)
    lost = groups.sums(lengths.add_(4 * count).mul_(tiny).add_(squared, alpha=gamma).sqrt_())
    return value.clamp_(min=0).addcmul_(lost, lost)


def _as_examples(site: Site, same: Padded) -> Site:
    """Return a site whose examples are units, and their rows positions of these."""
    if isinstance(site, Rows):
        indices, g = site.indices[same.rows], _gathered(site.g, same)
        return Rows(site.name, site.shapes[site.name], indices.flatten(1), g.flatten(1, 2))
    if isinstance(site, Direct):
        rows = _gathered(site.terms[0][0], same)
        lost = sum_error(rows.shape[1], rows.dtype) * row_squares(rows).sqrt().sum(1)
        return Direct(site.names, [(rows.sum(1), None, lost)])
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


def _added_up(
    sites: Sequence[Site], groups: Groups, names: Collection[str], squared: Tensor
) -> Tensor:
    """Return the norms of units whose rows' gradients are materialised and added up.

    The sum of a unit's m rows errs by gamma_m sum_i |c_i| and by the rows' own errors.
    """
    reach, lost = groups.sums(squared.sqrt()), torch.zeros_like(squared)
    value = torch.zeros_like(reach)
    for site in sites:
        value += _summed_squares(site, groups, names)
        slack = bound(site.slack())
        if isinstance(slack, Tensor):
            lost.add_(slack.square(), alpha=len(site.shapes))
    error = reach.mul(_gamma(groups)).add_(groups.sums(lost.sqrt_()))
    return value.sqrt_().add_(error).square_()


def _summed_squares(site: Site, groups: Groups, names: Collection[str]) -> Tensor:
    """Return |sum_i c_i|^2 of every unit as computed."""
    starts, begun = groups.starts, dict[str, Tensor]()
    parts: dict[str, list[Tensor]] = {name: [] for name in site.shapes if name in names}
    for rows in site.slices():
        first, stop, _ = rows.indices(site.batch)
        low, high = (int(np.searchsorted(starts, row, "right")) - 1 for row in (first, stop - 1))
        used = None if groups.used is None else groups.used[first:stop]
        part = Groups(groups.of[first:stop] - low, groups.sizes[low : high + 1], used)
        found = site.flat(slice(first, stop))
        for name, own in parts.items():
            total = part.sums(found[name])
            if name in begun:  # the first unit has rows in the run before
                total[0] += begun.pop(name)
            if stop < starts[high + 1]:
                begun[name], total = total[-1], total[:-1]
            own.append(squares(total))
    return torch.stack([torch.cat(own) for own in parts.values()]).sum(0)


def _gamma(groups: Groups) -> Tensor:
    """Return `sum_error` of float32 sums of each unit's rows, and 0 for one row."""
    rows, unit = groups.sizes.numpy(), torch.finfo(torch.float32).eps / 2
    gamma = np.minimum(rows, 4 * np.sqrt(rows) + 8) * (rows > 1) * unit
    return torch.from_numpy(gamma).to(groups.of.device)
