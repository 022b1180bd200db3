"""Langevin dynamics as a private mechanism: Theorems 1 and 3 of the DP-BNN paper, both ways.

With learning rate eta, clip C, n records, expected batch b and temperature tau, a step is

    half-step:  w <- w - (eta/2) ((n/b) sum_i clip(g_i) + grad r) + N(0, eta tau)
    paper:      w <- w -  eta    ((n/b) sum_i clip(g_i) + grad r) + N(0, 2 eta tau)

and both sample exp(-U/tau). The paper's own noise variance eta is tau = 1/2, a squared posterior.
The injected noise is the privacy noise: with drift factor a = eta/2 or eta,

    sigma = std / (a (n/b) C) = (b / (n C)) sqrt(2 tau / a),

and the step is DP-SGD with learning rate n a, noise multiplier sigma and regulariser r/n.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dpbnn.privacy.checks import check_positive
from dpbnn.privacy.plan import Plan, plan

__all__ = [
    "DPSGD",
    "DPSGLD",
    "DRIFT",
    "gdp_mu",
    "gdp_noise_multiplier",
    "sgd_equivalent",
    "sgld_clip",
    "sgld_equivalent",
    "sgld_learning_rate",
    "sgld_mu",
    "sgld_noise_multiplier",
    "sgld_plan",
]

DRIFT = {"half-step": 0.5, "paper": 1.0}
"""Share of the learning rate that moves along the gradient, by convention."""
_TEMPERATURE = {"half-step": 1.0, "paper": 0.5}


@dataclasses.dataclass(frozen=True)
class DPSGD:
    """A DP-SGD run: w <- w - learning_rate (mean of clipped gradients + noise + grad r / n)."""

    learning_rate: float
    noise_multiplier: float
    clip: float


@dataclasses.dataclass(frozen=True)
class DPSGLD:
    """A DP-SGLD run, in the convention that it names; `plan` where it was planned for a budget."""

    learning_rate: float
    clip: float
    temperature: float
    convention: str
    noise_multiplier: float
    plan: Plan | None = None


def sgld_noise_multiplier(
    learning_rate: float,
    clip: float,
    n: int,
    batch_size: float,
    temperature: float | None = None,
    convention: str = "half-step",
) -> float:
    """Return the noise multiplier that an SGLD step has: sigma = (b/(nC)) sqrt(2 tau/a).

    Args:
        learning_rate: eta.
        clip: C, the largest norm of one record's gradient.
        n: number of records.
        batch_size: expected batch size b.
        temperature: tau; by default 1 for "half-step" and 1/2 for "paper".
        convention: "half-step" (drift eta/2) or "paper" (drift eta).

    Example:
        >>> round(sgld_noise_multiplier(5e-6, 1.5, 60_000, 256, convention="paper"), 5)
        1.27207
    """
    drift, tau = _convention(convention, temperature)
    check_positive(learning_rate=learning_rate, clip=clip, n=n, batch_size=batch_size)
    return batch_size / (n * clip) * math.sqrt(2 * tau / (drift * learning_rate))


def sgld_clip(
    noise_multiplier: float,
    learning_rate: float,
    n: int,
    batch_size: float,
    temperature: float | None = None,
    convention: str = "half-step",
) -> float:
    """Return the clip at which an SGLD step has this noise multiplier."""
    check_positive(noise_multiplier=noise_multiplier)
    unit = sgld_noise_multiplier(learning_rate, 1.0, n, batch_size, temperature, convention)
    return unit / noise_multiplier


def sgld_learning_rate(
    noise_multiplier: float,
    clip: float,
    n: int,
    batch_size: float,
    temperature: float | None = None,
    convention: str = "half-step",
) -> float:
    """Return the learning rate at which an SGLD step has this noise multiplier."""
    check_positive(noise_multiplier=noise_multiplier)
    unit = sgld_noise_multiplier(1.0, clip, n, batch_size, temperature, convention)
    return (unit / noise_multiplier) ** 2


def sgd_equivalent(
    learning_rate: float,
    clip: float,
    n: int,
    batch_size: float,
    temperature: float | None = None,
    convention: str = "half-step",
) -> DPSGD:
    """Return the DP-SGD run that equals this DP-SGLD run step for step (Theorem 1).

    The regulariser is divided by n on the DP-SGD side, which the theorem leaves out.
    """
    drift, _ = _convention(convention, temperature)
    sigma = sgld_noise_multiplier(learning_rate, clip, n, batch_size, temperature, convention)
    return DPSGD(n * drift * learning_rate, sigma, clip)


def sgld_equivalent(
    learning_rate: float,
    noise_multiplier: float,
    n: int,
    batch_size: float,
    clip: float | None = None,
    temperature: float | None = None,
    convention: str = "half-step",
) -> DPSGLD:
    """Return the DP-SGLD run that equals a DP-SGD run step for step (Theorem 1, backwards).

    A DP-SGD run with any clip is Langevin dynamics at some temperature, tau = (sigma n C/b)^2 a/2.
    Given the clip, that temperature is returned; without it, the clip that gives `temperature`.

    Args:
        learning_rate: of DP-SGD.
        noise_multiplier: of DP-SGD.
        n: number of records.
        batch_size: expected batch size.
        clip: of DP-SGD; leave it out to solve for it.
        temperature: wanted temperature where the clip is solved for; the convention's by default.
        convention: "half-step" or "paper".
    """
    drift, tau = _convention(convention, temperature)
    check_positive(learning_rate=learning_rate, noise_multiplier=noise_multiplier, n=n)
    eta = learning_rate / (n * drift)
    if clip is None:
        clip = sgld_clip(noise_multiplier, eta, n, batch_size, tau, convention)
    elif temperature is not None:
        raise ValueError("clip and temperature: give one of the two, the other follows")
    else:
        check_positive(clip=clip, batch_size=batch_size)
        tau = (noise_multiplier * n * clip / batch_size) ** 2 * drift * eta / 2
    return DPSGLD(eta, clip, tau, convention, noise_multiplier)


def gdp_mu(noise_multiplier: float, rate: float, steps: int) -> float:
    """Return mu = q sqrt(T (exp(1/sigma^2) - 1)), the central-limit approximation (Theorem 2).

    **No guarantee**: epsilon from this mu can lie below the truth; see the "gdp-clt" accountant.
    """
    check_positive(noise_multiplier=noise_multiplier, rate=rate, steps=steps)
    return rate * math.sqrt(steps * math.expm1(noise_multiplier**-2))


def gdp_noise_multiplier(mu: float, rate: float, steps: int) -> float:
    """Return the noise multiplier at which `gdp_mu` is mu."""
    check_positive(mu=mu, rate=rate, steps=steps)
    return 1 / math.sqrt(math.log1p(mu**2 / (rate**2 * steps)))


def sgld_mu(
    learning_rate: float,
    clip: float,
    n: int,
    batch_size: float,
    steps: int,
    temperature: float | None = None,
    convention: str = "half-step",
) -> float:
    """Return Theorem 3's mu = (b/n) sqrt(T (exp(1/sigma^2) - 1)) of an SGLD run.

    In the paper's convention 1/sigma^2 = n^2 eta C^2 / b^2; mu falls as the batch grows. To go
    back, `gdp_noise_multiplier` and then `sgld_clip` or `sgld_learning_rate`.
    """
    sigma = sgld_noise_multiplier(learning_rate, clip, n, batch_size, temperature, convention)
    return gdp_mu(sigma, batch_size / n, steps)


def sgld_plan(
    *,
    learning_rate: float | None = None,
    clip: float | None = None,
    temperature: float | None = None,
    convention: str = "half-step",
    **budget: Any,
) -> DPSGLD:
    """Plan an SGLD run: of learning rate, clip and noise two are free, the third follows.

    Args:
        learning_rate: eta; solved for if missing.
        clip: C; solved for if missing. With both given, sigma follows and epsilon or the number of
            steps is what the budget solves for.
        temperature: tau; by default 1 for "half-step" and 1/2 for "paper".
        convention: "half-step" or "paper".
        **budget: the arguments of `plan`.

    Example:
        >>> run = sgld_plan(learning_rate=5e-6, epsilon=1.0, delta=1e-5, n=60_000, batch_size=256,
        ...                 epochs=15)
        >>> round(run.clip, 2), run.plan.epsilon <= 1.0
        (3.22, True)
    """
    _, tau = _convention(convention, temperature)
    if learning_rate is None and clip is None:
        raise ValueError("learning_rate and clip are both missing: give one, the other follows")
    if budget.get("n") is None or budget.get("batch_size") is None:
        raise ValueError("n and batch_size: an SGLD plan needs both")
    scale: dict[str, Any] = {
        "n": budget["n"],
        "batch_size": budget["batch_size"],
        "temperature": tau,
        "convention": convention,
    }
    if learning_rate is not None and clip is not None:
        sigma = sgld_noise_multiplier(learning_rate, clip, **scale)
        given = budget.get("noise_multiplier")
        if given is not None and not math.isclose(given, sigma, rel_tol=1e-9):
            raise ValueError(
                f"noise_multiplier={given:g}: learning_rate={learning_rate:g} and clip={clip:g} "
                f"make it {sigma:.6g}; leave one of the three out"
            )
        settled = plan(**{**budget, "noise_multiplier": sigma})
    else:
        settled = plan(**budget)
        sigma = settled.noise_multiplier
        if learning_rate is not None:
            clip = sgld_clip(sigma, learning_rate, **scale)
        elif clip is not None:
            learning_rate = sgld_learning_rate(sigma, clip, **scale)
    assert learning_rate is not None
    assert clip is not None
    return DPSGLD(learning_rate, clip, tau, convention, settled.noise_multiplier, settled)


def _convention(convention: str, temperature: float | None) -> tuple[float, float]:
    """Return the drift per learning rate and the temperature."""
    if convention not in DRIFT:
        raise ValueError(f"convention={convention!r}: must be 'half-step' or 'paper'")
    if temperature is None:
        temperature = _TEMPERATURE[convention]
    check_positive(temperature=temperature)
    return DRIFT[convention], temperature
