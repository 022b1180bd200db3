"""A mechanism of one's own: Laplace noise on one number. All that the library needs is here."""

import dataclasses
import math

import dp_accounting
import torch

from dpbnn.privacy.grid import add_on_grid, spacing
from dpbnn.privacy.mechanisms import Mechanism, register


@register
@dataclasses.dataclass(frozen=True)
class LaplaceNoise(Mechanism):
    """Laplace noise of scale b C on a sum of one number.

    Of four normals, (z1^2 + z2^2 - z3^2 - z4^2) / 2 is a difference of two exponential numbers.

    Args:
        noise_multiplier: b.
    """

    name = "laplace"
    words = "Laplace noise, scale"

    def check(self, shapes):
        """Refuse more than one number: their l1 norm is not what the gate clips."""
        if sum(math.prod(shape) for shape in shapes.values()) != 1:
            raise ValueError("mechanism: Laplace noise is for releases of one number here")

    def dp_event(self, shift):
        """Return a Laplace release of scale b / shift."""
        return dp_accounting.LaplaceDpEvent(self.noise_multiplier / shift)

    def add(self, sums, clip, dtype, source):
        """Add the noise, rounded to the grid as the sum is."""
        scale = self.noise_multiplier * clip
        squares = source.normal({"z": torch.zeros(4, dtype=torch.float64)}, 1.0)["z"].square()
        drawn = scale * (squares[:2].sum() - squares[2:].sum()) / 2
        for value in sums.values():
            grid = spacing(scale, dtype)
            add_on_grid(value, torch.full_like(value, drawn / grid, dtype=torch.float64), grid)
