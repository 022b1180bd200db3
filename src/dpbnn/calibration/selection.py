"""Private selection: the best of several posteriors, by noised sums of their scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpbnn.calibration.release import Budget, Records, release, row_blocks
from dpbnn.predictive import ClassPredictive
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.statement import UNKNOWN, PrivacyStatement, statement_of

__all__ = ["Selection", "select"]


@dataclasses.dataclass(frozen=True)
class Selection:
    """What `select` found.

    Attributes:
        name: of the candidate that was chosen: its key, or its position.
        posterior: the candidate itself.
        scores: noised mean scores by name, less the mean over the candidates; public.
        noise_std: standard deviation of the noise in each of them.
        privacy: the statement of all training runs and the selection together.
    """

    name: Any
    posterior: Any
    scores: dict[Any, float]
    noise_std: float
    privacy: PrivacyStatement


def select(
    candidates: Mapping[Any, Any] | Sequence[Any],
    data: tuple[Any, Any],
    epsilon: float | None = None,
    delta: float | None = None,
    *,
    ledger: Ledger,
    score: str = "log_prob",
    plan: Plan | None = None,
    samples: int = 100,
    seed: int = 0,
    noise: NoiseSource | None = None,
    on_bad_rows: str = "error",
) -> Selection:
    """Choose among posteriors on held-out data, privately, so that the choice is accounted for.

    A record contributes the vector of its scores s_i under the k candidates less their mean,

        c_i = s_i - mean_j s_ij,   of norm sqrt(k)/2 at most,

    and the candidate with the largest noised sum is chosen. A score is 1 for a right and 0 for a
    wrong answer ("accuracy"), or the log-probability of the target, not further than 1/2 from the
    record's median over the candidates, so that no outlier outweighs the others.

    **Guarantee.** One release of the gate, recorded before it is made; zero-out moves it by at
    most the clip. The choice and the scores are post-processing. The statement covers whatever the
    ledger holds, so all candidates must have been trained on that ledger; others are refused. A
    choice among models of which one is not private, or has no statement, is not private.

    Args:
        candidates: fitted posteriors or estimators, by name or in a list.
        data: (inputs, targets) that were held out; see `calibration_split`. For estimators with a
            schema a raw data frame, and its targets or None.
        epsilon: budget of the selection alone.
        delta: its delta; by default the ledger's, or the posteriors'.
        ledger: that of all the trainings.
        score: "log_prob", or "accuracy" for classes.
        plan: instead of epsilon, a plan of one step with sampling="full-batch", or an open plan.
            Under add/remove it is needed, and its n stands for the number of records.
        samples: number of posterior draws in a prediction.
        seed: of the draws.
        noise: the source of noise; a new one from operating-system entropy by default.
        on_bad_rows: "error" refuses records that cannot be used and says how many; "show" names
            them too; "zero" lets them contribute nothing.
    """
    named = dict(candidates if isinstance(candidates, Mapping) else enumerate(candidates))
    if len(named) < 2:
        raise ValueError(f"candidates: {len(named)} given; give at least 2 to choose from")
    if score not in ("log_prob", "accuracy"):
        raise ValueError(f"score={score!r}: must be 'log_prob' or 'accuracy'")
    records = Records.of(_encoded(named, data, on_bad_rows), on_bad_rows)
    _check_ledger(named, ledger)
    first = next(iter(named.values()))
    budget = Budget.of(_privacy(first), records.count, epsilon, delta, plan, ledger, 1)
    if budget.plan.steps != 1:
        raise ValueError(f"plan: has {budget.plan.steps} steps; a selection needs one")
    found = [_scores(c, records, score, samples, seed) for c in named.values()]
    scores = torch.stack([own for own, _ in found], 1)
    kept = torch.stack([own for _, own in found], 1).all(1)
    if score == "log_prob":
        middle = scores.median(1, keepdim=True).values
        scores = torch.minimum(torch.maximum(scores, middle - 0.5), middle + 0.5)
    centred = (scores - scores.mean(1, keepdim=True)).where(kept[:, None], 0.0)
    gate = budget.gate(math.sqrt(len(named)) / 2 * (1 + 1e-3), "private selection", noise)
    sums = release(gate, row_blocks(len(centred), len(named), lambda i, j: centred[i:j]))
    n = budget.plan.n
    means = dict(zip(named, (sums / n).tolist(), strict=True))
    chosen = max(means, key=means.__getitem__)
    open_gate = not budget.plan.private
    return Selection(
        name=chosen,
        posterior=named[chosen],
        scores=means,
        noise_std=0.0 if open_gate else gate.noise_multiplier * gate.clip / n,
        privacy=_statement(named, gate, budget),
    )


def _encoded(candidates: dict[Any, Any], data: tuple[Any, Any], on_bad_rows: str) -> Any:
    """Return the records; raw ones as the schema of all candidates encodes them."""
    schemas = [getattr(candidate, "schema_", None) for candidate in candidates.values()]
    if all(schema is None for schema in schemas):
        return data
    if any(schema != schemas[0] for schema in schemas):
        raise ValueError(
            "candidates: have different schemas; fit all of them with the same one, or without"
        )
    return next(iter(candidates.values())).records(*data, on_bad_rows)


def _scores(
    candidate: Any, records: Records, score: str, samples: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return every record's score under one candidate, in float64, and which records count."""
    y = None
    if getattr(candidate, "schema_", None) is not None:
        predictive, records = records.predicted(lambda x: candidate.predicted(x.numpy()))
    elif hasattr(candidate, "predictive"):
        predictive, records = records.predicted(candidate.predictive)
        if hasattr(candidate, "classes_"):
            y = torch.as_tensor(candidate.numbers(records.y))
    else:
        predictive, records = records.predicted(lambda x: candidate.predict(x, samples, seed=seed))
    y, kept = records.targets(predictive, y)
    if score == "log_prob":
        found = predictive.log_prob(y.to(predictive.mean.device)).double().clamp(min=-1e4)
        return found.cpu(), kept
    if not isinstance(predictive, ClassPredictive):
        raise ValueError("score='accuracy': the targets are real numbers; use 'log_prob'")
    return (predictive.mode.cpu() == y.cpu()).double(), kept


def _privacy(candidate: Any) -> PrivacyStatement | None:
    found = candidate.privacy_ if hasattr(candidate, "privacy_") else candidate.privacy
    return None if found is None else statement_of(found)


def _check_ledger(candidates: dict[Any, Any], ledger: Ledger) -> None:
    """Refuse candidates whose releases are in another ledger."""
    for name, posterior in candidates.items():
        statement = _privacy(posterior)
        if statement is None or not statement.private:
            continue
        if any(part.ledger != ledger.id for part in statement.released):
            raise ValueError(
                f"candidate {name!r}: was not trained on this ledger; train all candidates with "
                f"the same ledger= and pass it here"
            )


def _statement(candidates: dict[Any, Any], gate: Gate, budget: Budget) -> PrivacyStatement:
    """Return the ledger's statement, unless a candidate is not private, or not known to be."""
    public: list[str] = []
    for candidate in candidates.values():
        statement = _privacy(candidate)
        if statement is None or not statement.private:
            return statement or PrivacyStatement.not_private(UNKNOWN)
        public += statement.public
    return gate.statement(delta=budget.delta, tuning_runs=0, unit=statement.unit, public=public)
