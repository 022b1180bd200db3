"""The ledger: an append-only record of releases, durable before any release is used."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, SupportsIndex

from dpbnn.notebook import Shown
from dpbnn.privacy import accountants
from dpbnn.privacy.checks import check_numbers, round_up
from dpbnn.privacy.events import Event, check_one_unit, check_relation
from dpbnn.privacy.ledger_entries import SCHEMA, Attempt, Entries
from dpbnn.privacy.ledger_file import LedgerCorrupted, LedgerFile, Locked
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.statement import LabelledEvent, PrivacyStatement

__all__ = ["Attempt", "BudgetExceeded", "Ledger", "LedgerCorrupted"]


class BudgetExceeded(RuntimeError):
    """The next release would cost more than is left; nothing was spent."""


class Ledger(Shown):
    """Records every release and enforces a budget.

    The file holds one JSON object a line: a header (name, relation, budget), a line for every new
    mechanism and every new attempt, and a line for every spend: which attempt makes which steps by
    which mechanism. `ledger.jsonl.head` beside it says how the file must end.

    **Guarantee.** `spend` returns only after the entry is on disk (fsync), so a crash can only
    over-count. A file that has lost or changed anything is refused (`LedgerCorrupted`). The budget
    is checked before anything is written; threads and processes that share a ledger take turns and
    see each other's entries. A ledger in memory cannot be copied, pickled or used after a fork.

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
        self.path = None if path is None else Path(path).absolute()
        header = {
            "dpbnn_ledger": SCHEMA,
            "id": secrets.token_hex(16),
            "relation": str(Relation.parse(relation or Relation.ZERO_OUT)),
            "epsilon": epsilon,
            "delta": delta,
            "accountant": accountant,
        }
        self._guard, self._process = threading.RLock(), os.getpid()
        self._inside = False
        self._entries = Entries(header, self.path)
        self._file = None if self.path is None else LedgerFile(self.path)
        self._forget()
        if self._file is not None:
            self._open(self._file, given=relation is not None)

    def __str__(self) -> str:
        count, budget = self.releases, self.budget
        limit = "no limit" if budget is None else f"epsilon {budget[0]:g} at delta {budget[1]:g}"
        return (
            f"Ledger {'in memory' if self.path is None else self.path}\n"
            f"  {count} release{'s' * (count != 1)} on record, under {self.relation}\n"
            f"  budget: {limit}"
        )

    @property
    def id(self) -> str:
        """Name of this ledger, drawn when it was made."""
        name: str = self._entries.header["id"]
        return name

    @property
    def head(self) -> str:
        """Checksum of all entries so far; of a ledger in memory, their number."""
        self._refresh()
        if self._file is None:
            return str(len(self._entries.spends))
        return self._file.checks[self._file.offset]

    def holds(self, head: str) -> bool:
        """Return whether the ledger once had this head, so that nothing before it is missing."""
        self._refresh()
        if self._file is None:
            return head.isdigit() and int(head) <= len(self._entries.spends)
        return bool(head) and head in self._file.checks.values()

    @property
    def relation(self) -> Relation:
        """Neighbouring relation of all entries."""
        return Relation.parse(self._entries.header["relation"])

    @property
    def budget(self) -> tuple[float, float] | None:
        """(epsilon, delta) that may be spent in all, or None."""
        if self._entries.header["epsilon"] is None:
            return None
        return self._entries.header["epsilon"], self._entries.header["delta"]

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything spent, in order, runs of one mechanism joined."""
        return tuple(part.event for part in self._refresh())

    @property
    def untouched(self) -> bool:
        """Whether nothing was ever recorded, lost or observed."""
        return not self._refresh() and not self._entries.lost and not self._entries.observed

    @property
    def releases(self) -> int:
        """Number of releases recorded."""
        return sum(event.count for event in self.events)

    def spent(self, label: str) -> tuple[Event, ...]:
        """Return what was spent under a label, in order."""
        return tuple(part.event for part in self._refresh() if part.label == label)

    def outside_runs(self, other_than: str) -> list[Event]:
        """Return what single gates have spent, and no run of `fit`, under any label but one."""
        with self._known() as entries:
            return entries.outside_runs(other_than)

    def beside(self, run: str) -> list[Event]:
        """Return what was spent by others than a run."""
        with self._known() as entries:
            return entries.beside(run)

    def steps(self, run: str) -> int:
        """Return how many different steps of a run are recorded, by any of its attempts."""
        with self._known() as entries:
            return entries.steps(run)

    def covered(
        self, attempt: Attempt, step: int, clip: float | None = None, like: Event | None = None
    ) -> list[float]:
        """Return the sigmas of the steps from `step` on that are charged to an attempt already.

        Args:
            attempt: who makes them.
            step: the first of them.
            clip: of the releases; None for any.
            like: a release of their sampler and mechanism, at any sigma; None for any.
        """
        with self._known() as entries:
            return entries.covered(attempt, step, clip, like)

    def epsilon(self, delta: float | None = None, accountant: str | None = None) -> float:
        """Return epsilon of everything spent, at `delta` (by default the ledger's)."""
        events = self.events
        delta = self._delta(delta)
        if self._entries.observed:
            return math.inf
        if self._entries.lost:
            return self.budget[0] if self.budget and self.budget[1] == delta else math.inf
        return self._cost(events, delta, accountant)

    def statement(self, *, delta: float | None = None, **details: Any) -> PrivacyStatement:
        """Return the privacy statement of everything spent; see `PrivacyStatement.of`.

        **Guarantee.** Not private, whatever the entries say, where releases were observed (by
        `dpbnn.replay`, which charges nothing), or where entries were lost and no budget bounds
        what they can have been.
        """
        spends, delta = self._refresh(), self._delta(delta)
        own = {"epsilon", "relation", "labels", "clip", "ledger"} & details.keys()
        if own:
            raise ValueError(f"{', '.join(sorted(own))}: the entries say that; leave it out")
        if self._entries.observed:
            return PrivacyStatement.not_private(
                "releases were observed or replayed, and are in no ledger"
            )
        if self._entries.lost:
            if not math.isfinite(self.epsilon(delta)):
                return PrivacyStatement.not_private("entries of the ledger were lost")
            lost = "entries of the ledger were lost; its whole budget counts as spent"
            details = {**details, "epsilon": self.epsilon(delta)}
            details["caveats"] = (*details.get("caveats", ()), lost)
        statement = PrivacyStatement.of(
            spends,
            delta=delta,
            relation=self.relation,
            **{"accountant": self._entries.header["accountant"], **details},
        )
        return dataclasses.replace(statement, complete=not self._entries.lost)

    def observe(self) -> None:
        """Note, durably, that releases were made that are not recorded: nothing is private then."""
        if not self._entries.observed and self._file is not None:
            with self._mine(), self._read(self._file, writing=True) as locked:
                locked.append([{"observed": True}])
        self._entries.observed = True

    def spend(
        self,
        event: Event,
        *,
        label: str = "",
        clip: float | None = None,
        attempt: Attempt | None = None,
        step: int = 0,
    ) -> None:
        """Record `event` durably, or raise and record nothing.

        Args:
            event: the releases about to be made; made only after this returns.
            label: what they are for.
            clip: the clip they use, for the statement.
            attempt: who makes them; by default somebody new.
            step: the attempt's number of the first of them.

        Raises:
            BudgetExceeded: if the budget does not hold them.
            UnsupportedEvent: if sampling and relation have no analysis together, or if what is
                spent already protects another unit, such as a record and not a person.
        """
        check_relation(event, self.relation)
        attempt = Attempt.new() if attempt is None else attempt
        with self._mine(), contextlib.ExitStack() as stack:
            locked = None
            if self._file is not None:
                locked = stack.enter_context(self._read(self._file, writing=True))
            check_one_unit((event, *self._entries.first()))
            self._afford(event)
            lines = self._entries.lines(event, label, clip, attempt, step)
            if locked is not None:
                locked.append(lines)
            self._take(lines, own=True)

    def check(self, events: Iterable[Event]) -> None:
        """Raise BudgetExceeded if the budget does not hold `events`; nothing is spent."""
        with self._known() as entries:
            events = tuple(events)
            check_one_unit((*events, *entries.first()))
            self._refuse(events)

    @classmethod
    def repair(cls, path: str | os.PathLike[str]) -> Ledger:
        """Mend a ledger that is refused, counting the most that can have been spent.

        **Guarantee.** Where only the last entry is damaged or missing, its head says what it was,
        and it counts in full, whether its releases were made or not. Where more is lost, the whole
        budget counts as spent from then on; without a budget nothing is private any more. The
        damaged files stay beside it.
        """
        file = LedgerFile(Path(path))
        if file.exists():
            with contextlib.suppress(LedgerCorrupted):
                return cls(path)
        file.repair()
        return cls(path)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Let a copy of a ledger file open the file; refuse copies of one in memory."""
        if self.path is None:
            raise TypeError(
                "a ledger in memory cannot be copied or pickled: the copies would not see each "
                "other's entries; give it a path"
            )
        return _reopened, (self.path, self.id)

    def _forget(self) -> None:
        """Begin anew with nothing read; a file is read again from its first line."""
        before = self._entries
        self._entries = Entries(before.header, self.path, before.observed)
        self._allowance: tuple[Event | None, int, int] = (None, 0, 0)
        if self._file is not None:
            self._file.forget()

    def _delta(self, delta: float | None) -> float:
        delta = delta if delta is not None else self._entries.header["delta"]
        if delta is None:
            raise ValueError("delta: missing; this ledger was made without one, so pass delta")
        return delta

    def _cost(self, events: tuple[Event, ...], delta: float, name: str | None = None) -> float:
        name = name or self._entries.header["accountant"] or accountants.default_accountant(events)
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
        if key == unit and event.count <= left and not event.partition:
            self._allowance = (key, left - event.count, ahead)
            return
        spent = tuple(part.event for part in self._entries.events())
        if key == unit and event.count < 2 * ahead and not event.partition:
            block = dataclasses.replace(event, count=2 * ahead)
            if not self._entries.lost and self._cost((*spent, block), delta) <= epsilon:
                self._allowance = (unit, block.count - event.count, block.count)
                return
        self._refuse((event,))
        self._allowance = (unit, 0, max(event.count, ahead // 4 if key == unit else 0))

    def _refuse(self, events: tuple[Event, ...]) -> None:
        """Raise if the budget does not hold what is spent and `events`."""
        if self.budget is None:
            return
        epsilon, delta = self.budget
        if self._entries.lost:
            raise BudgetExceeded(
                "entries of this ledger were lost, so its whole budget counts as spent; use a new "
                "ledger with a budget of its own"
            )
        if any(event.count and not event.noise_multiplier for event in events):
            raise BudgetExceeded(
                f"releases without noise would use up any budget, and this ledger has one of "
                f"epsilon {epsilon:g} at delta {delta:g}; nothing was spent. Train privately, or "
                f"without this ledger"
            )
        spent = tuple(part.event for part in self._entries.events())
        cost = self._cost((*spent, *events), delta)
        if cost > epsilon:
            used, count = self._cost(spent, delta), sum(event.count for event in events)
            raise BudgetExceeded(
                f"{count} more release{'s' * (count != 1)} would bring epsilon to "
                f"{round_up(cost)}, over the budget of {epsilon:g} at delta {delta:g}; "
                f"{round_up(used)} is spent, {max(0.0, epsilon - used):.4g} is left; use more "
                f"noise, fewer steps or a new budget"
            )

    def _open(self, file: LedgerFile, given: bool) -> None:
        """Create the file with its header, or read it and compare what was asked for."""
        asked = self._entries.header
        with file.locked(writing=True) as locked:
            lines = locked.read()
            if not lines:
                locked.append([asked])
                return
            self._take(lines)
        for name, value in asked.items():
            if name == "id" or (name == "relation" and not given):
                continue
            if name == "delta" and asked["epsilon"] is None and self.budget is None:
                continue
            if value is not None and value != self._entries.header[name]:
                raise ValueError(
                    f"{name}={value!r}: the ledger {self.path} was made with "
                    f"{self._entries.header[name]!r}; leave it out or use another file"
                )

    @contextlib.contextmanager
    def _mine(self) -> Iterator[None]:
        """Keep other threads out; a forked process gets a lock of its own."""
        if self._process != os.getpid():
            if self._file is None:
                raise RuntimeError(
                    "a ledger in memory was forked: two processes would each count their own "
                    "releases alone; give the ledger a path"
                )
            self._guard, self._process = threading.RLock(), os.getpid()
            self._inside = False
        with self._guard:
            try:
                yield
            except BaseException:
                if self._file is not None:
                    self._forget()  # what was interrupted may have been taken in by half
                raise

    @contextlib.contextmanager
    def _read(self, file: LedgerFile, *, writing: bool) -> Iterator[Locked]:
        """Hold the file's lock, with all entries of others taken in."""
        if self._inside:
            raise RuntimeError("a signal handler used the ledger that it has interrupted")
        self._inside = True
        try:
            with file.locked(writing=writing) as locked:
                self._take(locked.read())
                yield locked
        finally:
            self._inside = False

    @contextlib.contextmanager
    def _known(self) -> Iterator[Entries]:
        """Keep other threads out, with all entries of others taken in."""
        with self._mine():
            if self._file is not None:
                with self._read(self._file, writing=False):
                    pass
            yield self._entries

    def _refresh(self) -> list[LabelledEvent]:
        """Take in what others have recorded and return everything spent."""
        with self._known() as entries:
            return entries.events(self.id)

    def _take(self, lines: list[dict[str, Any]], *, own: bool = False) -> None:
        """Take lines of the file in, or those just written."""
        if lines and not own:
            self._allowance = (None, 0, 0)
        self._entries.take(lines)


def _reopened(path: Path, name: str) -> Ledger:
    """Return the ledger of a pickle, which must still be there."""
    if not path.exists() or (book := Ledger(path)).id != name:
        raise LedgerCorrupted(f"{path}: the ledger of this pickle is not here; give its path again")
    return book
