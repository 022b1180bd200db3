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
from dpbnn.calibration.root import LEVELS, Crossing
from dpbnn.predictive import ClassPredictive, Predictive, RealPredictive
from dpbnn.predictive.classes import LOWEST
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.statement import PrivacyStatement

__all__ = ["RecalibratedPosterior", "recalibrate", "tempered"]

STEPS = 5
CLIP = {
    "classification": 3.0, "top class": 1 + 1e-3,  # no count is to be clipped
    "regression": 0.5 * (1 + 1e-3), "uncounted": 0.9 * (1 + 1e-3),
    "most": 0.5 * (1 + 1e-3), "half": 0.5 * (1 + 1e-3),
}  # fmt: skip
_CENTRE = {"regression": 0.4, "most": 0.25}  # mean of the contributions at the crossing, if not 0
_RISE = {"classification": 0.2, "regression": 0.15, "uncounted": 0.15}  # usual d mean / d log T
_COARSE = {
    "classification": ("top class", 0.1), "regression": ("most", 0.2), "uncounted": ("half", 0.3),
}  # what is asked in their place, and from what error on  # fmt: skip
_VARIED = 4.0  # or that error times sqrt(n), since coarse answers vary more from record to record


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
    influence: float = 0.0,
) -> RecalibratedPosterior:
    """Choose the temperature of a posterior's predictions, privately.

    Classes: p_T proportional to p^(1/T) for every posterior draw, T from 0.1 to 10, where the
    derivative of the log-loss crosses zero: a record contributes d(-log p_T(y_i))/d log T, clipped
    to [-3, 3]. Real targets: the predictive distribution stretched about its mean by sqrt(T), T
    from 0.01 to 100, so that 90 % intervals hold 90 % of the records: a record contributes 0.5 if
    its interval holds it and -0.5 if not, so heavy tails do not matter, and 0.4 for each of the n
    records is the sum at that T. Where the number of records that count is not public, under
    add/remove and with on_bad_rows="zero", it contributes 0.1 or -0.9, and the sum is to be 0.

    Where the noise of that would be large, which public numbers tell, a question of less
    sensitivity takes its place: is the most probable class right as often as it says (with p its
    probability, a record contributes 1 - p if it is and -p if not, over the larger of p and 1 - p),
    do 75 % intervals hold three quarters of the records (0.5 and -0.5, a sum of 0.25 n) or, where n
    is not public, do 50 % intervals hold half of them (0.5 and -0.5).

    Five noised sums are released, each at the posterior mean of log T given those before; the
    posterior knows the noise (see `Crossing`), and where the noise is large the temperature stays
    near 1.

    **Guarantee.** A record contributes one number of absolute value at most 3 (0.5, 0.9 or 1 for
    the other questions) to each release, clipped there by the gate, so that zero-out moves the sum
    by at most that (replace-one by twice that); which question it is depends on the plan and
    on_bad_rows alone; what follows is post-processing of the releases. All releases are in the
    ledger before the first is made. Nothing is assumed of the records: they may be those of the
    training, whose releases and these then compose. Bad data is refused before anything is spent.

    Args:
        posterior: what is recalibrated.
        data: (inputs, targets): held-out records (see `calibration_split`), or those of the
            training.
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
        influence: 0 for held-out records. For records of the training, how far one of them can have
            moved the posterior: the mu of a training that is mu-Gaussian private. A record is
            then judged by draws weighted by p(y_i)^-r, as if it had been left out of the training;
            r is 1, or less so that the logarithms of the weights spread by `influence` at most (the
            log-ratio of a mu-Gaussian private output with and without a record does not spread
            more). A point estimate has one draw, whose weight is 1.
    """
    records = Records.of(data, on_bad_rows)
    budget = Budget.of(posterior.privacy, records.count, epsilon, delta, plan, ledger, STEPS)
    predictive, records = records.predicted(lambda x: posterior.predict(x, samples, seed=seed))
    asked = question(_task(predictive, budget.plan, on_bad_rows), budget.plan)
    rows, work = _contributed(predictive.plain, *records.targets(predictive), influence, asked)
    n, sigma = budget.plan.n, budget.plan.noise_multiplier
    gate = budget.gate(CLIP[asked], "recalibration", noise)
    crossing = Crossing(asked, sigma * CLIP[asked] / n)
    for _ in range(budget.plan.steps):
        place = crossing.mean
        at = functools.partial(rows, temperature=math.exp(place))
        total = release(gate, row_blocks(len(records.x), 1, at, work))
        crossing.update(place, total.item() / n - _CENTRE.get(asked, 0.0))
    return RecalibratedPosterior(posterior, math.exp(crossing.mean), budget.statement(gate))


def error(task: str, plan: Plan) -> float:
    """Return about the standard error of log T that the noise of a plan causes.

    Args:
        task: "classification", "regression" or "uncounted".
        plan: of the releases.
    """
    return CLIP[task] * plan.noise_multiplier / (_RISE[task] * plan.n * math.sqrt(plan.steps))


