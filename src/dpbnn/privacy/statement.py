"""Privacy statements: what was promised to whom, in words and as JSON."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpbnn.notebook import Shown
from dpbnn.privacy import accountants
from dpbnn.privacy.attack import Attack, attack_on
from dpbnn.privacy.checks import round_up, weak_points
from dpbnn.privacy.events import Event, UnsupportedEvent, check_one_unit
from dpbnn.privacy.mechanisms import MECHANISMS
from dpbnn.privacy.relation import Relation

SCHEMA = 1

_SETTINGS = (
    "the settings of the run (model, method, bounds, classes and their weights, clip, noise, "
    "number of steps)"
)
_COVERS = (
    "every released sum, and all that is computed from them without the data: the posterior, its "
    "samples, its predictions on other data",
)
BEFORE = (
    "whatever was computed from the data before dpbnn got it, such as a scaler's means, imputed "
    "values, chosen columns, or bounds read off the data"
)
_ENTROPY = "operating-system entropy"
UNKNOWN = "nothing is known of the training of the model: it has no privacy statement"


@dataclasses.dataclass(frozen=True)
class LabelledEvent:
    """Releases of one kind, and what a statement says of them.

    Attributes:
        event: the releases.
        label: what they are for.
        clip: the clip they use, if that is known.
        ledger: name of the ledger that holds them; empty for none.
    """

    event: Event
    label: str = ""
    clip: float | None = None
    ledger: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return an entry of `PrivacyStatement.mechanisms`."""
        event = self.event
        return {
            "label": self.label,
            "sampling": event.sampling,
            "noise_multiplier": event.noise_multiplier,
            "clip": self.clip,
            "sample_rate": None if event.n is None else event.rate,
            "n": event.n,
            "batch_size": event.batch_size,
            "releases": event.count,
            "ledger": self.ledger,
            **({"start": event.start, "order": event.order} if event.partition else {}),
            **{k: v for k, v in event.to_dict().items() if k in ("mechanism", "parameters")},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LabelledEvent:
        """Rebuild the releases from `to_dict`."""
        names = (
            "sampling", "noise_multiplier", "n", "batch_size", "start", "order", "mechanism",
            "parameters",
        )  # fmt: skip
        given = {name: values[name] for name in names if name in values}
        event = Event.from_dict({"count": values["releases"], **given})
        return cls(event, values["label"], values["clip"], values.get("ledger", ""))


@dataclasses.dataclass(frozen=True)
class PrivacyStatement(Shown):
    """The guarantee of a run, or that there is none.

    Attributes:
        private: whether epsilon and delta hold.
        reason: why there is no guarantee, where there is none.
        unit: what one neighbour differs in.
        relation: the neighbouring relation, None where not private.
        epsilon: an upper bound on the privacy loss; infinite where not private.
        delta: probability that the bound fails; 1 where not private.
        accountant: name of the accountant.
        accountant_version: the code that computed epsilon.
        released: what was released, alike events added up.
        public: what is treated as public.
        covers: which outputs the guarantee covers.
        randomness: where noise and sampling came from.
        tuning_runs: number of other runs on the same data that chose the settings, as declared;
            None if nothing was declared.
        caveats: what the reader must know beside the numbers.
        complete: whether `released` is all that epsilon covers, so that no entry was lost.
    """

    private: bool
    reason: str = ""
    unit: str = "one record"
    relation: Relation | None = None
    epsilon: float = math.inf
    delta: float = 1.0
    accountant: str = ""
    accountant_version: str = ""
    released: tuple[LabelledEvent, ...] = ()
    public: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    randomness: str = ""
    tuning_runs: int | None = None
    caveats: tuple[str, ...] = ()
    complete: bool = True

    @classmethod
    def of(
        cls,
        events: Iterable[Event | LabelledEvent],
        *,
        delta: float,
        relation: Relation | str = Relation.ZERO_OUT,
        accountant: str | None = None,
        epsilon: float | None = None,
        labels: Sequence[str] = (),
        clip: float | None = None,
        unit: str | None = None,
        public: Sequence[str] = (),
        covers: Sequence[str] = (),
        randomness: str = _ENTROPY,
        debug: bool = False,
        tuning_runs: int | None = None,
        caveats: Sequence[str] = (),
    ) -> PrivacyStatement:
        """State the guarantee of a sequence of events.

        **Guarantee.** epsilon is computed from the events by a rigorous accountant, unless the
        caller chose "gdp-clt", which the statement then calls an approximation.

        Args:
            events: everything that was released; events without a label get those below.
            delta: the delta of the guarantee.
            relation: the neighbouring relation.
            accountant: as in `plan`; the tightest rigorous one by default.
            epsilon: epsilon of the events if the caller has computed it already.
            labels: one name per event without a label.
            clip: the clip of the events without a label.
            unit: what one neighbour differs in; by default what the events say: "one record", or
                "one person" where all records of a person are clipped together.
            public: what is treated as public beside n and the settings.
            covers: what is covered beside the released sums and what follows from them.
            randomness: source of noise and sampling.
            debug: whether noise or sampling was seeded, which voids the guarantee.
            tuning_runs: declared number of other runs that chose the settings.
            caveats: further remarks.
        """
        names = itertools.chain(labels, itertools.repeat(""))
        parts = [
            part if isinstance(part, LabelledEvent) else LabelledEvent(part, next(names), clip)
            for part in events
        ]
        own = [part.event for part in parts]
        relation = Relation.parse(relation)
        if debug:
            return cls.debug(randomness if randomness != _ENTROPY else "seeded")
        if any(event.noise_multiplier == 0 and event.count for event in own):
            return cls.not_private("releases were made without noise")
        check_one_unit(own)
        chosen = accountants.accountant(accountant or accountants.default_accountant(own))
        if epsilon is None:
            epsilon = chosen.epsilon(own, delta, relation)
        return cls(
            private=math.isfinite(epsilon),
            reason="" if math.isfinite(epsilon) else "the privacy loss is unbounded",
            unit=unit or f"one {_unit(own)}",
            relation=relation,
            epsilon=epsilon,
            delta=delta,
            accountant=chosen.name,
            accountant_version=chosen.version,
            released=_added_up(parts),
            public=_union((_size(_unit(own), relation), _SETTINGS), public),
            covers=(*_COVERS, *covers),
            randomness=randomness,
            tuning_runs=tuning_runs,
            caveats=(*_caveats(own, epsilon, delta, chosen, tuning_runs), *caveats),
        )

    @classmethod
    def not_private(cls, reason: str = "trained without privacy") -> PrivacyStatement:
        """State that there is no guarantee."""
        return cls(private=False, reason=reason)

    @classmethod
    def debug(cls, randomness: str = "seeded") -> PrivacyStatement:
        """State that noise or sampling was seeded, so that there is no guarantee."""
        return cls(
            private=False,
            reason=f"debug: not private, noise or sampling was {randomness}",
            randomness=randomness,
        )

    @property
    def unit_name(self) -> str:
        """What one neighbour differs in, without "one": "record", or such as "person"."""
        return self.unit.removeprefix("one ")

    @property
    def mechanisms(self) -> tuple[dict[str, Any], ...]:
        """What was released, as plain values.

        An entry has label, sampling, noise_multiplier, clip, sample_rate, n, batch_size, releases
        and the name of the ledger that holds them; of a partition also start and order.
        """
        return tuple(part.to_dict() for part in self.released)

    @functools.cached_property
    def attack(self) -> Attack | None:
        """What the best attack can achieve; None where there is no bound or an event is unknown.

        It comes from the composed privacy loss of all releases, so it says more than one epsilon.
        """
        if not (self.private and self.complete and self.released):
            return None
        assert self.relation is not None
        events = [part.event for part in self.released]
        try:
            if not accountants.accountant(self.accountant).rigorous:
                return None
            return attack_on(events, self.delta, self.relation, self.accountant)
        except (UnsupportedEvent, ValueError):  # an event or accountant that is not known here
            return None

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as plain values; where not private, epsilon and delta are null."""
        names = [f.name.replace("released", "mechanisms") for f in dataclasses.fields(self)]
        values = {name: getattr(self, name) for name in names}
        if not self.private:
            values["epsilon"] = values["delta"] = None
        values["relation"] = None if self.relation is None else str(self.relation)
        values["attack"] = None if self.attack is None else self.attack.to_dict()
        return {"schema": SCHEMA, **values}

    def to_json(self) -> str:
        """Return the statement as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> PrivacyStatement:
        """Rebuild a statement from `to_json`."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrivacyStatement:
        """Rebuild a statement from `to_dict`."""
        values = dict(values)
        schema = values.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"schema={schema!r}: this version reads statements of schema {SCHEMA}")
        values.pop("attack", None)  # follows from the releases
        values["released"] = tuple(map(LabelledEvent.from_dict, values.pop("mechanisms")))
        for name in ("public", "covers", "caveats"):
            values[name] = tuple(values[name])
        if not values["private"]:
            values["epsilon"], values["delta"] = math.inf, 1.0
        if values["relation"] is not None:
            values["relation"] = Relation.parse(values["relation"])
        return cls(**values)

    def __str__(self) -> str:
        if not self.private:
            banner = "NOT PRIVATE"
            if self.reason.startswith("debug"):
                banner = "DEBUG: NOT PRIVATE"
            return f"*** {banner} ***\nThere is no privacy guarantee: {self.reason}."
        assert self.relation is not None
        bound = "epsilon about" if self.accountant == "gdp-clt" else "epsilon ="
        lines = [
            f"Differential privacy: {bound} {round_up(self.epsilon)}, delta = {self.delta:g}",
            item(
                "Protects",
                f"{self.unit}: datasets that {self.relation.describe(self.unit_name)} "
                f"({self.relation}) give "
                f"outputs whose probabilities differ by a factor of at most exp(epsilon), "
                f"up to delta.",
            ),
            item("Accountant", f"{self.accountant} ({self.accountant_version})"),
            *([] if self.attack is None else [item("Attack", self.attack.of(self.unit_name))]),
            *(item("Mechanism", _describe(mechanism)) for mechanism in self.mechanisms),
            item("Covers", "; ".join(self.covers)),
            item("Excludes", BEFORE),
            item("Public", "; ".join(self.public)),
            item("Randomness", self.randomness),
            item("Tuning", _tuning(self.tuning_runs)),
            *(item("Caveat", caveat) for caveat in self.caveats),
        ]
        return "\n".join(lines)


def statement_of(privacy: PrivacyStatement | Mapping[str, Any]) -> PrivacyStatement:
    """Return the statement, from its `to_dict()` where that was given."""
    if isinstance(privacy, PrivacyStatement):
        return privacy
    return PrivacyStatement.from_dict(dict(privacy))


def joined(before: PrivacyStatement | None, later: PrivacyStatement, made: int) -> PrivacyStatement:
    """Return the statement of a ledger together with what was released before, once each.

    **Guarantee.** Releases from before that the ledger does not hold are added to its own. Nothing
    is private that was trained without privacy, or of which it is not known.

    Args:
        before: the statement of what was released earlier, such as the training; None if there is
            none.
        later: the statement of all that the ledger holds, at the delta of the joint guarantee.
        made: how many releases were made on the ledger since `before`.
    """
    if before is not None and not before.private:
        return before
    if not later.private:
        return later
    if before is None:
        return PrivacyStatement.not_private(UNKNOWN)
    relation = later.relation
    assert relation is not None
    assert before.relation is relation
    books = {part.ledger for part in later.released} - {""}
    missing = [part for part in before.released if part.ledger not in books]
    known = sum(part.event.count for part in before.released if part.ledger in books)
    held = sum(part.event.count for part in later.released)
    if known + made > held or not before.complete or (missing and not later.complete):
        return PrivacyStatement.not_private("the ledger lacks releases of the training")
    if missing:
        later = PrivacyStatement.of(
            [*missing, *later.released],
            delta=later.delta,
            relation=relation,
            randomness=later.randomness,
        )
    return dataclasses.replace(
        later,
        unit=before.unit,
        public=_union(later.public, before.public),
        covers=_union(later.covers, before.covers),
        tuning_runs=before.tuning_runs,
        caveats=_union(later.caveats, before.caveats),
    )


def _added_up(parts: Iterable[LabelledEvent]) -> tuple[LabelledEvent, ...]:
    """Return one part for all that are alike; events of a partition stay apart."""
    counts: dict[tuple[LabelledEvent, int], int] = {}
    for index, part in enumerate(parts):
        unit = dataclasses.replace(part, event=dataclasses.replace(part.event, count=1))
        key = (unit, index if part.event.partition else 0)
        counts[key] = counts.get(key, 0) + part.event.count
    return tuple(
        dataclasses.replace(unit, event=dataclasses.replace(unit.event, count=count))
        for (unit, _), count in counts.items()
    )


def _unit(events: Sequence[Event]) -> str:
    """Return the name of what all the releases protect; `Accountant.epsilon` has compared them."""
    return next((event.unit for event in events if event.count), "record")


def _size(unit: str, relation: Relation) -> str:
    if not relation.public_size:
        return (
            f"the expected number of {unit}s n, chosen without looking at the data (the true "
            f"number of {unit}s is not public)"
        )
    own = "" if unit == "record" else ", and the number of all records (not whose they are)"
    return f"the number of {unit}s n{own}"


def _union(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def _caveats(
    events: list[Event],
    epsilon: float,
    delta: float,
    chosen: accountants.Accountant,
    tuning_runs: int | None,
) -> list[str]:
    caveats = []
    if not chosen.rigorous:
        caveats.append(
            f"{chosen.name} is an approximation that can lie below the true epsilon; it is no bound"
        )
    sizes = [event.n for event in events if event.n is not None]
    caveats += weak_points(epsilon, delta, max(sizes, default=None))
    if tuning_runs:
        runs, are, they = (
            ("1 other run", "is", "it is") if tuning_runs == 1 else
            (f"{tuning_runs} other runs", "are", "they are")
        )  # fmt: skip
        caveats.append(
            f"{runs} on the same data chose the settings and {are} not part of epsilon, unless "
            f"{they} listed as mechanisms"
        )
    return caveats


def _describe(mechanism: dict[str, Any]) -> str:
    noise = mechanism.get("mechanism", "gaussian")
    words = MECHANISMS[noise].words if noise in MECHANISMS else f"{noise} noise, scale"
    count = mechanism["releases"]
    what = "release of a clipped sum" if count == 1 else "releases of clipped sums"
    text = f"{count} {what} with {words} = "
    text += f"{mechanism['noise_multiplier']:.6g} x clip"
    if mechanism["clip"] is not None:
        text += f" {mechanism['clip']:g}"
    text += f"; {mechanism['sampling']} sampling"
    if mechanism["sample_rate"] is not None:
        text += f", rate {mechanism['sample_rate']:.6g} (expected batch "
        text += f"{mechanism['batch_size']:g} of n = {mechanism['n']})"
    return f"{mechanism['label']}: {text}" if mechanism["label"] else text


def _tuning(runs: int | None) -> str:
    if runs is None:
        return "number of tuning runs not declared"
    return f"{runs} tuning run{'s' * (runs != 1)} declared"


def item(name: str, text: str) -> str:
    """Return a named paragraph of a statement."""
    return textwrap.fill(text, 96, initial_indent=f"  {name + ':':<12}", subsequent_indent=" " * 14)
