"""The page of a run: from plain values to one self-contained HTML file."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dpbnn
from dpbnn.report import charts, figures, png
from dpbnn.report.page import Band, Example, Examples, RunPage
from dpbnn.report.plain_words import read, written
from dpbnn.report.template import environment, facts, hero, short, write_page

_NOT_PUBLIC = (
    "No single test record is shown, because the test data was not declared public. If it is, "
    "evaluate again with --test-data-public."
)
_BASELINES = {
    "classification": "gives every record the shares of the classes among these test records",
    "regression": "gives every record the mean and the variance of the targets of these records",
}
_CHAIN_FACTS = ("chains", "draws", "functions", "clip", "temperature")
_CHAIN_ROWS = (
    ("rhat", "split R-hat", "1 where halves of chains agree; above 1.01 they do not", 3),
    ("ess_bulk", "bulk ESS", "number of independent draws with the same precision of the mean", 0),
    ("ess_tail", "tail ESS", "the same for the 5 % and 95 % quantiles", 0),
)
_MOST_COLUMNS = 12
_MOST_RELEASES = 12


def render(page: RunPage) -> str:
    """Return the page of a run as HTML.

    The page is a function of its argument alone: it reads no file, clock or network. Every text is
    escaped. Examples and data points are shown only with `test_data_public`.
    """
    reading = read(page.privacy)
    evaluation = figures.plain(page.evaluation)
    shown = figures.evaluation_charts(evaluation) if evaluation else []
    raw = bool(evaluation and evaluation.get("training_table"))
    parts = {
        "title": page.title,
        "subtitle": _subtitle(page, evaluation, reading.counted),
        "promise": page.promise,
        "rows": facts(page.rows),
        "public": facts(page.public),
        "reading": reading,
        "mechanisms": reading.mechanisms[:_MOST_RELEASES],
        "further": reading.mechanisms[_MOST_RELEASES:],
        **hero(reading),
        "bayesian": _bayesian(figures.plain(page.bayesian)),
        "evaluation": _evaluation(evaluation),
        "raw": raw,
        "charts": shown,
        "coverage_table": figures.coverage_rows(evaluation) if evaluation else [],
        "band": _band(page.band, page.test_data_public),
        "examples": _examples(page.examples if page.test_data_public else None),
        "no_examples": "None were chosen." if page.test_data_public else _NOT_PUBLIC,
        "diagnostics": _diagnostics(figures.plain(page.diagnostics)),
        "settings": list(_groups(page.settings)),
        "versions": facts(page.versions or {"dpbnn": dpbnn.__version__}),
        "hashes": facts(page.hashes),
        "ledger": page.ledger,
        "ledger_argument": shlex.quote(page.ledger or ""),
    }
    parts["sections"] = _sections(parts)
    return environment().get_template("run.html").render(parts)


def write(page: RunPage, path: str | os.PathLike[str]) -> Path:
    """Write the page of a run to `path`, whole or not at all, and return the path."""
    return write_page(Path(path), render(page))


def _subtitle(page: RunPage, evaluation: Mapping[str, Any] | None, counted: str) -> str:
    kind = ""
    if evaluation:
        records = "training" if evaluation.get("training_table") else "test"
        kind = f"{evaluation['task']} on {evaluation['n']} {records} records"
    rows = ", ".join(f"{count} {counted} for {use}" for use, count in page.rows.items())
    return " · ".join(part for part in (page.created, rows, kind) if part)


def _evaluation(evaluation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not evaluation:
        return None
    return {
        "n": evaluation["n"],
        "interval": f"{100 * evaluation.get('level', 0.95):g} % interval",
        "metrics": figures.metric_rows(evaluation),
        "groups": figures.group_table(evaluation),
        "confusion": figures.confusion_table(evaluation),
        "baseline": _BASELINES[evaluation["task"]] if evaluation.get("baseline") else "",
    }


def _bayesian(estimate: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return an estimate by its own names, without the statement, which the page shows already."""
    left_out = {"kind", "private", "dp"}
    return facts({k: v for k, v in (estimate or {}).items() if k not in left_out})


