"""Metrics by subgroup of the test records, with intervals that stay honest for small groups.

Shares (accuracy, recall, coverage) have Wilson intervals, which are wide for few records even where
all of them are right. AUROC has the Wilson interval of min(records of the class, other records)
trials: its variance is at most A (1 - A) over that number (Birnbaum and Klose, 1957). Means have
bootstrap intervals, widened by t_{n-1} / z * sqrt(n / (n - 1)) for few records (Hesterberg, 2015).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.stats import t as student

from dpbnn.evaluation import classification, ordinal, ranking, regression
from dpbnn.evaluation.checked import Classified, Floats, Integers, Targeted
from dpbnn.evaluation.resampling import Metric, Sums, resampled

MOST = 100
MISSING = "(missing)"


@dataclasses.dataclass(frozen=True)
class Group:
    """The metrics of the test records of one group.

    Attributes:
        name: value of the group column.
        n: number of its records.
        metrics: by name; NaN where a metric is not defined for these records.
    """

    name: str
    n: int
    metrics: dict[str, Metric]


def members(groups: Sequence[Any], n: int) -> dict[str, Integers]:
    """Return positions of the records of every group, by name in order."""
    if isinstance(groups, str) or len(groups) != n:
        raise ValueError(f"groups: give one value for each of the {n} records")
    names = np.array([MISSING if _absent(value) else str(value) for value in groups], dtype=object)
    found = sorted(set(names.tolist()))
    if len(found) > MOST:
        raise ValueError(
            f"groups: {len(found)} different values, at most {MOST} can be shown; give a column "
            f"with few values, such as a sex or an age group"
        )
    return {name: np.flatnonzero(names == name) for name in found}


def of_classes(
    c: Classified,
    groups: Sequence[Any],
    options: dict[str, Any],
    threshold: float,
    positive: int,
) -> tuple[Group, ...]:
    """Return accuracy, recall, AUROC and log-loss of every group; more for ordered classes."""
    found = []
    for name, rows in members(groups, len(c)).items():
        part = Classified(c.probabilities[rows], c.y[rows], ordered=c.ordered)
        n, once = len(rows), Sums(len(rows))
        ranked = ranking.metrics_of(part, threshold, positive)
        area, share = (float(ranked[key](once)[0]) for key in ("auroc", "recall"))
        counts = np.bincount(part.y, minlength=c.classes)
        if c.classes == 2:
            asked, pairs = int(counts[positive]), int(counts.min())
        else:
            seen = counts[(counts > 0) & (counts < n)]
            asked = int(seen.min(initial=n))
            pairs = int(np.minimum(seen, n - seen).min(initial=n))
        values = {"nll": classification.metrics_of(part)["nll"], **ordinal.metrics_of(part)}
        found.append(
            Group(
                name,
                n,
                {
                    "accuracy": wilson(float(part.hit.mean()), n, options["level"]),
                    "auroc": wilson(area, pairs, options["level"]),
                    "recall": wilson(share, asked, options["level"]),
                    **_widened(values, n, options),
                },
            )
        )
    return tuple(found)


def of_targets(t: Targeted, groups: Sequence[Any], options: dict[str, Any]) -> tuple[Group, ...]:
    """Return errors, log-likelihood and coverage of 90 % intervals of every group."""
    found = []
    for name, rows in members(groups, len(t)).items():
        part = Targeted(t.predictive.take(rows), t.y[rows])
        error = regression.errors(part)
        squares, sizes = part.per_record(error**2), part.per_record(np.abs(error))
        densities = regression.log_densities(part)
        values: dict[str, Callable[[Sums], Floats]] = {
            "rmse": lambda sums, v=squares: np.sqrt(sums.mean(v)),  # type: ignore[misc]
            "mae": lambda sums, v=sizes: sums.mean(v),  # type: ignore[misc]
            "log_likelihood": lambda sums, v=densities: sums.mean(v),  # type: ignore[misc]
        }
        inside = regression.covered(regression.ranks(part), 0.9)
        share = float(part.per_record(inside).mean())
        metrics = _widened(values, len(rows), options)
        metrics["coverage_90"] = wilson(share, len(rows), options["level"])
        found.append(Group(name, len(rows), metrics))
    return tuple(found)


def wilson(share: float, n: int, level: float) -> Metric:
    """Return a share of n trials with its Wilson interval."""
    if n == 0 or math.isnan(share):
        return Metric(math.nan)
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Metric(share, max(0.0, centre - half), min(1.0, centre + half))


def _widened(
    values: dict[str, Callable[[Sums], Floats]], n: int, options: dict[str, Any]
) -> dict[str, Metric]:
    found = resampled(values, n, ranges={}, **options)
    if n < 2:
        return found
    tail = (1 + options["level"]) / 2
    factor = float(student.ppf(tail, n - 1)) / NormalDist().inv_cdf(tail) * math.sqrt(n / (n - 1))
    for name, m in found.items():
        low, high = (m.value + factor * (end - m.value) for end in (m.low, m.high))
        found[name] = Metric(m.value, low if name == "log_likelihood" else max(low, 0.0), high)
    return found


def _absent(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))
