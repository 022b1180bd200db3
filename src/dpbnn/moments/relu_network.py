"""Moments of ReLU networks with independent Gaussian weights: probabilistic back-propagation."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.moments.model import Factors, MomentModel, Moments, Natural
from dpbnn.posteriors import NaturalPosterior, Posterior
from dpbnn.posteriors.natural import FAR, LinearMoments, linear_layers, propagate
from dpbnn.priors import Gaussian, Prior

__all__ = ["NetworkMoments"]

_CAP = 0.8  # largest v k: one example takes at most this share of a weight's variance
_NOISE_RANGE = (1e-6, 1e4)  # of a learned noise variance


@dataclasses.dataclass(frozen=True)
class _Pass:
    """What one layer keeps of a forward pass for the backward one."""

    layer: LinearMoments
    z: Tensor
    z_variance: Tensor | None
    m: Tensor
    v: Tensor


class NetworkMoments(MomentModel):
    """Linear and ReLU layers, Gaussian noise: moments as in Hernandez-Lobato and Adams (2015).

    Weights are w = u / sqrt(n), n the number of inputs of a layer with its bias; all Gaussians here
    are over u. A layer of input moments (z, v_z) has output moments

        m_a = M z / sqrt(n),   v_a = ((V + M^2) v_z + V z^2) / n,

    a ReLU those of a rectified Gaussian, and log Z = log N(y; m, v + s). With g_m, g_v the
    derivatives of log Z by a weight's mean and variance and k = g_m^2 - 2 g_v, an example's factor
    is

        f_2 = k / (1 - v k),   f_1 - m f_2 = g_m / (1 - v k),   v k <= 0.8.

    Args:
        model: Linear and ReLU layers in a Sequential.
        likelihood: Gaussian; with noise_std=None the noise is learned as an extra coordinate.
        prior: Gaussian, of the scaled weights u.
        n: number of records, which sets the scale of the noise's coordinate.
        start_variance: of the weights u at the start, as a share of the prior's.
        noise_start: noise variance at which learning begins.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: object,
        prior: Prior,
        n: int,
        *,
        start_variance: float = 1.0,
        noise_start: float = 1.0,
    ) -> None:
        self.layers = linear_layers(model)
        if type(likelihood) is not GaussianNoise:
            raise UnsupportedModel(
                f"likelihood={likelihood!r}: moments are known for Gaussian targets; use "
                f"'gaussian' or dpbnn.likelihoods.Gaussian(noise_std)"
            )
        if not isinstance(prior, Gaussian) or prior.mean != 0:
            raise UnsupportedModel(
                f"prior={prior}: must be Gaussian with mean 0; use dpbnn.Gaussian(std)"
            )
        self.model, self.likelihood, self.n = model, likelihood, n
        self.precision = 1 / prior.std**2
        self.start_variance = start_variance
        self.learned = likelihood.noise_std is None
        self.noise = noise_start if likelihood.noise_std is None else likelihood.noise_std**2
        weights = {name: layer.joined() for name, layer in self.layers.items()}
        self.means = {
            name: value.double() / self.layers[name].scale for name, value in weights.items()
        }

    def prior(self) -> Natural:
        """Return N(0, std^2) of every scaled weight."""
        return Natural(
            {name: torch.zeros_like(m) for name, m in self.means.items()},
            {name: torch.full_like(m, self.precision) for name, m in self.means.items()},
        )

    def start(self) -> Natural:
        """Return the network's own random weights as means, with a share of the prior variance."""
        variance = self.start_variance / self.precision
        return Natural.of(
            Moments(self.means, {n: torch.full_like(m, variance) for n, m in self.means.items()})
        )

    def extra(self) -> Mapping[str, torch.Size]:
        """Return the shape of the noise's coordinate, where it is learned."""
        return {"noise": torch.Size([])} if self.learned else {}

    def factors(self, cavity: Moments, x: Tensor, y: Tensor) -> Factors:
        """Return every example's factor by one hand-written backward pass."""
        passes, m, v = self._forward(cavity, x)
        g_m, g_v = self._head(m, v, y)
        extra: dict[str, Tensor] = {}
        if self.learned:
            extra["noise"] = math.sqrt(2 / self.n) * self.noise * g_v.sum(1)
        slope: dict[str, Tensor] = {}
        curvature: dict[str, Tensor] = {}
        for name, kept, by_mean, by_variance in _backward(passes, g_m, g_v):
            variance = kept.layer.variance
            gradient, k = _derivatives(kept, by_mean, by_variance)
            share = (k * variance).clamp_(max=_CAP)
            left = 1 - share
            slope[name] = gradient.div_(left)
            curvature[name] = share.div_(left).div_(variance)
        return Factors(slope, curvature, extra)

    def _head(self, m: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of log N(y; m, v + s) by m and v."""
        total = v + self.noise
        g_m = (y.reshape(m.shape) - m) / total
        return g_m, 0.5 * (g_m.square() - 1 / total)

    def moved_noise(self, extra: Mapping[str, Tensor], step: float) -> float:
        """Return the noise variance after a natural-gradient step of its logarithm.

        The Fisher information of log s is n/2; the coordinate is sqrt(2/n) d log Z / d log s.
        """
        low, high = _NOISE_RANGE
        move = step * math.sqrt(2 / self.n) * self.n * float(extra["noise"])
        return min(max(self.noise * math.exp(min(max(move, -1.0), 1.0)), low), high)

    def posterior(self, natural: Natural, **record: Any) -> Posterior:
        """Return independent Gaussian weights that predict by moment propagation."""
        moments = natural.moments()
        model = copy.deepcopy(self.model)
        std: dict[str, Tensor] = {}
        for name, layer in linear_layers(model).items():
            layer.split(moments.mean[name] * layer.scale)
            std |= layer.named(moments.covariance[name].sqrt() * layer.scale)
        return NaturalPosterior(model, GaussianNoise(math.sqrt(self.noise)), std, **record)

    def _forward(self, moments: Moments, x: Tensor) -> tuple[list[_Pass], Tensor, Tensor]:
        placed = {
            name: layer.at(moments.mean[name], moments.covariance[name])
            for name, layer in self.layers.items()
        }
        kept: list[_Pass] = []

        def note(name: str, z: Tensor, z_variance: Tensor | None, m: Tensor, v: Tensor) -> None:
            kept.append(_Pass(placed[name], z, z_variance, m, v))

        like = next(iter(placed.values())).mean
        m, v = propagate(placed, x.flatten(1).to(like), note)
        return kept, m, v


def _backward(
    passes: list[_Pass], g_m: Tensor, g_v: Tensor
) -> Iterator[tuple[str, _Pass, Tensor, Tensor]]:
    """Yield, from the last layer to the first, the derivatives by a layer's output moments."""
    for index in reversed(range(len(passes))):
        kept = passes[index]
        layer, scale = kept.layer, kept.layer.scale
        yield layer.name, kept, g_m, g_v
        if index == 0:
            return
        inputs = kept.z.shape[1] - layer.bias
        mean, variance = layer.mean[:, :inputs], layer.variance[:, :inputs]
        z = kept.z[:, :inputs]
        by_mean = scale * (g_m @ mean) + 2 * scale**2 * z * (g_v @ variance)
        by_variance = scale**2 * (g_v @ (variance + mean.square()))
        before = passes[index - 1]
        std = before.v.sqrt()
        ratio = (before.m / std).clamp(-FAR, FAR)
        upper = _normal_cdf(ratio)
        density = torch.exp(-0.5 * ratio.square()) / math.sqrt(2 * math.pi)
        g_m = by_mean * upper + by_variance * 2 * z * _normal_cdf(-ratio)
        g_v = by_mean * density / (2 * std) + by_variance * (upper - z * density / std)


def _derivatives(kept: _Pass, g_m: Tensor, g_v: Tensor) -> tuple[Tensor, Tensor]:
    """Return g and k = g^2 - 2 d log Z / dv of every weight, [batch, out, in]."""
    layer, scale = kept.layer, kept.layer.scale
    gradient = (scale * g_m).unsqueeze(2) * kept.z.unsqueeze(1)
    spread = kept.z.square()
    if kept.z_variance is not None:
        spread = spread + kept.z_variance
        more = (2 * scale**2 * g_v).unsqueeze(2) * kept.z_variance.unsqueeze(1)
        gradient.addcmul_(more, layer.mean)
    by_variance = (2 * scale**2 * g_v).unsqueeze(2) * spread.unsqueeze(1)
    return gradient, gradient.square().sub_(by_variance)


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2))
