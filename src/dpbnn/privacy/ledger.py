"""The ledger: an append-only record of releases, durable before any release is used."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dpbnn.privacy import accountants
from dpbnn.privacy.checks import check_numbers
from dpbnn.privacy.events import Event, check_relation
from dpbnn.privacy.plan import round_up
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.statement import PrivacyStatement

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]

__all__ = ["BudgetExceeded", "Ledger", "LedgerCorrupted"]

SCHEMA = 1


class BudgetExceeded(RuntimeError):
    """The next release would cost more than is left; nothing was spent."""


class LedgerCorrupted(RuntimeError):
    """The ledger file does not say reliably what was spent."""


@dataclasses.dataclass(frozen=True)
class _Mechanism:
    """What spends refer to: an event up to its count and start, and what it is for."""

    event: Event
    label: str
    clip: float | None


@dataclasses.dataclass(frozen=True)
class _Spend:
    """An entry: index of the mechanism, position of its first release, number of releases."""

    mechanism: int
    start: int
    count: int

    def to_dict(self) -> dict[str, int]:
        return {"spend": self.mechanism, "start": self.start, "count": self.count}


class Ledger:
    """Records every release and enforces a budget.

    The file holds one JSON object a line: a header (relation, budget), a line for every new
    mechanism, and a line for every spend (one release or a block of them). Each line carries a
    checksum chained to the line before it.

    **Guarantee.** `spend` returns only after the entry is on disk (fsync), so a crash can only
    over-count. A torn last line counts as spent. The budget is checked before anything is
    written; processes that share a file are serialised by a lock and see each other's entries.

    Args:
        path: the file, created if missing; None keeps the record in memory.
        epsilon: budget; None (for a new ledger) sets no limit.
        delta: delta of the budget, needed with epsilon; without one, that of the statements of a
            new ledger.
        relation: neighbouring relation of all entries.
        accountant: as in `plan`; the tightest rigorous one by default.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        relation: str | Relation | None = None,
        accountant: str | None = None,
    ) -> None:
        check_numbers(epsilon=epsilon, delta=delta)
        if epsilon is not None and not (epsilon > 0):
            raise ValueError(f"epsilon={epsilon}: must be > 0")
        if delta is not None and not (0 < delta < 1):
            raise ValueError(f"delta={delta}: must lie in (0, 1)")
        if epsilon is not None and delta is None:
            raise ValueError("delta: missing; a budget needs both epsilon and delta")
        if accountant is not None:
            accountants.accountant(accountant)
        self.path = None if path is None else Path(path)
        self._header: dict[str, Any] = {
            "dpbnn_ledger": SCHEMA,
            "relation": str(Relation.parse(relation or Relation.ZERO_OUT)),
            "epsilon": epsilon,
            "delta": delta,
            "accountant": accountant,
        }
        self._allowance: tuple[Event | None, int, int]
        self._reset()
        if self.path is not None:
            self._open(given=relation is not None)

    @property
    def relation(self) -> Relation:
        """Neighbouring relation of all entries."""
        return Relation.parse(self._header["relation"])

    @property
    def budget(self) -> tuple[float, float] | None:
        """(epsilon, delta) that may be spent in all, or None."""
        if self._header["epsilon"] is None:
            return None
        return self._header["epsilon"], self._header["delta"]

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything spent, in order, runs of one mechanism joined."""
        self._refresh()
        return tuple(event for event, _ in self._spends())

    @property
    def releases(self) -> int:
        """Number of releases recorded."""
        return sum(event.count for event in self.events)

    def spent(self, label: str) -> tuple[Event, ...]:
        """Return what was spent under a label, in order."""
        self._refresh()
        return tuple(event for event, mechanism in self._spends() if mechanism.label == label)

    def epsilon(self, delta: float | None = None, accountant: str | None = None) -> float:
        """Return epsilon of everything spent, at `delta` (by default the ledger's)."""
        events = self.events
        delta = delta if delta is not None else self._header["delta"]
        if delta is None:
            raise ValueError("delta: missing; this ledger was made without one, so pass delta")
        return self._cost(events, delta, accountant)

    def statement(self, *, delta: float | None = None, **details: Any) -> PrivacyStatement:
        """Return the privacy statement of everything spent; see `PrivacyStatement.of`."""
        self._refresh()
        delta = delta if delta is not None else self._header["delta"]
        if delta is None:
            raise ValueError("delta: missing; this ledger was made without one, so pass delta")
        spends = self._spends()
        return PrivacyStatement.of(
            [event for event, _ in spends],
            delta=delta,
            relation=self.relation,
            labels=[mechanism.label for _, mechanism in spends],
            clip=[mechanism.clip for _, mechanism in spends],
            **{"accountant": self._header["accountant"], **details},
        )

    def spend(self, event: Event, *, label: str = "", clip: float | None = None) -> None:
        """Record `event` durably, or raise and record nothing.

        Args:
            event: the releases about to be made; made only after this returns.
            label: what they are for.
            clip: the clip they use, for the statement.

        Raises:
            BudgetExceeded: if the budget does not hold them.
            UnsupportedEvent: if sampling and relation have no analysis together.
        """
        check_relation(event, self.relation)
        mechanism = _Mechanism(dataclasses.replace(event, count=1, start=0), label, clip)
        with self._locked():
            self._afford(event)
            if mechanism not in self._mechanisms:
                values = {"event": mechanism.event.to_dict(), "label": label, "clip": clip}
                self._append({"mechanism": len(self._mechanisms), **values})
                self._mechanisms[mechanism] = len(self._mechanisms)
            spend = _Spend(self._mechanisms[mechanism], event.start, event.count)
            self._append({**spend.to_dict(), "time": round(time.time(), 3)})
            self._entries.append(spend)

    def check(self, events: Iterable[Event]) -> None:
        """Raise BudgetExceeded if the budget does not hold `events`; nothing is spent."""
        self._refresh()
        self._refuse(tuple(events))

    def _spends(self) -> list[tuple[Event, _Mechanism]]:
        """Return the entries as events, runs of one mechanism joined."""
        mechanisms = list(self._mechanisms)
        joined: list[_Spend] = []
        for spend in (*self._entries, *([self._torn_spend] if self._torn_spend else [])):
            if joined and joined[-1].mechanism == spend.mechanism:
                last = joined[-1]
                partition = mechanisms[spend.mechanism].event.sampling == "partition"
                if not partition or last.start + last.count == spend.start:
                    joined[-1] = dataclasses.replace(last, count=last.count + spend.count)
                    continue
            joined.append(spend)
        return [
            (dataclasses.replace(mechanism.event, count=spend.count, start=spend.start), mechanism)
            for spend in joined
            for mechanism in (mechanisms[spend.mechanism],)
        ]

    def _cost(self, events: tuple[Event, ...], delta: float, name: str | None = None) -> float:
        name = name or self._header["accountant"] or accountants.default_accountant(events)
        return accountants.accountant(name).epsilon(events, delta, self.relation)

    def _afford(self, event: Event) -> None:
        """Raise unless the budget holds `event`.

        Composing is slow, so a success is tried for twice as many releases as last time; as long
        as nobody else spends, that allowance is used up before anything is composed again.
        """
        if self.budget is None:
            return
        epsilon, delta = self.budget
        unit = dataclasses.replace(event, count=1, start=0)
        key, left, ahead = self._allowance
        if key == unit and event.count <= left and event.sampling != "partition":
            self._allowance = (key, left - event.count, ahead)
            return
        spent = tuple(e for e, _ in self._spends())
        if key == unit and event.count < 2 * ahead and event.sampling != "partition":
            block = dataclasses.replace(event, count=2 * ahead)
            if self._cost((*spent, block), delta) <= epsilon:
                self._allowance = (unit, block.count - event.count, block.count)
                return
        self._refuse((event,))
        self._allowance = (unit, 0, max(event.count, ahead // 4 if key == unit else 0))

    def _refuse(self, events: tuple[Event, ...]) -> None:
        """Raise if the budget does not hold what is spent and `events`."""
        if self.budget is None:
            return
        epsilon, delta = self.budget
        spent = tuple(event for event, _ in self._spends())
        cost = self._cost((*spent, *events), delta)
        if cost > epsilon:
            used = self._cost(spent, delta)
            raise BudgetExceeded(
                f"{sum(event.count for event in events)} more releases would bring epsilon to "
                f"{round_up(cost)}, over the budget of {epsilon:g} at delta {delta:g}; "
                f"{round_up(used)} is spent, {max(0.0, epsilon - used):.4g} is left; use more "
                f"noise, fewer steps or a new budget"
            )

    def _reset(self) -> None:
        self._mechanisms: dict[_Mechanism, int] = {}
        self._entries: list[_Spend] = []
        self._check = ""
        self._offset = 0
        self._torn = False
        self._torn_spend: _Spend | None = None
        self._allowance = (None, 0, 0)

    def _open(self, given: bool) -> None:
        """Create the file with its header, or read it and compare what was asked for."""
        assert self.path is not None
        if fcntl is None:  # pragma: no cover
            raise OSError("ledger files need POSIX file locks, which this system does not have")
        asked = self._header
        with self._locked():
            if self._offset == 0:
                self._append(asked)
                directory = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
                return
        for name, value in asked.items():
            if name == "relation" and not given:
                continue
            if name == "delta" and asked["epsilon"] is None and self.budget is None:
                continue
            if value is not None and value != self._header[name]:
                raise ValueError(
                    f"{name}={value!r}: the ledger {self.path} was made with "
                    f"{self._header[name]!r}; leave it out or use another file"
                )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's lock, with all entries of other processes read."""
        if self.path is None:
            yield
            return
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise _unwritable(error, self.path) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._read()
            if self._torn:
                self._mend()
            yield
        finally:
            os.close(self._file)

    def _refresh(self) -> None:
        if self.path is not None:
            self._file = os.open(self.path, os.O_RDONLY)
            try:
                fcntl.flock(self._file, fcntl.LOCK_SH)
                self._read()
            finally:
                os.close(self._file)

    def _read(self) -> None:
        """Take in the lines added since the last time."""
        size = os.fstat(self._file).st_size
        if size < self._offset:
            raise LedgerCorrupted(
                f"{self.path} became shorter: entries were removed. Restore it from a backup, or "
                f"count the whole budget as spent"
            )
        self._torn, self._torn_spend = False, None
        data = os.pread(self._file, size - self._offset, self._offset)
        if data:
            self._allowance = (None, 0, 0)
        while data:
            line, newline, rest = data.partition(b"\n")
            values = _parse(line) if newline else None
            if values is None and self._offset == 0:
                raise LedgerCorrupted(
                    f"{self.path} has no readable header, so it is no ledger, or one in which no "
                    f"release was recorded yet: delete it, or give another path"
                )
            if values is None and not rest:
                self._count_torn()
                return
            check = None if values is None else values.pop("check")
            if values is None or check != _checksum(self._check, values):
                raise LedgerCorrupted(
                    f"{self.path} is damaged at byte {self._offset}. Restore it from a backup, or "
                    f"count the whole budget as spent and start a new ledger with what remains"
                )
            self._take(values)
            self._check = check
            self._offset += len(line) + 1
            data = rest

    def _take(self, values: dict[str, Any]) -> None:
        if self._offset == 0:
            if values["dpbnn_ledger"] != SCHEMA:
                raise LedgerCorrupted(
                    f"{self.path} has schema {values['dpbnn_ledger']}, this version reads {SCHEMA}"
                )
            self._header = values
        elif "mechanism" in values:
            event = Event.from_dict(values["event"])
            mechanism = _Mechanism(event, values["label"], values["clip"])
            self._mechanisms[mechanism] = values["mechanism"]
        else:
            self._entries.append(_Spend(values["spend"], values["start"], values["count"]))

    def _count_torn(self) -> None:
        """Count a torn last line as a spend: the newest mechanism's largest so far, or one release.

        The release itself cannot have been used, since entries are on disk before that.
        """
        self._torn = True
        if self._mechanisms:
            newest = len(self._mechanisms) - 1
            index = newest
            if self._entries and any(entry.mechanism == newest for entry in self._entries):
                index = self._entries[-1].mechanism
            same = [entry for entry in self._entries if entry.mechanism == index]
            self._torn_spend = max(same, key=lambda e: e.count, default=_Spend(index, 0, 1))

    def _mend(self) -> None:
        """Replace a torn last line by the spend that it counts as."""
        spend = self._torn_spend
        os.ftruncate(self._file, self._offset)
        self._torn, self._torn_spend = False, None
        if spend is not None:
            self._append({**spend.to_dict(), "torn": True})
            self._entries.append(spend)

    def _append(self, values: dict[str, Any]) -> None:
        """Write one line and wait until it is on disk."""
        check = _checksum(self._check, values)
        line = json.dumps({**values, "check": check}).encode() + b"\n"
        if self.path is not None:
            try:
                view = memoryview(line)
                while view:
                    view = view[os.write(self._file, view) :]
                os.fsync(self._file)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._offset)
                raise _unwritable(error, self.path) from None
        self._check = check
        self._offset += len(line)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the entry in a line, or None if there is none."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "check" in values else None


def _unwritable(error: OSError, path: Path) -> OSError:
    cure = "give a path in a writable folder with space left"
    return type(error)(
        error.errno, f"the ledger cannot be written: {error.strerror}; {cure}", str(path)
    )


def _checksum(previous: str, values: dict[str, Any]) -> str:
    text = previous + json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
