"""What an attacker can achieve, from the whole privacy curve and not from one point of it.

Every value is an upper bound, where the accountant is rigorous. It knows events and no data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from dpbnn.privacy import accountants
from dpbnn.privacy.accountants import gaussian_delta
from dpbnn.privacy.checks import round_up
from dpbnn.privacy.events import Event, gaussian_mu
from dpbnn.privacy.relation import Relation

FALSE_POSITIVES = (0.01, 0.1)
_POINTS = 1000  # of the curve, from epsilon 0 to the stated one


@dataclasses.dataclass(frozen=True)
class Attack:
    """Bounds on the best test of whether one given record was used.

    The attacker knows every other record, all settings and everything that was released.

    Attributes:
        mu: of Gaussian differential privacy; None where no finite mu is known.
        up_to: the epsilon up to which delta(epsilon) is at most that of mu; None for every epsilon,
            so that the releases are mu-GDP.
        right: share of right guesses at even odds; 0.5 is tossing a coin.
        power: share of used records that are found, by share of unused records taken for used.
    """

    mu: float | None
    up_to: float | None
    right: float
    power: dict[float, float]

    @property
    def scope(self) -> str:
        """What mu is, in words."""
        if self.up_to is None:
            return "Gaussian DP"
        return f"the curve of Gaussian DP, for epsilon up to {self.up_to:.4g}"

    def __str__(self) -> str:
        return self.of("record").removesuffix(".")

    def of(self, unit: str) -> str:
        """Return the bounds as a sentence about a unit of this name."""
        found = " and ".join(
            f"{round_up(100 * value, 3)} % at {100 * share:g} % false positives"
            for share, value in self.power.items()
        )
        known = "" if self.mu is None else f"mu = {round_up(self.mu)} ({self.scope}); "
        return (
            f"{known}the best guess whether a {unit} was used is right in at most "
            f"{round_up(100 * self.right, 3)} % (a coin: 50 %), and finds at most {found}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        power = {f"{share:g}": value for share, value in self.power.items()}
        return {"mu": self.mu, "up_to": self.up_to, "right": self.right, "power": power}


def attack_on(
    events: Iterable[Event],
    delta: float,
    relation: Relation = Relation.ZERO_OUT,
    accountant: str | None = None,
) -> Attack:
    """Return what the best attack on all events together can achieve.

    With delta(e) for every e >= 0, a test with false positives alpha finds at most

        min_e min( exp(e) alpha + delta(e),  1 - exp(-e) (1 - alpha - delta(e)) )

    of the used records, and the best guess at even odds is right in (1 + delta(0))/2.

    Args:
        events: everything that was released.
        delta: of the guarantee; the curve is looked at down to it.
        relation: the neighbouring relation.
        accountant: as in `plan`; the tightest rigorous one by default.
    """
    own = tuple(event for event in events if event.count > 0)
    return _attack(own, delta, relation, accountant or accountants.default_accountant(own))


@functools.lru_cache(maxsize=64)
def _attack(events: tuple[Event, ...], delta: float, relation: Relation, name: str) -> Attack:
    chosen = accountants.accountant(name)
    epsilon = chosen.epsilon(events, delta, relation)
    if not np.isfinite(epsilon):
        return Attack(None, None, 1.0, dict.fromkeys(FALSE_POSITIVES, 1.0))
    curve = chosen.curve(events, delta, relation)
    grid = np.linspace(0.0, epsilon, _POINTS)
    deltas = np.clip(curve(grid), 0.0, 1.0)
    power = {share: _power(share, grid, deltas) for share in FALSE_POSITIVES}
    exact = name == "exact"
    mu = gaussian_mu(events, relation) if exact else _mu(grid, deltas)
    return Attack(mu, None if exact else epsilon, (1 + float(deltas[0])) / 2, power)


def _power(share: float, grid: np.ndarray, deltas: np.ndarray) -> float:
    grown = np.exp(np.minimum(grid, 700.0)) * share + deltas
    complement = 1 - np.exp(-grid) * (1 - share - deltas)
    return float(min(grown.min(), complement.min(), 1.0))


def _mu(grid: np.ndarray, deltas: np.ndarray) -> float | None:
    """Return a mu whose curve lies above all points, each moved to the right end of its cell.

    delta(e) falls in e, so the curve lies above all that is between the points too.
    """
    right, highest = np.append(grid[1:], grid[-1]), deltas

    def above(mu: float) -> bool:
        return bool((gaussian_delta(mu, right) >= highest).all())

    low, high = 0.0, 1.0
    while not above(high):
        low, high = high, 2 * high
        if high > 1e3:
            return None
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return high
