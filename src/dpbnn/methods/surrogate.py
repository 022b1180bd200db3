"""A model of what a gate releases, and chains that sample weights from it.

Everything here is post-processing: it sees releases, public inputs and settings, and no data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Surrogate", "annealed_chains", "clipped_scores", "with_moments"]

_ACCEPTED = 0.7  # share of proposals that the step size aims at
_LEAST, _MOST = 1e-3, 0.98  # variance of an input, and its largest share of 1 - mean^2
_ANNEALED = 0.7  # share of the iterations in which the likelihood rises to its full weight


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """A Gaussian likelihood of one released statistic, whitened.

        release ~ N(sum_j sum_k p_w(k | x_j) features_jk, I)

    Attributes:
        outcomes: returns p_w(k | x_j) of standardised weights [S, P], as [S, inputs * outcomes].
        features: what an example with input x_j and outcome k adds, [inputs * outcomes, P].
        release: [P].
        information: of the weights, near the released point, [P, P].
    """

    outcomes: Callable[[Tensor], Tensor]
    features: Tensor
    release: Tensor
    information: Tensor

    def potential(self, weights: Tensor, power: float) -> tuple[Tensor, Tensor]:
        """Return -log p(w) - power log p(release | w) of every row of weights, and its gradient."""
        with torch.enable_grad():
            weights = weights.detach().requires_grad_()
            residual = self.release - self.outcomes(weights) @ self.features
            energy = 0.5 * power * residual.square().sum(1) + 0.5 * weights.square().sum(1)
            (gradient,) = torch.autograd.grad(energy.sum(), weights)
        return energy.detach(), gradient


def clipped_scores(jacobian: Tensor, slopes: Tensor, clip: float) -> Tensor:
    """Return the slopes of clipped gradients, scaled as a gate scales them.

    Args:
        jacobian: of the outputs with respect to the weights, [inputs, outputs, P].
        slopes: of the negative log-likelihood with respect to the outputs, [inputs, outcomes,
            outputs].
        clip: C.
    """
    inner = jacobian @ jacobian.mT
    norms = ((slopes @ inner) * slopes).sum(-1).clamp(min=1e-30).sqrt()
    return (clip / norms).clamp(max=1)[..., None] * slopes


def annealed_chains(
    surrogate: Surrogate,
    chains: int,
    iterations: int,
    draws: int,
    leaps: int,
    generator: torch.Generator,
) -> Tensor:
    """Return draws of standardised weights, [chains, draws, P], by Hamiltonian Monte Carlo.

    Chains start at draws from the prior. The likelihood rises from 0 to its full weight, so that
    they spread over what the release allows. The metric is the prior's precision plus the weighted
    information. Its step size is fixed before the first draw that is kept.

    Reference: Neal, MCMC using Hamiltonian dynamics, 2011.

    Args:
        surrogate: of the release.
        chains: number of chains.
        iterations: of every chain.
        draws: kept of every chain, the last ones.
        leaps: leapfrog steps of an iteration.
        generator: source of starts, momenta and decisions, on the device of the surrogate.
    """
    values, vectors = torch.linalg.eigh(surrogate.information)
    like = surrogate.release
    values, vectors = values.clamp(min=0).to(like), vectors.to(like)
    drawing: dict[str, Any] = {"generator": generator, "dtype": like.dtype, "device": like.device}
    position = torch.randn(chains, len(like), **drawing)
    kept: list[Tensor] = []
    step, rising = 0.2, max(1.0, min(_ANNEALED * iterations, iterations - draws))
    for iteration in range(iterations):
        power = min(1.0, ((iteration + 1) / rising) ** 3)
        root = (vectors / (1 + power * values).sqrt()).mT
        energy, gradient = surrogate.potential(position, power)
        momentum = torch.randn(position.shape, **drawing)
        before = energy + 0.5 * momentum.square().sum(1)
        size = step * (0.8 + 0.4 * float(torch.rand((), **drawing)))
        proposal, momentum = position, momentum - size / 2 * (gradient @ root.mT)
        for leap in range(leaps):
            proposal = proposal + size * (momentum @ root)
            energy, gradient = surrogate.potential(proposal, power)
            momentum = momentum - (size if leap < leaps - 1 else size / 2) * (gradient @ root.mT)
        change = before - energy - 0.5 * momentum.square().sum(1)
        accepted = torch.rand(chains, **drawing).log() < change
        position = torch.where(accepted[:, None], proposal, position)
        if iteration < iterations - draws:
            step *= math.exp(0.2 * (float(accepted.float().mean()) - _ACCEPTED))
        else:
            kept.append(position)
    return torch.stack(kept, 1)


def with_moments(uniform: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Return points in [-1, 1] of given moments; uniform ones stay as they are at moments of these.

    Each column has the density of largest entropy that has its mean and variance, p(x) ~
    exp(a x + b x^2): a truncated Gaussian, or for large variances one with two peaks. Columns are
    joined by a Gaussian copula with the correlations given.

    Args:
        uniform: points that are uniform in [-1, 1]^d.
        mean: [d], kept within 0.95 of 0.
        covariance: [d, d], made positive definite where it is not.
    """
    mean = mean.clamp(-0.95, 0.95)
    room = _MOST * (1 - mean.square())
    variance = covariance.diagonal().clamp(min=_LEAST).minimum(room)
    scale = covariance.diagonal().clamp(min=_LEAST).sqrt()
    values, vectors = torch.linalg.eigh(covariance / torch.outer(scale, scale))
    root = vectors * values.clamp(min=_LEAST).sqrt() @ vectors.mT
    root = root / root.square().sum(0).sqrt()
    normal = torch.special.ndtri(((uniform + 1) / 2).clamp(1e-4, 1 - 1e-4)) @ root
    ranks = torch.special.ndtr(normal)
    grid = torch.linspace(-1, 1, 401).to(uniform)
    columns = []
    for column, (m, v) in enumerate(zip(mean.tolist(), variance.tolist(), strict=True)):
        chances = _largest_entropy(grid, m, m**2 + v).cumsum(0)
        below = torch.searchsorted(chances, ranks[:, column].contiguous()).clamp(1, 400)
        left, right = chances[below - 1], chances[below]
        part = ((ranks[:, column] - left) / (right - left).clamp(min=1e-12)).clamp(0, 1)
        columns.append(grid[below - 1] + part * (grid[below] - grid[below - 1]))
    return torch.stack(columns, 1)


def _largest_entropy(grid: Tensor, mean: float, second: float) -> Tensor:
    """Return p ~ exp(a x + b x^2) on a grid with these moments, by a damped Newton's method."""
    powers = torch.stack([grid, grid.square()])
    wanted = torch.tensor([mean, second]).to(grid)
    tilt = torch.zeros(2).to(grid)
    for _ in range(60):
        chances = (tilt @ powers).softmax(0)
        found = powers @ chances
        spread = (powers * chances) @ powers.mT - torch.outer(found, found)
        spread.diagonal().add_(1e-9)
        move = torch.linalg.solve(spread, wanted - found)
        tilt = tilt + move * min(1.0, 5.0 / max(float(move.abs().max()), 1e-12))
    return (tilt @ powers).softmax(0)
