"""Held-out rows: a temperature and a conformal threshold, paid for out of a fit's own budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpbnn.calibration import calibration_split, conformalize, recalibrate
from dpbnn.calibration.conformal import attainable
from dpbnn.calibration.temperature import CLIP
from dpbnn.estimators import recipes
from dpbnn.posteriors import Posterior
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan, open_plan
from dpbnn.privacy.statement import PrivacyStatement

__all__ = ["BETA", "COVER_SHARE", "HeldOut", "Parts"]

TEMPER_ROWS = (0.2, 10_000)  # share of all rows for the temperature, and the most of them
COVER_ROWS = (0.2, 20_000)  # likewise for the threshold
COVER_SHARE = 0.2  # of epsilon, for the threshold
TEMPER_STEPS = 6  # of the bisection, whose last one moves the temperature by 7 %
TEMPER_NOISE = 1 / 20  # most noise of a slope per row, with which the temperature is off by 20 %
BETA = 0.01  # probability that the noise spoils the threshold


@dataclasses.dataclass(frozen=True)
class Parts:
    """Positions of rows; each row is in one part, which its number alone decides.

    Attributes:
        train: rows for the training.
        temper: rows for the temperature.
        cover: rows for the threshold.
    """

    train: np.ndarray
    temper: np.ndarray
    cover: np.ndarray


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What held-out rows are asked for.

    Attributes:
        share: of epsilon, for the temperature; None leaves predictions as they are.
        alpha: share of misses of sets and intervals; None leaves them out.
        on_bad_rows: as in `dpbnn.fit`.
    """

    share: float | None
    alpha: float | None
    on_bad_rows: str = "error"

    def __post_init__(self) -> None:
        most = 1 - (COVER_SHARE if self.alpha is not None else 0.0)
        if self.share is not None and not 0 < self.share < most:
            raise ValueError(
                f"recalibrate={self.share}: must be a share of epsilon between 0 and {most:g}, "
                f"such as recalibrate=0.1"
            )
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ValueError(
                f"conformal={self.alpha}: must be a share of misses between 0 and 1, such as "
                f"conformal=0.1"
            )

    def __bool__(self) -> bool:
        return self.share is not None or self.alpha is not None

    def parts(self, n: int) -> Parts:
        """Return the parts of n rows: a function of n and of public settings alone."""
        none = np.empty(0, dtype=np.int64)
        if not self:
            return Parts(np.arange(n), none, none)
        if n < 8:
            raise ValueError(
                f"{n} rows are too few to hold some out; leave recalibrate and conformal out"
            )
        temper = min(TEMPER_ROWS[0], TEMPER_ROWS[1] / n) if self.share is not None else 0.0
        cover = min(COVER_ROWS[0], COVER_ROWS[1] / n) if self.alpha is not None else 0.0
        train, held = (part.numpy() for part in calibration_split(n, temper + cover))
        if not (temper and cover):
            return Parts(train, held, none) if temper else Parts(train, none, held)
        others, first = calibration_split(len(held), temper / (temper + cover), seed=1)
        return Parts(train, held[first.numpy()], held[others.numpy()])

    def plans(
        self, parts: Parts, epsilon: float | None, delta: float
    ) -> tuple[Plan | None, Plan | None]:
        """Return the plans of temperature and threshold, where they are asked for.

        What noise alone would decide is refused; the numbers behind that are public.
        """
        temper = cover = None
        if self.share is not None:
            temper = _plan(len(parts.temper), TEMPER_STEPS, epsilon, self.share, delta)
            if CLIP * temper.noise_multiplier > TEMPER_NOISE * temper.n:
                raise ValueError(
                    f"recalibrate={self.share:g}: {temper.n} held-out rows are too few for that "
                    f"share of epsilon={epsilon:g}: the noise would decide the temperature; raise "
                    f"recalibrate or epsilon, or leave recalibrate out"
                )
        if self.alpha is not None:
            cover = _plan(len(parts.cover), 1, epsilon, COVER_SHARE, delta)
            if not attainable(cover, self.alpha, BETA):
                spent = "" if epsilon is None else f" for a fifth of epsilon={epsilon:g}"
                raise ValueError(
                    f"conformal={self.alpha:g}: {cover.n} held-out rows are too few{spent}: every "
                    f"set or interval would hold everything; raise conformal or epsilon, or leave "
                    f"conformal out"
                )
        return temper, cover

    def found(
        self,
        posterior: Posterior,
        plans: tuple[Plan | None, Plan | None],
        temper: tuple[Any, Any],
        cover: tuple[Any, Any],
        ledger: Ledger,
        samples: int,
        seed: int,
    ) -> tuple[float | None, float | None, PrivacyStatement]:
        """Return temperature and threshold, and the statement of training and both.

        **Guarantee.** Both are releases of the gate, recorded in the ledger before they are made.

        Args:
            posterior: of the training.
            plans: from `plans`.
            temper: inputs and targets of the rows for the temperature.
            cover: those of the rows for the threshold.
            ledger: that of the training.
            samples: number of posterior draws in a prediction.
            seed: of the draws.
        """
        used: Any = posterior
        temperature = threshold = None
        common: dict[str, Any] = {
            "ledger": ledger,
            "samples": samples,
            "seed": seed,
            "on_bad_rows": self.on_bad_rows,
        }
        if plans[0] is not None:
            used = recalibrate(used, temper, plan=plans[0], **common)
            temperature = used.temperature
        if plans[1] is not None:
            assert self.alpha is not None
            used = conformalize(used, cover, plan=plans[1], alpha=self.alpha, beta=BETA, **common)
            threshold = used.threshold
        return temperature, threshold, used.privacy


def _plan(n: int, steps: int, epsilon: float | None, share: float, delta: float) -> Plan:
    if epsilon is None:
        return open_plan(n=n, steps=steps, sampling="full-batch")
    return recipes.solved_plan(
        epsilon=share * epsilon, delta=delta, n=n, steps=steps, sampling="full-batch"
    )
