"""What both kinds of calibration share: the budget, a full-batch gate, and the statement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dpbnn.contributions.dense import ChunkedContributions, DenseContributions
from dpbnn.messages import as_numbers, check_on_bad_rows, refuse_rows, unquoted
from dpbnn.predictive import ClassPredictive, CountPredictive, Predictive
from dpbnn.predictive.base import NumberPredictive
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan, plan
from dpbnn.privacy.relation import check_same
from dpbnn.privacy.statement import PrivacyStatement, joined, statement_of

_ROWS = 1 << 21  # numbers of a block of contributions


@dataclasses.dataclass(frozen=True)
class Budget:
    """A settled calibration: full-batch releases of all records, and where they are recorded."""

    plan: Plan
    ledger: Ledger
    delta: float
    before: PrivacyStatement | None

    @classmethod
    def of(
        cls,
        before: PrivacyStatement | Mapping[str, Any] | None,
        records: int,
        epsilon: float | None,
        delta: float | None,
        given: Plan | None,
        ledger: Ledger | None,
        steps: int,
    ) -> Budget:
        """Settle the noise and check the ledger's budget, before any data is read.

        Args:
            before: the statement of the training, or its `to_dict()`.
            records: how many calibration records there are. Under add/remove that is not public:
                the plan says n.
            epsilon: the budget, where there is no plan.
            delta: by default the ledger's, or that of the training.
            given: the plan, where there is no epsilon.
            ledger: by default one in memory.
            steps: number of releases, where there is no plan.
        """
        before = None if before is None else statement_of(before)
        relation = None if before is None else before.relation
        if before is not None and before.private and before.unit_name != "record":
            raise ValueError(
                f"the posterior protects {before.unit}, and this release would protect one record "
                f"only; leave it out"
            )
        ledger = Ledger(relation=relation) if ledger is None else ledger
        if relation is not None and ledger.relation is not relation:
            raise ValueError(
                f"relation: the posterior has {relation} and the ledger {ledger.relation}; pass "
                f"the ledger of the training"
            )
        hidden = not (given or ledger).relation.public_size
        if hidden and given is None:
            raise ValueError(
                f"plan: missing; under add/remove the number of records is not public; state an "
                f"expected one, plan=dpbnn.plan(n=..., sampling='full-batch', steps={steps}, "
                f"relation='add/remove', ...)"
            )
        if not (records or hidden):
            raise ValueError("the calibration data has no records; give at least one")
        if (epsilon is None) == (given is None):
            raise ValueError("epsilon and plan: give one of them, such as epsilon=0.1")
        if delta is None:
            known = ledger.budget[1] if ledger.budget else None
            delta = before.delta if known is None and before and before.private else known
        if given is None:
            if delta is None:
                raise ValueError("delta: missing; give a small probability, such as delta=1e-5")
            given = plan(
                epsilon=epsilon, delta=delta, n=records, steps=steps, sampling="full-batch",
                relation=ledger.relation,
            )  # fmt: skip
        n = given.n if hidden else records
        if given.sampling != "full-batch" or given.n != n or len(given.noise_multipliers) != 1:
            raise ValueError(
                f"plan: is for {given.sampling} sampling of n={given.n}; calibration needs "
                f"sampling='full-batch', n={n} and one noise multiplier"
            )
        if given.private:
            check_same(given.relation, ledger.relation)
        ledger.check(given.own_events)
        return cls(given, ledger, given.delta if delta is None else delta, before)

    def gate(self, clip: float, label: str, noise: NoiseSource | None) -> Gate:
        """Return a gate with this clip, open if the plan is, and with all releases recorded."""
        clip = clip if self.plan.private else math.inf
        sigma = self.plan.noise_multiplier
        gate = Gate(clip, sigma, self.plan.sampler, self.ledger, noise=noise, label=label)
        gate.reserve(self.plan.steps)
        return gate

    def statement(self, gate: Gate) -> PrivacyStatement:
        """Return the statement of everything in the ledger and of the training, once each."""
        return joined(self.before, gate.statement(delta=self.delta), self.plan.steps)


def row_blocks(
    n: int, width: int, rows: Callable[[int, int], Tensor], work: int = 1
) -> ChunkedContributions:
    """Return dense contributions made block by block, so that memory does not grow with n.

    Args:
        n: number of records.
        width: numbers that a record contributes.
        rows: gives the contributions of records first to last - 1.
        work: numbers that it takes to compute those of one record.
    """
    return ChunkedContributions(
        lambda first, last: DenseContributions(rows(first, last)), n, _ROWS // max(width, work),
        {"value": torch.Size([width])}, torch.device("cpu"), torch.float64,
    )  # fmt: skip


def release(gate: Gate, contributions: ChunkedContributions) -> Tensor:
    """Return the noised sum of all records' contributions, in float64."""
    records = torch.arange(contributions.batch_size)
    return gate(contributions, records=records)["value"].double()


