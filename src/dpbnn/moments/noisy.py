"""Inference from noised second moments and scores of a generalised linear model.

It sees released numbers alone, and may import nothing of training. The noise that the gate added
has a known covariance, and is part of the model:

    A~   = A + E                                  mean of w u u', u = (1, features)
    g~_t = G(theta) - G(theta_t) + xi + e_t       mean score at the public theta_t
    c~_t = E[clip(r_t)^2] + f_t                   mean squared residual, in linear regression

with G(theta) = A theta and xi ~ N(0, s^2 A/n) in linear regression; in logistic regression
G(theta) = E[sigmoid(u' theta) u] and xi ~ N(0, E[sigmoid' u u']/n), for Gaussian features of the
second moments A. A, theta and s are unknown. `noisy_posterior` infers them.

All tensors have a first axis of problems that are solved at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpbnn.moments.coordinates import packed, unpacked

__all__ = ["LOG_NOISE", "Model", "Released"]

_NODES = 24  # of the quadrature over a linear predictor
_FIRST = 0.1  # prior sd of log sqrt(A_00), the mean weight of a record
_BELOW = 2.0  # prior variance of an entry of A's root over the mean square of correlations
_LEAST = 0.25  # least such variance, times p
_USUAL = (0.37, 0.3)  # prior mean and sd of the mean square of a feature, over all features
_LEAST_SQUARE = 0.05  # of features
_LOG_SCALE = 0.5  # prior sd of the log scale of a feature about that of all
LOG_NOISE = 1.0  # prior sd of log s


class Released(NamedTuple):
    """What was released, as means over n records; K releases of p coefficients.

    Attributes:
        second: A~ as `packed`, averaged over the releases, [D, p (p + 1)/2].
        second_std: of its noise, [D].
        score: g~_t, [D, K, p].
        score_std: of its noise, [D, K].
        at: theta_t, [D, K, p].
        square: c~_t, [D, K]; not used where the noise is known.
        square_std: of its noise, [D, K].
        bound: of absolute residuals, [D, K].
    """

    second: Tensor
    second_std: Tensor
    score: Tensor
    score_std: Tensor
    at: Tensor
    square: Tensor
    square_std: Tensor
    bound: Tensor

    def repeated(self, count: int) -> Released:
        """Return every problem so many times, one after another."""
        return Released(*(part.repeat_interleave(count, 0) for part in self))


@dataclasses.dataclass(frozen=True)
class Model:
    """The model of what was released, and its priors.

    Attributes:
        size: p.
        n: number of records.
        logistic: whether the model is logistic regression; otherwise it is linear regression.
        mean: prior mean of the coefficients, [p].
        std: prior standard deviation of the coefficients, [p].
        noise: s, if it is known.
        scale: prior median of s, where it is learned.
    """

    size: int
    n: float
    logistic: bool
    mean: Tensor
    std: Tensor
    noise: float | None = None
    scale: float = 0.5

    @property
    def learned(self) -> bool:
        """Whether s is learned."""
        return not self.logistic and self.noise is None

    @property
    def triangle(self) -> int:
        """Number of entries of A."""
        return self.size * (self.size + 1) // 2

    def parts(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return A, theta and log s of coordinates [..., numbers]."""
        p, m = self.size, self.triangle
        zero = torch.zeros_like(q[..., :1])
        root = torch.cat([q[..., p:m], zero, zero + 1], -1)[..., _places(p)]
        root = q[..., :p].exp().unsqueeze(-1) * root
        log_noise = q[..., m + p] if self.learned else q.new_zeros(())
        if not self.learned and self.noise is not None:
            log_noise = log_noise + math.log(self.noise)
        return root @ root.mT, q[..., m : m + p], log_noise

    def coordinates(self, second: Tensor, theta: Tensor, log_noise: Tensor) -> Tensor:
        """Return the coordinates of A, theta and log s."""
        root = torch.linalg.cholesky(second)
        diagonal = torch.diagonal(root, dim1=-2, dim2=-1)
        rows, columns = torch.tril_indices(self.size, self.size, -1)
        unit = (root / diagonal.unsqueeze(-1))[..., rows, columns]
        found = [diagonal.log(), unit, theta]
        if self.learned:
            found.append(log_noise.unsqueeze(-1))
        return torch.cat(found, -1)

    def prior(self, q: Tensor, data: Released) -> Tensor:
        """Return the coordinates less their prior means, in prior standard deviations.

        How large features are and how far they are correlated, in the mean, is taken from what was
        released: it has less noise than a single entry.
        """
        p, m = self.size, self.triangle
        rows, columns = torch.triu_indices(p, p)
        apart = data.second[..., rows != columns].square().mean(-1) - data.second_std.square()
        size = data.second[..., (rows == columns) & (rows > 0)].mean(-1)
        share = (_BELOW * apart / size.clamp(min=0.1).square()).clamp(_LEAST / p, 1.0)
        share = share.unsqueeze(-1)
        noise = (data.second_std / _USUAL[1]).square() / max(1, p - 1)
        usual = ((size + noise * _USUAL[0]) / (1 + noise)).clamp(min=_LEAST_SQUARE)
        # A_ii = exp(2 h_i) (1 + sum of squares below): the more of them, the lower h_i.
        later = torch.arange(1, p, dtype=q.dtype)
        centres = 0.5 * (usual.log().unsqueeze(-1) - torch.log1p(share * later))
        found = [q[..., :1] / _FIRST, (q[..., 1:p] - centres) / _LOG_SCALE]
        found.append(q[..., p:m] / share.sqrt())
        found.append((q[..., m : m + p] - self.mean) / self.std)
        if self.learned:
            found.append((q[..., m + p :] - math.log(self.scale)) / LOG_NOISE)
        return torch.cat(found, -1)

    def expected(self, second: Tensor, theta: Tensor) -> Tensor:
        """Return G(theta) of logistic regression."""
        weight, mean, _, along, etas, nodes = self._predictor(second, theta)
        p = torch.sigmoid(etas)
        first = p @ nodes
        slope = (p * (1 - p)) @ nodes
        rest = mean * first.unsqueeze(-1) + along * slope.unsqueeze(-1)
        return weight.unsqueeze(-1) * torch.cat([first.unsqueeze(-1), rest], -1)

    def information(self, second: Tensor, theta: Tensor) -> Tensor:
        """Return E[sigmoid'(u' theta) u u']."""
        weight, mean, spread, along, etas, nodes = self._predictor(second, theta)
        p = torch.sigmoid(etas)
        d1 = p * (1 - p)
        d2 = d1 * (1 - 2 * p)
        d3 = d1 * (1 - 6 * d1)
        k0, k1, k2 = (d @ nodes for d in (d1, d2, d3))
        one = k0[..., None, None]
        side = mean * k0.unsqueeze(-1) + along * k1.unsqueeze(-1)
        cross = mean.unsqueeze(-1) * along.unsqueeze(-2)
        inner = one * (spread + mean.unsqueeze(-1) * mean.unsqueeze(-2))
        inner = inner + k1[..., None, None] * (cross + cross.mT)
        inner = inner + k2[..., None, None] * along.unsqueeze(-1) * along.unsqueeze(-2)
        top = torch.cat([one, side.unsqueeze(-2)], -1)
        rest = torch.cat([side.unsqueeze(-1), inner], -1)
        return weight[..., None, None] * torch.cat([top, rest], -2)

    def _predictor(self, second: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
        """Return weight, mean and covariance of the features, S theta, and u' theta at nodes."""
        weight = second[..., 0, 0]
        mean = second[..., 0, 1:] / weight.unsqueeze(-1)
        spread = second[..., 1:, 1:] / weight[..., None, None]
        spread = spread - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        slopes = theta[..., 1:]
        along = (spread @ slopes.unsqueeze(-1)).squeeze(-1)
        centre = theta[..., 0] + (mean * slopes).sum(-1)
        sd = ((along * slopes).sum(-1) + 1e-12).sqrt()
        points, weights = _quadrature()
        etas = centre.unsqueeze(-1) + sd.unsqueeze(-1) * points
        return weight, mean, spread, along, etas, weights

    def shared(self, second: Tensor, theta: Tensor, log_noise: Tensor) -> Tensor:
        """Return the covariance of xi."""
        if self.logistic:
            return self.information(second, theta) / self.n
        return (2 * log_noise).exp()[..., None, None] * second / self.n

    def residuals(self, q: Tensor, data: Released) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the releases less their expectations: second, mean score, other scores, squares.

        Scores are averaged by their precisions; what is left of each is in units of its noise.
        """
        second, theta, log_noise = self.parts(q)
        errors = packed(second) - data.second
        squares = q.new_zeros((*q.shape[:-1], 0))
        if self.logistic:
            there = self.expected(second.unsqueeze(-3), data.at)
            moved = self.expected(second, theta).unsqueeze(-2) - there
        else:
            away = theta.unsqueeze(-2) - data.at
            moved = away @ second
            variance = (2 * log_noise).exp().unsqueeze(-1) + (away * moved).sum(-1)
            inside, clipped = _clipped(variance, data.bound)
            moved = inside.unsqueeze(-1) * moved
            if self.learned:
                squares = data.square - second[..., :1, 0] * clipped
        scores = data.score - moved
        weights = data.score_std.square().reciprocal()
        weights = weights / weights.sum(-1, keepdim=True)
        mean = (weights.unsqueeze(-1) * scores).sum(-2)
        rest = (scores - mean.unsqueeze(-2)) / data.score_std.unsqueeze(-1)
        return errors, mean, rest.flatten(-2), squares

    def spread(self, q: Tensor, data: Released) -> tuple[Tensor, Tensor]:
        """Return the Cholesky root of the mean score's covariance, and the squares' deviations."""
        second, theta, log_noise = self.parts(q)
        variance = 1 / data.score_std.square().reciprocal().sum(-1)
        eye = torch.eye(self.size, dtype=q.dtype)
        covariance = self.shared(second, theta, log_noise) + variance[..., None, None] * eye
        root = torch.linalg.cholesky_ex(covariance + 1e-12 * eye)[0]
        if not self.learned:
            return root, q.new_zeros((*q.shape[:-1], 0))
        away = theta.unsqueeze(-2) - data.at
        total = (2 * log_noise).exp().unsqueeze(-1) + (away * (away @ second)).sum(-1)
        return root, (2 * total.square() / self.n + data.square_std.square()).sqrt()

    def standard(
        self, q: Tensor, data: Released, spread: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return all residuals, and the prior's, in units of their standard deviations."""
        errors, mean, rest, squares = self.residuals(q, data)
        root, deviations = self.spread(q, data) if spread is None else spread
        white = torch.linalg.solve_triangular(root, mean.unsqueeze(-1), upper=False).squeeze(-1)
        errors = errors / data.second_std.unsqueeze(-1)
        return torch.cat([errors, white, rest, squares / deviations, self.prior(q, data)], -1)

    def log_density(self, q: Tensor, data: Released) -> Tensor:
        """Return the log density of coordinates given what was released, up to a constant."""
        root, deviations = self.spread(q, data)
        found = -0.5 * self.standard(q, data, (root, deviations)).square().sum(-1)
        found = found - torch.diagonal(root, dim1=-2, dim2=-1).log().sum(-1)
        return found - deviations.log().sum(-1)

    def start(self, data: Released) -> Tensor:
        """Return coordinates to begin with: A~ made positive definite, and ridge regression."""
        second = unpacked(data.second, self.size)
        values, axes = torch.linalg.eigh(second)
        least = (2 * data.second_std).clamp(0.02, 0.5).unsqueeze(-1)
        second = (axes * values.clamp(min=least).clamp(max=4 * self.size).unsqueeze(-2)) @ axes.mT
        theta, last = data.at[:, -1], data.square[:, -1]
        log_noise = torch.full((len(second),), math.log(self.noise or self.scale)).to(second)
        if not self.logistic:
            variance = 1 / data.score_std.square().reciprocal().sum(-1)
            ridge = math.exp(2 * float(log_noise[0])) / self.n + variance / least.squeeze(-1)
            ridge = torch.diag_embed(ridge.unsqueeze(-1) / self.std.square())
            step = torch.linalg.solve(second + ridge, data.score[:, -1].unsqueeze(-1)).squeeze(-1)
            theta = theta + step
            left = (last - (step * data.score[:, -1]).sum(-1)).clamp(min=0.02 * self.scale**2)
            log_noise = 0.5 * left.log() if self.learned else log_noise
        return self.coordinates(second, theta, log_noise)


@functools.cache
def _places(size: int) -> Tensor:
    """Return where the entries of a unit triangular matrix are in (below, 0, 1)."""
    below = size * (size - 1) // 2
    where = torch.full((size, size), below).fill_diagonal_(below + 1)
    rows, columns = torch.tril_indices(size, size, -1)
    where[rows, columns] = torch.arange(below)
    return where


@functools.cache
def _quadrature() -> tuple[Tensor, Tensor]:
    """Return nodes and weights of expectations over a standard normal."""
    points, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    return torch.as_tensor(points), torch.as_tensor(weights / weights.sum())


def _clipped(variance: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(|r| < B) and E[min(r^2, B^2)] of r ~ N(0, variance)."""
    far = bound / variance.sqrt()
    inside = torch.erf(far / math.sqrt(2))
    density = torch.exp(-0.5 * far.square()) / math.sqrt(2 * math.pi)
    within = inside - 2 * torch.where(far < 30, far, 0.0) * density
    beyond = torch.where(far < 30, bound.square() * (1 - inside), 0.0)
    return inside, variance * within + beyond
