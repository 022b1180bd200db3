"""Bootstrap intervals of metrics that are functions of weighted sums over records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dpbnn.evaluation.checked import Floats, Integers, array

_UNITS = 10_000  # largest number of units drawn with replacement
_CELLS = 5_000_000  # numbers in a block of weights


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number with its bootstrap interval.

    The interval lies between quantiles of the resampled metric, shifted so that their median is
    the value. It states the sampling error; it does not remove the bias that binned metrics such as
    the calibration error have on few records.

    Attributes:
        value: on all records.
        low: lower end; NaN where there is no interval.
        high: upper end.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.4f}"
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


class Sums:
    """Weighted sums over records, one row per resample; here every record counts once.

    Args:
        n: number of records.

    Attributes:
        total: sum of the weights, [resamples].
    """

    def __init__(self, n: int) -> None:
        self.total: Floats = np.array([float(n)])

    def __call__(self, values: Floats, slot: Integers | None = None, slots: int = 1) -> Floats:
        """Return sum_i w_i values_i by slot, [resamples, slots]."""
        if slot is None:
            return values.sum(dtype=np.float64).reshape(1, 1)
        return np.bincount(slot, values, slots)[None]

    def mean(self, values: Floats) -> Floats:
        """Return the weighted mean of values, [resamples]."""
        return self(values)[:, 0] / self.total


class Resamples(Sums):
    """Resamples: n records drawn with replacement from n.

    More than 10000 records are first put into 10000 groups at random, and groups are drawn. A sum
    keeps its variance, and the time stays bounded.

    Args:
        n: number of records.
        count: number of resamples.
        generator: draws groups and resamples.
    """

    def __init__(self, n: int, count: int, generator: np.random.Generator) -> None:
        self.units = min(n, _UNITS)
        self.group: Integers | None = None
        if n > self.units:
            self.group = generator.permutation(n) % self.units
        self.drawn = np.empty((count, self.units), dtype=np.float32)
        for row in self.drawn:
            row[:] = np.bincount(
                generator.integers(self.units, size=self.units), minlength=self.units
            )
        self.total = self(np.ones(n))[:, 0]

    def __call__(self, values: Floats, slot: Integers | None = None, slots: int = 1) -> Floats:
        """Return sum_i w_i values_i by slot, [resamples, slots]."""
        units = np.arange(len(values)) if self.group is None else self.group
        cells = units if slot is None else units * slots + slot
        table = np.bincount(cells, values, self.units * slots).reshape(-1, slots)
        return (self.drawn @ table.astype(np.float32)).astype(np.float64)


def resampled(
    metrics: dict[str, Callable[[Sums], Floats]],
    n: int,
    *,
    resamples: int,
    level: float,
    seed: int,
    ranges: dict[str, tuple[float, float]],
) -> dict[str, Metric]:
    """Return metrics with their intervals, all from the same resamples.

    Args:
        metrics: functions of weighted sums that return one number per resample.
        n: number of records.
        resamples: how many; 0 leaves the intervals out.
        level: probability of the intervals.
        seed: of the draws.
        ranges: the smallest and largest value that a metric can have.
    """
    check_bootstrap(resamples, level)
    whole = Sums(n)
    values = {name: float(metric(whole)[0]) for name, metric in metrics.items()}
    generator = np.random.default_rng(seed)
    drawn: dict[str, list[Floats]] = {name: [] for name in metrics}
    size = max(1, _CELLS // min(n, _UNITS))
    for first in range(0, resamples if n > 1 else 0, size):
        sums = Resamples(n, min(size, resamples - first), generator)
        for name, metric in metrics.items():
            if math.isfinite(values[name]):
                drawn[name].append(metric(sums))
    return {
        name: interval(
            value,
            np.concatenate(drawn[name]) if drawn[name] else np.empty(0),
            level,
            ranges.get(name, (-math.inf, math.inf)),
        )
        for name, value in values.items()
    }


def bootstrap(
    metric: Callable[..., Any],
    *arrays: Any,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Metric:
    """Return any metric with its bootstrap interval.

    The metric is called on every resample; `evaluate` has the library's own metrics much faster.

    Args:
        metric: takes the arrays, returns a number.
        *arrays: tensors or arrays with one row per record, such as probabilities and labels.
        resamples: how often records are drawn with replacement.
        level: probability of the interval.
        seed: of the draws.

    Example:
        >>> print(bootstrap(lambda y: y.mean(), np.arange(101.0)))
        50.0000 [44.4743, 55.5649]
    """
    check_bootstrap(resamples, level)
    values = [array(a, "arrays") for a in arrays]
    lengths = {len(a) for a in values}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"arrays have {sorted(lengths)} rows; give arrays of the same length, at least one row"
        )
    n = lengths.pop()
    generator = np.random.default_rng(seed)
    rows = (generator.integers(n, size=n) for _ in range(resamples if n > 1 else 0))
    drawn = np.array([float(metric(*(a[row] for a in values))) for row in rows])
    return interval(float(metric(*values)), drawn, level, (-math.inf, math.inf))


def interval(value: float, drawn: Floats, level: float, within: tuple[float, float]) -> Metric:
    """Return the value with quantiles of the resampled values, their median shifted to it."""
    drawn = drawn[np.isfinite(drawn)]
    if not (len(drawn) and math.isfinite(value)):
        return Metric(value)
    low, middle, high = np.quantile(drawn, [(1 - level) / 2, 0.5, (1 + level) / 2])
    low, high = np.clip([value + low - middle, value + high - middle], *within)
    return Metric(value, float(low), float(high))


def check_bootstrap(resamples: int, level: float) -> None:
    """Raise unless resamples is a whole number >= 0 and level a probability."""
    if not (resamples >= 0 and resamples == int(resamples)):
        raise ValueError(f"resamples={resamples}: must be a whole number >= 0; try 1000")
    if not 0 < level < 1:
        raise ValueError(f"level={level}: must lie between 0 and 1; try 0.95")
