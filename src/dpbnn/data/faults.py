"""Faults: values of a table that cannot be used, counted by column or shown one by one.

No message quotes a value or a row unless on_bad_rows="show" asks for it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpbnn.data.table import Table, TableError

_NAMED = 3  # columns named in a message
_HINT = "on_bad_rows='show' or 'dpbnn schema check --show-values' names the row and the value"


class Fault(NamedTuple):
    """Rows of a column that cannot be used.

    Attributes:
        rows: which they are.
        why: says what is wrong with a value and how to correct it, without quoting it.
        absent: whether the value is missing.
    """

    rows: np.ndarray
    why: Callable[[Any], str]
    absent: bool = False


class Faults:
    """Collects the faults of a table: counts them by column, or raises at the first one."""

    def __init__(self, table: Table, on_bad_rows: str) -> None:
        self.source, self.on_bad_rows = table.source, on_bad_rows
        self.counts: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}

    def add(self, part: Table, name: str, raw: Any, faults: list[Fault]) -> np.ndarray:
        """Record the faults of a part of a column, and return which rows are bad."""
        bad = bad_rows(part.n, faults)
        if not faults or self.on_bad_rows == "zero":
            return bad
        row = int(np.flatnonzero(bad)[0])
        fault = next(fault for fault in faults if fault.rows[row])
        why = fault.why(raw[row])
        if self.on_bad_rows == "show":
            value = "a value" if fault.absent else repr(str(raw[row]))
            raise TableError(f"{part.where(row)}, column {name!r}: {value} {why}")
        self.counts[name] += int(bad.sum())
        self.reasons.setdefault(name, why)
        return bad

    def refuse(self) -> None:
        """Raise if there are faults: name the columns, the counts and one reason for each."""
        if not self.counts:
            return
        parts = [
            f"column {name!r}: {self.counts[name]} value{'s' * (self.counts[name] != 1)} cannot be "
            f"used; one {why}"
            for name, why in itertools.islice(self.reasons.items(), _NAMED)
        ]
        more = len(self.counts) - len(parts)
        ending = f"; {more} more columns" if more else ""
        raise TableError(f"{self.source}, {'; '.join(parts)}{ending} ({_HINT})")


def bad_rows(n: int, faults: list[Fault]) -> np.ndarray:
    """Return which of n rows have a fault."""
    bad = np.zeros(n, dtype=bool)
    for fault in faults:
        bad |= fault.rows
    return bad
