"""Inference from noised second moments and scores of a generalised linear model.

It sees released numbers alone, and may import nothing of training. The noise that the gate added
has a known covariance, and is part of the model:

    A~   = A + E                                  mean of w u u', u = (1, features)
    g~_t = G(theta) - G(theta_t) + xi + e_t       mean score at the public theta_t
    c~_t = E[clip(r_t)^2] + f_t                   mean squared residual, in linear regression

with G(theta) = A theta and xi ~ N(0, s^2 A/n) in linear regression; in logistic regression
G(theta) = E[sigmoid(u' theta) u] and xi ~ N(0, E[sigmoid' u u']/n), for Gaussian features of the
second moments A. A, theta and s are unknown. The posterior is sampled: a mode by Gauss-Newton
steps, then elliptical slice sampling in its coordinates.

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

__all__ = ["Model", "Released", "covariance", "exact", "mode", "sample"]

_NODES = 24  # of the quadrature over a linear predictor
_FIRST = 0.1  # prior sd of log sqrt(A_00), the mean weight of a record
_BELOW = 0.25  # prior variance of all entries of A's root in a row, over the diagonal's square
_CENTRE = -0.5  # prior mean of the log scale of a feature
_LOG_SCALE = 0.5  # prior sd of the log scale of a feature
_SWEEPS = 36  # of slice sampling; the states after a quarter and a half fit its reference
_TRIES = 6  # of a sweep, after which a chain stays where it is
_APART = 4  # sweeps between states of a chain that are kept
_WIDER = 1.3  # reference of the sampler over the Gaussian at the mode
_LOG_NOISE = 1.0  # prior sd of log s


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

    def prior(self, q: Tensor) -> Tensor:
        """Return the coordinates less their prior means, in prior standard deviations."""
        p, m = self.size, self.triangle
        scales = torch.full((p,), _LOG_SCALE, dtype=q.dtype)
        scales[0] = _FIRST
        # A_ii = exp(2 h_i) (1 + sum of squares below): the more of them, the lower h_i.
        share = _BELOW / p
        centres = _CENTRE - 0.5 * torch.log1p(share * torch.arange(p, dtype=q.dtype))
        centres[0] = 0.0
        found = [(q[..., :p] - centres) / scales, q[..., p:m] / math.sqrt(share)]
        found.append((q[..., m : m + p] - self.mean) / self.std)
        if self.learned:
            found.append((q[..., m + p :] - math.log(self.scale)) / _LOG_NOISE)
        return torch.cat(found, -1)

    def expected(self, second: Tensor, theta: Tensor) -> Tensor:
        """Return G(theta)."""
        if not self.logistic:
            return (second @ theta.unsqueeze(-1)).squeeze(-1)
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
        here = self.expected(second, theta).unsqueeze(-2)
        there = self.expected(second.unsqueeze(-3), data.at)
        moved = here - there
        squares = q.new_zeros((*q.shape[:-1], 0))
        if not self.logistic:
            away = theta.unsqueeze(-2) - data.at
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
        moved = (second.unsqueeze(-3) @ away.unsqueeze(-1)).squeeze(-1)
        total = (2 * log_noise).exp().unsqueeze(-1) + (away * moved).sum(-1)
        return root, (2 * total.square() / self.n + data.square_std.square()).sqrt()

    def standard(
        self, q: Tensor, data: Released, spread: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return all residuals, and the prior's, in units of their standard deviations."""
        errors, mean, rest, squares = self.residuals(q, data)
        root, deviations = self.spread(q, data) if spread is None else spread
        white = torch.linalg.solve_triangular(root, mean.unsqueeze(-1), upper=False).squeeze(-1)
        errors = errors / data.second_std.unsqueeze(-1)
        return torch.cat([errors, white, rest, squares / deviations, self.prior(q)], -1)

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


def mode(model: Model, data: Released, start: Tensor | None = None, steps: int = 30) -> Tensor:
    """Return a mode of the posterior, by damped Fisher scoring."""
    q = model.start(data) if start is None else start
    damping = torch.full((len(q),), 1e-2, dtype=q.dtype)
    value, gradient = _gradient(model, q, data)
    for _ in range(steps):
        matrix = _precision(model, q, data)
        matrix = matrix + (damping[:, None, None] * torch.eye(q.shape[1], dtype=q.dtype))
        move = torch.linalg.solve(matrix, gradient.unsqueeze(-1)).squeeze(-1)
        moved = q + move.clamp(-1.0, 1.0)
        found, slope = _gradient(model, moved, data)
        better = found > value
        gain = torch.where(better, found - value, 0.0)
        q = torch.where(better.unsqueeze(-1), moved, q)
        gradient = torch.where(better.unsqueeze(-1), slope, gradient)
        value = torch.where(better, found, value)
        damping = torch.where(better, damping / 5, damping * 5).clamp(1e-6, 1e6)
        if bool(((better & (gain < 1e-2)) | (damping > 1e5)).all()):
            break
    return q


def _gradient(model: Model, q: Tensor, data: Released) -> tuple[Tensor, Tensor]:
    """Return the log density and its gradient."""
    q = q.detach().requires_grad_()
    with torch.enable_grad():
        value = model.log_density(q, data)
        (gradient,) = torch.autograd.grad(value.sum(), q)
    return value.detach().nan_to_num(-math.inf, -math.inf, -math.inf), gradient


def _precision(model: Model, q: Tensor, data: Released) -> Tensor:
    """Return J'J of the residuals in standard units, in each problem."""
    jacobian = torch.func.vmap(torch.func.jacfwd(model.standard))(q, data, model.spread(q, data))
    return jacobian.mT @ jacobian


