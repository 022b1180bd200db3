"""Plans: what a run will cost, settled before any data is seen."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from dpbnn.notebook import Shown
from dpbnn.privacy import accountants
from dpbnn.privacy.accountants import Accountant
from dpbnn.privacy.checks import check_between, round_up, warn_if_weak
from dpbnn.privacy.events import Event, check_relation
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import Sampler, sampler
from dpbnn.privacy.schedule import Schedule, first_steps, read_length, read_schedule, scaled
from dpbnn.privacy.solve import noise_scale, step_count
from dpbnn.privacy.statement import PrivacyStatement

_DELTA = (0, 0.1, "a small probability, such as 1e-5, well below 1/n")
_EPOCHS = (0, math.inf, "a number of passes over the data")


class _Budget(Shown, ABC):
    """What `Plan` and `ComposedPlan` share: events, delta, relation and the numbers from them."""

    delta: float
    epsilon: float
    relation: Relation
    accountant: str

    def epsilons(self) -> dict[str, float]:
        """Return epsilon by every accountant that covers the plan.

        "gdp-clt" is an approximation that can lie below the truth; the others are upper bounds.
        """
        return {
            name: a.epsilon(self.events, self.delta, self.relation)
            for name, a in accountants.ACCOUNTANTS.items()
            if all(a.supports(event, self.relation) is None for event in self.events)
        }

    def statement(self, **details: Any) -> PrivacyStatement:
        """Return the privacy statement of a run that follows this plan.

        Args:
            **details: what the plan cannot know; see `PrivacyStatement.of`.
        """
        return PrivacyStatement.of(
            self.events,
            delta=self.delta,
            relation=self.relation,
            accountant=self.accountant,
            epsilon=self.epsilon,
            **details,
        )

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` gives it back."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    @abstractmethod
    def events(self) -> tuple[Event, ...]:
        """All events that epsilon covers."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""


