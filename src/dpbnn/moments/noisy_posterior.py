"""The posterior of noised moments: a mode, and draws by elliptical slice sampling.

It sees released numbers alone, and may import nothing of training. See `noisy` for the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dpbnn.moments.noisy import LOG_NOISE, Model, Released

__all__ = ["covariance", "exact", "mode", "sample"]

_SWEEPS = 48  # of slice sampling; states after an eighth, a quarter and a half fit its reference
_TRIES = 6  # of a sweep, after which a chain stays where it is
_MANY = 24  # coefficients, beyond which A is drawn from the Gaussian at the mode
_FEW = 1 / 3  # coordinates a chain, up to which the reference is fitted to those of A too
_WIDER = 1.3  # reference of the sampler over the Gaussian at the mode


def mode(model: Model, data: Released, start: Tensor | None = None, steps: int = 30) -> Tensor:
    """Return a mode of the posterior, by damped Fisher scoring."""
    q = model.start(data) if start is None else start
    damping = torch.full((len(q),), 1e-2, dtype=q.dtype)
    value, gradient = _gradient(model, q, data)
    eye = torch.eye(q.shape[1], dtype=q.dtype)
    better = torch.ones(len(q), dtype=torch.bool)
    for step in range(steps):
        if step < 2 or (step % 3 == 0 and bool(better.any())):  # it changes little
            matrix = _precision(model, q, data)
        root = torch.linalg.cholesky(matrix + damping[:, None, None] * eye)
        move = torch.cholesky_solve(gradient.unsqueeze(-1), root).squeeze(-1)
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
    weight = weight - 0.5 * ((grid - math.log(model.scale)) / LOG_NOISE).square()
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
    sweeps: int | None = None,
    keep: int = 4,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return draws of theta [D, draws, p] and of log s [D, draws].

    Every chain begins at a draw of the Gaussian at the mode and is moved by elliptical slice
    sampling; states of the second half are returned. What it moves along is fitted to the states of
    all chains. Of more coefficients than `_MANY`, the entries of A stay at that draw, and the rest
    moves given them.
    """
    sweeps = sweeps or _SWEEPS
    centre = mode(model, data, start)
    root = torch.linalg.cholesky(_precision(model, centre, data))
    size, problems, m = centre.shape[1], len(centre), model.triangle
    if size <= _FEW * chains and model.size <= _MANY:
        m = 0  # coordinates whose reference stays that of the mode
    many = data.repeated(chains)

    def normal() -> Tensor:
        return torch.randn(problems, size - fixed, chains, dtype=centre.dtype, generator=generator)

    def uniform() -> Tensor:
        return torch.rand(problems, chains, dtype=centre.dtype, generator=generator)

    shift = torch.zeros(problems, size - m, 1, dtype=centre.dtype)
    wide = _WIDER * torch.eye(size - m, dtype=centre.dtype).expand(problems, -1, -1)
    fixed = 0
    start_at = centre.unsqueeze(-1)
    axes = torch.linalg.solve_triangular(root.mT, torch.eye(size, dtype=centre.dtype), upper=True)
    if model.size > _MANY:
        drawn, fixed = normal()[:, :m], m
        start_at, axes = start_at + axes[:, :, :m] @ drawn, axes[:, :, m:]

    def placed(v: Tensor) -> Tensor:
        return torch.cat([v[:, : m - fixed], shift + wide @ v[:, m - fixed :]], 1)

    def at(v: Tensor) -> Tensor:
        return (start_at + axes @ placed(v)).mT.reshape(problems * chains, size)

    def ratio(v: Tensor) -> Tensor:
        value = model.log_density(at(v), many).view(problems, chains)
        return (value + 0.5 * v.square().sum(1)).nan_to_num(-math.inf, -math.inf, -math.inf)

    v, kept = normal(), []
    apart = max(1, sweeps // (2 * keep))
    v = torch.where(ratio(v).isfinite().unsqueeze(1), v, 0.0)
    for sweep in range(1, sweeps + 1):
        v = _slice(ratio, v, normal(), uniform)
        left = sweeps - sweep
        if sweep in (sweeps // 8, sweeps // 4, sweeps // 2):
            z = placed(v)[:, m - fixed :]
            shift, wide = _fitted(z)
            v = torch.cat([v[:, : m - fixed], torch.linalg.solve(wide, z - shift)], 1)
        elif left % apart == 0 and left < apart * keep:
            kept.append(at(v).view(problems, chains, size))
    _, theta, log_noise = model.parts(torch.cat(kept, 1))
    return theta, log_noise.expand(theta.shape[:-1])


def _fitted(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and root of a Gaussian that is a little wider than states [D, :, chains]."""
    mean = z.mean(-1, keepdim=True)
    covariance = (z - mean) @ (z - mean).mT / z.shape[-1]
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    return mean, torch.linalg.cholesky(_WIDER * covariance + 0.05 * eye)


def _slice(
    ratio: Callable[[Tensor], Tensor],
    v: Tensor,
    other: Tensor,
    uniform: Callable[[], Tensor],
) -> Tensor:
    """Return the next states of elliptical slice sampling.

    Args:
        ratio: log density of states over the standard normal's.
        v: states [D, numbers, chains].
        other: standard normal draws, likewise.
        uniform: draws [D, chains].
    """
    level = ratio(v) + uniform().log()
    angle = 2 * math.pi * uniform()
    low, high = angle - 2 * math.pi, angle
    found, done = v, torch.zeros_like(level, dtype=torch.bool)
    for _ in range(_TRIES):
        proposal = v * angle.cos().unsqueeze(1) + other * angle.sin().unsqueeze(1)
        taken = ~done & (ratio(proposal) > level)
        found = torch.where(taken.unsqueeze(1), proposal, found)
        done = done | taken
        if bool(done.all()):
            break
        low = torch.where(angle < 0, angle, low)
        high = torch.where(angle >= 0, angle, high)
        angle = low + (high - low) * uniform()
    return found