@dataclasses.dataclass(frozen=True)
class Records:
    """Inputs and targets of calibration records; where there are none, a row that is not kept.

    Attributes:
        x: inputs; zeros in rows that are not kept.
        y: targets, as they were given.
        kept: false for rows that contribute nothing, under on_bad_rows="zero".
        on_bad_rows: as in `dpbnn.fit`.
        count: how many records there are; not public under add/remove.
    """

    x: Tensor
    y: Tensor
    kept: Tensor
    on_bad_rows: str
    count: int

    @classmethod
    def of(cls, data: Any, on_bad_rows: str) -> Records:
        """Return the records, or refuse inputs that are not finite."""
        check_on_bad_rows(on_bad_rows)
        zero = on_bad_rows == "zero"
        with unquoted("the calibration data are not numbers", "give tensors or arrays", ValueError):
            x, y = (torch.as_tensor(as_numbers(part) if zero else part) for part in data)
        if len(x) != len(y):
            raise ValueError(
                "the calibration data has more or fewer targets than inputs; give one target for "
                "every input"
            )
        count = len(x)
        if not count:
            x, y = x.new_zeros(1, *x.shape[1:]), y.new_zeros(1, *y.shape[1:])
        kept = torch.full((len(x),), bool(count))
        records = cls(x, y, kept, on_bad_rows, count)
        bad = ~x.reshape(len(x), -1).isfinite().all(1)
        return records._without(bad, "inputs must be finite, no NaN or infinity")

    def predicted(self, predict: Callable[[Tensor], Predictive]) -> tuple[Predictive, Records]:
        """Return a prediction for every record; rows that it fails on are no longer kept."""
        if self.on_bad_rows != "zero":
            return predict(self.x), self
        found = _tried(predict, self.x)
        if found is not None:
            return found, self
        bad = torch.zeros(len(self.x), dtype=torch.bool)
        bad[_failing(predict, self.x, 0, len(self.x))] = True
        records = self._without(bad, "")
        return predict(records.x), records

    def targets(self, predictive: Predictive, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return a usable target for every prediction, and which records contribute.

        Args:
            predictive: of all records.
            y: the targets, where they are numbered in another way than the records'.
        """
        y = (self.y if y is None else y).cpu()
        if isinstance(predictive, NumberPredictive):
            if y.numel() != predictive.mean.numel():
                raise ValueError(
                    f"the calibration targets have shape {list(y.shape)} for predictions of shape "
                    f"{list(predictive.mean.shape)}; give one for each"
                )
            good, expected = y.isfinite(), "targets must be finite, no NaN or infinity"
            if isinstance(predictive, CountPredictive):
                good &= (y >= 0) & (y == y.round())
                expected = "counts must be whole numbers, 0 or more"
        elif not isinstance(predictive, ClassPredictive) or predictive.mean.dim() != 2:
            raise TypeError(
                f"{type(predictive).__name__} of shape {list(predictive.mean.shape)} was "
                f"predicted; calibration needs one class label or real target per record"
            )
        else:
            n, classes = predictive.mean.shape
            real = y.is_floating_point() and self.on_bad_rows != "zero"
            if y.shape != (n,) or real or y.is_complex():
                raise ValueError(
                    f"y has shape {list(y.shape)} and dtype {y.dtype}; labels must be integers of "
                    f"shape {[n]}"
                )
            good = (y >= 0) & (y < classes)
            if y.is_floating_point():
                good &= y == y.round()
            y, expected = torch.where(good, y, 0).long(), f"labels must be in 0..{classes - 1}"
        bad = ~good.reshape(len(y), -1).all(1)
        kept = self._without(bad, expected).kept
        return torch.where(good, y, 0), kept

    def _without(self, bad: Tensor, expected: str) -> Records:
        """Return the records without bad ones, or refuse them."""
        bad = bad.cpu()
        if self.on_bad_rows != "zero":
            show = self.on_bad_rows == "show"
            refuse_rows(bad, expected, show=show, what="calibration records", counted=False)
            return self
        shape = (-1, *[1] * (self.x.dim() - 1))
        x = self.x.masked_fill(bad.view(shape).to(self.x.device), 0)
        return dataclasses.replace(self, x=x, kept=self.kept & ~bad)


def _tried(predict: Callable[[Tensor], Predictive], x: Tensor) -> Predictive | None:
    """Return predictions, or None where the network raises or they are not finite."""
    try:
        return predict(x)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None


def _failing(predict: Callable[[Tensor], Any], x: Tensor, start: int, stop: int) -> list[int]:
    """Return the rows that a prediction fails on, whatever it raises."""
    if _tried(predict, x[start:stop]) is not None:
        return []
    if stop - start == 1:
        return [start]
    middle = (start + stop) // 2
    return _failing(predict, x, start, middle) + _failing(predict, x, middle, stop)
