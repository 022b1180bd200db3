"""DP-SEP on a mixture as the paper's code runs it, for many settings at once.

It shows what the printed tables rest on, on generated data. Nothing here is private: the records
are visited in a fixed order, steps are left out without noise, and the noise is torch's.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from dpbnn.privacy.accountants import gaussian_epsilon

__all__ = ["AUTODP", "Printed", "run_printed", "true_epsilon"]

AUTODP = {1.0: (4.13, 8131.0), 5.0: (0.972, 3.475), 50.0: (0.449, 0.632)}
"""Noise multipliers of means and precisions that the code gets from autodp, by claimed epsilon:
4/5 and 1/5 of the budget, rate 1/N, 100 N steps, C = 1."""


@dataclasses.dataclass(frozen=True)
class Printed:
    """A run: its clip, infinite for none, and the noise multipliers of means and precisions."""

    clip: float
    sigmas: tuple[float, float] = (0.0, 0.0)


def true_epsilon(run: Printed, passes: int, delta: float = 1e-5) -> float:
    """Return the epsilon of passes in a fixed order: every record enters one release a pass.

    The noise is the multiplier times 2 C gamma / N, which is what exchanging a record may move, so
    mu^2 = passes (1/sigma_1^2 + 1/sigma_2^2) under replace-one.
    """
    mu = math.sqrt(passes * sum(s**-2 for s in run.sigmas))
    return gaussian_epsilon(mu, delta)


def run_printed(
    x: Tensor,
    centres: Tensor,
    prior_variance: float,
    noise_std: float,
    runs: list[Printed],
    passes: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return means [runs, J, D] and covariances [runs, J, D, D] after passes of Algorithm 3.

    Natural parameters are (V^-1 m, V^-1), one pair a component, and q = prior f^N. A record's
    factor is clipped in two blocks, and f moves by (1/N^2) (clipped factor - f) as printed, gamma
    being 1. A step whose update is not positive definite without the noise is left out.

    Args:
        x: points of every run [runs, N, D], visited in order.
        centres: prior means [J, D].
        prior_variance: of the prior means.
        noise_std: within a component.
        runs: settings.
        passes: T.
        generator: of the noise.
    """
    count, n, d = x.shape
    eye = torch.eye(d, dtype=x.dtype)
    clip = torch.tensor([run.clip for run in runs], dtype=x.dtype)[:, None, None]
    scale = 2 * torch.nan_to_num(clip, posinf=0.0) / n
    noise = torch.tensor([run.sigmas for run in runs], dtype=x.dtype)
    first = (centres / prior_variance).expand(count, -1, -1)
    second = (eye / prior_variance).expand(count, len(centres), d, d)
    prior = _clipped(first, clip), _clipped(second, clip.unsqueeze(-1))
    factor = torch.zeros_like(prior[0]), torch.zeros_like(prior[1])
    noisy = noise[:, 0] > 0
    back = torch.cat([noisy.nonzero()[:, 0], (~noisy).nonzero()[:, 0]]).argsort()
    for _ in range(passes):
        for point in x.unbind(1):
            whole = [p + n * f for p, f in zip(prior, factor, strict=True)]
            cavity = [q - f for q, f in zip(whole, factor, strict=True)]
            matched = _matched(point, *cavity, noise_std)
            new = [m - c for m, c in zip(matched, cavity, strict=True)]
            new = [_clipped(new[0], clip), _clipped(new[1], clip.unsqueeze(-1))]
            ok = torch.isfinite(new[0]).all(-1).all(-1) & torch.isfinite(new[1]).flatten(1).all(-1)
            moved = [
                n * f + (torch.nan_to_num(g) - f) / n for f, g in zip(factor, new, strict=True)
            ]
            ok &= torch.linalg.cholesky_ex(prior[1] + moved[1]).info.eq(0).all(-1)
            e = torch.randn(moved[0].shape, generator=generator, dtype=x.dtype)
            upper = torch.randn(moved[1].shape, generator=generator, dtype=x.dtype).triu()
            moved[0] = moved[0] + noise[:, 0, None, None] * scale * e
            spread = noise[:, 1, None, None] * scale
            moved[1] = moved[1] + spread.unsqueeze(-1) * (upper + upper.triu(1).mT)
            moved[1] = torch.cat([_positive(moved[1][noisy]), moved[1][~noisy]])[back]
            parts = (
                _clipped(moved[0] / n, clip),
                _clipped(moved[1] / n, clip.unsqueeze(-1)),
            )
            factor = (
                torch.where(ok[:, None, None], parts[0], factor[0]),
                torch.where(ok[:, None, None, None], parts[1], factor[1]),
            )
    precision = prior[1] + n * factor[1]
    natural = prior[0] + n * factor[0]
    covariance = torch.linalg.inv(precision)
    return (covariance @ natural.unsqueeze(-1)).squeeze(-1), covariance


def _matched(point: Tensor, first: Tensor, second: Tensor, noise_std: float) -> tuple[Tensor, ...]:
    """Return the natural parameters of the moments of likelihood times cavity, by component."""
    covariance = torch.linalg.inv(second)
    mean = (covariance @ first.unsqueeze(-1)).squeeze(-1)
    total = covariance + noise_std**2 * torch.eye(point.shape[-1], dtype=point.dtype)
    gap = point.unsqueeze(1) - mean
    solved = torch.linalg.solve(total, torch.cat([gap.unsqueeze(-1), covariance], -1))
    quadratic = (gap * solved[..., 0]).sum(-1)
    share = torch.softmax(-0.5 * (torch.linalg.slogdet(total)[1] + quadratic), -1)
    shift = (covariance @ solved[..., :1]).squeeze(-1)
    r = share[..., None, None]
    new = (
        covariance
        + r * (1 - r) * shift.unsqueeze(-1) * shift.unsqueeze(-2)
        - r * covariance @ solved[..., 1:]
    )
    precision = torch.linalg.inv(new)
    moved = mean + share.unsqueeze(-1) * shift
    return (precision @ moved.unsqueeze(-1)).squeeze(-1), precision


def _clipped(value: Tensor, clip: Tensor) -> Tensor:
    """Return a block of every run at norm C at most, over all components together."""
    norm = value.flatten(1).norm(dim=1).view(clip.shape)
    return value * torch.clamp(clip / norm.clamp(min=1e-300), max=1.0)


def _positive(value: Tensor) -> Tensor:
    values, axes = torch.linalg.eigh(value)
    fixed = torch.where(values <= 0, torch.full_like(values, 1e-4), values)
    return (axes * fixed.unsqueeze(-2)) @ axes.mT
