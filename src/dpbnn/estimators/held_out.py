"""A temperature and a conformal threshold, paid for out of a fit's own budget."""

from __future__ import annotations

import dataclasses
import math
from numbers import Real
from typing import Any

import numpy as np

from dpbnn.calibration import calibration_split, conformalize, recalibrate
from dpbnn.calibration.conformal import records_needed
from dpbnn.calibration.temperature import STEPS, error, of_real
from dpbnn.estimators import budget
from dpbnn.estimators.open_prior import plenty
from dpbnn.posteriors import Posterior
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan, open_plan
from dpbnn.privacy.statement import PrivacyStatement

__all__ = ["BETA", "COVER_SHARE", "HeldOut", "Parts"]

TRAINING = "training"
TEMPER_ROWS = (0.2, 10_000)  # share of all rows held out for the temperature, and most rows for it
TEMPER_SHARE = {"classification": (0.2, 0.2), "regression": (0.1, 0.4), "uncounted": (0.1, 0.4)}
"""Most of mu^2 that a temperature of training rows costs: with a large and with a small budget."""
TEMPER_RISE = 0.9  # of that share, by the error that all of mu^2 would leave
TEMPER_ENOUGH = {"classification": 0.07, "regression": 0.04, "uncounted": 0.04}  # error of log T
TEMPER_HOPELESS = {"classification": 2.0, "regression": 2.2, "uncounted": 4.0}  # none is tried
TEMPER_DRAWS = 16  # most posterior draws of the predictions for it
COVER_ROWS = (0.2, 20_000)  # share of all rows held out for the threshold, and most of them
COVER_SHARE = 0.2  # of epsilon, for the threshold
BETA = 0.01  # probability that the noise spoils the threshold


