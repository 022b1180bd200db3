"""Private conformal prediction: sets and intervals that cover, however good the model is."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from dpbnn.calibration import prefix
from dpbnn.calibration.release import Budget, Records, release, row_blocks
from dpbnn.contributions.dense import ChunkedContributions
from dpbnn.predictive import ClassPredictive, Predictive
from dpbnn.predictive.base import NumberPredictive
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.statement import PrivacyStatement

__all__ = ["ConformalPosterior", "conformalize"]

_CELLS = 256
_ROUNDING = 1 + 4e-4  # the gate sees norms up to 3e-4 above the truth; no column is to be clipped
_SMALLEST, _LARGEST = 0.02, 200.0  # of standardised residuals


class ConformalPosterior:
    """A posterior with a threshold that makes its sets or intervals cover; see `conformalize`.

    Attributes:
        posterior: the posterior underneath.
        threshold: largest score that is inside; infinite where the budget or the number of records
            did not allow one.
        task: "classification" or "regression".
        alpha: share of misses that was asked for.
        beta: probability that the noise spoils the threshold.
        privacy: the statement of training and calibration together.
        samples: number of posterior draws in a prediction, part of the score.
        seed: of the draws, likewise.
    """

    def __init__(
        self,
        posterior: Any,
        threshold: float,
        task: str,
        alpha: float,
        beta: float,
        privacy: PrivacyStatement,
        samples: int,
        seed: int,
    ) -> None:
        self.posterior, self.threshold, self.task = posterior, float(threshold), task
        self.alpha, self.beta, self.privacy = alpha, beta, privacy
        self.samples, self.seed = samples, seed

    @property
    def coverage(self) -> float:
        """The coverage that is promised, 1 - alpha - beta."""
        return 1 - self.alpha - self.beta

    def predict(self, x: Any) -> Predictive:
        """Return the predictive distribution that the sets and intervals are made from."""
        return self.posterior.predict(x, self.samples, seed=self.seed)

    def predict_set(self, x: Any) -> Tensor:
        """Return the classes whose score 1 - p_k is at most the threshold, as a mask [N, K].

        A set can be empty: no class looks like the calibration records then.
        """
        predictive = self.predict(x)
        if not isinstance(predictive, ClassPredictive):
            raise TypeError("the targets are real numbers; use predict_interval")
        return 1 - predictive.mean.double() <= self.threshold

    def predict_interval(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return the ends mean -+ threshold * std, shaped like the mean.

        Several outputs are covered together: the box of their intervals holds the target.
        """
        predictive = self.predict(x)
        if not isinstance(predictive, NumberPredictive):
            raise TypeError("the targets are classes; use predict_set")
        mean, room = predictive.mean.double(), reach(self.threshold, predictive.std.double())
        return mean - room, mean + room

    def to_dict(self) -> dict[str, Any]:
        """Return the threshold and its record as plain values; the posterior is saved by itself."""
        return {
            "schema": 1,
            "threshold": self.threshold if math.isfinite(self.threshold) else None,
            "task": self.task,
            "alpha": self.alpha,
            "beta": self.beta,
            "samples": self.samples,
            "seed": self.seed,
            "privacy": self.privacy.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], posterior: Any) -> ConformalPosterior:
        """Put the values of `to_dict` on a posterior."""
        values = dict(values)
        schema = values.pop("schema", None)
        if schema != 1:
            raise ValueError(f"schema={schema!r}: this version reads schema 1")
        values["threshold"] = math.inf if values["threshold"] is None else values["threshold"]
        values["privacy"] = PrivacyStatement.from_dict(values["privacy"])
        return cls(posterior, **values)

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def conformalize(
    posterior: Any,
    data: tuple[Any, Any],
    epsilon: float | None = None,
    delta: float | None = None,
    *,
    alpha: float = 0.1,
    beta: float = 0.01,
    plan: Plan | None = None,
    ledger: Ledger | None = None,
    samples: int = 100,
    seed: int = 0,
    noise: NoiseSource | None = None,
    on_bad_rows: str = "error",
) -> ConformalPosterior:
    """Find the threshold of scores that makes sets or intervals cover, privately.

    The score is s = 1 - p_y for classes, and max |y - mean|/std over outputs for real targets. A
    grid t_1 < ... < t_256 is public. Cumulative counts F_j = #{i: s_i <= t_j} are released with
    Gaussian noise eta_j, and the threshold is the first t_j with

        F_j + eta_j - m >= ceil((n + 1)(1 - alpha)),    m the (1 - beta)-quantile of max_j eta_j,

    or infinite if there is none.

    **Theorem.** If the n calibration records and a new one are exchangeable and none of them was
    used in training or recalibration, P(s_new <= threshold) >= 1 - alpha - beta. Proof: unless
    max_j eta_j > m, which has probability at most beta, the chosen j has F_j >= k =
    ceil((n + 1)(1 - alpha)), so that t_j is at least the k-th smallest score, which a new score
    exceeds with probability at most 1 - k/(n + 1) <= alpha; an infinite threshold covers anyway.
    The coverage is over records, not for every class or every input. Under add/remove n is the
    plan's, and the theorem needs a plan whose n is not below the true number of records.

    **Guarantee.** A record adds one column of a public matrix to one noised sum, or nothing; the
    gate's clip is the largest norm of a column, so zero-out moves the sum by at most the clip. The
    threshold is post-processing. Bad data is refused before anything is spent.

    Args:
        posterior: a posterior, recalibrated or not.
        data: (inputs, targets) that were held out; see `calibration_split`.
        epsilon: budget of this release alone.
        delta: its delta; by default the ledger's, or the posterior's.
        alpha: share of misses.
        beta: probability that the noise spoils the threshold, at least 1e-3.
        plan: instead of epsilon, a plan of one step with sampling="full-batch", or an open plan.
            Under add/remove it is needed, and its n stands for the number of records.
        ledger: where the release is recorded, best that of the training; in memory by default.
        samples: number of posterior draws in a prediction.
        seed: of the draws.
        noise: the source of noise; a new one from operating-system entropy by default.
        on_bad_rows: "error" refuses records that cannot be used and says how many; "show" names
            them too; "zero" lets them contribute nothing, as if their
            scores were infinite, so that the theorem holds.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha}: must lie between 0 and 1; try 0.1")
    if not 1e-3 <= beta < 1:
        raise ValueError(f"beta={beta}: must lie between 0.001 and 1; try 0.01")
    records = Records.of(data, on_bad_rows)
    budget = Budget.of(posterior.privacy, records.count, epsilon, delta, plan, ledger, 1)
    if budget.plan.steps != 1:
        raise ValueError(f"plan: has {budget.plan.steps} steps; the counts need one")
    predictive, records = records.predicted(lambda x: posterior.predict(x, samples, seed=seed))
    task, scores = _scores(predictive, *records.targets(predictive))
    grid = _grid(task)
    clip = prefix.sensitivity(_CELLS) * _ROUNDING
    gate = budget.gate(clip, "conformal calibration", noise)
    counts = _cumulative(release(gate, _columns(scores, grid)))
    threshold = _threshold(counts - _raised(budget.plan, beta), grid, budget.plan.n, alpha)
    return ConformalPosterior(
        posterior, threshold, task, alpha, beta, budget.statement(gate), samples, seed
    )


def reach(threshold: float, std: Tensor) -> Tensor:
    """Return how far intervals reach; without end where the threshold is, also for std = 0."""
    return threshold * std if math.isfinite(threshold) else torch.full_like(std, math.inf)


def records_needed(plan: Plan, alpha: float, beta: float) -> int:
    """Return the fewest records for which a threshold can be finite, at the noise of a plan.

        n - m >= ceil((n + 1)(1 - alpha)),    m the margin that is taken off the counts

    A function of public numbers: with fewer, no data can make it finite but by luck.

    Args:
        plan: of the counts.
        alpha: share of misses.
        beta: probability that the noise spoils the threshold.
    """
    margin = _raised(plan, beta)
    n = max(1, math.floor(margin / alpha))
    while n - margin < _count_needed(n, alpha):
        n += 1
    return n


def _raised(plan: Plan, beta: float) -> float:
    """Return the margin that is taken off the noisy counts."""
    clip = prefix.sensitivity(_CELLS) * _ROUNDING
    return prefix.margin(_CELLS, beta) * plan.noise_multiplier * clip if plan.private else 0.0


def _scores(predictive: Predictive, y: Tensor, kept: Tensor) -> tuple[str, Tensor]:
    """Return the task and every record's score, in float64; infinite if it is not kept."""
    if isinstance(predictive, ClassPredictive):
        p = predictive.mean.double()
        task, scores = "classification", 1 - p.gather(-1, y.view(-1, 1).to(p.device)).squeeze(-1)
    else:
        mean, std = predictive.mean.double(), predictive.std.double()
        standardised = (y.to(mean).reshape(mean.shape) - mean).abs() / std
        task = "regression"
        scores = standardised.flatten(1).amax(1) if mean.dim() > 1 else standardised
    return task, scores.where(kept.to(scores.device), math.inf)


