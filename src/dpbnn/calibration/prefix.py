"""Noisy cumulative counts of values on a public grid, in one release."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["margin", "root", "sensitivity"]

_DRAWS = 1 << 15
_FAILURE = 1e-6  # chance that the simulated quantile lies below the true one


@functools.lru_cache(maxsize=8)
def root(cells: int) -> Tensor:
    """Return the square root R of the matrix A of cumulative sums, A = R R, lower triangular.

    A record in cell j contributes column j of R, whose norm is about sqrt(1 + log(cells)/pi). R
    times the noised sum is the cumulative counts with noise of standard deviation about
    sigma (1 + log(cells)/pi), where noised plain counts, added up, would have sigma sqrt(cells).

        R_ij = binom(2k, k)/4^k,   k = i - j

    Reference: Fichtenberger, Henzinger, Upadhyay, Constant matters, 2023.

    Args:
        cells: number of cells.
    """
    k = np.arange(1, cells)
    first = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
    lag = np.subtract.outer(np.arange(cells), np.arange(cells))
    return torch.from_numpy(np.where(lag >= 0, first[np.abs(lag)], 0.0))


def sensitivity(cells: int) -> float:
    """Return the largest norm of a column of the root, that of the first."""
    return float(root(cells)[:, 0].norm())


@functools.lru_cache(maxsize=32)
def margin(cells: int, beta: float) -> float:
    """Return a number that max_j (R Z)_j exceeds with probability at most beta, Z standard normal.

    The quantile is simulated, and read off at an order statistic so high that it is too small with
    probability below 1e-6 only, which beta includes.

    Args:
        cells: number of cells.
        beta: probability, above 1e-4.
    """
    from scipy.stats import binom

    generator = np.random.default_rng(20210)
    matrix = root(cells).numpy()
    highest: list[NDArray[np.float64]] = []
    for _ in range(_DRAWS // 4096):
        highest.append((generator.standard_normal((4096, cells)) @ matrix.T).max(1))
    exceed = int(binom.ppf(_FAILURE, _DRAWS, beta - _FAILURE))
    ordered = np.sort(np.concatenate(highest))
    return math.inf if exceed < 1 else float(ordered[_DRAWS - exceed])