def question(task: str, plan: Plan) -> str:
    """Return what the records are asked, a key of CLIP: the task, or less where noise is large.

    Args:
        task: "classification", "regression" or "uncounted".
        plan: of the releases.
    """
    coarse, most = _COARSE[task]
    return coarse if error(task, plan) > max(most, _VARIED / math.sqrt(plan.n)) else task


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
    if isinstance(predictive, ClassPredictive | RealPredictive):
        return predictive.tempered(temperature)
    raise _no_temperature(predictive)


def of_real(public: bool, on_bad_rows: str) -> str:
    """Return the task of real targets.

    Args:
        public: whether the number of records is public.
        on_bad_rows: as in `recalibrate`; "zero" hides how many of them count.
    """
    return "regression" if public and on_bad_rows != "zero" else "uncounted"


def _task(predictive: Predictive, plan: Plan, on_bad_rows: str) -> str:
    if isinstance(predictive, ClassPredictive):
        return "classification"
    if isinstance(predictive, RealPredictive):
        return of_real(plan.relation.public_size, on_bad_rows)
    raise _no_temperature(predictive)


def _no_temperature(predictive: Predictive) -> TypeError:
    name = type(predictive).__name__
    return TypeError(f"{name} has no temperature; give classes or real targets")


def _contributed(
    predictive: Predictive, y: Tensor, kept: Tensor, influence: float, asked: str
) -> tuple[Callable[..., Tensor], int]:
    """Return what records first to last - 1 contribute at a temperature, and its size.

    It is zero for records that are not kept.
    """
    count: Callable[..., Tensor]
    if isinstance(predictive, ClassPredictive):
        parts = [predictive.log_probabilities.clamp(min=LOWEST)]
        target = y.to(parts[0].device, torch.long)
        count = _slope if asked == "classification" else _right
    else:
        assert isinstance(predictive, RealPredictive)
        parts = [predictive.means, predictive.variances]
        count = functools.partial(_inside, LEVELS[asked], _CENTRE.get(asked, 0.0))
        target = y.to(predictive.means).reshape(predictive.mean.shape).double()

    def rows(first: int, last: int, temperature: float) -> Tensor:
        draws = (part[:, first:last].double() for part in parts)
        found = count(target[first:last], temperature, influence, *draws)
        return found.where(kept[first:last].to(found.device), 0.0)[:, None]

    return rows, parts[0][:, 0].numel()


def _slope(y: Tensor, temperature: float, influence: float, logs: Tensor) -> Tensor:
    """Return sum_s r_s (l_sy - sum_k p_sk l_sk)/T, with r_s the shares of the draws in p_T(y)."""
    scaled = (logs / temperature).log_softmax(-1)
    index = y.view(1, -1, 1).expand(len(logs), -1, 1)
    own = logs.gather(-1, index).squeeze(-1)
    shares = (scaled.gather(-1, index).squeeze(-1) + _left_out(own, influence)).softmax(0)
    return (shares * (own - (scaled.exp() * logs).sum(-1))).sum(0) / temperature


def _right(y: Tensor, temperature: float, influence: float, logs: Tensor) -> Tensor:
    """Return ([the most probable class is right] - p)/max(p, 1 - p), with p its probability.

    Its mean is 0 given p where p is right, and no such number between -1 and 1 tells more.
    """
    index = y.view(1, -1, 1).expand(len(logs), -1, 1)
    weights = _left_out(logs.gather(-1, index), influence).softmax(0)
    p, top = (weights * (logs / temperature).softmax(-1)).sum(0).max(-1)
    return ((top == y).double() - p) / torch.maximum(p, 1 - p)


def _inside(
    level: float,
    centre: float,
    y: Tensor,
    temperature: float,
    influence: float,
    means: Tensor,
    variances: Tensor,
) -> Tensor:
    """Return [a record is in its interval] - level + centre, averaged over outputs."""
    mean = means.mean(0)
    u = mean + (y - mean) / math.sqrt(temperature)
    own = -0.5 * ((y - means).square() / variances + variances.log())
    weights = _left_out(own, influence).softmax(0)
    below = (weights * torch.erfc((means - u) / (2 * variances).sqrt()) / 2).sum(0)
    found = ((below - 0.5).abs() <= level / 2).double() - level + centre
    return found.flatten(1).mean(1) if found.dim() > 1 else found


def _left_out(own: Tensor, influence: float) -> Tensor:
    """Return log-weights of the draws [S, ...], -r log p_s(y) with a spread of `influence` at most.

    Args:
        own: log-probability of a record's target under every draw.
        influence: see `recalibrate`.
    """
    spread = own.std(0, correction=0).clamp(min=1e-12)
    return -own * (influence / spread).clamp(max=1.0)
