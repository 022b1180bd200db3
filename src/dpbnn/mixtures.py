"""The mixture of Gaussians with unknown means, as a module that every method can train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpbnn.messages import as_numbers, unquoted
from dpbnn.networks.layers import attributes, register

__all__ = ["GaussianMixture", "checked_points", "log_normal", "synthetic_mixture", "whitened"]

_LEAST = 10  # records


class GaussianMixture(nn.Module):
    """A mixture of Gaussians, p(x) = sum_j w_j N(x; m_j, s^2 I), with unknown means.

    The means are centres + offsets. The offsets are the parameters, so a prior N(0, std^2) of the
    parameters is the prior N(centre_j, std^2 I) of the means. The centres break the symmetry of
    the components and must not depend on the data. Everything is in float64.

    Weights and covariances are known to all methods but `EM`, which can learn them from there.

    Args:
        components: J.
        dimensions: D.
        noise_std: s, within a component.
        weights: w, one per component; equal by default.
        centres: [J, D]; standard normal draws of torch's generator by default.
    """

    def __init__(
        self,
        components: int,
        dimensions: int,
        noise_std: float = 0.5,
        weights: Sequence[float] | None = None,
        centres: Any = None,
    ) -> None:
        super().__init__()
        for name, value in (("components", components), ("dimensions", dimensions)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be a whole number >= 1")
        if not 0 < noise_std < math.inf:
            raise ValueError(f"noise_std={noise_std}: must be a finite number > 0")
        self.components, self.dimensions, self.noise_std = components, dimensions, noise_std
        size = (components, dimensions)
        if centres is None:
            given = torch.randn(size, dtype=torch.float64)
        else:
            given = torch.as_tensor(centres, dtype=torch.float64)
            if given.shape != size or not given.isfinite().all():
                raise ValueError(
                    f"centres have shape {tuple(given.shape)}: must be finite, of shape {size}"
                )
        self.offsets = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.register_buffer("centres", given.detach().clone())
        self.register_buffer("log_weights", _log_weights(weights, components))
        noise = noise_std**2 * torch.eye(dimensions, dtype=torch.float64)
        self.register_buffer("covariances", noise.repeat(components, 1, 1))

    centres: Tensor
    log_weights: Tensor
    covariances: Tensor

    @property
    def means(self) -> Tensor:
        """The means of the components, [J, D]."""
        return self.centres + self.offsets

    @property
    def weights(self) -> Tensor:
        """The weights of the components, [J]."""
        return self.log_weights.exp()

    def forward(self, x: Tensor) -> Tensor:
        """Return log w_j + log N(x; m_j, S_j), [N, J]."""
        return self.log_weights + log_normal(x, self.means, self.covariances)


register(GaussianMixture, saved=attributes("components", "dimensions", "noise_std"))


def log_normal(x: Tensor, means: Tensor, covariances: Tensor) -> Tensor:
    """Return log N(x_i; m_j, S_j), [N, J]."""
    roots = torch.linalg.cholesky(covariances)
    z = whitened(x, means, roots)
    scale = roots.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * z.square().sum(-1) - scale - 0.5 * x.shape[-1] * math.log(2 * math.pi)


def whitened(x: Tensor, means: Tensor, roots: Tensor) -> Tensor:
    """Return L_j^-1 (x_i - m_j), [N, J, D], for lower triangular L_j."""
    away = (x[:, None] - means).permute(1, 2, 0)
    return torch.linalg.solve_triangular(roots, away, upper=False).permute(2, 0, 1)


def synthetic_mixture(
    n: int = 1000,
    components: int = 4,
    dimensions: int = 4,
    noise_std: float = 0.5,
    seed: int = 60,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return points [n, D], labels [n] and true means [J, D] of the DP-SEP paper's recipe.

    The means are MU + |S| e with MU, S and e standard normal, MU of ten times the seed; labels are
    uniform. The paper's own numbers depend on its random generator and cannot be had from here.
    """
    middle = np.random.default_rng(10 * seed).standard_normal((components, dimensions))
    generator = np.random.default_rng(seed)
    spread, e = generator.standard_normal((2, components, dimensions))
    means = middle + np.abs(spread) * e
    labels = generator.integers(components, size=n)
    points = means[labels] + noise_std * generator.standard_normal((n, dimensions))
    return torch.from_numpy(points), torch.from_numpy(labels), torch.from_numpy(means)


def checked_points(
    data: Any, mixture: GaussianMixture, on_bad_rows: str, n: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the points and targets of zero, or raise before anything is spent.

    Args:
        data: points [n, D], alone or as (points, anything); targets are not used.
        mixture: the model.
        on_bad_rows: as in `fit`; "zero" leaves out what looks at values.
        n: public number of records, where the true one is not public.
    """
    given = data[0] if isinstance(data, tuple | list) else data
    with unquoted("the points are no numbers", "give a tensor or an array", ValueError):
        points = torch.as_tensor(as_numbers(given) if on_bad_rows == "zero" else given).detach()
    if points.dim() != 2 or points.shape[1] != mixture.dimensions:
        raise ValueError(
            f"the points have shape {tuple(points.shape)} and the mixture dimensions="
            f"{mixture.dimensions}; give points of shape (n, {mixture.dimensions})"
        )
    size = len(points) if n is None else n
    if size < max(_LEAST, mixture.components):
        raise ValueError(
            f"{size} records and {mixture.components} components: a mixture needs at least "
            f"{_LEAST} records and one per component; collect more, or use fewer components"
        )
    points = points.to(torch.float64)
    if on_bad_rows != "zero" and n is None:
        constant = (points == points[0]).all(0).nonzero()[:, 0].tolist()
        if constant:
            raise ValueError(
                f"columns {constant[:5]} of the points are constant; leave them out, and set "
                f"dimensions={mixture.dimensions - len(constant)}"
            )
    return points, points.new_zeros(len(points))


def _log_weights(weights: Sequence[float] | None, components: int) -> Tensor:
    if weights is None:
        return torch.full((components,), -math.log(components), dtype=torch.float64)
    values = [float(w) for w in weights]
    if len(values) != components or not min(values) > 0 or abs(sum(values) - 1) > 1e-6:
        raise ValueError(
            f"weights={values}: must be {components} positive numbers that sum to 1; leave them "
            f"out for equal ones"
        )
    return torch.tensor(values, dtype=torch.float64).log()