def _band(band: Band | None, public: bool) -> dict[str, Any] | None:
    if band is None:
        return None
    points = band.points if public else None
    svg = charts.band(
        band.x,
        band.mean,
        band.epistemic,
        band.aleatoric,
        x_label=band.x_label,
        y_label=band.y_label,
        points=points,
        truth=band.truth,
        bounds=band.bounds,
    )
    caption = "Line: predictive mean. Bands: 95 % of a Gaussian with these stds."
    if points is not None:
        caption += " Points: test records."
    elif band.points is not None:
        caption += " Test records are not drawn, because they were not declared public."
    return {"svg": svg, "truth": band.truth is not None, "caption": f"{caption} {band.note}"}


def _examples(examples: Examples | None) -> dict[str, Any] | None:
    if examples is None or not (examples.certain or examples.uncertain):
        return None
    classes = [str(name) for name in examples.classes]
    if classes:
        caption = (
            "Ranked by the entropy of the prediction. Each dot is the probability that one "
            "posterior draw gives to a class; boxes hold the middle half of the draws, strokes "
            "are means, the true class is bold."
        )
    else:
        caption = (
            "Ranked by the std of the prediction. Each dot is the mean that one posterior draw "
            "predicts; the box holds the middle half of the draws, the stroke is their mean, the "
            "pale bar is 95 % of the prediction with its noise, the round mark the true value."
        )
    return {
        "caption": caption,
        "groups": [
            (heading, [_card(example, classes) for example in group])
            for heading, group in (
                ("Most certain", examples.certain),
                ("Least certain", examples.uncertain),
            )
        ],
    }


def _card(example: Example, classes: Sequence[str]) -> dict[str, Any]:
    if classes:
        svg = charts.class_draws(example.draws, classes, example.truth)
    else:
        svg = charts.real_draws(example.draws, float(example.truth), example.uncertainty)
    shown = written(example.uncertainty, 2 if classes else 4)
    return {
        "name": example.name,
        "truth": example.truth,
        "prediction": example.prediction,
        "right": example.truth == example.prediction if classes else None,
        "uncertainty": f"entropy {shown} nats" if classes else f"predictive std {shown}",
        "image": None if example.image is None else png.data_uri(example.image),
        "row": facts(example.row)[:_MOST_COLUMNS],
        "more": max(len(example.row or ()) - _MOST_COLUMNS, 0),
        "svg": svg,
    }


def _diagnostics(diagnostics: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not diagnostics:
        return None
    known = {name: diagnostics.get(name) for name in _CHAIN_FACTS}
    return {
        "meaning": list(diagnostics.get("meaning") or ()),
        "warnings": list(diagnostics.get("warnings") or ()),
        "facts": facts({name: value for name, value in known.items() if value is not None}),
        "rows": [
            (
                name,
                text,
                *(
                    _significant(diagnostics[summary].get(key), digits)
                    for summary in ("median", "worst")
                ),
            )
            for key, name, text, digits in _CHAIN_ROWS
        ],
    }


def _sections(parts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return anchor and name of every section that the page has, in its order."""
    return [
        ("privacy", "Privacy"),
        *([("public", "Public facts")] if parts["public"] or parts["rows"] else []),
        ("metrics", "Metrics"),
        *([("groups", "Groups")] if (parts["evaluation"] or {}).get("groups") else []),
        *([("confusion", "Confusion")] if (parts["evaluation"] or {}).get("confusion") else []),
        *((chart.id, chart.name) for chart in parts["charts"]),
        *([("intervals", "Intervals")] if parts["coverage_table"] else []),
        *([("band", "Uncertainty")] if parts["band"] else []),
        ("examples", "Examples"),
        *([("diagnostics", "Diagnostics")] if parts["diagnostics"] else []),
        ("settings", "Settings"),
        ("versions", "Versions"),
        ("hashes", "Hashes"),
        ("verify", "Verify"),
    ]


def _significant(number: float | str | None, digits: int) -> str:
    value = figures.value_of(number)
    return f"{value:.{digits}f}" if math.isfinite(value) else figures.decimals(value)


def _groups(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield ("fact", name, value), and ("group", name, "") before the facts of a mapping."""
    inner = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    for name, value in values.items():
        if name not in inner:
            yield "fact", str(name), short(value)
    for name, group in inner.items():
        yield "group", str(name), ""
        for key, value in group.items():
            yield "fact", str(key), short(value)
