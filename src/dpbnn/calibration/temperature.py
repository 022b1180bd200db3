"""Private temperature scaling: one number that makes predictions more or less certain."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpbnn.calibration.release import Budget, Records, release, row_blocks
from dpbnn.predictive import ClassPredictive, Predictive, RealPredictive
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.statement import PrivacyStatement

__all__ = ["RecalibratedPosterior", "recalibrate", "tempered"]

CLIP = 3.0
STEPS = 8
_SPAN = {"classification": math.log(10), "regression": math.log(100)}
_LOWEST = -1e4  # log-probability that stands for that of probability 0


class RecalibratedPosterior:
    """A posterior whose predictions are tempered; see `recalibrate`.

    Attributes:
        posterior: the posterior underneath.
        temperature: above 1 predictions become less certain, below 1 more.
        privacy: the statement of training and recalibration together.
    """

    def __init__(self, posterior: Any, temperature: float, privacy: PrivacyStatement) -> None:
        self.posterior, self.temperature, self.privacy = posterior, float(temperature), privacy

    @property
    def likelihood(self) -> Any:
        """The likelihood of the posterior underneath."""
        return self.posterior.likelihood

    def predict(self, x: Any, samples: int = 100, **options: Any) -> Predictive:
        """Return the tempered predictive distribution; see `Posterior.predict`."""
        return tempered(self.posterior.predict(x, samples, **options), self.temperature)

    def to_dict(self) -> dict[str, Any]:
        """Return temperature and statement as plain values; the posterior is saved by itself."""
        return {"schema": 1, "temperature": self.temperature, "privacy": self.privacy.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any], posterior: Any) -> RecalibratedPosterior:
        """Put the values of `to_dict` on a posterior."""
        if values.get("schema") != 1:
            raise ValueError(f"schema={values.get('schema')!r}: this version reads schema 1")
        privacy = PrivacyStatement.from_dict(values["privacy"])
        return cls(posterior, values["temperature"], privacy)

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def recalibrate(
    posterior: Any,
    data: tuple[Any, Any],
    epsilon: float | None = None,
    delta: float | None = None,
    *,
    plan: Plan | None = None,
    ledger: Ledger | None = None,
    samples: int = 100,
    seed: int = 0,
    noise: NoiseSource | None = None,
    on_bad_rows: str = "error",
) -> RecalibratedPosterior:
    """Choose the temperature of a posterior's predictions on held-out data, privately.

    Classes: p_T proportional to p^(1/T) for every posterior draw, T from 0.1 to 10. Real targets:
    the predictive distribution stretched about its mean by sqrt(T), T from 0.01 to 100. The
    temperature is where the derivative of the log-loss crosses zero, found by bisection in log T:
    every record contributes d(-log p_T(y_i))/d log T, clipped to [-3, 3], to 8 noised sums, and the
    sign of each sum says where to go on.

    **Guarantee.** A record contributes one number of absolute value at most 3 to each release, so
    that zero-out moves the sum by at most 3 (replace-one by at most 6); what follows is
    post-processing of the releases. All releases are in the ledger before the first is made.
    Bad data is refused before anything is spent.

    Args:
        posterior: what is recalibrated.
        data: (inputs, targets) that were held out; see `calibration_split`.
        epsilon: budget of the recalibration alone.
        delta: its delta; by default the ledger's, or the posterior's.
        plan: instead of epsilon, a plan with sampling="full-batch" (as many releases as it has
            steps), or an open plan.
            Under add/remove it is needed, and its n stands for the number of records.
        ledger: where the releases are recorded, best that of the training; in memory by default.
        samples: number of posterior draws in a prediction.
        seed: of the draws.
        noise: the source of noise; a new one from operating-system entropy by default.
        on_bad_rows: "error" refuses records that cannot be used and says how many; "show" names
            them too; "zero" lets them contribute nothing.
    """
    records = Records.of(data, on_bad_rows)
    budget = Budget.of(posterior.privacy, records.count, epsilon, delta, plan, ledger, STEPS)
    predictive, records = records.predicted(lambda x: posterior.predict(x, samples, seed=seed))
    task, derivative, work = _derivative(predictive, *records.targets(predictive))
    gate = budget.gate(CLIP, "recalibration", noise)
    low, high = -_SPAN[task], _SPAN[task]
    for _ in range(budget.plan.steps):
        middle = (low + high) / 2
        rows = functools.partial(derivative, temperature=math.exp(middle))
        slope = release(gate, row_blocks(len(records.x), 1, rows, work))
        low, high = (low, middle) if slope.item() > 0 else (middle, high)
    return RecalibratedPosterior(posterior, math.exp((low + high) / 2), budget.statement(gate))


def tempered(predictive: Predictive, temperature: float) -> Predictive:
    """Return a prediction at another temperature.

        classes:  log p_s <- log softmax(log p_s / T)
        real:     m_s <- m + sqrt(T) (m_s - m),   v_s <- T v_s

    with m the predictive mean, so that the variance becomes T times what it was.

    Args:
        predictive: what `posterior.predict` returned.
        temperature: T > 0.
    """
    if not (0 < temperature < math.inf):
        raise ValueError(f"temperature={temperature}: must be a finite number > 0; 1 changes none")
    if isinstance(predictive, ClassPredictive):
        scaled = predictive.log_probabilities.clamp(min=_LOWEST) / temperature
        return ClassPredictive.from_logits(scaled)
    if isinstance(predictive, RealPredictive):
        spread = (predictive.means - predictive.mean) * math.sqrt(temperature)
        return RealPredictive(predictive.mean + spread, predictive.variances * temperature)
    raise TypeError(f"{type(predictive).__name__} has no temperature; give classes or real targets")


def _derivative(
    predictive: Predictive, y: Tensor, kept: Tensor
) -> tuple[str, Callable[..., Tensor], int]:
    """Return the task, d(-log p_T(y_i))/d log T of records first to last - 1, and its size.

    It is zero for records that are not kept.
    """
    slope: Callable[..., Tensor]
    if isinstance(predictive, ClassPredictive):
        parts = [predictive.log_probabilities.clamp(min=_LOWEST)]
        task, slope, target = "classification", _class_slope, y.to(parts[0].device, torch.long)
    else:
        assert isinstance(predictive, RealPredictive)
        parts = [predictive.means, predictive.variances]
        task, slope = "regression", _real_slope
        target = y.to(predictive.means).reshape(predictive.mean.shape).double()

    def rows(first: int, last: int, temperature: float) -> Tensor:
        draws = (part[:, first:last].double() for part in parts)
        found = slope(target[first:last], temperature, *draws)
        return found.where(kept[first:last].to(found.device), 0.0)[:, None]

    return task, rows, parts[0][:, 0].numel()


def _class_slope(y: Tensor, temperature: float, logs: Tensor) -> Tensor:
    """Return sum_s r_s (l_sy - sum_k p_sk l_sk)/T, with r_s the shares of the draws in p_T(y)."""
    scaled = (logs / temperature).log_softmax(-1)
    index = y.view(1, -1, 1).expand(len(logs), -1, 1)
    found = logs.gather(-1, index).squeeze(-1) - (scaled.exp() * logs).sum(-1)
    shares = scaled.gather(-1, index).squeeze(-1).softmax(0)
    return (shares * found).sum(0) / temperature


def _real_slope(y: Tensor, temperature: float, means: Tensor, variances: Tensor) -> Tensor:
    """Return (1 + (u - m)(log p)'(u))/2 with u = m + (y - m)/sqrt(T), averaged over outputs."""
    mean = means.mean(0)
    u = mean + (y - mean) / math.sqrt(temperature)
    joint = -0.5 * ((means - u).square() / variances + variances.log())
    shares = joint.flatten(2).sum(2).softmax(0) if joint.dim() > 2 else joint.softmax(0)
    shares = shares.view(*shares.shape, *[1] * (joint.dim() - 2))
    score = (shares * (means - u) / variances).sum(0)
    slope = (1 + (u - mean) * score) / 2
    return slope.flatten(1).mean(1) if slope.dim() > 1 else slope
