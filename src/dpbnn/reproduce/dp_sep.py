"""DP-SEP (stochastic expectation propagation): the paper's error measures and bounds.

The error measures compare the posterior of a mixture's means with the truth. The bounds say what
clipping and noise do to a Gaussian posterior; where the printed formula is wrong, it is corrected.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

__all__ = [
    "MixtureError",
    "NoisyPosterior",
    "clipping_kl",
    "confidence_ring",
    "gaussian_kl",
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
        matching: for every component of the truth, the component matched to it.
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
    """Return for every true mean the component matched to it, greedily.

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

    A mixture's posterior approaches it where the components are well apart.

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


def gaussian_kl(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Return KL(q || p) of Gaussians in natural parameters (eta, Lambda).

        2 KL = Tr(D Lq^-1) - log |Lp Lq^-1| + (g - D m)^T Lp^-1 (g - D m),
        D = Lp - Lq,  g = eta_p - eta_q,  m = Lq^-1 eta_q

    Args:
        first: eta_q [d] and Lambda_q [d, d].
        second: eta_p [..., d] and Lambda_p [..., d, d].
    """
    (eta, precision), (other_eta, other) = first, second
    root, other_root = torch.linalg.cholesky(precision), torch.linalg.cholesky(other)
    mean = torch.cholesky_solve(eta.unsqueeze(-1), root)
    change = other - precision
    moved = (other_eta - eta).unsqueeze(-1) - change @ mean
    distance = torch.linalg.solve_triangular(other_root, moved, upper=False).square().sum((-2, -1))
    trace = (change @ torch.cholesky_inverse(root)).diagonal(dim1=-2, dim2=-1).sum(-1)
    return 0.5 * (trace - _log_det(other_root) + _log_det(root) + distance)


def clipping_kl(eta: Tensor, precision: Tensor, clip: float) -> float:
    """Return KL(q || p) of a posterior q and p, whose natural parameters are clipped to norm C.

        2 KL = d/m + (b^2/m) eta^T Lambda^-1 eta - d + d log m,
        m = max(1, |Lambda|_F/C),  b = m / max(1, |eta|/C) - 1

    The DP-SEP paper's appendix A prints d m for d/m, though Tr(Lambda_p Lambda_q^-1) = d/m, and
    |Sigma_q|_F for |Lambda_q|_F in the logarithm; this is the corrected formula.

    Args:
        eta: first natural parameter of q, [d].
        precision: Lambda, second natural parameter of q, [d, d].
        clip: C, for each of the two.
    """
    if not clip > 0:
        raise ValueError(f"clip={clip}: must be > 0")
    d = len(eta)
    m = max(1.0, float(precision.norm()) / clip)
    b = m / max(1.0, float(eta.norm()) / clip) - 1
    fit = float(eta @ torch.linalg.solve(precision, eta))
    return 0.5 * (d / m + b**2 / m * fit - d + d * math.log(m))


@dataclasses.dataclass(frozen=True)
class NoisyPosterior:
    """A Gaussian posterior q and what one release of noise makes of it, p.

        eta_p = eta_q + e,    Lambda_p = repaired(Lambda_q + E)

    with e of independent entries N(0, sigma_1^2) and E symmetric, its upper triangle of independent
    entries N(0, sigma_2^2); v(E) = d sigma_2^2. Two repairs make Lambda_p a precision:

        "shift": Lambda_q + E + (rho - lowest eigenvalue) I, the paper's definition 4.2. It always
            has the lowest eigenvalue rho, and so does not go away with the noise unless rho is
            the lowest eigenvalue of Lambda_q;
        "lift": eigenvalues below rho become rho, as the paper's Algorithm 3 does.

    Attributes:
        eta: eta_q, [d].
        precision: Lambda_q, [d, d].
        sigma_1: std of the noise on eta.
        sigma_2: std of the noise on Lambda.
        rho: lowest eigenvalue after repair.
    """

    eta: Tensor
    precision: Tensor
    sigma_1: float
    sigma_2: float
    rho: float

    def __post_init__(self) -> None:
        if not self.rho > 0 or self.sigma_1 < 0 or self.sigma_2 < 0:
            raise ValueError(
                f"rho={self.rho}, sigma_1={self.sigma_1}, sigma_2={self.sigma_2}: rho must be > 0 "
                f"and the sigmas >= 0"
            )

    @property
    def variance(self) -> float:
        """The matrix variance v(E) = |E[E^2]| = d sigma_2^2."""
        return len(self.eta) * self.sigma_2**2

    def simulated(self, repair: str, draws: int, generator: torch.Generator) -> Tensor:
        """Return KL(q || p) for draws of the noise, [draws]."""
        d = len(self.eta)
        e = torch.randn(draws, d, generator=generator, dtype=self.eta.dtype)
        noise = torch.randn(draws, d, d, generator=generator, dtype=self.eta.dtype).triu()
        noise = self.sigma_2 * (noise + noise.triu(1).mT)
        repaired = self.precision + noise
        if self.sigma_2 > 0:
            repaired = _repaired(repaired, self.rho, repair)
        return gaussian_kl((self.eta, self.precision), (self.eta + self.sigma_1 * e, repaired))

    def bound(self, repair: str = "lift") -> float:
        """Return an upper bound on E[KL(q || p)], over all noise and with no conditions.

        With D = Lambda_p - Lambda_q, m the mean of q and S = Lambda_q^-1 + m m^T, log(1+x) >=
        x/(1+x) for the eigenvalues of Lambda_q^-1/2 D Lambda_q^-1/2 gives

            2 E KL <= sigma_1^2 E Tr(Lambda_p^-1) + E Tr(S D Lambda_p^-1 D).

        "shift": Lambda_p >= rho I and |D - E| <= |a| + |E|, a = rho - lowest(Lambda_q), so with
        t^2 = min(d v, 2 v (1 + log 2d)) >= E|E|^2

            2 E KL <= (d sigma_1^2 + Tr(S) (sqrt(v) + |a| + t)^2) / rho.

        "lift", for rho below all eigenvalues: the projection moves nothing where |E| <= M < lowest
        - rho, and is non-expansive elsewhere, so with P = min(1, 2d exp(-M^2/2v)) and
        |E|_F^4 = sigma_2^4 (d^4 + 4 d^2 - 2 d) on average

            2 E KL <= (d sigma_1^2 + v Tr(S)) / (lowest - M)
                      + (d sigma_1^2 P + |S| sqrt(P E|E|_F^4)) / rho,

        the least over M and the bound without the event, (d sigma_1^2 + |S| d v) / rho.

        Args:
            repair: "lift" or "shift".
        """
        if self.sigma_2 == 0:
            return 0.5 * self.sigma_1**2 * float(torch.linalg.inv(self.precision).trace())
        d, v = len(self.eta), self.variance
        mean = torch.linalg.solve(self.precision, self.eta)
        second = torch.linalg.inv(self.precision) + torch.outer(mean, mean)
        lowest = float(torch.linalg.eigvalsh(self.precision)[0])
        first = d * self.sigma_1**2
        if repair == "shift":
            reach = math.sqrt(min(d * v, 2 * v * (1 + math.log(2 * d))))
            moved = math.sqrt(v) + abs(self.rho - lowest) + reach
            return 0.5 * (first + float(second.trace()) * moved**2) / self.rho
        if repair != "lift":
            raise ValueError(f"repair={repair!r}: must be 'lift' or 'shift'")
        if self.rho > lowest:
            raise ValueError(
                f"rho={self.rho:g}: lifting must leave q alone; give at most its lowest eigenvalue "
                f"{lowest:g}"
            )
        norm = float(torch.linalg.matrix_norm(second, 2))
        fourth = self.sigma_2**4 * (d**4 + 4 * d**2 - 2 * d)
        best = (first + norm * d * v) / self.rho
        for share in torch.linspace(0.01, 0.99, 99).tolist():
            reach = share * (lowest - self.rho)
            outside = min(1.0, 2 * d * math.exp(-(reach**2) / (2 * v)))
            tail = (first * outside + norm * math.sqrt(outside * fourth)) / self.rho
            best = min(best, (first + v * float(second.trace())) / (lowest - reach) + tail)
        return 0.5 * best

    def printed_bound(self, reach: float) -> float:
        """Return the right side of Theorem 4.1 (equation 8) as printed; infinite where h <= 0.

        It is here for comparison only:

        - h > 0 for the lowest eigenvalue means rho > 2 M. With the small rho of the paper, h <= 0
          and E[1/X] <= (h + H - E X)/(h H) says nothing.
        - eigenvalues of Lambda_q^-1/2 (E + A) Lambda_q^-1/2 are taken as ratios of eigenvalues,
          and b is squared entry by entry in another basis than theirs. Both need matrices
          that commute.
        - an expectation over all noise is bounded on an event of probability
          1 - d exp(-M^2/2v), of which two are needed.

        Args:
            reach: M, for which the noise has |E| <= M with the probability above.
        """
        d, v, rho = len(self.eta), self.variance, self.rho
        values, axes = torch.linalg.eigh(self.precision)
        lowest, gap = float(values[0]), math.sqrt(2 * v * math.log(d))
        low = 1 + (rho - lowest - 2 * reach) / values
        high = 1 + (rho - lowest + 2 * reach) / values
        if not bool((low > 0).all()):
            return math.inf
        inverse = (low + high - 1 + (lowest + gap - rho) / values) / (low * high)
        root = (axes * values.rsqrt()) @ axes.T
        b, a = root @ self.eta, torch.linalg.solve(self.precision, self.eta)
        shift = rho - lowest + gap
        terms = (
            shift * (1 / values).sum(),
            self.sigma_1**2 / lowest * inverse.sum(),
            (b.square() * inverse).sum() - self.eta @ a,
            shift * a @ a,
            inverse.log().sum(),
        )
        return 0.5 * float(sum(terms))


def _repaired(matrices: Tensor, rho: float, repair: str) -> Tensor:
    values, axes = torch.linalg.eigh(matrices)
    if repair == "shift":
        values = values - values[..., :1] + rho
    elif repair == "lift":
        values = values.clamp(min=rho)
    else:
        raise ValueError(f"repair={repair!r}: must be 'lift' or 'shift'")
    return (axes * values.unsqueeze(-2)) @ axes.mT


def _log_det(root: Tensor) -> Tensor:
    return 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
