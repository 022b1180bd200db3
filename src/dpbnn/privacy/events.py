"""Privacy events: what a run released, as participation times mechanism.

How records get in is a `Sampler` class, what noise is added is a `Mechanism` class; an event names
both. `Event.dp_event` is the one place where it becomes an event of dp-accounting.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from dpbnn.privacy.mechanisms import MECHANISMS, Mechanism
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.sampling import SAMPLERS, Participation, Sampler


class UnsupportedEvent(ValueError):
    """The sampler, relation and accountant asked for have no sound analysis together."""


@dataclasses.dataclass(frozen=True)
class Event:
    """`count` releases of clipped sums, each with noise of scale sigma * C.

    Attributes:
        sampling: how each release chose its records, a name of `SAMPLERS`: "poisson", "fixed-size",
            "partition", "full-batch" (the last also stands for "unknown": nothing is amplified).
        noise_multiplier: sigma = noise std / clip; 0 means no noise and is not private.
        count: number of releases.
        n: number of records, public; under add/remove the expected one, chosen without looking at
            the data. Needed for every sampling but "full-batch".
        batch_size: expected batch size, likewise.
        start: for "partition", the position in the sequence of batches of the first release.
        order: for "partition", a name of the order that the records were in. Batches are fixed by
            position, so the batches of two orders are two partitions.
        mechanism: what noise each release got, a name of `MECHANISMS`.
        parameters: further public settings of sampler and mechanism, as (name, value).
    """

    sampling: str
    noise_multiplier: float
    count: int = 1
    n: int | None = None
    batch_size: float | None = None
    start: int = 0
    order: str = ""
    mechanism: str = "gaussian"
    parameters: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("sampling", SAMPLERS), ("mechanism", MECHANISMS)):
            value = getattr(self, name)
            if value not in known:
                raise UnsupportedEvent(f"{name}={value!r}: must be one of {', '.join(known)}")
        if not (self.noise_multiplier >= 0):
            raise ValueError(f"noise_multiplier={self.noise_multiplier}: must be >= 0")
        if self.count < 0 or self.start < 0:
            raise ValueError(f"count={self.count}, start={self.start}: must be >= 0")
        unknown = self.n is None or self.batch_size is None
        if unknown and self.sampler.participation is not Participation.EVERY:
            raise ValueError(f"an event with sampling={self.sampling!r} needs n and batch_size")

    @property
    def sampler(self) -> type[Sampler]:
        """What chose the records."""
        return SAMPLERS[self.sampling]

    @property
    def noise(self) -> Mechanism:
        """What noise was added."""
        return MECHANISMS[self.mechanism].of(self)

    @property
    def gaussian(self) -> bool:
        """Whether the noise is Gaussian and independent, so that closed forms hold."""
        return MECHANISMS[self.mechanism].gaussian

    @property
    def unit(self) -> str:
        """What a release clips as a whole and a neighbour differs in: "record", or as "person"."""
        return str(dict(self.parameters).get("unit", "record"))

    @property
    def rate(self) -> float:
        """Expected share of the records in one release."""
        if self.n is None or self.batch_size is None:
            return 1.0
        return self.batch_size / self.n

    @property
    def chance(self) -> float:
        """Probability that a release holds a record; 1 where nothing is amplified."""
        return self.rate if self.amplified else 1.0

    @property
    def partition(self) -> bool:
        """Whether batches are fixed by position, so that it matters which ones were released."""
        return self.sampler.by_position

    @property
    def amplified(self) -> bool:
        """Whether random sampling hides who took part in a release."""
        hides = (Participation.INDEPENDENT, Participation.OTHER)
        return self.sampler.participation in hides and self.rate < 1.0

    def dp_event(self, relation: Relation) -> Any:
        """Return all releases as an event of dp-accounting: the sampler's, of the mechanism's."""
        return self.sampler.dp_event(self, self.noise.dp_event(relation.shift))

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain values, without those at their default."""
        values = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }
        return values | ({"parameters": dict(self.parameters)} if self.parameters else {})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Event:
        """Rebuild an event from `to_dict`."""
        return cls(**{**values, "parameters": tuple(values.get("parameters", {}).items())})


