"""Dates in tables: ISO texts, which a column with dates as its bounds turns into days.

A date is never read as a number unless the schema declares the column so.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["as_text", "day_of", "days", "declared", "text_of"]

_EPOCH = datetime.datetime(1970, 1, 1)


def declared(bounds: Any) -> tuple[float, float] | None:
    """Return bounds that are two dates, or texts of them, in days; None where they are not."""
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        return None
    ends = [day_of(b.isoformat() if isinstance(b, datetime.date) else b) for b in bounds]
    return None if None in ends else (ends[0], ends[1])  # type: ignore[return-value]


def day_of(text: Any) -> float | None:
    """Return the days from 1970-01-01 to an ISO date, with a time or without; None for others."""
    try:
        when = datetime.datetime.fromisoformat(text)
        if when.tzinfo is not None:
            when = when.astimezone(datetime.UTC).replace(tzinfo=None)
    except (TypeError, ValueError, OverflowError):  # the year 1 or 9999 in another time zone
        return None
    return (when - _EPOCH) / datetime.timedelta(days=1)


def days(texts: Sequence[Any], missing: frozenset[str]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return texts as days, NaN for missing ones, and which of them are no dates, if any are."""
    known = {t: math.nan if t is None or t in missing else day_of(t) for t in set(texts)}
    found = [known[text] for text in texts]
    bad = np.fromiter((value is None for value in found), bool, len(found))
    values = np.array([math.nan if value is None else value for value in found], np.float64)
    return values, bad if bad.any() else None


def as_text(values: np.ndarray) -> np.ndarray:
    """Return an array of datetime64 as ISO texts, each as Python writes it; None for none."""
    unit = "D" if np.datetime_data(values.dtype)[0] in ("Y", "M", "W", "D") else "us"
    distinct, at = np.unique(values.astype(f"datetime64[{unit}]"), return_inverse=True)
    texts = [_text(when) for when in distinct.tolist()]
    return np.array(texts, dtype=object)[at]


def _text(when: Any) -> str | None:
    """Return the text of a date; one beyond the year 9999 is a number, and no date."""
    return None if when is None else when.isoformat() if hasattr(when, "isoformat") else str(when)


def text_of(day: float) -> str:
    """Return the ISO text of a number of days, with the time of day if there is one."""
    when = _EPOCH + datetime.timedelta(days=day)
    return when.isoformat() if day % 1 else when.date().isoformat()
