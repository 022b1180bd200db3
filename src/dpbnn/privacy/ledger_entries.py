"""What the lines of a ledger say: who has released what. It knows no file, no lock, no budget."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpbnn.privacy.events import Event, UnsupportedEvent
from dpbnn.privacy.ledger_file import LedgerCorrupted
from dpbnn.privacy.statement import LabelledEvent

SCHEMA = 2


@dataclasses.dataclass(frozen=True)
class Attempt:
    """Who makes releases, by name.

    The release of an attempt at a step is one and the same however often it is computed: same
    noise, same function. Another key, or another function, is another attempt.

    Attributes:
        run: name of the run.
        key: name of the key of its noise and sampling; the key itself is secret.
        what: a digest of all that is computed.
    """

    run: str
    key: str
    what: str = ""

    @classmethod
    def new(cls) -> Attempt:
        """Return an attempt of its own, for one gate."""
        return cls(secrets.token_hex(8), secrets.token_hex(8))


@dataclasses.dataclass(frozen=True)
class _Spend:
    """An entry: mechanism and attempt by number, the steps, and their position in a partition."""

    mechanism: int
    attempt: int
    step: int
    count: int
    start: int


class Entries:
    """The lines of a ledger, taken in one after the other.

    Mechanisms and attempts have a line each, and a number; a spend refers to them by it.

    Attributes:
        header: the first line: name, relation, budget.
        path: of the file, for messages.
        observed: whether releases were made that are not recorded.
        lost: whether entries were lost.
        spends: the entries.
    """

    def __init__(
        self, header: dict[str, Any], path: Path | None = None, observed: bool = False
    ) -> None:
        self.header, self.path, self.observed = header, path, observed
        self.lost = False
        self.spends: list[_Spend] = []
        self._mechanisms: dict[LabelledEvent, int] = {}  # of one release at the start
        self._attempts: dict[Attempt, int] = {}

    def take(self, lines: list[dict[str, Any]]) -> None:
        """Take lines in, in the order that they were written in."""
        for values in lines:
            if "dpbnn_ledger" in values:
                if values["dpbnn_ledger"] != SCHEMA:
                    raise LedgerCorrupted(
                        f"{self.path} has schema {values['dpbnn_ledger']}, this version reads "
                        f"{SCHEMA}. Keep the file as a record, start a new one, and plan with what "
                        f"it has spent beside: dpbnn.plan(..., beside=[...])"
                    )
                self.header = values
            elif "mechanism" in values:
                event = self._event(values["event"])
                mechanism = LabelledEvent(event, values["label"], values["clip"])
                self._mechanisms[mechanism] = self._next(self._mechanisms, values["mechanism"])
            elif "attempt" in values:
                who = {name: values[name] for name in ("run", "key", "what")}
                self._attempts[Attempt(**who)] = self._next(self._attempts, values["attempt"])
            elif "observed" in values:
                self.observed = True
            elif "lost" in values:
                self.lost = True
            else:
                self.spends.append(_Spend(**values["spend"]))

    def lines(
        self, event: Event, label: str, clip: float | None, attempt: Attempt, step: int
    ) -> list[dict[str, Any]]:
        """Return the lines that record an event; the arguments are those of `Ledger.spend`."""
        lines: list[dict[str, Any]] = []
        unit = dataclasses.replace(event, count=1, start=0)
        mechanism = self._mechanisms.get(LabelledEvent(unit, label, clip))
        if mechanism is None:
            mechanism = len(self._mechanisms)
            values = {"event": unit.to_dict(), "label": label, "clip": clip}
            lines.append({"mechanism": mechanism, **values})
        number = self._attempts.get(attempt)
        if number is None:
            number = len(self._attempts)
            lines.append({"attempt": number, **dataclasses.asdict(attempt)})
        spend = dataclasses.asdict(_Spend(mechanism, number, step, event.count, event.start))
        return [*lines, {"spend": spend, "time": round(time.time(), 3)}]

    def events(self, ledger: str = "") -> list[LabelledEvent]:
        """Return what was spent, in order, runs of one mechanism joined, as of a ledger."""
        mechanisms = list(self._mechanisms)
        joined: list[_Spend] = []
        for spend in self.spends:
            if joined and joined[-1].mechanism == spend.mechanism:
                last = joined[-1]
                partition = mechanisms[spend.mechanism].event.partition
                if not partition or last.start + last.count == spend.start:
                    joined[-1] = dataclasses.replace(last, count=last.count + spend.count)
                    continue
            joined.append(spend)
        return [
            dataclasses.replace(
                mechanism,
                event=dataclasses.replace(mechanism.event, count=spend.count, start=spend.start),
                ledger=ledger,
            )
            for spend in joined
            for mechanism in (mechanisms[spend.mechanism],)
        ]

    def first(self) -> list[Event]:
        """Return one release of the first mechanism, if any; the others protect the same unit."""
        return [part.event for part in itertools.islice(self._mechanisms, 1)]

    def outside_runs(self, other_than: str) -> list[Event]:
        """Return what single gates have spent, and no run of `fit`, under any label but one."""
        mechanisms, attempts = list(self._mechanisms), list(self._attempts)
        return [
            dataclasses.replace(mechanisms[spend.mechanism].event, count=spend.count)
            for spend in self.spends
            if not attempts[spend.attempt].what and mechanisms[spend.mechanism].label != other_than
        ]

    def beside(self, run: str) -> list[Event]:
        """Return what was spent by others than a run."""
        mechanisms, attempts = list(self._mechanisms), list(self._attempts)
        return [
            dataclasses.replace(
                mechanisms[spend.mechanism].event, count=spend.count, start=spend.start
            )
            for spend in self.spends
            if attempts[spend.attempt].run != run
        ]

    def steps(self, run: str) -> int:
        """Return how many different steps of a run are recorded, by any of its attempts."""
        mine = {number for attempt, number in self._attempts.items() if attempt.run == run}
        spends = (spend for spend in self.spends if spend.attempt in mine)
        return len({spend.step + i for spend in spends for i in range(spend.count)})

    def covered(
        self, attempt: Attempt, step: int, clip: float | None, like: Event | None
    ) -> list[float]:
        """Return the sigmas of the steps from `step` on that are charged to an attempt already."""
        mechanisms = list(self._mechanisms)

        def alike(event: Event) -> bool:
            unit = dataclasses.replace(like or event, count=1, start=0)
            return dataclasses.replace(event, noise_multiplier=unit.noise_multiplier) == unit

        charged = {
            spend.step + i: mechanisms[spend.mechanism].event.noise_multiplier
            for spend in self.spends
            if spend.attempt == self._attempts.get(attempt)
            and clip in (None, mechanisms[spend.mechanism].clip)
            and alike(mechanisms[spend.mechanism].event)
            for i in range(spend.count)
        }
        found = []
        while step in charged:
            found.append(charged[step])
            step += 1
        return found

    def _event(self, values: dict[str, Any]) -> Event:
        try:
            return Event.from_dict(values)
        except UnsupportedEvent as error:
            raise UnsupportedEvent(
                f"{self.path}: holds releases that nothing here can account for ({error}); import "
                f"the module that registers their sampler or mechanism before opening the ledger"
            ) from None

    def _next(self, known: Mapping[Any, int], number: int) -> int:
        """Return the number of a new mechanism or attempt, which follows that of the last one."""
        if number != len(known):
            raise LedgerCorrupted(f"{self.path}: its entries are numbered wrongly; see a backup")
        return number