def _grid(task: str) -> Tensor:
    """Return the public thresholds: even steps up to 1, or 3.7 % steps from 0.02 to 200 std."""
    if task == "classification":
        return torch.arange(1, _CELLS + 1, dtype=torch.float64) / _CELLS
    ends = math.log(_SMALLEST), math.log(_LARGEST)
    return torch.linspace(*ends, _CELLS, dtype=torch.float64).exp()


def _columns(scores: Tensor, grid: Tensor) -> ChunkedContributions:
    """Return what records contribute: the column of the root of their cell, or zero beyond it."""
    columns = torch.cat([prefix.root(len(grid)).T, torch.zeros(1, len(grid))])
    cells = torch.searchsorted(grid, scores.cpu())
    return row_blocks(len(scores), len(grid), lambda first, last: columns[cells[first:last]])


def _cumulative(released: Tensor) -> Tensor:
    """Return noisy cumulative counts from the noised sum of columns."""
    return prefix.root(len(released)) @ released.cpu()


def _threshold(counts: Tensor, grid: Tensor, n: int, alpha: float) -> float:
    """Return the first grid point at which enough records are counted, or infinity."""
    enough = counts >= _count_needed(n, alpha)
    return float(grid[int(enough.int().argmax())]) if enough.any() else math.inf


def _count_needed(n: int, alpha: float) -> float:
    return math.ceil((n + 1) * (1 - alpha)) - 1e-6
