"""The page that puts runs side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpbnn.privacy.statement import PrivacyStatement, statement_of
from dpbnn.report import charts, figures
from dpbnn.report.page import ComparisonRow
from dpbnn.report.plain_words import Reading, read
from dpbnn.report.template import environment, hero, write_page

_COMPARED = {
    "classification": ("accuracy", "auroc", "average_precision", "nll", "ece"),
    "regression": ("rmse", "mae", "r2", "log_likelihood", "crps"),
}


def render_comparison(
    rows: Sequence[ComparisonRow],
    *,
    total: PrivacyStatement | Mapping[str, Any] | None = None,
    title: str = "Comparison of private Bayesian models",
    created: str = "",
) -> str:
    """Return the page that puts runs on the same data side by side, as HTML.

    Args:
        rows: the runs, in the order of the table.
        total: the statement of all runs together (their composed budget).
        title: heading of the page.
        created: date, as shown.
    """
    if not rows:
        raise ValueError("rows is empty; a comparison needs at least one run")
    readings = [read(row.privacy) for row in rows]
    evaluations = [figures.plain(row.evaluation) for row in rows]
    tasks = {evaluation["task"] for evaluation in evaluations}
    if len(tasks) != 1:
        raise ValueError(f"rows mix the tasks {sorted(tasks)}; compare runs of one task at a time")
    open_runs = [reading for reading in readings if reading.banner]
    whole = None if total is None else read(total)
    others = _others(whole, len(rows) - len(open_runs)) if open_runs else ""
    if open_runs:
        reason = f"of the {len(rows)} runs, {len(open_runs)} had none, so all together have none"
        whole = Reading(banner="NOT PRIVATE", reason=reason)
    keys = _compared(tasks.pop(), evaluations)
    methods = list(dict.fromkeys(row.method for row in rows))
    best = _best(keys, [e for r, e in zip(readings, evaluations, strict=True) if not r.banner])
    parts = {
        "title": title,
        "subtitle": " · ".join(p for p in (f"{len(rows)} runs on the same data", created) if p),
        "reading": whole or Reading(banner=""),
        "total": whole is not None,
        "others": others,
        **hero(whole),
        "measured": _measured(evaluations),
        "metrics": [figures.meaning(key) for key in keys],
        "rows": [
            _comparison_row(row, reading, evaluation, keys, best)
            for row, reading, evaluation in zip(rows, readings, evaluations, strict=True)
        ],
        "baseline": _baseline(keys, evaluations),
        "table_note": "Small print: 95 % intervals. Bold: best of the runs with a guarantee; where "
        "intervals overlap, the order may be chance. Test records are not covered by any of "
        "the guarantees. The baseline looks at no input: it is made of the shares of the classes, "
        "or mean and variance of the targets, of the test records.",
        "keys": [
            {"method": method, "symbol": charts.key_symbol(i)} for i, method in enumerate(methods)
        ],
        "charts": [_metric_chart(key, rows, evaluations, methods) for key in keys],
    }
    return environment().get_template("comparison.html").render(parts)


def write_comparison(
    rows: Sequence[ComparisonRow], path: str | os.PathLike[str], **details: Any
) -> Path:
    """Write the comparison to `path`, whole or not at all, and return the path."""
    return write_page(Path(path), render_comparison(rows, **details))


def _compared(task: str, evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics that all runs have, the usual ones of the task, five at most."""
    common = [
        key for key in evaluations[0]["metrics"] if all(key in e["metrics"] for e in evaluations)
    ]
    usual = [key for key in _COMPARED.get(task, ()) if key in common]
    return (usual or common)[:5]


def _others(total: Reading | None, count: int) -> str:
    """Say what holds for the runs with a guarantee beside runs that have none."""
    if total is None or total.banner or not count:
        return "Each run's own epsilon is in the table." if count else ""
    runs_have = "run with a guarantee has" if count == 1 else f"{count} runs with a guarantee have"
    together = " together" * (count > 1)
    return (
        f"The {runs_have} epsilon {total.epsilon} at delta {total.delta}{together}. "
        f"Each run's own epsilon is in the table."
    )


def _best(keys: Sequence[str], evaluations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the best value of every metric for which higher or lower is better."""
    choose = {"higher": max, "lower": min}
    return {
        key: choose[figures.meaning(key).better](
            figures.value_of(e["metrics"][key]["value"]) for e in evaluations
        )
        for key in keys
        if figures.meaning(key).better and len(evaluations) > 1
    }


def _baseline(
    keys: Sequence[str], evaluations: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Return name and value of the baseline's metrics; none where test sets differ."""
    known = [evaluation.get("baseline") for evaluation in evaluations]
    if not known[0] or any(other != known[0] for other in known):
        return []
    return [
        (figures.meaning(key).name, figures.decimals(known[0][key]) if key in known[0] else "")
        for key in keys
    ]


def _measured(evaluations: Sequence[Mapping[str, Any]]) -> str:
    sizes = {evaluation["n"] for evaluation in evaluations}
    if len(sizes) == 1:
        return f"Each run was evaluated on {sizes.pop()} test records."
    return f"The runs were evaluated on test sets of {min(sizes)} to {max(sizes)} records."


def _metric_chart(
    key: str,
    rows: Sequence[ComparisonRow],
    evaluations: Sequence[Mapping[str, Any]],
    methods: Sequence[str],
) -> dict[str, Any]:
    groups: dict[str, list[Any]] = {method: [] for method in methods}
    for row, evaluation in zip(rows, evaluations, strict=True):
        statement = statement_of(row.privacy)
        metric = evaluation["metrics"][key]
        groups[row.method].append(
            (
                statement.epsilon if statement.private else None,
                *(figures.value_of(metric.get(end)) for end in ("value", "low", "high")),
            )
        )
    known = figures.meaning(key)
    hint = f" {known.better.capitalize()} is better." if known.better else ""
    return {
        "svg": charts.metric_by_epsilon(known.name, groups),
        "caption": f"{known.text.capitalize()}.{hint}",
    }


def _comparison_row(
    row: ComparisonRow,
    reading: Reading,
    evaluation: Mapping[str, Any],
    keys: Sequence[str],
    best: Mapping[str, float],
) -> dict[str, Any]:
    cells = []
    for key in keys:
        metric = evaluation["metrics"][key]
        cells.append(
            {
                "name": figures.meaning(key).name,
                "value": figures.decimals(metric["value"]),
                "interval": figures.interval(metric),
                "best": not reading.banner and figures.value_of(metric["value"]) == best.get(key),
            }
        )
    return {
        "method": row.method,
        "note": row.note,
        "report": row.report,
        "private": not reading.banner,
        "epsilon": ("≈ " if reading.approximate else "") + reading.epsilon,
        "delta": reading.delta,
        "cells": cells,
    }
