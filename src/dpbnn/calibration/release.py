"""What both kinds of calibration share: the budget, a full-batch gate, and the statement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dpbnn.contributions.base import ChunkedContributions, Contributions, DenseContributions
from dpbnn.predictive import ClassPredictive, Predictive, RealPredictive
from dpbnn.privacy.events import Event
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan, plan
from dpbnn.privacy.statement import PrivacyStatement, statement_of

_ROWS = 1 << 21  # numbers of a block of contributions


@dataclasses.dataclass(frozen=True)
class Budget:
    """A settled calibration: full-batch releases of all n records, and where they are recorded."""

    plan: Plan
    ledger: Ledger
    delta: float
    before: PrivacyStatement | None

    @classmethod
    def of(
        cls,
        before: PrivacyStatement | Mapping[str, Any] | None,
        n: int,
        epsilon: float | None,
        delta: float | None,
        given: Plan | None,
        ledger: Ledger | None,
        steps: int,
    ) -> Budget:
        """Settle the noise and check the ledger's budget, before any data is read.

        Args:
            before: the statement of the training, or its `to_dict()`.
            n: number of calibration records.
            epsilon: the budget, where there is no plan.
            delta: by default the ledger's, or that of the training.
            given: the plan, where there is no epsilon.
            ledger: by default one in memory.
            steps: number of releases, where there is no plan.
        """
        before = None if before is None else statement_of(before)
        relation = None if before is None else before.relation
        ledger = Ledger(relation=relation) if ledger is None else ledger
        if relation is not None and ledger.relation is not relation:
            raise ValueError(
                f"relation: the posterior has {relation} and the ledger {ledger.relation}; pass "
                f"the ledger of the training"
            )
        if (epsilon is None) == (given is None):
            raise ValueError("epsilon and plan: give one of them, such as epsilon=0.1")
        if delta is None:
            known = ledger.budget[1] if ledger.budget else None
            delta = before.delta if known is None and before and before.private else known
        if given is None:
            if delta is None:
                raise ValueError("delta: missing; give a small probability, such as delta=1e-5")
            given = plan(
                epsilon=epsilon, delta=delta, n=n, steps=steps, sampling="full-batch",
                relation=ledger.relation,
            )  # fmt: skip
        if given.sampling != "full-batch" or given.n != n or len(given.noise_multipliers) != 1:
            raise ValueError(
                f"plan: is for {given.sampling} sampling of n={given.n}; calibration needs "
                f"sampling='full-batch', n={n} and one noise multiplier"
            )
        if given.private and given.relation is not ledger.relation:
            raise ValueError(
                f"relation: the plan has {given.relation} and the ledger {ledger.relation}; give "
                f"the plan the ledger's"
            )
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
        """Return the statement of everything in the ledger and of the training, once each.

        **Guarantee.** Releases of the training that the ledger does not hold are added. Nothing is
        private that was trained without privacy.
        """
        before = self.before
        if before is not None and not before.private:
            return before
        own = gate.statement(delta=self.delta)
        if before is None:
            note = "the training of the model is not part of this statement: nothing is known of it"
            return dataclasses.replace(own, caveats=(*own.caveats, note))
        if not own.private:
            return own
        held = self._without(own.mechanisms, gate)
        missing = [m for m in before.mechanisms if not _holds(held, m)]
        if not missing:
            return dataclasses.replace(
                own,
                unit=before.unit,
                public=_union(own.public, before.public),
                covers=_union(own.covers, before.covers),
                tuning_runs=before.tuning_runs,
                caveats=_union(own.caveats, before.caveats),
            )
        mechanisms = [*missing, *own.mechanisms]
        return PrivacyStatement.of(
            [_event(m) for m in mechanisms],
            delta=self.delta,
            relation=self.ledger.relation,
            labels=[m["label"] for m in mechanisms],
            clip=[m["clip"] for m in mechanisms],
            unit=before.unit,
            public=[p for p in before.public if p not in own.public],
            covers=[c for c in before.covers if c not in own.covers],
            randomness=own.randomness,
            tuning_runs=before.tuning_runs,
            caveats=[c for c in before.caveats if c not in own.caveats],
        )

    def _without(self, mechanisms: tuple[dict[str, Any], ...], gate: Gate) -> list[dict[str, Any]]:
        """Return what the ledger held before this gate's releases, which look like older ones."""
        new = {
            "label": gate.label,
            "sampling": self.plan.sampling,
            "noise_multiplier": gate.noise_multiplier,
            "clip": gate.clip,
            "n": self.plan.n,
        }
        return [
            {**m, "releases": m["releases"] - self.plan.steps}
            if all(m[name] == value for name, value in new.items())
            else m
            for m in mechanisms
        ]


class RowBlocks(ChunkedContributions):
    """Dense contributions that are made block by block, so that memory does not grow with n.

    Args:
        n: number of records.
        width: numbers that a record contributes.
        rows: gives the contributions of records first to last - 1.
        work: numbers that it takes to compute those of one record.
    """

    dtype = summed_in = torch.float64

    def __init__(
        self, n: int, width: int, rows: Callable[[int, int], Tensor], work: int = 1
    ) -> None:
        self.batch_size, self.rows = n, rows
        self.shapes = {"value": torch.Size([width])}
        self.device = torch.device("cpu")
        self._size = max(1, _ROWS // max(width, work))

    def chunks(self) -> Iterator[Contributions]:
        """Yield the contributions of every block."""
        for first in range(0, self.batch_size, self._size):
            yield DenseContributions(self.rows(first, min(first + self._size, self.batch_size)))


def release(gate: Gate, contributions: RowBlocks) -> Tensor:
    """Return the noised sum of all records' contributions, in float64."""
    records = torch.arange(contributions.batch_size)
    return gate(contributions, records=records)["value"].double()


def checked(data: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the calibration records, at least one."""
    x, y = (torch.as_tensor(part) for part in data)
    if not len(x) or len(x) != len(y):
        raise ValueError(
            f"the calibration data has {len(x)} inputs and {len(y)} targets; give one target for "
            f"every input, and at least one"
        )
    return x, y


def check_targets(predictive: Predictive, y: Tensor) -> None:
    """Raise unless there is one label, or finite target, for every prediction."""
    if isinstance(predictive, RealPredictive):
        if y.numel() != predictive.mean.numel() or not y.isfinite().all():
            raise ValueError(
                f"the calibration targets have shape {list(y.shape)} for predictions of shape "
                f"{list(predictive.mean.shape)}, or hold NaN or infinity; remove or mend those rows"
            )
    elif not isinstance(predictive, ClassPredictive) or predictive.mean.dim() != 2:
        raise TypeError(
            f"{type(predictive).__name__} of shape {list(predictive.mean.shape)} was predicted; "
            f"calibration needs one class label or real target per record"
        )
    else:
        predictive.log_prob(y)  # refuses labels that are none of the classes


def _holds(mechanisms: list[dict[str, Any]], wanted: dict[str, Any]) -> bool:
    """Return whether a mechanism is among others, with at least as many releases."""
    return any(
        m["releases"] >= wanted["releases"]
        and all(m[k] == v for k, v in wanted.items() if k not in ("releases", "sample_rate"))
        for m in mechanisms
    )


def _event(m: dict[str, Any]) -> Event:
    """Return the event of a mechanism; partitions all begin at batch 0, where they cost most."""
    return Event(m["sampling"], m["noise_multiplier"], m["releases"], m["n"], m["batch_size"])


def _union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))
