"""Private standardisation: a centre and a spread for every column, from two noised sums."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbnn.contributions.dense import ChunkedContributions, DenseContributions
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.relation import check_same
from dpbnn.privacy.sampling import FullBatch
from dpbnn.units import Units

__all__ = ["Standardisation", "noise_of_means", "private_standardisation"]

RELEASES = 2
PUBLIC = 0.5  # spread of a column about which the release says nothing
_SMALLEST = 0.02  # spread
_PRIOR = 0.4  # standard deviation of centres, before any data
_MARGIN = 2.0  # noise that a spread is widened by, in its standard deviations
_NORMAL = math.sqrt(math.pi / 2)  # standard deviation over mean absolute deviation
_ROWS = 8192  # records in memory at once


@dataclasses.dataclass(frozen=True)
class Standardisation:
    """Centres and spreads of columns whose values lie in [-1, 1].

    Attributes:
        centre: about the mean of every column.
        spread: about its standard deviation, from 0.02 to 0.5.
    """

    centre: np.ndarray
    spread: np.ndarray

    @classmethod
    def public(cls, columns: int) -> Standardisation:
        """Return the standardisation that looks at no data."""
        return cls(np.zeros(columns), np.full(columns, PUBLIC))

    @classmethod
    def learned(cls, values: np.ndarray) -> Standardisation:
        """Return the standardisation by the values themselves: NOT PRIVATE."""
        centre = np.nanmean(values, axis=0, dtype=np.float64)
        deviation = np.nanmean(np.abs(values - centre), axis=0, dtype=np.float64)
        return cls(centre, np.clip(_NORMAL * deviation, _SMALLEST, PUBLIC))


def noise_of_means(n: int, noise_multiplier: float, weights: np.ndarray) -> np.ndarray:
    """Return the standard deviation of the noise in every column's released mean.

        tau_j = sigma |w| / (n w_j)

    Args:
        n: number of records.
        noise_multiplier: sigma of each release.
        weights: w, one per column.
    """
    return noise_multiplier * np.linalg.norm(weights) / (n * weights)


def private_standardisation(
    values: Any,
    weights: Any = None,
    *,
    plan: Plan,
    ledger: Ledger | None = None,
    keep: Tensor | None = None,
    owners: Units | None = None,
    noise: NoiseSource | None = None,
    label: str = "private standardisation",
) -> Standardisation:
    """Release centres and spreads of columns that are scaled to [-1, 1].

        centre = shrunk((sum_i w x_i + noise) / (n w))
        spread = sqrt(pi/2) (sum_i w min(|x_i - centre|, 1) + noise) / (n w), widened by its noise

    The spread is a mean absolute deviation, not the root of a variance: its noise does not grow
    where the bounds are far wider than the values, and tails hardly count. Constant columns, and
    those whose noise is larger than they are, get the noise's size as their spread.

    **Guarantee.** Two releases by the gate. A record adds a vector of norm |w| at most, which is
    the clip, to each; values outside [-1, 1] are clipped there. Records with a value that is not
    finite add nothing. The ledger is charged before the sums are formed; what follows is
    post-processing.

    Args:
        values: [records, columns] within [-1, 1].
        weights: w > 0, one per column; the larger, the less noise a column gets, and the more
            the others. 1 by default.
        plan: of two full-batch releases; it says n, which under add/remove is not that of values.
        ledger: where the releases are recorded; one in memory by default.
        keep: false for records that add nothing.
        owners: whose records they are. A person then adds the mean of all its records, and the
            plan's n counts persons.
        noise: the source of noise; a new one from operating-system entropy by default.
        label: what the releases are for, in the ledger and the statement.
    """
    columns, n = values.shape[1], plan.n
    records = len(values) if owners is None else len(owners)
    if plan.relation.public_size and records != n:
        raise ValueError(f"plan: is for n={n} and there are {records} records; state n={records}")
    if (plan.steps, plan.sampling) != (RELEASES, "full-batch"):
        raise ValueError(
            f"plan: has {plan.steps} {plan.sampling} releases; a standardisation needs "
            f"dpbnn.plan(sampling='full-batch', steps={RELEASES}, n={n}, ...)"
        )
    w = np.ones(columns) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != (columns,) or not (np.isfinite(w).all() and (w > 0).all()):
        raise ValueError(f"weights: must be {columns} finite numbers > 0, one per column")
    sigma = plan.noise_multiplier
    book = Ledger(relation=plan.relation) if ledger is None else ledger
    check_same(plan.relation, book.relation)
    draw = FullBatch(n, unit=plan.sampler.unit)
    gate = Gate(float(np.linalg.norm(w)), sigma, draw, book, noise=noise, label=label)
    options: dict[str, Any] = {"keep": keep, "records": torch.arange(records)}
    if owners is not None:
        options = {"units": torch.arange(records), "records": torch.arange(records)}

    def mean(centre: np.ndarray | None) -> np.ndarray:
        """Return the released mean of the values, or of their distances from a centre."""

        def part(first: int, last: int) -> DenseContributions:
            whole = slice(first, last) if owners is None else owners.records(first, last)
            block = np.array(values[whole], dtype=np.float64)
            np.clip(block, -1.0, 1.0, out=block)
            if centre is not None:
                block = np.minimum(np.abs(block - centre), 1.0)
            if owners is not None:
                block = owners.means(first, last, block, keep)
            return DenseContributions({"sums": torch.from_numpy(block * w)})

        device = torch.device("cpu")
        shapes = {"sums": torch.Size([columns])}
        rows = ChunkedContributions(part, records, _ROWS, shapes, device, torch.float64)
        return gate(rows, **options)["sums"].numpy() / (n * w)

    tau = noise_of_means(n, sigma, w)
    centre = np.clip(mean(None) * _PRIOR**2 / (_PRIOR**2 + tau**2), -1.0, 1.0)
    deviation = np.maximum(_NORMAL * mean(centre), 0.0)
    spread = np.clip(np.hypot(deviation, _MARGIN * tau), _SMALLEST, PUBLIC)
    return Standardisation(centre, spread)
