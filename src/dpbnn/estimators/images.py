"""Fixed features of images in place of their pixels: `features="scattering"`.

They are functions of one row alone, and have seen no data, so that they cost no privacy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from dpbnn.networks import Scattering
from dpbnn.privacy.checks import quoted

__all__ = ["Scattered", "check_features"]

_AT_ONCE = 50  # images; the maps of more would not stay in a processor's cache


def check_features(features: Any, schema: Any) -> None:
    """Raise unless `features` of an estimator can be made, given its schema."""
    if features not in (None, "scattering"):
        raise ValueError(f"features={quoted(features)}: must be None or 'scattering'")
    if features and schema is not None:
        raise ValueError("features: are for rows of pixels; leave it or the schema out")


class Scattered:
    """From rows of pixels in [-1, 1] to the scattering maps of the square images they are.

    Args:
        columns: pixels of an image.
    """

    def __init__(self, columns: int) -> None:
        size = math.isqrt(columns)
        if size * size != columns or size < 4:
            raise ValueError(
                f"features='scattering': {columns} columns are no square image; pass one row of "
                f"pixels for each, such as 784 of 28 x 28"
            )
        self.size, self.layer = size, Scattering(size)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return the maps [rows, maps * height * width], of the type of the values."""
        if not len(values):
            return self(np.zeros((1, values.shape[1]), values.dtype))[:0]
        pixels = (torch.from_numpy(values).float() + 1) / 2  # so that what is added around is black
        images = pixels.view(-1, 1, self.size, self.size)
        parts = [self.layer(part).flatten(1) for part in images.split(_AT_ONCE)]
        return torch.cat(parts).numpy().astype(values.dtype, copy=False)
