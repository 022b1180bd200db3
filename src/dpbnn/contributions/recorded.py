"""Contributions of a network: what one recorded batch leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dpbnn.contributions.dense import Contributions, Draws, Weights
from dpbnn.contributions.joined import unit_squares
from dpbnn.contributions.rounding import INFLATION, Bad, full_precision, without
from dpbnn.contributions.sites import AnySlack, Direct, Measured, Site, merge, with_slack
from dpbnn.contributions.together import Together, gathered, part_squares
from dpbnn.privacy.fused import row_weights, total_of
from dpbnn.privacy.units import Groups


class NetworkContributions(Contributions):
    """Gradients of the negative log-likelihood of each example, held as layer inputs and g.

    Args:
        sites: what the recorded layers left.
        batch_size: number of examples.
        shapes: released names and shapes.
        device: where the model is.
        dtype: of the weights, and of the sums of names that no layer contributed to.
        data_free: gradients added to every example's contribution.
        draws: standard normal draws the batch was run at.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        batch_size: int,
        shapes: Mapping[str, torch.Size],
        device: torch.device,
        dtype: torch.dtype,
        data_free: Mapping[str, Tensor],
        draws: Draws,
    ) -> None:
        self.batch_size, self.shapes, self.device, self.draws = batch_size, shapes, device, draws
        self.dtype = self.summed_in = dtype
        self._total: Tensor | None = None
        self._squares: Tensor | None = None
        self._measured: dict[int, Measured] = {}
        seen = {name for site in sites for name in site.shapes}
        like = torch.empty(batch_size, dtype=dtype, device=device)
        unused = [
            Direct([name], [(like.new_zeros(batch_size, *shapes[name]), None, 0.0)])
            for name in data_free
            if name not in seen and batch_size
        ]
        self._sites = merge([*sites, *unused])
        for site in self._sites:
            site.data_free = {n: d.detach() for n, d in data_free.items() if n in site.shapes}

    def _norms(self) -> tuple[Tensor, Bad]:
        """Return |c_i|^2 of every example, and which examples are not finite."""
        if self._total is None:
            self._groups = gathered(self._sites)
            with full_precision(self.device):
                parts: list[tuple[Tensor, AnySlack]] = []
                for site in self._groups:
                    if isinstance(site, Together):
                        parts.append(site.total())
                    else:
                        values, slack = self._measured[id(site)] = site.measured()
                        parts += ((value, slack) for value in values.values())
                stacked = part_squares(parts or [(self._zeros(), 0.0)])
                self._total, self._bad = total_of(stacked, INFLATION**2)
        return self._total, self._bad

    def _zeros(self) -> Tensor:
        return torch.zeros(self.batch_size, dtype=torch.float64, device=self.device)

    def squared_norms(self) -> dict[str, Tensor]:
        """Return |c_i|^2 per released name, never below the truth (float64, [batch])."""
        if self._squares is None:
            bad, raw = self._norms()[1], dict[str, Tensor]()
            with full_precision(self.device):
                for site in self._groups:
                    known = self._measured.get(id(site))
                    raw |= site.squared_norms() if known is None else with_slack(*known)
            stacked = torch.stack([raw[n] if n in raw else self._zeros() for n in self.shapes])
            self._squares = without(stacked.mul_(INFLATION**2), bad, 1)
        return dict(zip(self.shapes, self._squares.unbind(), strict=True))

    def norms(self) -> Tensor:
        """Return |c_i| over all released names, never below the truth (float64, [batch])."""
        return self._norms()[0].sqrt()

    def unit_squares(self, groups: Groups, names: Sequence[str]) -> Tensor:
        """Return |sum_i c_i|^2 over some names and the rows of each unit; never below it.

        A unit of one row may have less: its norm is that of the row.
        """
        squared, bad = self._norms()
        if len(names) < len(self.shapes):
            own = self.squared_norms()
            squared = torch.stack([own[name] for name in names]).sum(0)
        with full_precision(self.device):
            found = unit_squares(self._sites, groups.without(bad), names, squared)
        return found.mul_(INFLATION**2)

    def sum_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Let `weighted_sum` return these tensors, written anew, where that saves a copy."""
        for site in self._sites:
            site.into = tensors

    def weighted_sum(self, w: Weights) -> dict[str, Tensor]:
        """Return sum_i w_i c_i per released name, in float32 or better."""
        sums = dict(self.weighted_sums(w))
        return {name: sums[name] for name in self.shapes}

    def weighted_sums(self, w: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the same, a few names at a time, so that not all of it is held at once."""
        bad = self._norms()[1]
        given = self.per_name(w)
        once: dict[int, Tensor] = {}
        for values in given.values():
            if id(values) not in once:
                weight = values.detach().to(self.device)
                once[id(values)] = row_weights(weight, bad, self.dtype)
        weights = {name: once[id(values)] for name, values in given.items()}
        left = dict(self.shapes)
        for site in self._groups:
            with full_precision(self.device):
                sums = site.weighted_sum(weights, bad, self.summed_in is torch.float64)
            for name in list(sums):
                del left[name]
                yield name, sums.pop(name)
        for name, shape in left.items():
            yield name, torch.zeros(shape, dtype=self.dtype, device=self.device)

    def inner(self, other: Contributions) -> Tensor:
        """Return the inner products <c_i, d_j> with another batch's contributions (float64)."""
        if not isinstance(other, NetworkContributions) or other.shapes != self.shapes:
            raise TypeError("inner products need contributions of the same kind and shapes.")
        result = torch.zeros(
            self.batch_size, other.batch_size, dtype=torch.float64, device=self.device
        )
        mine, theirs = self._norms()[1], other._norms()[1]
        with full_precision(self.device):
            for one, two in zip(self._sites, other._sites, strict=True):
                result += one.inner(two, mine, theirs)
        return result


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a forward pass may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def same_draws(
    part: Callable[[int, int], NetworkContributions], device: torch.device
) -> Callable[[int, int], NetworkContributions]:
    """Return `part`, such that every call for the same examples sees the same dropout masks."""
    states: dict[int, list[Tensor]] = {}

    def again(first: int, last: int) -> NetworkContributions:
        if first not in states:
            states[first] = random_state(device)
            return part(first, last)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.set_rng_state(states[first][0])
            for state in states[first][1:]:
                torch.cuda.set_rng_state(state, device)
            return part(first, last)

    return again