@dataclasses.dataclass(frozen=True)
class Parts:
    """Positions of rows, which their numbers alone decide.

    Attributes:
        train: rows for the training.
        temper: rows for the temperature: of the training, or of neither other part.
        cover: rows for the threshold.
    """

    train: np.ndarray
    temper: np.ndarray
    cover: np.ndarray


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What calibration is asked for.

    Attributes:
        share: of epsilon, for the temperature, from rows that are held out; "training" finds it on
            rows of the training, for a share of its own; None leaves predictions as they are.
        alpha: share of misses of sets and intervals, from rows that are held out; None leaves them
            out.
        regression: whether the target is a number.
        on_bad_rows: as in `dpbnn.fit`.
    """

    share: float | str | None
    alpha: float | None
    regression: bool = False
    on_bad_rows: str = "error"

    def __post_init__(self) -> None:
        most = 1 - (COVER_SHARE if self.alpha is not None else 0.0)
        held = self.share is not None and not self.on_training
        if held and not (isinstance(self.share, float | int) and 0 < self.share < most):
            raise ValueError(
                f"recalibrate={self.share}: must be 'training', None, or a share of epsilon "
                f"between 0 and {most:g}, such as recalibrate=0.1"
            )
        share = isinstance(self.alpha, Real) and 0 < self.alpha < 1
        if self.alpha is not None and not share:
            raise ValueError(
                f"conformal={self.alpha!r}: must be a share of misses between 0 and 1, such as "
                f"conformal=0.1"
            )

    def __bool__(self) -> bool:
        return self.share is not None or self.alpha is not None

    @property
    def on_training(self) -> bool:
        """Whether the temperature comes from rows of the training."""
        return isinstance(self.share, str) and self.share == TRAINING

    def parts(self, n: int) -> Parts:
        """Return the parts of n rows: a function of n and of public settings alone."""
        none = np.empty(0, dtype=np.int64)
        temper = cover = 0.0
        if self.share is not None and not self.on_training:
            temper = min(TEMPER_ROWS[0], TEMPER_ROWS[1] / n)
        if self.alpha is not None:
            cover = min(COVER_ROWS[0], COVER_ROWS[1] / n)
        if not (temper or cover):
            return Parts(np.arange(n), self._seen(np.arange(n)), none)
        if n < 8:
            raise ValueError(
                f"{n} rows are too few to hold some out; leave recalibrate and conformal out"
            )
        train, held = (part.numpy() for part in calibration_split(n, temper + cover))
        if not temper:
            return Parts(train, self._seen(train), held)
        if not cover:
            return Parts(train, held, none)
        others, first = calibration_split(len(held), temper / (temper + cover), seed=1)
        return Parts(train, held[first.numpy()], held[others.numpy()])

    def _seen(self, train: np.ndarray) -> np.ndarray:
        """Return the rows of the training that the temperature is found on."""
        if not self.on_training:
            return train[:0]
        if len(train) <= TEMPER_ROWS[1]:
            return train
        return train[calibration_split(len(train), TEMPER_ROWS[1] / len(train))[1].numpy()]

    def plans(
        self, parts: Parts, epsilon: float | None, delta: float
    ) -> tuple[Plan | None, Plan | None]:
        """Return the plans of temperature and threshold, where they are asked for.

        What noise alone would decide is refused, and a temperature from training rows left out; the
        numbers behind that are public.
        """
        temper = cover = None
        if self.on_training:
            temper = self._plan_on_training(len(parts.temper), epsilon, delta)
        elif self.share is not None:
            temper = _plan(len(parts.temper), STEPS, epsilon, float(self.share), delta)
            if error(self._task, temper) > 1:
                raise ValueError(
                    f"recalibrate={self.share:g}: {temper.n} held-out rows are too few for that "
                    f"share of epsilon={epsilon:g}: the noise would decide the temperature; raise "
                    f"recalibrate or epsilon, or leave recalibrate out"
                )
        if self.alpha is not None:
            cover = _plan(len(parts.cover), 1, epsilon, COVER_SHARE, delta)
            needed = records_needed(cover, self.alpha, BETA)
            if cover.n < needed:
                spent = "" if epsilon is None else f" for a fifth of epsilon={epsilon:g}"
                within = needed <= COVER_ROWS[1]
                rows = f", take {math.ceil(needed / COVER_ROWS[0])} rows or more" if within else ""
                raise ValueError(
                    f"conformal={self.alpha:g}: {cover.n} held-out rows are too few{spent}: every "
                    f"set or interval would hold everything; raise conformal or epsilon{rows}, or "
                    f"leave conformal out"
                )
        return temper, cover

    @property
    def _task(self) -> str:
        return of_real(True, self.on_bad_rows) if self.regression else "classification"

    def _plan_on_training(self, n: int, epsilon: float | None, delta: float) -> Plan | None:
        """Return a plan that spends no more than needed; None where the noise would decide.

        Without privacy there is none here, since a model may fit its training rows better than
        others; see `found`.
        """
        if epsilon is None:
            return None
        one = _budget(n, epsilon, delta)
        least, most = TEMPER_SHARE[self._task]
        best = error(self._task, one)
        share = min(most, max(least, TEMPER_RISE * best))
        more = max(1 / math.sqrt(share), TEMPER_ENOUGH[self._task] / best)
        sigma = one.noise_multiplier * more
        found = budget.solved_plan(
            noise_multiplier=sigma * math.sqrt(STEPS), delta=delta, n=n, steps=STEPS,
            sampling="full-batch",
        )  # fmt: skip
        return found if error(self._task, found) <= TEMPER_HOPELESS[self._task] else None

    def found(
        self,
        posterior: Posterior,
        plan: Plan,
        plans: tuple[Plan | None, Plan | None],
        temper: tuple[Any, Any],
        cover: tuple[Any, Any],
        ledger: Ledger,
        samples: int,
        seed: int,
    ) -> tuple[float | None, float | None, PrivacyStatement]:
        """Return temperature and threshold, and the statement of training and both.

        A regressor without privacy gets a temperature where its training rows are plenty.

        **Guarantee.** Both are releases of the gate, recorded in the ledger before they are made.

        Args:
            posterior: of the training.
            plan: likewise.
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
        chosen, count = plans[0], len(temper[0])
        if self.on_training and self.regression and not plan.private:
            chosen = _plan(count, STEPS, None, 0.0, 0.0) if plenty(count, posterior.model) else None
        if chosen is not None:
            more = dict(common)
            if self.on_training:
                more["samples"] = min(samples, TEMPER_DRAWS)
            if self.on_training and plan.private:
                one = _budget(count, plan.epsilon, plan.delta)
                more["influence"] = 1 / one.noise_multiplier
            used = recalibrate(used, temper, plan=chosen, **more)
            temperature = used.temperature
        if plans[1] is not None:
            assert self.alpha is not None
            used = conformalize(used, cover, plan=plans[1], alpha=self.alpha, beta=BETA, **common)
            threshold = used.threshold
        return temperature, threshold, used.privacy


def _plan(n: int, steps: int, epsilon: float | None, share: float, delta: float) -> Plan:
    if epsilon is None:
        return open_plan(n=n, steps=steps, sampling="full-batch")
    return budget.solved_plan(
        epsilon=share * epsilon, delta=delta, n=n, steps=steps, sampling="full-batch"
    )


def _budget(n: int, epsilon: float, delta: float) -> Plan:
    """Return the plan of a single release for all of a budget, whose mu is 1/sigma."""
    return budget.solved_plan(epsilon=epsilon, delta=delta, n=n, steps=1, sampling="full-batch")