def covariance(model: Model, q: Tensor, data: Released) -> Tensor:
    """Return the covariance of theta of the Gaussian at a mode, [D, p, p]."""
    part = slice(model.triangle, model.triangle + model.size)
    return torch.linalg.inv(_precision(model, q, data))[:, part, part]


def exact(
    model: Model,
    second: Tensor,
    score: Tensor,
    square: float,
    generator: torch.Generator,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Return draws of theta and log s in linear regression, from moments without noise.

    Given s the posterior is Gaussian; s itself has one dimension, and is drawn on a fine grid.

    Args:
        model: the model.
        second: mean of u u', [p, p].
        score: mean of y u, [p].
        square: mean of y^2, where s is learned.
        generator: of the draws.
        count: number of draws.
    """
    prior = torch.diag(model.std.square().reciprocal())
    natural = prior @ model.mean
    if model.learned:
        fitted = score @ torch.linalg.pinv(second) @ score
        middle = 0.5 * math.log(max(square - float(fitted), 1e-12))
        grid = middle + torch.linspace(-1, 1, 2001, dtype=second.dtype) * min(
            3.0, 20 / model.n**0.5
        )
    else:
        assert model.noise is not None
        grid = torch.tensor([math.log(model.noise)], dtype=second.dtype)
    ratio = model.n * (-2 * grid).exp()
    precision = ratio[:, None, None] * second + prior
    root = torch.linalg.cholesky(precision)
    mean = torch.cholesky_solve((ratio[:, None] * score + natural).unsqueeze(-1), root).squeeze(-1)
    fit = 0.5 * (mean * (ratio[:, None] * score + natural)).sum(-1)
    weight = fit - model.n * grid - 0.5 * ratio * square
    weight = weight - torch.diagonal(root, dim1=-2, dim2=-1).log().sum(-1)
    weight = weight - 0.5 * ((grid - math.log(model.scale)) / _LOG_NOISE).square()
    which = torch.multinomial(weight.softmax(0), count, replacement=True, generator=generator)
    normal = torch.randn(count, model.size, 1, dtype=second.dtype, generator=generator)
    moved = torch.linalg.solve_triangular(root[which].mT, normal, upper=True).squeeze(-1)
    return mean[which] + moved, grid[which]


def sample(
    model: Model,
    data: Released,
    generator: torch.Generator,
    *,
    chains: int = 128,
    sweeps: int = _SWEEPS,
    keep: int = 4,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return draws of theta [D, draws, p] and of log s [D, draws].

    Every chain begins at a draw of the Gaussian at the mode and is moved by elliptical slice
    sampling; `keep` states of the second half of each are returned.
    """
    centre = mode(model, data, start)
    root = torch.linalg.cholesky(_precision(model, centre, data))
    size, problems, m = centre.shape[1], len(centre), model.triangle
    many = data.repeated(chains)

    def normal() -> Tensor:
        return torch.randn(problems, size, chains, dtype=centre.dtype, generator=generator)

    def uniform() -> Tensor:
        return torch.rand(problems, chains, dtype=centre.dtype, generator=generator)

    def at(z: Tensor) -> Tensor:
        q = centre.unsqueeze(-1) + torch.linalg.solve_triangular(root.mT, z, upper=True)
        return q.mT.reshape(problems * chains, size)

    shift = torch.zeros(problems, size - m, 1, dtype=centre.dtype)
    wide = _WIDER * torch.eye(size - m, dtype=centre.dtype).expand(problems, -1, -1)

    def placed(v: Tensor) -> Tensor:
        return torch.cat([v[:, :m], shift + wide @ v[:, m:]], 1)

    def ratio(v: Tensor) -> Tensor:
        value = model.log_density(at(placed(v)), many).view(problems, chains)
        return (value + 0.5 * v.square().sum(1)).nan_to_num(-math.inf, -math.inf, -math.inf)

    v, kept = normal(), []
    value = ratio(v)
    v = torch.where(value.isfinite().unsqueeze(1), v, 0.0)
    for sweep in range(1, sweeps + 1):
        v, value = _slice(ratio, v, ratio(v), normal(), uniform)
        left = sweeps - sweep
        if sweep in (sweeps // 4, sweeps // 2):
            z = placed(v)[:, m:]
            shift, wide = _fitted(z)
            v = torch.cat([v[:, :m], torch.linalg.solve(wide, z - shift)], 1)
        elif left % _APART == 0 and left < _APART * keep:
            kept.append(at(placed(v)).view(problems, chains, size))
    q = torch.cat(kept, 1)
    _, theta, log_noise = model.parts(q)
    return theta, log_noise.expand(theta.shape[:-1])


def _fitted(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and root of a Gaussian a little wider than states [D, numbers, chains]."""
    mean = z.mean(-1, keepdim=True)
    covariance = (z - mean) @ (z - mean).mT / z.shape[-1]
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    return mean, torch.linalg.cholesky(_WIDER * covariance + 0.05 * eye)


def _slice(ratio, z: Tensor, value: Tensor, other: Tensor, uniform):  # type: ignore[no-untyped-def]
    """Return the next states of elliptical slice sampling, and their log ratios."""
    level = value + uniform().log()
    angle = 2 * math.pi * uniform()
    low, high = angle - 2 * math.pi, angle.clone()
    done = torch.zeros_like(value, dtype=torch.bool)
    found, now = z, value
    for _ in range(_TRIES):
        proposal = z * angle.cos().unsqueeze(1) + other * angle.sin().unsqueeze(1)
        new = ratio(proposal)
        taken = ~done & (new > level)
        found = torch.where(taken.unsqueeze(1), proposal, found)
        now = torch.where(taken, new, now)
        done = done | taken
        if bool(done.all()):
            break
        low = torch.where(angle < 0, angle, low)
        high = torch.where(angle >= 0, angle, high)
        angle = low + (high - low) * uniform()
    return found, now
