"""DP-BBB: the note's comparison of fixed batches with subsampling, corrected."""

from __future__ import annotations

import dataclasses

from dpbnn.privacy.accountants import ACCOUNTANTS
from dpbnn.privacy.events import gaussian_mu
from dpbnn.privacy.langevin import gdp_mu
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import Partition, Poisson

__all__ = ["PassComparison", "compare_passes"]


@dataclasses.dataclass(frozen=True)
class PassComparison:
    """Epsilon of the same passes over the data with and without amplification by sampling.

    Attributes:
        partition: epsilon with fixed disjoint batches, the note's DP-BBB; exact.
        poisson: epsilon with Poisson batches of the same expected size and number, by pld.
        mu_partition: Gaussian-DP parameter of the former, sqrt(passes)/sigma.
        mu_poisson: central-limit parameter of the latter, sqrt(passes q (exp(1/sigma^2) - 1)).
    """

    partition: float
    poisson: float
    mu_partition: float
    mu_poisson: float


def compare_passes(
    noise_multiplier: float, n: int, batch_size: int, epochs: int, delta: float
) -> PassComparison:
    """Compare fixed disjoint batches with Poisson batches at equal noise and length.

    The note argues that a pass over fixed disjoint batches touches a record once, so that T passes
    cost mu = sqrt(T)/sigma, which is right (zero-out; twice that under replace-one, where the note
    derives a sensitivity of 2C and then uses C). It then claims DP-SGD's bound to be the same,
    from an amplification of sqrt(b/n) per step. Amplification is b/n per step, so DP-SGD's mu is
    sqrt(T n/b) (b/n) sqrt(exp(1/sigma^2) - 1), smaller than the former by about sqrt(b/n).
    """
    fixed, poisson = Partition(n, batch_size), Poisson(n, batch_size)
    passes = [fixed.event(noise_multiplier, fixed.steps(epochs))]
    draws = [poisson.event(noise_multiplier, poisson.steps(epochs))]
    return PassComparison(
        partition=ACCOUNTANTS["exact"].epsilon(passes, delta),
        poisson=ACCOUNTANTS["pld"].epsilon(draws, delta),
        mu_partition=gaussian_mu(passes, Relation.ZERO_OUT),
        mu_poisson=gdp_mu(noise_multiplier, poisson.rate, draws[0].count),
    )