@dataclasses.dataclass(frozen=True)
class Plan(_Budget):
    """A settled run: its sampler, its noise, its number of steps and what they cost.

    Attributes:
        sampler: draws the batches; n and the expected batch size are in it.
        noise_multipliers: sigma as runs of (value, number of steps), in order.
        delta: the delta of the guarantee.
        epsilon: the epsilon of exactly `steps` releases, together with `beside`.
        relation: the neighbouring relation.
        accountant: name of the accountant that gave epsilon.
        target_epsilon: the budget that the plan was solved for, if it was.
        beside: events of other mechanisms on the same data that share the budget.
    """

    sampler: Sampler
    noise_multipliers: tuple[tuple[float, int], ...]
    delta: float
    epsilon: float
    relation: Relation
    accountant: str
    target_epsilon: float | None = None
    beside: tuple[Event, ...] = ()

    @property
    def n(self) -> int:
        """Number of records, public; under add/remove the expected one."""
        return self.sampler.n

    @property
    def batch_size(self) -> float:
        """Expected batch size."""
        return self.sampler.batch_size

    @property
    def sampling(self) -> str:
        """Name of the sampler."""
        return self.sampler.name

    @property
    def sample_rate(self) -> float:
        """Expected share of the records in a batch."""
        return self.sampler.rate

    @property
    def steps(self) -> int:
        """Number of releases."""
        return sum(count for _, count in self.noise_multipliers)

    @property
    def epochs(self) -> float:
        """Expected number of times that a record takes part."""
        return self.steps * self.sample_rate

    @property
    def noise_multiplier(self) -> float:
        """Sigma = noise std / clip; of a schedule, the smallest."""
        return min((sigma for sigma, _ in self.noise_multipliers), default=math.inf)

    @property
    def private(self) -> bool:
        """Whether every release has noise."""
        return self.noise_multiplier > 0

    @property
    def own_events(self) -> tuple[Event, ...]:
        """Events of this run alone."""
        return _events(self.sampler, self.noise_multipliers)

    @property
    def events(self) -> tuple[Event, ...]:
        """All events that epsilon covers: this run's and those beside it."""
        return self.own_events + self.beside

    def epsilon_after(self, steps: int) -> float:
        """Return the epsilon of the first steps alone, together with `beside`."""
        runs = first_steps(self.noise_multipliers, steps)
        events = _events(self.sampler, runs) + self.beside
        return accountants.accountant(self.accountant).epsilon(events, self.delta, self.relation)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "schema": 1,
            "sampling": self.sampling,
            "n": self.n,
            "batch_size": self.batch_size,
            **({"parameters": dict(self.sampler.parameters)} if self.sampler.parameters else {}),
            "noise_multipliers": [list(run) for run in self.noise_multipliers],
            "steps": self.steps,
            "epsilon": self.epsilon if self.private else None,
            "delta": self.delta,
            "relation": str(self.relation),
            "accountant": self.accountant,
            "target_epsilon": self.target_epsilon,
            "beside": [event.to_dict() for event in self.beside],
        }

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Rebuild a plan from `to_json`; epsilon is computed anew, not read."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Rebuild a plan from `to_dict`; epsilon is computed anew, not read."""
        schema = values.get("schema")
        if schema != 1:
            raise ValueError(f"schema={schema!r}: this version reads plans of schema 1")
        given = {name: values[name] for name in ("sampling", "n", "batch_size")}
        return _settle(
            sampler(**given, **values.get("parameters", {})),
            tuple((float(sigma), int(count)) for sigma, count in values["noise_multipliers"]),
            values["delta"],
            Relation.parse(values["relation"]),
            values["accountant"],
            values["target_epsilon"],
            tuple(Event.from_dict(event) for event in values["beside"]),
        )

    def __str__(self) -> str:
        sigma = f"sigma {self.noise_multiplier:.5g}"
        if len(self.noise_multipliers) > 1:
            sigma = f"a schedule of sigma from {self.noise_multiplier:.5g} upwards"
        guarantee = "NOT PRIVATE"
        if self.private:
            bound = f"({round_up(self.epsilon)}, {self.delta:g})-DP"
            guarantee = f"{bound} by {self.accountant} under {self.relation}"
        plural, more = "s" * (self.steps != 1), len(self.beside)
        return (
            f"{guarantee}: {self.steps} {self.sampling} release{plural} of expected batch size "
            f"{self.batch_size:g} from n = {self.n}, {sigma}"
            + (f", with {more} other mechanism{'s' * (more != 1)}" if more else "")
        )


@dataclasses.dataclass(frozen=True)
class ComposedPlan(_Budget):
    """Several mechanisms on the same data, in one budget.

    Attributes:
        parts: the plans.
        delta: the delta of the joint guarantee.
        epsilon: epsilon of all parts together.
        relation: the neighbouring relation of all parts.
        accountant: name of the accountant that gave epsilon.
    """

    parts: tuple[Plan, ...]
    delta: float
    epsilon: float
    relation: Relation
    accountant: str

    @property
    def events(self) -> tuple[Event, ...]:
        """All events of all parts, each with what it has beside it.

        Nothing is taken for the same because it looks the same, so a mechanism that stands beside
        two parts counts twice: compose plans without `beside`, and the shared mechanism once.
        """
        return tuple(event for part in self.parts for event in part.events)

    @property
    def steps(self) -> int:
        """Number of releases of all parts."""
        return sum(part.steps for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "schema": 1,
            "parts": [part.to_dict() for part in self.parts],
            "epsilon": self.epsilon,
            "delta": self.delta,
            "relation": str(self.relation),
            "accountant": self.accountant,
        }

    @classmethod
    def from_json(cls, text: str) -> ComposedPlan:
        """Rebuild a composed plan from `to_json`; epsilon is computed anew, not read."""
        values = json.loads(text)
        parts = (Plan.from_dict(part) for part in values["parts"])
        return compose(*parts, delta=values["delta"], accountant=values["accountant"])

    def __str__(self) -> str:
        bound = f"({round_up(self.epsilon)}, {self.delta:g})-DP by {self.accountant}"
        title = f"{bound} under {self.relation}, all together:"
        return "\n  ".join([title, *map(str, self.parts)])


