"""Noisy counts of columns, and quantiles, moments and bounds from them: post-processing only."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from dpbnn.privacy.checks import quoted
from dpbnn.privacy.events import Event

CERTAIN = 5.0  # standard deviations of the noise that cells must stand out by
_WIDTHS = (1, 2, 4, 8)  # neighbouring cells that are added up in the search for bounds
_HIDDEN = 0.005  # share of the values that noise may hide


class Bounds(NamedTuple):
    """Bounds of columns, which `bounds=` of the estimators takes as they are.

    Attributes:
        low: lowest value of every column.
        high: highest value of every column.
    """

    low: np.ndarray
    high: np.ndarray


@dataclasses.dataclass(frozen=True)
class Histograms:
    """Noisy counts of every column, as released. All methods are post-processing.

    Attributes:
        edges: [columns, cells + 1], public; the outer cells hold all values beyond them too.
        counts: [columns, cells], each with N(0, noise_std^2) added.
        noise_std: standard deviation of the noise in a count.
        n: number of records, public; under add/remove that of the plan.
        event: what was charged, for `dpbnn.plan(beside=[...])`.
    """

    edges: np.ndarray
    counts: np.ndarray
    noise_std: float
    n: int
    event: Event

    def mass(self) -> np.ndarray:
        """Return the counts c >= 0 with sum <= n that are nearest to the noisy ones.

        With Gaussian noise this is the most likely histogram; its cumulative sums rise.
        """
        return np.stack([_project(row, self.n) for row in self.counts])

    def quantiles(self, q: Any) -> np.ndarray:
        """Return quantiles [len(q), columns] from the cumulative sums, linear within a cell."""
        levels = checked_levels(q)
        found = [
            _quantiles(levels, mass, edges)
            for mass, edges in zip(self.mass(), self.edges, strict=True)
        ]
        return np.stack(found, axis=1)

    def mean(self) -> np.ndarray:
        """Return the mean of every column, as if values lay in the middle of their cells."""
        mass, middle, _ = self._cells()
        return np.asarray((mass * middle).sum(1) / np.maximum(mass.sum(1), 1e-12))

    def std(self) -> np.ndarray:
        """Return the standard deviation of every column, values spread evenly in their cells."""
        mass, middle, width = self._cells()
        square = (middle - self.mean()[:, None]) ** 2 + width**2 / 12
        return np.sqrt((mass * square).sum(1) / np.maximum(mass.sum(1), 1e-12))

    def bounds(self, tail: float = 0.005, beta: float = 0.1) -> Bounds:
        """Return the lowest and highest value of every column, such that few values lie outside.

        The search begins at the w = 1, 2, 4 or 8 neighbouring cells with the largest sum/sqrt(w).
        From there the upper bound goes on to the next cell j, d cells away, for which the sum of
        some w <= d cells up to j has

            sum > tail n + z sqrt(w) noise_std,

        where noise alone exceeds z with a probability of beta/(2 d (d + 1)), shared by the w.
        Far cells must be more certain than near ones, since a wrong one costs more resolution.
        The lower bound is found likewise. If noise can hide more than the tail, both go one cell
        further. Where no cells stand out, the bounds are the outermost edges.

        Args:
            tail: share of the values that a cell beyond the bounds may hold.
            beta: probability that noise widens the bounds of a column.
        """
        check_rule(tail, beta)
        cells = self.counts.shape[1]
        level = tail * self.n + _margins(cells, beta) * self.noise_std
        hidden = self.noise_std > max(tail, _HIDDEN) * self.n
        ends = []
        for counts in self.counts:
            first, last = _strongest(counts, self.noise_std)
            if first < 0:
                ends.append((0, cells))
                continue
            last = _reached(counts, last, level)
            first = cells - 1 - _reached(counts[::-1], cells - 1 - first, level)
            ends.append((max(first - hidden, 0), min(last + 1 + hidden, cells)))
        low, high = np.array(ends).T
        rows = np.arange(len(ends))
        return Bounds(self.edges[rows, low], self.edges[rows, high])

    def _cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mass, middle and width of the cells; those beyond the data count as empty."""
        low, high = self.edges[:, :-1], self.edges[:, 1:]
        lowest, highest = self.bounds(tail=0.0)
        inside = (low >= lowest[:, None]) & (high <= highest[:, None])
        return self.mass() * inside, (low + high) / 2, high - low


