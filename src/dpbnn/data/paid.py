"""Bounds that were learned privately, and the ledger that paid for them.

A schema with such bounds may train only under that ledger: otherwise a statement would leave out
what the bounds have cost.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpbnn.data.draft import TODO
from dpbnn.data.statistics import private_bounds, signed_log_grid
from dpbnn.data.table import Table, TableError, measured
from dpbnn.data.target import whole_bounds
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan

LABEL = "private bounds of a schema"
_DIGITS = 4  # of a learned bound


@dataclasses.dataclass(frozen=True)
class PaidBounds:
    """Which columns of a schema have bounds that were learned privately, and who paid.

    Attributes:
        columns: their names; the target may be among them.
        ledger: name of the ledger, `Ledger.id`.
        head: of the ledger, once it had been charged.
    """

    columns: tuple[str, ...]
    ledger: str
    head: str

    @classmethod
    def from_dict(cls, values: Any) -> PaidBounds:
        """Return what the section [private_bounds] of a schema says."""
        if not isinstance(values, Mapping) or {*values} != {"columns", "ledger", "head"}:
            raise TableError(
                "schema, [private_bounds]: must have columns, ledger and head, as 'dpbnn schema "
                "bounds' writes them"
            )
        return cls(tuple(values["columns"]), str(values["ledger"]), str(values["head"]))

    def to_dict(self) -> dict[str, Any]:
        """Return the section as plain values."""
        return {**dataclasses.asdict(self), "columns": [*self.columns]}

    def check(self, ledger: Ledger | None) -> None:
        """Raise unless the ledger is the one that paid, with that release still in it."""
        if ledger is None or ledger.id != self.ledger or not ledger.holds(self.head):
            raise ValueError(
                "schema: its bounds were learned privately and paid for by another ledger; train "
                "with that ledger (--ledger), so that their cost is counted, or state public "
                "bounds and delete [private_bounds]"
            )


def learn_bounds(
    draft: Mapping[str, Any],
    table: Table,
    *,
    plan: Plan,
    ledger: Ledger,
    noise: NoiseSource | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fill in the bounds that are TODO in a draft, privately.

    **Guarantee.** That of `private_bounds`: one release by the gate for all columns together, which
    is in the ledger before the counts are formed. Nothing else of the values is used: cells that
    are no numbers add nothing, and raise nothing.

    Args:
        draft: a schema as plain values, in the form of a TOML file.
        table: the table.
        plan: of one full-batch release.
        ledger: what is charged; training must use it too.
        noise: the source of noise; a new one from operating-system entropy by default.

    Returns:
        The schema with those bounds, and the columns for which noise has hidden all values: they
        are still TODO.
    """
    if draft.get("unit"):
        raise TableError(
            f"schema: its unit is {draft['unit']!r}, and bounds learned here would protect one row "
            f"only, so that no training could use them; state public bounds"
        )
    filled = copy.deepcopy(dict(draft))
    target = filled.get("target", {})
    places = {name: own for name, own in filled.get("columns", {}).items() if _unknown(own)}
    if _unknown(target):
        places[target["name"]] = target
    if not places:
        raise TableError(
            "schema: no column has bounds = ['TODO', 'TODO'], so there is nothing to learn; see "
            "'dpbnn schema draft'"
        )
    before = PaidBounds.from_dict(filled["private_bounds"]) if "private_bounds" in filled else None
    if before is not None:
        before.check(ledger)
    x = np.stack([_values(table, name) for name in places], 1)
    low, high = private_bounds(x, plan=plan, ledger=ledger, label=LABEL, noise=noise)
    edges = signed_log_grid()
    hidden = []
    for (name, own), one, other in zip(places.items(), low, high, strict=True):
        if (one, other) == (edges[0], edges[-1]):
            hidden.append(name)
            continue
        least = max(one, 0.0) if own.get("log") is True else one
        ends = [_rounded(least, math.floor), _rounded(other, math.ceil)]
        own["bounds"] = whole_bounds(ends) if own.get("kind") == "count" else ends
    paid = (*(before.columns if before else ()), *(n for n in places if n not in hidden))
    if paid:
        filled["private_bounds"] = PaidBounds(paid, ledger.id, ledger.head).to_dict()
    return filled, tuple(hidden)


def _unknown(values: Any) -> bool:
    return isinstance(values, Mapping) and list(values.get("bounds", ())) == [TODO, TODO]


def _values(table: Table, name: str) -> np.ndarray:
    """Return a column as numbers, with NaN for all that is none."""
    values, unreadable = measured(table.column(name), table.missing)
    return values if unreadable is None else np.where(unreadable, np.nan, values)


def _rounded(value: float, towards: Any) -> float:
    """Return a bound with few digits, never further inside."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - _DIGITS + 1)
    return float(f"{towards(value / unit) * unit:.{_DIGITS}g}")
