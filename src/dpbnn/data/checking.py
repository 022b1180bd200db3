"""All problems of a schema and a table at once, for the data holder.

A message counts bad values. It quotes a value and its row only with on_bad_rows="show".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dpbnn.data.column import Column, all_missing
from dpbnn.data.faults import bad_rows
from dpbnn.data.schema import Schema, column_of_values, unit_labels
from dpbnn.data.table import Table, TableError
from dpbnn.data.target import encoded, target_of_values
from dpbnn.units import numbered

_ROWS = 100_000  # checked at once
_SHOWN = 20  # bad values of a column that are quoted, where they may be


def problems(values: Mapping[str, Any], table: Table | None, show: bool = False) -> list[str]:
    """Return what is wrong with a schema, and with a table under it, one line each.

    Args:
        values: the schema as plain values, in the form of a TOML file.
        table: the table; None where it cannot be read.
        show: whether bad values are quoted, with their rows.
    """
    found: list[str] = []

    def tried(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except TableError as error:
            if str(error) not in found:
                found.append(str(error))
            return None

    given = values.get("columns")
    columns = {
        name: tried(lambda name=name, own=own: column_of_values(name, own))
        for name, own in (given if isinstance(given, Mapping) else {}).items()
    }
    aim = values.get("target")
    named = isinstance(aim, Mapping) and "name" in aim
    target = tried(lambda: target_of_values(aim)) if named else None
    schema = tried(lambda: Schema.from_dict(values))
    if table is None:
        return found
    goal = aim["name"] if named and isinstance(aim, Mapping) else None
    unit = values.get("unit") or None
    absent = [name for name in (*columns, goal, unit) if name is not None and name not in table]
    for name in absent:
        what = "target" if name == goal else "unit" if name == unit else "column"
        found.append(
            f"{table.source}: the {what} {name!r} of the schema is absent; the table has "
            f"{table.listed(show=show)}; correct the name in the schema"
        )
    whole = len(found)
    for name, column in columns.items():
        if column is not None and name in table:
            found += _in_column(column, table, show, _faults_of(column, table))
    if target is not None and target.name in table:
        task = "regression" if target.categories is None else "classification"
        faults = functools.partial(encoded, target, task, missing=table.missing)
        found += _in_column(target, table, show, lambda raw: faults(raw)[1])
    if unit is not None and unit in table:
        found += _in_units(unit, table, show)
    if schema is not None and whole == len(found):
        tried(lambda: schema.check(table, on_bad_rows="show" if show else "error"))
    return found


def _in_units(unit: str, table: Table, show: bool) -> list[str]:
    """Return what is wrong with the column that says whose record each one is."""
    try:
        whose, missing = numbered(unit_labels(table, unit))
    except ValueError as error:
        return [f"{table.source}, unit {unit!r}: {str(error).removeprefix('units: ')}"]
    count = int(missing.sum())
    if count:
        first = np.flatnonzero(missing.numpy())[:_SHOWN].tolist()
        rows = f" ({', '.join(table.where(row) for row in first)})" if show else ""
        what = (
            "1 record does not say whose it is"
            if count == 1
            else (f"{count} records do not say whose they are")
        )
        return [
            f"{table.source}, unit {unit!r}: {what}{rows}; fill it in, or fit with --on-bad-rows "
            f"zero, where such records contribute nothing"
        ]
    if table.n > 1 and int(whose.max()) == 0:
        return [
            f"{table.source}, unit {unit!r}: all records are of one unit, and training needs 2 or "
            f"more; name another column, or leave unit out"
        ]
    return []


def _faults_of(column: Column, table: Table) -> Callable[[Any], list[Any]]:
    return lambda raw: column.encode(raw, table.missing)[1]


def _in_column(
    column: Column, table: Table, show: bool, faults_of: Callable[[Any], list[Any]]
) -> list[str]:
    """Return what is wrong with the values of a column."""
    count, shown, why = 0, [], ""
    for start in range(0, table.n, _ROWS):
        raw = table.column(column.name, slice(start, start + _ROWS))
        faults = faults_of(raw)
        bad = bad_rows(len(raw), faults)
        count += int(bad.sum())
        for row in np.flatnonzero(bad)[: _SHOWN - len(shown) if show else 1].tolist():
            fault = next(fault for fault in faults if fault.rows[row])
            why = why or fault.why(raw[row])
            value = "a value" if fault.absent else repr(str(raw[row]))
            place = table.where(start + row)
            shown.append(f"{place}, column {column.name!r}: {value} {fault.why(raw[row])}")
    if not count:
        return []
    if all_missing(column, table):
        return [
            f"{table.source}: column {column.name!r} has no value in any row; delete it from the "
            f"schema or correct the table"
        ]
    if show:
        more = count - len(shown)
        return shown + ([f"{table.source}, column {column.name!r}: {more} more"] if more else [])
    return [
        f"{table.source}, column {column.name!r}: {count} value{'s' * (count != 1)} cannot be "
        f"used; one {why} (--show-values names the row and the value)"
    ]