def checked_levels(q: Any) -> np.ndarray:
    """Return levels of quantiles as an array, or raise."""
    levels = np.atleast_1d(np.asarray(q, dtype=np.float64))
    if not ((levels >= 0) & (levels <= 1)).all():
        raise ValueError(f"q={quoted(q)}: must lie in [0, 1]")
    return levels


def check_rule(tail: float, beta: float) -> None:
    """Raise unless the settings of `Histograms.bounds` can be used."""
    if not 0 <= tail < 0.5 or not 0 < beta < 1:
        raise ValueError(f"tail={tail}, beta={beta}: must lie in [0, 0.5) and (0, 1)")


def _margins(cells: int, beta: float) -> np.ndarray:
    """Return by how much sums of w cells must exceed zero, in the noise of one cell [w, distance].

    They hold for empty cells d away from the bound with probability 1 - beta/(2 d (d + 1)).
    """
    from scipy.stats import norm

    distance = np.arange(1, cells + 1)
    widths = np.array(_WIDTHS)[:, None]
    share = beta / (2 * distance * (distance + 1) * (widths <= distance).sum(0))
    return np.where(widths <= distance, np.sqrt(widths) * norm.isf(share), math.inf)


def _strongest(counts: np.ndarray, noise_std: float) -> tuple[int, int]:
    """Return the first and the last of the neighbouring cells that stand out most, or (-1, -1)."""
    total = np.concatenate([[0.0], np.cumsum(counts)])
    best, found = CERTAIN * noise_std, (-1, -1)
    for width in _WIDTHS:
        if width <= len(counts):
            strength = (total[width:] - total[:-width]) / math.sqrt(width)
            first = int(strength.argmax())
            if strength[first] > best:
                best, found = strength[first], (first, first + width - 1)
    return found


def _reached(counts: np.ndarray, last: int, level: np.ndarray) -> int:
    """Return the last cell whose sums exceed their levels [w, distance], from `last` on."""
    total = np.concatenate([[0.0], np.cumsum(counts)])
    widths = np.array(_WIDTHS)
    for cell in range(last + 1, len(counts)):
        sums = total[cell + 1] - total[np.maximum(cell + 1 - widths, 0)]
        if (sums > level[:, cell - last - 1]).any():
            last = cell
    return last


def _project(counts: np.ndarray, n: int) -> np.ndarray:
    """Return max(counts - t, 0) with the smallest t >= 0 for which the sum is at most n."""
    if np.maximum(counts, 0).sum() <= n:
        return np.maximum(counts, 0)
    falling = np.sort(counts)[::-1]
    thresholds = (np.cumsum(falling) - n) / np.arange(1, len(counts) + 1)
    return np.maximum(counts - thresholds[np.flatnonzero(falling > thresholds)[-1]], 0)


def _quantiles(levels: np.ndarray, mass: np.ndarray, edges: np.ndarray) -> np.ndarray:
    total = np.cumsum(mass)
    if total[-1] <= 0:
        return np.full(len(levels), (edges[0] + edges[-1]) / 2)
    wanted = np.clip(levels, 1e-12, 1) * total[-1]
    cell = np.minimum(np.searchsorted(total, wanted * (1 - 1e-12)), len(mass) - 1)
    inside = np.clip((wanted - (total - mass)[cell]) / np.maximum(mass[cell], 1e-300), 0, 1)
    return np.asarray(edges[cell] + inside * (edges[cell + 1] - edges[cell]))
