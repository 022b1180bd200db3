"""How exact a release is: what rounding takes off the clip, from public numbers alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from dpbnn.privacy.contracts import Clippable
from dpbnn.privacy.grid import RESOLUTION, spacing
from dpbnn.privacy.group import Shares

__all__ = ["UNKNOWN", "Precision", "precision_of"]

UNKNOWN = 1 << 20
"""Records of a batch whose number is secret; twice the expected number if that is more."""
# Clips below it, divided by the largest norm, are no normal numbers of the dtype.
_SMALLEST_CLIP = {torch.float32: 1e-18, torch.float64: 1e-150}
_ROUGH = 0.02  # error of a float32 sum, in clips, above which sums of units are float64
_COARSE = 0.05  # share of the clip that rounding may cost before the noise is drawn in float64


@dataclasses.dataclass(frozen=True)
class Precision:
    """How exact a release is.

    Attributes:
        share: of the clip that is left for contributions.
        dtype: of the noise.
        step: spacing of its grid, or 0.
    """

    share: float
    dtype: torch.dtype
    step: float = 0.0


def precision_of(
    contributions: Clippable,
    sigma: float,
    clips: Mapping[str, float],
    clip: float,
    rows: int,
    *,
    public_size: bool,
    by_unit: bool,
) -> Precision:
    """Return the precision of a release; raises where there is none to be had.

    Args:
        contributions: to be released; sums are made in float64 where that is needed.
        sigma: noise multiplier.
        clips: of the groups of names.
        clip: of all together.
        rows: most rows of a batch.
        public_size: whether the number of records is public.
        by_unit: whether the rows of a unit are clipped together.
    """
    dtype = contributions.dtype
    if not sigma > 0:
        return Precision(1.0, dtype)
    if not public_size or (by_unit and contributions.sum_error(rows) > _ROUGH):
        contributions.summed_in = torch.float64
    spread = sigma * math.sqrt(sum(math.prod(s) for s in contributions.shapes.values()))
    if isinstance(contributions, Shares):
        spread *= contributions.roundings(public_size)
    if spread * RESOLUTION[dtype] > _COARSE:
        dtype = torch.float64
    step = spacing(sigma * clip, dtype)
    if isinstance(contributions, Shares):
        contributions.check_range(rows * clip / step)
    least = _SMALLEST_CLIP[contributions.dtype]
    if (smallest := min(clips.values())) < least:
        raise ValueError(
            f"clip={smallest:g}: contributions in {contributions.dtype} need {least:g} or more; "
            f"use larger contributions and a larger clip"
        )
    share = (1 - spread * RESOLUTION[dtype]) / (1 + 2 * contributions.sum_error(rows))
    if not share > 0:
        raise ValueError(
            f"noise_multiplier={sigma:g}: too large for {contributions.shapes}; rounding would "
            f"leave nothing of the clip"
        )
    return Precision(share, dtype, step)
