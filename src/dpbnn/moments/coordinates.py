"""Coordinates in which factors are clipped and noised, and the way back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from dpbnn.contributions.dense import ChunkedContributions, DenseContributions
from dpbnn.moments.model import Factors, MomentModel, Moments, Natural, applied

__all__ = ["Coordinates", "FactorContributions", "Raw", "Whitened", "packed", "unpacked"]

_CHUNK = {"cpu": 2**19, "cuda": 2**25}  # numbers in a chunk of contributions


class Coordinates(ABC):
    """Turns factors into vectors `mean.*` and `precision.*`, and vectors into factors.

    A symmetric matrix is its upper triangle with the other entries times sqrt(2), so that the norm
    is the Frobenius norm and independent noise is symmetric noise.

    Args:
        cavity: where factors are taken; public.
        weight: of the precision coordinates against the mean's.
    """

    def __init__(self, cavity: Moments, weight: float = 1.0) -> None:
        self.cavity, self.weight = cavity, weight
        self.full = {n: c.dim() > cavity.mean[n].dim() for n, c in cavity.covariance.items()}

    @abstractmethod
    def _vectors(self, name: str, slope: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _factor(self, name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]: ...

    def vectors(self, factors: Factors) -> dict[str, Tensor]:
        """Return the factors' coordinates by released name, batch first."""
        found: dict[str, Tensor] = {}
        for name, slope in factors.slope.items():
            first, second = self._vectors(name, slope, factors.curvature[name])
            found[f"mean.{name}"] = first
            if self.full[name]:
                second = packed(second)
            found[f"precision.{name}"] = second if self.weight == 1 else self.weight * second
        for name, value in factors.extra.items():
            found[f"extra.{name}"] = value
        return found

    def factor(self, vectors: Mapping[str, Tensor]) -> Natural:
        """Return the natural parameters of one vector, such as a release."""
        first: dict[str, Tensor] = {}
        second: dict[str, Tensor] = {}
        for name, mean in self.cavity.mean.items():
            curvature = vectors[f"precision.{name}"].to(mean) / self.weight
            if self.full[name]:
                curvature = unpacked(curvature, mean.shape[-1])
            first[name], second[name] = self._factor(
                name, vectors[f"mean.{name}"].to(mean), curvature
            )
        return Natural(first, second)

    def limited(self, name: str, vector: Tensor, low: float, high: float) -> Tensor:
        """Return precision coordinates with every eigenvalue (or entry) kept in [low, high]."""
        block = name.removeprefix("precision.")
        if not self.full[block]:
            return vector.clamp(low, high)
        values, axes = torch.linalg.eigh(unpacked(vector, self.cavity.mean[block].shape[-1]))
        return packed((axes * values.clamp(low, high).unsqueeze(-2)) @ axes.mT)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the vectors by released name."""
        found: dict[str, torch.Size] = {}
        for name, mean in self.cavity.mean.items():
            found[f"mean.{name}"] = mean.shape
            last = mean.shape[-1]
            triangle = torch.Size([*mean.shape[:-1], last * (last + 1) // 2])
            found[f"precision.{name}"] = triangle if self.full[name] else mean.shape
        return found

    def centred(self, factor: Natural) -> Factors:
        """Return one factor as a batch of one, centred on the cavity mean."""
        mean = self.cavity.mean
        slope = {n: (v - applied(factor.second[n], mean[n])) for n, v in factor.first.items()}
        return Factors(
            {n: v.unsqueeze(0) for n, v in slope.items()},
            {n: v.unsqueeze(0) for n, v in factor.second.items()},
        )


class Whitened(Coordinates):
    """Coordinates in which the cavity is a standard normal.

        c_1 = L^T (f_1 - f_2 m),   c_2 = L^T f_2 L,   V = L L^T

    and back d_2 = L^-T c_2 L^-1, d_1 = L^-T c_1 + d_2 m. The cavity is public, so is L.
    """

    def __init__(self, cavity: Moments, weight: float = 1.0) -> None:
        super().__init__(cavity, weight)
        self.root = {
            name: torch.linalg.cholesky(c) if self.full[name] else c.sqrt()
            for name, c in cavity.covariance.items()
        }

    def _vectors(self, name: str, slope: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        root = self.root[name].to(slope)
        if not self.full[name]:
            return slope * root, curvature * root.square()
        first = (root.mT @ slope.unsqueeze(-1)).squeeze(-1)
        return first, root.mT @ curvature @ root

    def _factor(self, name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        root, mean = self.root[name], self.cavity.mean[name]
        if not self.full[name]:
            curvature = second / root.square()
            return first / root + curvature * mean, curvature
        half = torch.linalg.solve_triangular(root.mT, second, upper=True)
        curvature = torch.linalg.solve_triangular(root.mT, half.mT, upper=True)
        curvature = (curvature + curvature.mT) / 2
        slope = torch.linalg.solve_triangular(root.mT, first.unsqueeze(-1), upper=True).squeeze(-1)
        return slope + applied(curvature, mean), curvature


class Raw(Coordinates):
    """The natural parameters themselves, as Algorithm 3 of the DP-SEP paper has them."""

    def _vectors(self, name: str, slope: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.cavity.mean[name].to(slope)
        if not self.full[name]:
            return slope + curvature * mean, curvature
        return slope + (curvature @ mean.unsqueeze(-1)).squeeze(-1), curvature

    def _factor(self, name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first, second


class FactorContributions(ChunkedContributions):
    """The factors of a batch, in some coordinates, less an offset; computed chunk by chunk.

    Args:
        model: gives the factors.
        coordinates: of the vectors.
        offset: subtracted from every example's vector (the shared factor's), by released name.
        x: inputs.
        y: targets.
        chunk: most examples at once; as many as fit in a small memory by default.
    """

    def __init__(
        self,
        model: MomentModel,
        coordinates: Coordinates,
        offset: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        chunk: int | None = None,
    ) -> None:
        extra = {f"extra.{name}": shape for name, shape in model.extra().items()}
        shapes = {**coordinates.shapes(), **extra}
        numbers = sum(math.prod(shape) for shape in shapes.values())
        chunk = chunk or _CHUNK.get(x.device.type, 2**19) // numbers

        def part(first: int, last: int) -> DenseContributions:
            factors = model.factors(coordinates.cavity, x[first:last], y[first:last])
            vectors = coordinates.vectors(factors)
            for name, value in offset.items():
                vectors[name].sub_(value)
            return DenseContributions(vectors)

        dtype = next(iter(offset.values()), x).dtype
        super().__init__(part, len(x), chunk, shapes, x.device, dtype)


def packed(matrix: Tensor) -> Tensor:
    """Return the upper triangle, off-diagonal entries times sqrt(2), over the last two axes."""
    rows, columns = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], device=matrix.device)
    scale = 1 + (math.sqrt(2) - 1) * (rows != columns).to(matrix)
    return matrix[..., rows, columns] * scale


def unpacked(triangle: Tensor, size: int) -> Tensor:
    """Return the symmetric matrices of `packed`."""
    rows, columns = torch.triu_indices(size, size, device=triangle.device)
    scale = 1 + (math.sqrt(0.5) - 1) * (rows != columns).to(triangle)
    matrix = triangle.new_zeros(*triangle.shape[:-1], size, size)
    matrix[..., rows, columns] = triangle * scale
    matrix[..., columns, rows] = triangle * scale
    return matrix
