"""How far a posterior of a mixture's means is from the truth."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

__all__ = [
    "MixtureError",
    "confidence_ring",
    "label_posterior",
    "match_components",
    "mixture_error",
]


@dataclasses.dataclass(frozen=True)
class MixtureError:
    """Distances between matched components, averaged over the components.

    Attributes:
        mean: squared distance of the means, sum over entries; the DP-SEP paper's "F-norm".
        covariance: squared distance of the covariances, likewise; nan where a method has none.
        root_mean: distance of the means, not squared.
        root_covariance: Frobenius distance of the covariances, not squared; nan likewise.
        matching: for every component of the truth, the component that stands for it.
    """

    mean: float
    covariance: float
    root_mean: float
    root_covariance: float
    matching: tuple[int, ...]

    @property
    def average(self) -> float:
        """Mean of the squared distances of means and covariances, as in the paper's Table 1."""
        return (self.mean + self.covariance) / 2


def match_components(means: Tensor, truth: Tensor) -> list[int]:
    """Return for every true mean the component that stands for it, by greedy matching.

    The closest pair is matched first, then the closest of the rest, and so on.

    Args:
        means: [J, D].
        truth: [J, D].
    """
    if means.shape != truth.shape or means.dim() != 2:
        raise ValueError(
            f"means have shape {list(means.shape)} and the truth {list(truth.shape)}; both must be "
            f"[components, dimensions]."
        )
    distances = torch.cdist(truth.double(), means.double())
    if not distances.isfinite().all():
        raise ValueError("the means must be finite; check the training.")
    found = [0] * len(truth)
    for _ in range(len(truth)):
        row, column = divmod(int(distances.argmin()), len(truth))
        found[row] = column
        distances[row], distances[:, column] = math.inf, math.inf
    return found


def mixture_error(
    means: Tensor,
    true_means: Tensor,
    covariances: Tensor | None = None,
    true_covariances: Tensor | None = None,
) -> MixtureError:
    """Return how far means, and covariances of the means, are from the truth.

    What the DP-SEP paper calls the F-norm is the squared one, sum_ij (A_ij - B_ij)^2, averaged
    over the components; the root of each component's, averaged, is given beside it.

    Args:
        means: [J, D].
        true_means: [J, D].
        covariances: posterior covariances of the means, [J, D, D]; not those within components.
        true_covariances: likewise of the true posterior.
    """
    order = match_components(means, true_means)
    mean = (means[order] - true_means).double().square().sum(-1)
    spread = torch.full_like(mean, math.nan)
    if covariances is not None and true_covariances is not None:
        spread = (covariances[order] - true_covariances).double().square().sum((-2, -1))
    return MixtureError(
        float(mean.mean()),
        float(spread.mean()),
        float(mean.sqrt().mean()),
        float(spread.sqrt().mean()),
        tuple(order),
    )


def label_posterior(
    x: Tensor, labels: Tensor, centres: Tensor, prior_std: float, noise_std: float
) -> tuple[Tensor, Tensor]:
    """Return means and covariances of the posterior of the means when the labels are known.

        P_j = (1/std^2 + N_j/s^2) I,    m_j = P_j^-1 (centre_j/std^2 + sum_{i in j} x_i / s^2)

    It is what a mixture's posterior comes to where the components are well apart.

    Args:
        x: points, [n, D].
        labels: the component of each point, [n].
        centres: prior means, [J, D].
        prior_std: prior standard deviation of the means about the centres.
        noise_std: s, within a component.
    """
    hot = torch.nn.functional.one_hot(labels.long(), len(centres)).to(centres)
    precision = prior_std**-2 + hot.sum(0) / noise_std**2
    natural = centres / prior_std**2 + hot.T @ x.to(centres) / noise_std**2
    eye = torch.eye(x.shape[1]).to(centres)
    return natural / precision.unsqueeze(-1), eye / precision[:, None, None]


def confidence_ring(mean: Tensor, covariance: Tensor, level: float = 0.98) -> Tensor:
    """Return points on the ellipse that holds `level` of a two-dimensional Gaussian, [100, 2].

    (t - m)^T V^-1 (t - m) = -2 log(1 - level)
    """
    if mean.shape != (2,) or covariance.shape != (2, 2):
        raise ValueError(
            f"mean has shape {list(mean.shape)} and covariance {list(covariance.shape)}; a ring "
            f"needs [2] and [2, 2]."
        )
    values, axes = torch.linalg.eigh(covariance)
    angle = torch.linspace(0, 2 * math.pi, 100, dtype=mean.dtype)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    radius = math.sqrt(-2 * math.log1p(-level))
    return mean + radius * (circle * values.clamp(min=0).sqrt()) @ axes.T