def check_one_unit(events: Iterable[Event]) -> None:
    """Raise UnsupportedEvent where releases protect different units, whose costs do not add up."""
    units = sorted({event.unit for event in events if event.count})
    if len(units) > 1:
        raise UnsupportedEvent(
            f"some releases protect one {units[0]} and some one {units[1]}: what they cost "
            f"together is not known; make all of them for the same unit, or keep their ledgers and "
            f"plans apart"
        )


def check_relation(event: Event, relation: Relation) -> None:
    """Raise UnsupportedEvent where sampling and relation have no analysis together."""
    for kind, allowed in (
        (f"{event.sampling} sampling", event.sampler.relations),
        (f"{event.mechanism} noise", MECHANISMS[event.mechanism].relations),
    ):
        if relation not in allowed:
            raise UnsupportedEvent(
                f"relation={str(relation)!r} is not supported with {kind}; use relation="
                f"{' or '.join(repr(str(r)) for r in allowed)}, or another {kind.split()[-1]}"
            )


def gaussian_mu(events: Iterable[Event], relation: Relation) -> float:
    """Return the Gaussian-DP parameter mu of unamplified releases composed.

    A record takes part in every full-batch release, and in the releases of the one batch of each
    partition that holds it, so with s = `relation.shift`

        mu^2 = sum_full s^2/sigma^2 + sum_partitions max_batch sum_{releases of it} s^2/sigma^2.

    **Guarantee.** Adaptive composition of Gaussian mechanisms is exactly mu-GDP (Dong, Roth, Su
    2022, Corollary 2). Batches are fixed by position, so events of the same (n, batch_size, order)
    have the same batches. Different partitions add up their maxima, which is an upper bound: a
    record may lie in the worst batch of each.
    """
    squared = 0.0
    partitions: dict[tuple[int, float, str], list[Event]] = {}
    for event in events:
        if event.count == 0:
            continue
        if event.noise_multiplier == 0:
            return math.inf
        if event.partition and event.sampler.participation is Participation.BY_POSITION:
            key = (event.n or 0, event.batch_size or 0, event.order)
            partitions.setdefault(key, []).append(event)
        else:
            squared += event.count * (relation.shift / event.noise_multiplier) ** 2
    for (n, batch_size, _), passes in partitions.items():
        squared += _worst_batch(passes, math.ceil(n / batch_size), relation)
    return math.sqrt(squared)


def _worst_batch(events: list[Event], batches: int, relation: Relation) -> float:
    """Return the largest mu^2 that any one batch of a partition collects.

    Every event covers each batch `count // batches` times, and an arc of the cycle of batches once
    more; a sweep over the ends of the arcs finds the batch with the largest total.
    """
    everywhere = 0.0
    changes: dict[int, float] = {}
    for event in events:
        cost = (relation.shift / event.noise_multiplier) ** 2
        passes, rest = divmod(event.count, batches)
        everywhere += passes * cost
        first = event.start % batches
        for begin, end in ((first, first + rest), (0, first + rest - batches)):
            if end > begin:
                changes[begin] = changes.get(begin, 0.0) + cost
                changes[end] = changes.get(end, 0.0) - cost
    running = worst = 0.0
    for position in sorted(changes):
        running += changes[position]
        worst = max(worst, running)
    return everywhere + worst


def unpaid(beside: Sequence[Event], paid: Iterable[Event]) -> list[Event]:
    """Return what a plan has beside the training and nobody has charged.

    What single gates have spent from a ledger, such as private statistics, is theirs. Equal events
    of other runs, or charged for them, pay for nothing.

    Args:
        beside: events of the plan.
        paid: events of single gates.
    """
    held = Counter[Event]()
    for event in paid:
        held[dataclasses.replace(event, count=1)] += event.count
    found = []
    for event in beside:
        unit = dataclasses.replace(event, count=1, start=0, order="")
        there = min(held[unit], event.count)
        held[unit] -= there
        if event.count > there:
            found.append(dataclasses.replace(event, count=event.count - there))
    return found
