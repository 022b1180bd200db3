"""Drafts of schemas: columns and their types, and TODO for what must be publicly known.

A draft takes names and types from a table, and no value. Suggested bounds are comments: they come
from the name alone, and are in use only when somebody writes them into the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tomli_w

from dpbnn.data.column import is_date
from dpbnn.data.table import Table, distinct_texts, numbers

TODO = "TODO"
BOOLEANS = ("false", "true")
_NOTES = """\
# Fill in every TODO from public knowledge: documentation, a questionnaire, physics,
# never from this data. Delete the columns that the model should not use.
# A suggestion is what a column of that name often means; check it before you use it.
# A target with bounds is a regression; write classes = [...] for a classification.
# kind = 'count' says that the target is a whole number from 0, kind = 'ordinal' that
# its classes have an order, the lowest first. weights = {CLASS = 5} lets records of a
# class count five times in training.
# Missing values: missing = 'refuse' (default); 'middle' or 'indicator' for
# numbers; 'zeros' or 'category' for categories. other = true takes in unknown
# categories; log = true suits skewed numbers that are never negative.
# 'dpbnn schema bounds' learns bounds that are TODO privately, out of a ledger.
"""
_UNNAMED = """\
# The names of the columns are the first line of the table. If that line is a
# record, delete this file, which then quotes it, and give names (--names).
"""
_IDENTIFIERS = {
    "id", "ids", "uuid", "guid", "key", "ssn", "mrn", "iban", "email", "phone", "identifier",
    "index", "unnamed",
}  # fmt: skip
_PERSONS = {"patient", "person", "subject", "participant", "customer", "client"}
_BOUNDS = {
    "age": (0, 120), "percent": (0, 100), "percentage": (0, 100), "pct": (0, 100),
    "probability": (0, 1), "fraction": (0, 1), "proportion": (0, 1), "year": (1900, 2100),
    "month": (1, 12), "weekday": (0, 7), "hour": (0, 24), "hours per week": (0, 168),
    "latitude": (-90, 90), "lat": (-90, 90), "longitude": (-180, 180), "lon": (-180, 180),
    "height cm": (30, 250), "weight kg": (1, 300), "bmi": (10, 80), "systolic": (40, 300),
    "diastolic": (20, 200), "pulse": (20, 300), "heart rate": (20, 300), "ph": (0, 14),
}  # fmt: skip
_CATEGORIES = {"sex": ("female", "male"), "gender": ("female", "male", "other")}


def drafted(table: Table, target: str) -> str:
    """Return a schema in TOML to be filled in; see `Schema.draft`."""
    table.column(target, slice(0, 0))
    kinds = {name: kind(table, name) for name in table.names}
    aside = {
        name: "dates" if kinds[name] == "date" else "identifier"
        for name in table.names
        if name != target and (kinds[name] == "date" or _names_records(name, kinds[name]))
    }
    parts = [_NOTES if table.named else _NOTES + _UNNAMED]
    if aside:
        flagged = "".join(f"# {tomli_w.dumps({n: why}).strip()}\n" for n, why in aside.items())
        parts.append(
            "# Left out, by name or type. Give dates that you want to use two dates as bounds.\n"
            "# Where several rows are of one person, write unit = 'NAME' with the column that\n"
            "# says whose they are, and take it out of this list: a person is protected then.\n"
            f"{flagged}{one_line({'ignore': [*aside]})}"
        )
    own = _empty(kinds[target], "classes")
    parts.append(_section({"target": {"name": target, **own}}, target, kinds[target]))
    for name in table.names:
        if name != target and name not in aside:
            empty = _empty(kinds[name], "categories")
            parts.append(_section({"columns": {name: empty}}, name, kinds[name]))
    return "\n".join(parts)


def kind(table: Table, name: str) -> str:
    """Return "boolean", "number", "date" or "text"."""
    raw = table.column(name)
    if isinstance(raw, np.ndarray) and raw.dtype.kind in "biuf":
        return "boolean" if raw.dtype.kind == "b" else "number"
    texts = {t for t in distinct_texts(raw) if t is not None and t not in table.missing}
    if texts and {text.lower() for text in texts} <= {*BOOLEANS}:
        return "boolean"
    if texts and all(map(is_date, texts)):
        return "date"
    return "number" if numbers([*texts])[1] is None else "text"


def one_line(values: Mapping[str, Any]) -> str:
    """Return values as TOML, every list on one line; line ends in texts are escaped."""
    text = tomli_w.dumps(values, indent=0)
    return text.replace("[\n", "[").replace(",\n]", "]").replace(",\n", ", ")


def _empty(kind: str, several: str) -> dict[str, Any]:
    """Return what is known of a column by its type alone."""
    if kind == "boolean":
        return {several: [*BOOLEANS]}
    return {"bounds": [TODO, TODO]} if kind == "number" else {several: [TODO]}


def _section(values: dict[str, Any], name: str, kind: str) -> str:
    """Return a part of the file, with a suggestion where there is one."""
    head, _, rest = one_line(values).partition("\n")
    words = " ".join(_words(name))
    known: Mapping[str, Any] = {"number": _BOUNDS, "text": _CATEGORIES}.get(kind, {})
    for key, value in known.items():
        if f" {key} " in f" {words} ":
            own = {"bounds" if kind == "number" else "categories": [*value]}
            return f"{head}\n# Suggestion, from the name alone: {one_line(own)}{rest}"
    return f"{head}\n{rest}"


def _names_records(name: str, kind: str) -> bool:
    """Return whether a column is an identifier, by its name: patient_id, or patient alone."""
    words = {*_words(name)}
    return bool(words & _IDENTIFIERS) or (
        kind != "boolean" and len(words & _PERSONS) == len(words) == 1
    )


def _words(name: str) -> list[str]:
    """Return the words of a name: patientId and patient_id are the same two."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return re.findall(r"[a-z]+|\d+", apart.lower())
