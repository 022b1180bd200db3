"""A held-out part of the data that no record's value can move."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["calibration_split"]


def calibration_split(n: int, fraction: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the positions of training and calibration records, each in order.

    **Guarantee.** The split is a function of (n, fraction, seed) alone, all of them public, so that
    neighbours under zero-out and replace-one have the same split. Under add/remove n is not public,
    and the records after the one removed move up and may change sides: split by a property of the
    record itself then, such as a hash of its identifier.

    Each record is on one side only, yet epsilons are still added up in one ledger: its statement is
    about all releases and all records, which is on the safe side.

    Args:
        n: number of records, public.
        fraction: share of them that is held out; at least one record is on either side.
        seed: of the split.
    """
    if not (n >= 2 and n == int(n)):
        raise ValueError(f"n={n}: must be a whole number >= 2 to be split")
    if not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction}: must lie between 0 and 1; try 0.2")
    count = min(max(1, round(n * fraction)), n - 1)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    return order[count:].sort().values, order[:count].sort().values
