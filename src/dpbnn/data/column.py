"""One column of a schema: its public bounds or categories, and its encoding.

Nothing here may be learned from the data.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpbnn.data import dates
from dpbnn.data.faults import Fault
from dpbnn.data.table import (
    MISSING,
    Held,
    Table,
    TableError,
    cell,
    codes,
    days,
    measured,
    numbers,
    shown,
)

_RULES = {
    "numeric": ("refuse", "middle", "indicator"),
    "categorical": ("refuse", "zeros", "category"),
    "count": ("refuse",),
    "ordinal": ("refuse",),
}
_THOUSANDS = re.compile(r"[+-]?\d{1,3},\d{3}")  # the comma may be a decimal one
DATE = re.compile(r"\d{4}-\d\d?-\d\d?(?:[T ]\d|$)|\d{4}/\d\d?/\d\d?$|\d\d?[./-]\d\d?[./-]\d{4}$")
_LOOK = 128  # rows looked at at once
_NO_TARGET = "fill it in, or delete the row: training and evaluation need every target"


@dataclasses.dataclass(frozen=True)
class Column:
    """One column: its public bounds or categories, and a public rule for missing values.

    A number x is clipped to the bounds (l, h) and scaled, with f = log1p if `log` and f(x) = x
    otherwise, to

        2 (f(clip(x, l, h)) - f(l)) / (f(h) - f(l)) - 1  in [-1, 1];

    a category becomes one column of zeros and ones each.

    Attributes:
        name: the column's name in the table.
        kind: "numeric" or "categorical"; follows from bounds or categories if left out. A target
            may also be a "count", a whole number from 0 within the bounds, or "ordinal": its
            categories have an order, the lowest first.
        bounds: (lowest, highest) value of a numeric column, from public knowledge; two dates, or
            ISO texts of them, for a column of dates, which is then a number of days.
        categories: all values of a categorical column, from public knowledge.
        missing: "refuse"; for numbers "middle" (of the bounds) or "indicator" (the middle, and a
            column that is 1 where the value is missing); for categories "zeros" (no category) or
            "category" (a column of its own).
        other: whether values outside the declared categories go to a column "other".
        log: scale log(1 + x) instead of x, for skewed columns that are never negative.
        cuts: for a target only: numbers at which a numeric column is cut into classes; a value
            belongs to the first class whose cut it does not exceed.
        date: whether the bounds were dates; they are kept as days since 1970-01-01.
        weights: for a target only: public weight of every class in training.
    """

    name: str
    kind: str = ""
    bounds: tuple[float, float] | None = None
    categories: tuple[str, ...] | None = None
    missing: str = "refuse"
    other: bool = False
    log: bool = False
    cuts: tuple[float, ...] | None = None
    date: bool = False
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self._need(isinstance(self.name, str) and self.name, "has no name; give one")
        for field in ("bounds", "categories", "cuts", "missing", "kind"):
            self._need(
                "TODO" not in _flat(getattr(self, field)),
                f"{field}: still TODO; fill in what is publicly known, or delete the column",
            )
        for field in ("other", "log"):
            value = getattr(self, field)
            self._need(isinstance(value, bool), f"{field}={value!r}: must be true or false")
        if not self.kind:
            self._need(
                self.bounds is not None or self.categories is not None,
                "has neither bounds nor categories; give bounds = [lowest, highest] or "
                "categories = [...], from public knowledge",
            )
            kind = "numeric" if self.categories is None else "categorical"
            object.__setattr__(self, "kind", kind)
        self._need(
            self.kind in _RULES,
            f"kind={self.kind!r}: must be 'numeric' or 'categorical'; of a target also 'count' or "
            f"'ordinal'",
        )
        self._need(
            self.missing in _RULES[self.kind],
            f"missing={self.missing!r}: must be one of {', '.join(map(repr, _RULES[self.kind]))} "
            f"for a {self.kind} column",
        )
        if self.cuts is not None:
            self._check_cut()
        elif self.kind in ("numeric", "count"):
            self._check_numeric()
        else:
            self._check_categorical()

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        if self.kind == "numeric":
            extra = (f"{self.name} missing",) if self.missing == "indicator" else ()
            return (self.name, *extra)
        own = [f"{self.name}={category}" for category in self.categories or ()]
        if self.other:
            own.append(f"{self.name}=other")
        if self.missing == "category":
            own.append(f"{self.name}=missing")
        return tuple(own)

    @property
    def scale(self) -> tuple[float, float]:
        """(middle, half width) of the bounds, after the logarithm if there is one."""
        assert self.bounds is not None
        low, high = (math.log1p(b) if self.log else b for b in self.bounds)
        return low / 2 + high / 2, high / 2 - low / 2

    def as_dates(self) -> dict[str, list[str]]:
        """Return the bounds as a schema file has them, where they are dates."""
        return {"bounds": [dates.text_of(day) for day in self.bounds or ()]} if self.date else {}

    def encode(
        self, raw: Held, missing: frozenset[str] = MISSING, out: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[Fault]]:
        """Return the encoded columns [rows, features], and the faults.

        Args:
            raw: the values, as a table holds them.
            missing: texts that stand for a missing value.
            out: array of zeros for the encoded columns.
        """
        if out is None:
            out = np.zeros((len(raw), len(self.features)), dtype=np.float32)
        if self.kind == "numeric":
            return out, self._encode_numbers(raw, out, missing)
        code = self._codes(raw, missing)
        width = len(self.features)
        declared = len(self.categories or ())
        cure = "add it to the schema's categories, declare other = true, or correct it"
        faults = [] if self.other else self._unknown(code, cure)
        if self.missing == "refuse":
            faults += self._missing(code == -1)
        position = np.where(code == -2, declared if self.other else -1, code)
        if self.missing == "category":
            position = np.where(code == -1, width - 1, position)
        rows = np.flatnonzero(position >= 0)
        out[rows, position[rows]] = 1.0
        return out, faults

    def classes(
        self, raw: Held, missing: frozenset[str] = MISSING
    ) -> tuple[np.ndarray, list[Fault]]:
        """Return class numbers (int64), and the faults."""
        if self.cuts is not None:
            values, faults = self._numbers(raw, missing)
            code = np.where(np.isnan(values), -1, np.searchsorted(self.cuts, values))
        else:
            code = self._codes(raw, missing)
            faults = self._unknown(code, "add it to the schema's classes or correct it")
        return np.maximum(code, 0), [*faults, *_absent(code == -1, _NO_TARGET)]

    def targets(
        self, raw: Held, missing: frozenset[str] = MISSING
    ) -> tuple[np.ndarray, list[Fault]]:
        """Return scaled targets, and the faults."""
        values, faults = self.scaled(raw, missing)
        return np.nan_to_num(values), [*faults, *_absent(np.isnan(values), _NO_TARGET)]

    def counts(
        self, raw: Held, missing: frozenset[str] = MISSING
    ) -> tuple[np.ndarray, list[Fault]]:
        """Return counts (int64), clipped to the bounds, and the faults."""
        values, faults = self._numbers(raw, missing)
        absent = np.isnan(values)
        bad = ~absent & ((values < 0) | (values != np.rint(values)))
        if bad.any():
            faults = [*faults, Fault(bad, _no_count)]
        assert self.bounds is not None
        found = np.clip(np.where(absent | bad, self.bounds[0], values), *self.bounds)
        return found.astype(np.int64), [*faults, *_absent(absent, _NO_TARGET)]

    def scaled(
        self, raw: Held, missing: frozenset[str] = MISSING
    ) -> tuple[np.ndarray, list[Fault]]:
        """Return numbers clipped to the bounds and scaled to [-1, 1], NaN where missing."""
        values, faults = self._numbers(raw, missing)
        assert self.bounds is not None
        values = np.clip(values, *self.bounds)
        middle, half = self.scale
        if self.log:
            np.log1p(values, out=values)
        values -= middle
        values /= half
        return np.clip(values, -1.0, 1.0, out=values), faults

    def _encode_numbers(self, raw: Held, out: np.ndarray, missing: frozenset[str]) -> list[Fault]:
        values, faults = self.scaled(raw, missing)
        absent = np.isnan(values)
        if self.missing == "refuse":
            unread = faults[0][0] if faults else np.zeros(len(raw), bool)
            faults = [*faults, *self._missing(absent & ~unread)]
        out[:, 0] = values
        if absent.any():
            out[absent, 0] = 0.0
        if self.missing == "indicator":
            out[:, 1] = absent
        return faults

    def _numbers(self, raw: Held, missing: frozenset[str]) -> tuple[np.ndarray, list[Fault]]:
        values, unread = (days if self.date else measured)(raw, missing)
        infinite = np.isinf(values)
        if unread is None and not infinite.any():
            return values, []
        bad = infinite if unread is None else infinite | unread
        return np.where(bad, np.nan, values), [Fault(bad, _no_date if self.date else _no_number)]

    def _codes(self, raw: Held, missing: frozenset[str]) -> np.ndarray:
        return codes(raw, {c: i for i, c in enumerate(self.categories or ())}, missing)

    def _unknown(self, code: np.ndarray, cure: str) -> list[Fault]:
        bad = code == -2
        known = shown(self.categories or (), 6)
        return [Fault(bad, lambda _: f"is none of {known}; {cure}")] if bad.any() else []

    def _missing(self, absent: np.ndarray) -> list[Fault]:
        rules = " or ".join(f"missing = {rule!r}" for rule in _RULES[self.kind][1:])
        return _absent(absent, f"fill it in, or declare {rules} in the schema")

    def _check_numeric(self) -> None:
        for field in ("categories", "other"):
            self._need(not getattr(self, field), f"{field} goes with a categorical column only")
        self._need(
            self.bounds is not None,
            "has no bounds; give bounds = [lowest, highest], from public knowledge",
        )
        if (ends := dates.declared(self.bounds)) is not None:
            self._need(not self.log, "log goes with numbers, not with dates")
            object.__setattr__(self, "date", True)
            object.__setattr__(self, "bounds", ends)
        try:
            low, high = (float(b) for b in self.bounds or ())
        except (TypeError, ValueError):
            self._need(False, f"bounds={self.bounds!r}: must be two numbers [lowest, highest]")
        given = f"bounds = [{low:g}, {high:g}]"
        self._need(math.isfinite(high - low), f"{given}: must be finite; give the public range")
        self._need(low <= high, f"{given}: are reversed; write [{high:g}, {low:g}]")
        self._need(low < high, f"{given}: leave no room; delete the column or widen them")
        self._need(not self.log or low >= 0, f"{given}: log = true needs bounds that are >= 0")
        object.__setattr__(self, "bounds", (low, high))

    def _check_categorical(self) -> None:
        for field in ("bounds", "log"):
            self._need(not getattr(self, field), f"{field} goes with a numeric column only")
        given = self.categories
        self._need(
            isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0,
            "has no categories; give categories = [...], from public knowledge",
        )
        object.__setattr__(self, "categories", _labels(self.name, given or ()))
        for rule, taken in (("other", self.other), ("missing", self.missing == "category")):
            self._need(
                not (taken and rule in (self.categories or ())),
                f"category {rule!r} has the name of the column that the rule adds; rename it",
            )

    def _check_cut(self) -> None:
        self._need(
            self.kind in ("numeric", "ordinal") and self.categories and self.bounds is None,
            "cuts go with classes, and with neither bounds nor another kind than 'ordinal'",
        )

    def _need(self, condition: Any, problem: str) -> None:
        if not condition:
            raise TableError(f"schema, column {self.name!r}: {problem}")


def cut(
    name: str, cuts: tuple[float, ...], classes: tuple[Any, ...], kind: str = "numeric"
) -> Column:
    """Return a target whose classes are ranges of a numeric column.

    Args:
        name: of the column.
        cuts: rising numbers; a value belongs to the first class whose cut it does not exceed.
        classes: their names, one more than there are cuts.
        kind: "numeric", or "ordinal" where their order is to be used.
    """
    rising = all(a < b for a, b in itertools.pairwise(cuts))
    if len(classes) != len(cuts) + 1 or not rising or kind == "count":
        raise TableError(
            f"schema, target {name!r}: cuts = {list(cuts)} with {len(classes)} classes; give "
            f"rising cuts and one class more than cuts"
        )
    return Column(name, kind, categories=_labels(name, classes), cuts=tuple(float(c) for c in cuts))


def _absent(absent: np.ndarray, cure: str) -> list[Fault]:
    return [Fault(absent, lambda _: f"is missing; {cure}", True)] if absent.any() else []


def _no_date(value: Any) -> str:
    """Say that a value is no date, without quoting it."""
    return "is not a date; write it as 2020-12-31, or leave it empty if it is missing"


def _no_count(value: Any) -> str:
    """Say that a number is no count, without quoting it."""
    return "is not a count; counts are whole numbers, 0 or more: correct it, or leave kind out"


def _no_number(value: Any) -> str:
    """Say why a value is not a finite number, without quoting it."""
    text = str(value)
    if text.lower().lstrip("+-") in ("inf", "infinity") or _overflows(text):
        return "is infinite; write a number, or leave it empty if it is missing"
    if is_date(text):
        return "is a date; write dates as 2024-01-31, and give the column two dates as bounds"
    if _THOUSANDS.fullmatch(text.strip()):
        return (
            "has a comma; take it out where it separates thousands, or read the table with "
            "decimal=',' where it is a decimal comma"
        )
    if "," in text and _overflows(text.replace(",", ".", 1)) is False:
        return "has a comma; read the table with decimal=',' (--decimal ,), or take the comma out"
    if _separated(text):
        return "has separators of thousands; take them out of the table"
    return (
        "is not a number; correct it, or declare categories (for a target: classes) in the schema"
    )


def is_date(text: str) -> bool:
    """Return whether a text is written as a date."""
    return DATE.match(text) is not None


def _labels(name: str, given: Sequence[Any]) -> tuple[str, ...]:
    """Return declared categories as text; empty ones and duplicates are refused."""
    try:
        texts = [cell(category) or "" for category in given]
    except TypeError as error:
        raise TableError(
            f"schema, column {name!r}: categories hold {error}; give text or numbers"
        ) from None
    for text, count in Counter(texts).items():
        if not text:
            raise TableError(
                f"schema, column {name!r}: a category is empty; delete it and state a rule for "
                f"missing values, such as missing = 'category'"
            )
        if count > 1:
            raise TableError(
                f"schema, column {name!r}: category {text!r} is there twice; delete one of the two"
            )
    return tuple(texts)


def _separated(text: str) -> bool:
    """Return whether a text is a number once its thousands separators are removed."""
    plain = re.sub(r"(?<=\d)[,.'\s](?=\d{3}(?!\d))", "", text).replace(",", ".")
    return plain != text and _overflows(plain) is False


def _overflows(text: str) -> bool | None:
    """Return whether a text is an infinite number; None where it is not a number."""
    try:
        return math.isinf(float(text))
    except ValueError:
        return None


def _flat(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def all_missing(column: Column, table: Table) -> bool:
    """Return whether a column has no value in any row."""
    for start in range(0, table.n, _LOOK):
        raw = table.column(column.name, slice(start, start + _LOOK))
        if column.kind in ("numeric", "count"):
            values, unread = numbers(raw, table.missing)
            present = not np.isnan(values).all() or unread is not None
        else:
            own = {category: i for i, category in enumerate(column.categories or ())}
            present = bool((codes(raw, own, table.missing) != -1).any())
        if present:
            return False
    return True
