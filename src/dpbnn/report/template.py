"""What all pages share: the templates, short forms of values, and writing pages."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

import dpbnn
from dpbnn.report import charts
from dpbnn.report.plain_words import Reading, percent_up, written
from dpbnn.storage import replace_file

_ADVICE = (
    "Keep the model, and everything that comes out of it, as confidential as the data it was "
    "trained on. The figures on this page say nothing about privacy."
)
_MOST_ITEMS = 40
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")


@functools.cache
def environment() -> jinja2.Environment:
    """Return the templates; everything put into them is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dpbnn.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short
    environment.filters["whole_dates"] = whole_dates
    environment.globals["generator"] = dpbnn.__version__
    return environment


def hero(reading: Reading | None) -> dict[str, Any]:
    """Return what stands in the box at the top: a sentence and a drawing, or advice."""
    if reading is None or reading.banner:
        return {"lead": "", "guess": "", "advice": _ADVICE}
    bound = "about" if reading.approximate else "at most"
    return {
        "lead": f"Whoever bets on whether one {reading.unit} was used in training wins {bound} "
        f"{percent_up(reading.chance)} of the time, against 50 % by tossing a coin.",
        "guess": charts.guess(reading.chance, reading.approximate),
        "advice": "",
    }


def facts(values: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return names and values as text."""
    return [(str(name), short(value)) for name, value in (values or {}).items()]


def short(value: Any) -> str:
    """Return a value as a reader wants it: floats with at most six digits, lists with commas."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return written(value)
    if isinstance(value, Mapping):
        value = [f"{key}: {short(item)}" for key, item in value.items()]
    if isinstance(value, list | tuple):
        more = [f"and {len(value) - _MOST_ITEMS} more"] if len(value) > _MOST_ITEMS else []
        return ", ".join([*(short(item) for item in value[:_MOST_ITEMS]), *more])
    return str(value)


def whole_dates(text: str) -> Markup:
    """Return a text, escaped, in which no line ends inside a date."""
    return Markup(_DATE.sub(r'<span class="whole">\g<0></span>', str(escape(text))))


def write_page(path: Path, text: str) -> Path:
    """Write a page, whole or not at all."""
    return replace_file(path, lambda part: part.write_bytes(text.encode("utf-8", "replace")))