def plan(
    *,
    epsilon: float | None = None,
    delta: float,
    noise_multiplier: float | Sequence[float] | None = None,
    n: int,
    batch_size: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    sampling: str = "poisson",
    relation: str | Relation = Relation.ZERO_OUT,
    accountant: str | None = None,
    schedule: Sequence[float] | None = None,
    beside: Iterable[Plan | ComposedPlan | Event] = (),
) -> Plan:
    """Settle a run: give all of epsilon, noise multiplier and length but one, and get that one.

    **Guarantee.** The epsilon of exactly `plan.steps` releases, together with `beside`, is at most
    the target; where the noise is solved for, it is within 0.5 % of it.

    Args:
        epsilon: the budget; computed if missing.
        delta: the delta of the guarantee, well below 1/n.
        noise_multiplier: sigma = noise std / clip, one or one per step; solved for if missing.
        n: number of records, public. Under add/remove an expected number, chosen without looking
            at the data, which may then have any number of records.
        batch_size: expected batch size; all n for sampling="full-batch".
        epochs: length in passes over the data; solved for if missing.
        steps: length in releases, instead of epochs.
        sampling: "poisson", "fixed-size", "partition" or "full-batch".
        relation: "zero-out", "add/remove" or "replace-one".
        accountant: "pld", "rdp", "exact" or "gdp-clt"; by default the tightest rigorous one.
        schedule: relative sigma of each step, where the noise is solved for.
        beside: plans or events on the same data that share the budget, such as private statistics.

    Example:
        >>> p = plan(epsilon=1.0, delta=1e-5, n=60_000, batch_size=256, epochs=15)
        >>> p.steps, round(p.noise_multiplier, 2), p.epsilon <= 1.0
        (3516, 1.19, True)
    """
    check_between(0, math.inf, "a budget, such as 1.0", epsilon=epsilon)
    check_between(*_DELTA, delta=delta)
    check_between(*_EPOCHS, epochs=epochs)
    draw = sampler(sampling, n, batch_size)
    warn_if_weak(epsilon, delta, n)
    relation = Relation.parse(relation)
    check_relation(draw.event(1.0), relation)
    others = tuple(
        e for item in beside for e in ([item] if isinstance(item, Event) else item.events)
    )
    length = read_length(draw, epochs, steps)
    sigmas = read_schedule("noise_multiplier", noise_multiplier, length)
    shape = read_schedule("schedule", schedule, length)
    if shape is not None and (epsilon is None or sigmas is not None or length is None):
        raise ValueError(
            "schedule: goes with epsilon and epochs or steps, where the noise is solved for; "
            "give the sigmas themselves as noise_multiplier=[...] otherwise"
        )
    free = {"epsilon": epsilon, "noise_multiplier": sigmas, "epochs (or steps)": length}
    missing = [name for name, value in free.items() if value is None]
    if len(missing) > 1:
        raise ValueError(
            f"{' and '.join(missing)} missing: give all of epsilon, noise_multiplier and epochs "
            f"(or steps) but one"
        )
    chosen = accountants.accountant(
        accountant or accountants.default_accountant((draw.event(1.0), *others))
    )

    def cost(runs: Schedule, by: Accountant = chosen) -> float:
        return by.epsilon(_events(draw, runs) + others, delta, relation)

    if epsilon is not None and cost(()) >= epsilon:
        raise ValueError(
            f"epsilon={epsilon}: the mechanisms beside this run already cost "
            f"{round_up(cost(()))}; raise epsilon or make them cheaper"
        )
    if sigmas is None:
        assert length is not None
        assert epsilon is not None
        form = shape or ((1.0, length),)
        quick = accountants.accountant("gdp-clt")
        fits = all(quick.supports(e, relation) is None for e in (draw.event(1.0), *others))
        model = (lambda scale: cost(scaled(form, scale), quick)) if fits else None
        sigmas = scaled(form, noise_scale(lambda s: cost(scaled(form, s)), epsilon, model))
    elif length is None:
        assert epsilon is not None
        sigma = sigmas[0][0]
        sigmas = ((sigma, step_count(lambda steps: cost(((sigma, steps),)), epsilon)),)
    return _settle(draw, sigmas, delta, relation, chosen.name, epsilon, others)


