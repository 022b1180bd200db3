"""Plans of a fit: what of a budget the training, the standardisation and the rest get.

Everything here follows from public numbers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from dpbnn.data.standardising import (
    RELEASES,
    Standardisation,
    noise_of_means,
    private_standardisation,
)
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan, open_plan, plan
from dpbnn.units import Units

__all__ = ["default_delta", "settled_plan", "solved_plan", "standardisation", "standardising_plan"]

_BATCH = 1024
_ALL = 2048  # rows up to which every step uses all of them
_STANDARD = 0.1  # share of mu^2 for the standardisation
HIDDEN = 0.25  # noise in a mean, in units of half the bounds, that hides what a column is like


def default_delta(n: int) -> float:
    """Return min(1e-5, 1/(10 n)), so that delta is well below 1/n."""
    return min(1e-5, 1 / (10 * n))


def settled_plan(
    n: int,
    epsilon: float | None,
    delta: float,
    batch_size: float | None,
    epochs: float | None,
    beside: tuple[Any, ...] = (),
    steps: int = 400,
    every: bool = False,
) -> Plan:
    """Return the plan of a fit; all records at once where batch_size is n, or with `every`.

    Without batch_size it is n up to 2048 rows and 1024 beyond. Without epochs there are `steps`
    (without privacy, where they cost nothing, 1000, or 10 with `every`), or one pass over the data
    if that is more.
    """
    size = (n if n <= _ALL or every else _BATCH) if batch_size is None else batch_size
    length: dict[str, Any] = {"epochs": epochs}
    if epochs is None:
        count = (10 if every else 1000) if epsilon is None else steps
        length = {"steps": max(count, -(-n // max(1, int(size))))}
    if size >= n:
        size, sampling = n, "full-batch"
    else:
        sampling = "poisson"
    if epsilon is None:
        return open_plan(n=n, batch_size=size, sampling=sampling, **length)
    return solved_plan(
        epsilon=epsilon,
        delta=delta,
        n=n,
        batch_size=size,
        sampling=sampling,
        beside=beside,
        **length,
    )


@functools.lru_cache(maxsize=256)
def solved_plan(**arguments: Any) -> Plan:
    """Solve for the noise once for all fits of a search that share their public numbers."""
    return plan(**arguments)


def weights(columns: int, regression: bool) -> np.ndarray:
    """Return the weights of a private standardisation; the target, which comes last, has more."""
    inputs = np.ones(columns)
    return np.append(inputs, max(1.0, columns**0.5 / 2)) if regression else inputs


def standardising_plan(
    n: int, weights: np.ndarray, epsilon: float, delta: float, most: float = HIDDEN
) -> Plan | None:
    """Return the plan of a private standardisation; None where noise would be above `most`.

    It costs a tenth of mu^2, where mu is that of one Gaussian release for the whole budget.
    """
    common: dict[str, Any] = {"delta": delta, "n": n, "sampling": "full-batch"}
    whole = solved_plan(epsilon=epsilon, steps=1, **common)
    sigma = whole.noise_multiplier * math.sqrt(RELEASES / _STANDARD)
    if noise_of_means(n, sigma, weights).min() > most:
        return None
    return solved_plan(noise_multiplier=sigma, steps=RELEASES, **common)


def standardisation(
    values: np.ndarray,
    weights: np.ndarray,
    epsilon: float | None,
    plan: Plan | None,
    ledger: Ledger,
    owners: Units | None,
    keep: torch.Tensor,
) -> Standardisation:
    """Return the standardisation of columns in [-1, 1].

    Args:
        values: [rows, columns].
        weights: of the columns.
        epsilon: None learns it from the values, WITHOUT privacy.
        plan: from `standardising_plan`; None takes the one that looks at no data.
        ledger: where the releases are recorded.
        owners: whose rows they are, where the plan counts persons.
        keep: false for rows that add nothing.
    """
    if epsilon is None:
        return Standardisation.learned(values)
    if plan is None:
        return Standardisation.public(values.shape[1])
    return private_standardisation(
        values, weights, plan=plan, ledger=ledger, keep=keep, owners=owners
    )
