"""Contributions restricted to some of the weights, drawn without the data."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dpbnn.contributions.dense import ChunkedContributions, Contributions, UnsupportedModel
from dpbnn.contributions.outer import Outer
from dpbnn.contributions.recorded import NetworkContributions
from dpbnn.contributions.sites import Direct, Site

__all__ = ["masked"]


def masked(contributions: Contributions, masks: Mapping[str, Tensor]) -> Contributions:
    """Return m * c_i for every example: norms and sums of the masked coordinates alone.

    A mask takes the place that k has in a Gaussian layer (|m * g a^T|^2 = (g*g)^T m (a*a) for m of
    zeros and ones), so no gradient is instantiated that was not before. The masks must not depend
    on the data. The given contributions are used up.

    Args:
        contributions: of a network made of Linear and convolution layers, and biases.
        masks: zeros and ones by released name, shaped like the weights.
    """
    whole = contributions
    if isinstance(whole, ChunkedContributions):
        part = whole.part
        return ChunkedContributions(
            lambda first, last: masked(part(first, last), masks), whole.batch_size, whole.size,
            whole.shapes, whole.device, whole.dtype, whole.summed_in, whole.draws,
        )  # fmt: skip
    if not isinstance(whole, NetworkContributions):
        raise UnsupportedModel(f"{type(whole).__name__} cannot be masked; mask its values before")
    sites = [_site(site, masks) for site in whole._sites]
    return NetworkContributions(
        sites, whole.batch_size, whole.shapes, whole.device, whole.dtype, {}, whole.draws
    )


def _site(site: Site, masks: Mapping[str, Tensor]) -> Site:
    names = list(site.shapes)
    plain = isinstance(site, (Outer, Direct)) and len(site.names) == 1 and not site.data_free
    if not plain or len(names) != 1:
        raise UnsupportedModel(
            f"{names} cannot be masked weight by weight; use Linear and convolution layers"
        )
    mask = masks[names[0]]
    if isinstance(site, Outer):
        for term in site.terms:
            term.scale = mask.to(term.g)
        return Outer([None, names[0]], site.shape, site.terms)
    assert isinstance(site, Direct)
    return Direct([None, names[0]], [(g, mask.to(g), slack) for g, _, slack in site.terms])
