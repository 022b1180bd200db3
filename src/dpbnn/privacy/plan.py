"""Plans: what a run will cost, settled before any data is seen."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dpbnn.privacy import accountants
from dpbnn.privacy.checks import check_numbers
from dpbnn.privacy.events import Event, check_relation
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import Sampler, sampler

if TYPE_CHECKING:
    from dpbnn.privacy.statement import PrivacyStatement

__all__ = ["ComposedPlan", "Plan", "compose", "open_plan", "plan", "round_up"]

_MOST_STEPS = 10**8
_LARGEST_DELTA = 0.1  # beyond it a guarantee says nothing
_LOOKS = 16  # estimates at most, where a plan looks for its first guess
_CLOSE = 0.998  # a solved epsilon lies in [_CLOSE * target, target]


class _Budget(ABC):
    """What `Plan` and `ComposedPlan` share: events, delta, relation and the numbers from them."""

    events: tuple[Event, ...]
    delta: float
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

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` gives it back."""
        return json.dumps(self.to_dict(), indent=2)

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
    def events(self) -> tuple[Event, ...]:  # type: ignore[override]
        """All events that epsilon covers: this run's and those beside it."""
        return self.own_events + self.beside

    def statement(self, **details: Any) -> PrivacyStatement:
        """Return the privacy statement of a run that follows this plan.

        Args:
            **details: what the plan cannot know; see `PrivacyStatement.of`.
        """
        from dpbnn.privacy.statement import PrivacyStatement

        return PrivacyStatement.of(
            self.events,
            delta=self.delta,
            relation=self.relation,
            accountant=self.accountant,
            epsilon=self.epsilon,
            **details,
        )

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
        if values.get("schema") != 1:
            raise ValueError(
                f"schema={values.get('schema')!r}: this version reads plans of schema 1"
            )
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
        return (
            f"{guarantee}: {self.steps} {self.sampling} releases of expected batch size "
            f"{self.batch_size:g} from n = {self.n}, {sigma}"
            + (f", with {len(self.beside)} other mechanisms" if self.beside else "")
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
    def events(self) -> tuple[Event, ...]:  # type: ignore[override]
        """All events of all parts, each with what it has beside it.

        Nothing is taken for the same because it looks the same, so a mechanism that stands beside
        two parts counts twice: compose plans without `beside`, and the shared mechanism once.
        """
        return tuple(event for part in self.parts for event in part.events)

    @property
    def steps(self) -> int:
        """Number of releases of all parts."""
        return sum(part.steps for part in self.parts)

    statement = Plan.statement

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
        lines = [
            f"({round_up(self.epsilon)}, {self.delta:g})-DP by {self.accountant} under "
            f"{self.relation}, all together:"
        ]
        return "\n  ".join([*lines, *(str(part) for part in self.parts)])


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
    _check("epsilon", epsilon, 0, math.inf, "a budget, such as 1.0")
    _check("delta", delta, 0, _LARGEST_DELTA, "a small probability, such as 1e-5, well below 1/n")
    _check("epochs", epochs, 0, math.inf, "a number of passes over the data")
    draw = sampler(sampling, n, batch_size)
    relation = Relation.parse(relation)
    check_relation(draw.event(1.0), relation)
    others = tuple(
        e for item in beside for e in ([item] if isinstance(item, Event) else item.events)
    )
    length = _length(draw, epochs, steps)
    sigmas = _sigmas("noise_multiplier", noise_multiplier, length)
    shape = _sigmas("schedule", schedule, length)
    if shape is not None and (epsilon is None or sigmas is not None or length is None):
        raise ValueError(
            "schedule: goes with epsilon and epochs or steps, where the noise is solved for; "
            "give the sigmas themselves as noise_multiplier=[...] otherwise"
        )
    missing = [
        name
        for name, value in (
            ("epsilon", epsilon),
            ("noise_multiplier", sigmas),
            ("epochs (or steps)", length),
        )
        if value is None
    ]
    if len(missing) > 1:
        raise ValueError(
            f"{' and '.join(missing)} missing: give all of epsilon, noise_multiplier and epochs "
            f"(or steps) but one"
        )
    chosen = accountants.accountant(
        accountant or accountants.default_accountant((draw.event(1.0), *others))
    )

    def cost(runs: _Runs) -> float:
        return chosen.epsilon(_events(draw, runs) + others, delta, relation)

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

        def rough(scale: float) -> float:
            return quick.epsilon(_events(draw, _scaled(form, scale)) + others, delta, relation)

        def near(scale: float) -> float | None:
            events = _events(draw, _scaled(form, scale)) + others
            return chosen.estimate(events, delta, relation)

        model = rough if fits and chosen != quick else None
        start = None if model is None else _start(near, model, epsilon)
        solved = _solve_scale(lambda s: cost(_scaled(form, s)), epsilon, model, start=start)
        sigmas = _scaled(form, solved)
    elif length is None:
        assert epsilon is not None
        sigma = sigmas[0][0]
        sigmas = ((sigma, _solve_steps(lambda k: cost(((sigma, k),)), epsilon)),)
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
    _check("epochs", epochs, 0, math.inf, "a number of passes over the data")
    draw = sampler(sampling, n, batch_size)
    length = _length(draw, epochs, steps)
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
    _check("delta", delta, 0, _LARGEST_DELTA, "a small probability, such as 1e-5, well below 1/n")
    relation = parts[0].relation
    joint = ComposedPlan(parts, delta or parts[0].delta, math.nan, relation, "")
    chosen = accountants.accountant(accountant or accountants.default_accountant(joint.events))
    return dataclasses.replace(
        joint,
        epsilon=chosen.epsilon(joint.events, joint.delta, relation),
        accountant=chosen.name,
    )


def round_up(value: float, digits: int = 4) -> str:
    """Return `value` with `digits` significant digits, never below it."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1)
    return f"{math.ceil(value / unit - 1e-9) * unit:.{digits}g}"


_Runs = tuple[tuple[float, int], ...]


def _settle(
    draw: Sampler,
    sigmas: _Runs,
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


def _events(draw: Sampler, runs: _Runs) -> tuple[Event, ...]:
    starts = itertools.accumulate((count for _, count in runs), initial=0)
    return tuple(
        draw.event(sigma, count, start) for (sigma, count), start in zip(runs, starts, strict=False)
    )


def _scaled(runs: _Runs, scale: float) -> _Runs:
    return tuple((scale * sigma, count) for sigma, count in runs)


def _check(name: str, value: float | None, low: float, high: float, meaning: str) -> None:
    check_numbers(**{name: value})
    if value is not None and not (low < value < high):
        raise ValueError(f"{name}={value}: must lie in ({low:g}, {high:g}); give {meaning}")


def _length(draw: Sampler, epochs: float | None, steps: int | None) -> int | None:
    check_numbers(steps=steps)
    if steps is not None and not (1 <= steps <= _MOST_STEPS and steps == math.floor(steps)):
        raise ValueError(f"steps={steps}: must be a whole number from 1 to {_MOST_STEPS}")
    if epochs is None:
        return None if steps is None else int(steps)
    length = draw.steps(epochs)
    if steps is not None and steps != length:
        raise ValueError(
            f"epochs={epochs:g} and steps={steps} contradict each other: {epochs:g} epochs are "
            f"{length} steps; give one of the two"
        )
    return length


def _sigmas(name: str, value: float | Sequence[float] | None, length: int | None) -> _Runs | None:
    """Return sigma, one or one per step, as runs of (value, number of steps)."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        check_numbers(**{name: value})
    values = [float(v) for v in value] if isinstance(value, Iterable) else [float(value)]
    for sigma in values:
        _check(name, sigma, 0, math.inf, "the ratio of noise std to clip, such as 1.0")
    if not isinstance(value, Iterable):
        return ((values[0], 1 if length is None else length),)
    if length is None or len(values) != length:
        raise ValueError(
            f"{name}: has {len(values)} values for {length or 'an unknown number of'} steps; "
            f"give one value per step together with steps={len(values)}"
        )
    return tuple((sigma, len(list(run))) for sigma, run in itertools.groupby(values))


def _solve_scale(
    cost: Callable[[float], float],
    target: float,
    model: Callable[[float], float] | None = None,
    close: float = _CLOSE,
    start: float | None = None,
    rounds: int = 200,
) -> float:
    """Return a scale of the noise whose epsilon lies within [close * target, target].

    Epsilon falls in the scale. A cheap model of the cost says where to look, as if the two had a
    fixed ratio; it decides nothing. Without one the secant in logarithms does, in a bracket.
    """
    low, high = 0.0, math.inf
    middle = target * (1 + close) / 2
    scale = start or (1.0 if model is None else _modelled(model, middle, 1.0))
    known: list[tuple[float, float]] = []
    for _ in range(rounds):
        value = cost(scale)
        if close * target <= value <= target:
            return scale
        if value > target:
            low = scale
        else:
            high = scale
        known.append((scale, value))
        if model is not None and len(known) < 4 and 0 < value < math.inf:
            guess = _modelled(model, middle * model(scale) / value, scale)
        else:
            guess = _secant(known, middle)
        if low < guess < high:
            scale = min(max(guess, scale / 8), scale * 8)
        elif math.isinf(high):
            scale = 2 * low
        elif low == 0:
            scale = high / 2
        else:
            scale = math.sqrt(low * high)
        if low > 0 and high / low < 1 + 1e-9:
            return high
        if scale > 1e9:
            break
    raise ValueError(f"epsilon={target}: no noise multiplier up to 1e9 reaches it; raise epsilon")


def _start(
    near: Callable[[float], float | None], model: Callable[[float], float], target: float
) -> float | None:
    """Return where to look first: where the estimate lies in the middle of what is accepted."""

    def cost(scale: float) -> float:
        value = near(scale)
        if value is None or not 0 < value < math.inf:
            raise ValueError("no estimate")
        return value

    room = (1 - _CLOSE) / 4
    try:
        return _solve_scale(cost, target * (1 - room), model, 1 - 2 * room, rounds=_LOOKS)
    except ValueError:
        return None


def _modelled(model: Callable[[float], float], target: float, otherwise: float) -> float:
    try:
        return _solve_scale(model, target, close=1 - 1e-7)
    except (ValueError, OverflowError):
        return otherwise


def _secant(known: list[tuple[float, float]], target: float) -> float:
    points = [(math.log(s), math.log(v)) for s, v in known if 0 < v < math.inf][-2:]
    if len(points) < 2 or points[0][1] == points[1][1]:
        return math.nan
    (x0, y0), (x1, y1) = points
    exponent = x1 + (math.log(target) - y1) * (x1 - x0) / (y1 - y0)
    return math.exp(min(max(exponent, -50.0), 50.0))


def _solve_steps(cost: Callable[[int], float], target: float) -> int:
    """Return the largest number of steps whose epsilon is at most the target."""
    if cost(1) > target:
        raise ValueError(
            f"epsilon={target}: a single release at this noise costs {round_up(cost(1))}; "
            f"raise noise_multiplier or epsilon"
        )
    low, high = 1, 2
    while cost(high) <= target:
        low, high = high, 4 * high
        if low > _MOST_STEPS:
            raise ValueError(
                f"epsilon={target}: allows more than {_MOST_STEPS} steps at this noise; "
                f"give steps or epochs and leave noise_multiplier out"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= target else (low, middle)
    return low
