"""Many small gradients as one matrix: few operations where a network has hundreds of biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dpbnn.contributions.rounding import Bad, squares, summed_rows, weighable
from dpbnn.contributions.sites import AnySlack, Direct, Site, Slack, with_slack
from dpbnn.privacy.fused import with_roots

__all__ = ["Together", "gathered", "part_squares"]

_FEW = 4  # sites that are as quick one by one


class Together(Site):
    """Gradients at hand, of one use each, side by side in a matrix [batch, numbers].

    |c_i| <= |computed| + |(slack_1, slack_2, ...)|, by the triangle inequality.

    Args:
        sites: that `gathered` has found.
    """

    def __init__(self, sites: Sequence[Direct]) -> None:
        self.sites, self.batch, self.data_free = list(sites), sites[0].batch, {}
        self.shapes = {name: shape for site in sites for name, shape in site.shapes.items()}
        self._matrix: Tensor | None = None

    @property
    def matrix(self) -> Tensor:
        """Return all gradients, [batch, numbers]."""
        if self._matrix is None:
            self._matrix = torch.cat([site.terms[0][0].flatten(1) for site in self.sites], 1)
        return self._matrix

    def total(self) -> tuple[Tensor, Slack | float]:
        """Return |c_i|^2 over all names as computed, and a bound on what rounding has lost."""
        slacks = [slack for site in self.sites if isinstance(slack := site.slack(), Slack)]
        found = squares(self.matrix)
        if not slacks:
            return found, 0.0
        whole = torch.stack([slack.squared for slack in slacks]).sum(0)
        return found, Slack(max(slack.gamma for slack in slacks), whole)

    def squared_norms(self) -> dict[str, Tensor]:
        """Return |c_i|^2 per name, an upper bound up to a relative 1e-4 (float64, [batch])."""
        return {name: v for site in self.sites for name, v in site.squared_norms().items()}

    def slices(self, size: int = 0) -> Iterator[slice]:
        """Yield all examples at once: they are instantiated already."""
        yield slice(None)

    def instantiate(self, rows: slice) -> dict[str, Tensor]:
        """Return the contributions of some examples without the data-free part."""
        return {name: v for site in self.sites for name, v in site.instantiate(rows).items()}

    def raw_sum(self, w: Mapping[str, Tensor], bad: Bad, exact: bool) -> dict[str, Tensor]:
        """Return sum_i w_i c_i without the bad examples."""
        given = {id(w[name]): w[name] for name in self.shapes}
        if len(given) > 1:
            sums = (site.raw_sum(w, bad, exact) for site in self.sites)
            return {name: value for own in sums for name, value in own.items()}
        (weights,) = given.values()
        matrix = weighable(self.matrix, bad, exact)
        flat = summed_rows(weights.to(matrix).unsqueeze(1), matrix, exact)[0]
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()])
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}


def gathered(sites: Sequence[Site]) -> list[Site]:
    """Return the sites, those that are small gradients of one use as one site."""
    small = [
        site
        for site in sites
        if type(site) is Direct
        and site.single
        and site.squared is None
        and len(site.names) == len(site.shapes) == 1
        and isinstance(site.slack(), Slack | float)
    ]
    kinds = {site.terms[0][0].dtype for site in small}
    if len(small) < _FEW or len(kinds) > 1:
        return list(sites)
    alone = {id(site) for site in small}
    return [*(site for site in sites if id(site) not in alone), Together(small)]


def part_squares(parts: Sequence[tuple[Tensor, AnySlack]]) -> Tensor:
    """Return (|c| + slack)^2 of parts of contributions, or sums over parts alike, [_, batch].

    Args:
        parts: |c_i|^2 and slack of each.
    """
    found: list[Tensor] = []
    alike: dict[float, list[tuple[Tensor, Tensor]]] = {}
    for value, slack in parts:
        if isinstance(slack, Slack):
            alike.setdefault(slack.gamma, []).append((value, slack.squared))
        else:
            found += with_slack({"": value}, slack).values()
    for gamma, pairs in alike.items():
        if len(pairs) == 1:
            found.append(with_roots(*pairs[0], gamma))
            continue
        values, squared = (torch.stack(own) for own in zip(*pairs, strict=True))
        found.append(with_roots(values, squared, gamma).sum(0))
    return torch.stack(found)