def open_plan(
    *,
    n: int,
    batch_size: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    sampling: str = "poisson",
) -> Plan:
    """Return a plan without noise, for training that is not private and says so.

    Args:
        n: number of records.
        batch_size: expected batch size; all n for sampling="full-batch".
        epochs: length in passes over the data.
        steps: length in releases, instead of epochs.
        sampling: as in `plan`.
    """
    check_between(*_EPOCHS, epochs=epochs)
    draw = sampler(sampling, n, batch_size)
    length = read_length(draw, epochs, steps)
    if length is None:
        raise ValueError("epochs and steps are missing: give one of them")
    relation = draw.relations[0]
    return Plan(draw, ((0.0, length),), 1e-5, math.inf, relation, "rdp")


def compose(
    *plans: Plan | ComposedPlan, delta: float | None = None, accountant: str | None = None
) -> ComposedPlan:
    """Put several mechanisms on the same data into one budget.

    **Guarantee.** The epsilon of all releases of all plans at `delta`, composed adaptively in any
    order: private statistics, training, recalibration; k chains are k times the same plan.

    Args:
        *plans: the plans, of one n and one relation.
        delta: the delta of the joint guarantee; by default the one that all plans share.
        accountant: as in `plan`.

    Example:
        >>> chain = plan(noise_multiplier=2.0, delta=1e-5, n=1000, batch_size=50, epochs=5)
        >>> compose(chain, chain).epsilon > chain.epsilon
        True
    """
    parts = tuple(
        part for p in plans for part in (p.parts if isinstance(p, ComposedPlan) else (p,))
    )
    if not parts:
        raise ValueError("compose: no plans given; pass at least one")
    for name in ("n", "relation", *(("delta",) if delta is None else ())):
        values = sorted({str(getattr(part, name)) for part in parts})
        if len(values) > 1:
            cure = "; pass delta= for the joint guarantee" if name == "delta" else ""
            raise ValueError(f"{name}: the plans disagree ({' and '.join(values)}){cure}")
    check_between(*_DELTA, delta=delta)
    relation = parts[0].relation
    joint = ComposedPlan(parts, delta or parts[0].delta, math.nan, relation, "")
    chosen = accountants.accountant(accountant or accountants.default_accountant(joint.events))
    return dataclasses.replace(
        joint,
        epsilon=chosen.epsilon(joint.events, joint.delta, relation),
        accountant=chosen.name,
    )


def _settle(
    draw: Sampler,
    sigmas: Schedule,
    delta: float,
    relation: Relation,
    name: str,
    target: float | None,
    beside: tuple[Event, ...],
) -> Plan:
    events = _events(draw, sigmas) + beside
    epsilon = accountants.accountant(name).epsilon(events, delta, relation)
    if target is not None and epsilon > target:
        raise ValueError(
            f"epsilon={target:g}: {sum(count for _, count in sigmas)} steps at noise_multiplier="
            f"{min(sigma for sigma, _ in sigmas):g} cost {round_up(epsilon)}; leave one of "
            f"epsilon, noise_multiplier and epochs out to have it solved for"
        )
    return Plan(draw, sigmas, delta, epsilon, relation, name, target, beside)


def _events(draw: Sampler, runs: Schedule) -> tuple[Event, ...]:
    starts = itertools.accumulate((count for _, count in runs), initial=0)
    return tuple(
        draw.event(sigma, count, start) for (sigma, count), start in zip(runs, starts, strict=False)
    )
