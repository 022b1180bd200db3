"""An evaluation as the page shows it: a table of metrics, and charts with captions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from markupsafe import Markup

from dpbnn.report import charts
from dpbnn.report.plain_words import written


class Meaning(NamedTuple):
    """A metric in words.

    Attributes:
        name: as shown.
        text: what it measures, one sentence.
        better: "higher", "lower" or "".
    """

    name: str
    text: str = ""
    better: str = ""


@dataclasses.dataclass(frozen=True)
class MetricRow:
    """A line of the table of metrics."""

    name: str
    meaning: str
    value: str
    interval: str
    baseline: str = ""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A drawing with its heading."""

    id: str
    name: str
    svg: Markup
    caption: str


_MEANINGS = {
    "accuracy": Meaning("accuracy", "share of records classified right", "higher"),
    "auroc": Meaning(
        "AUROC", "chance that a record of the class is ranked above one of another class", "higher"
    ),
    "average_precision": Meaning(
        "average precision", "mean precision over all thresholds of the probability", "higher"
    ),
    "recall": Meaning("recall", "share of the records of the class that are found", "higher"),
    "nll": Meaning("log-loss (NLL)", "mean surprise at the true class, in nats", "lower"),
    "brier": Meaning("Brier score", "squared distance of the probabilities to the truth", "lower"),
    "rps": Meaning(
        "RPS", "squared distance of cumulative probabilities to the truth; order counts", "lower"
    ),
    "ece": Meaning(
        "ECE", "expected calibration error: mean gap of confidence and accuracy", "lower"
    ),
    "ece_mass": Meaning("ECE, equal mass", "the same with equally filled bins", "lower"),
    "mce": Meaning("MCE", "largest gap of confidence and accuracy in any bin", "lower"),
    "classwise_ece": Meaning("classwise ECE", "mean of the gaps of all classes", "lower"),
    "global_gap": Meaning(
        "global gap", "difference of mean confidence and accuracy, over all records", "lower"
    ),
    "aurc": Meaning("AURC", "mean error while answering the most certain first", "lower"),
    "rmse": Meaning("RMSE", "root of the mean squared error, in units of the target", "lower"),
    "mae": Meaning("MAE", "mean absolute error, in units of the target", "lower"),
    "r2": Meaning("R²", "share of the variance explained; 0 is the baseline", "higher"),
    "log_likelihood": Meaning(
        "log-likelihood", "mean log density at the target, in nats", "higher"
    ),
    "crps": Meaning(
        "CRPS", "distance of the predictive distribution to the target, in its units", "lower"
    ),
    "coverage_90": Meaning("90 % intervals", "share of targets inside"),
}

_MOST_CLASSES = 12
_SMALL = 1e-3  # smaller numbers are written with a power of ten


def plain(value: Any) -> Any:
    """Return `value.to_dict()` where there is one, else the value itself."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def meaning(key: str) -> Meaning:
    """Return a metric in words; one that is not known keeps its own name."""
    return _MEANINGS.get(key) or Meaning(key.replace("_", " "))


def value_of(number: float | str | None) -> float:
    """Return a number that may come from JSON: None is NaN, texts are infinities."""
    return math.nan if number is None else float(number)


def decimals(number: float | str | None) -> str:
    """Return a number with at most four decimals, with fewer where it is large."""
    value = value_of(number)
    if math.isnan(value):
        return "—"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or _SMALL <= abs(value) < 10:
        text = f"{value:.4f}".rstrip("0").rstrip(".")
    elif 1000 <= abs(value) < 1e7:
        text = f"{value:.0f}"
    else:
        text = written(value, 4 if abs(value) >= 10 else 2)
    return f"−{text[1:]}" if text.startswith("-") else text


def interval(values: Mapping[str, Any], show: Callable[[Any], str] = decimals) -> str:
    """Return an interval `low` to `high` in words, empty where there is none.

    Both ends have as many decimals as the larger one has room for, such as 8.38 to 10.36; a whole
    number has none.
    """
    ends = value_of(values.get("low")), value_of(values.get("high"))
    if any(map(math.isnan, ends)):
        return ""
    largest = max(map(abs, ends))
    if show is decimals and _SMALL <= largest < 1e7:
        places = 4 if largest < 10 else max(0, 3 - math.floor(math.log10(largest)))
        rounded = [round(end, places) for end in ends]
        while places and rounded == [round(end, places - 1) for end in rounded]:
            places -= 1
        texts = [f"{abs(end):.{0 if end.is_integer() else places}f}" for end in rounded]
        signs = ["−" if end < 0 else "" for end in rounded]
        return f"{signs[0]}{texts[0]} to {signs[1]}{texts[1]}"
    return f"{show(ends[0])} to {show(ends[1])}"


def metric_rows(evaluation: Mapping[str, Any]) -> list[MetricRow]:
    """Return the table of metrics."""
    rows = []
    beside = evaluation.get("baseline") or {}
    for key, metric in evaluation["metrics"].items():
        known = meaning(key)
        hint = f"{known.better} is better" if known.better else ""
        text = "; ".join(part for part in (known.text, _asked(key, evaluation), hint) if part)
        base = decimals(beside[key]) if key in beside else ""
        rows.append(MetricRow(known.name, text, decimals(metric["value"]), interval(metric), base))
    return rows


def _asked(key: str, evaluation: Mapping[str, Any]) -> str:
    """Say which class and which threshold a metric is about."""
    several = len(evaluation.get("confusion") or ()) > 2
    names = evaluation.get("classes") or ("0", "1")
    whose = "mean over classes" if several else f"class {names[evaluation.get('positive', 1)]}"
    if key == "recall":
        return f"{whose}, from probability {written(evaluation.get('threshold', 0.5))}"
    if key == "mae" and evaluation.get("confusion") is not None:
        return "of ordered classes one step is 1"
    if key == "average_precision" or (key == "auroc" and several):
        return whose
    return ""


def group_table(evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the table of metrics by subgroup, None where there are no groups."""
    groups = evaluation.get("groups") or ()
    if not groups:
        return None
    keys = list(groups[0]["metrics"])
    return {
        "column": evaluation.get("group") or "group",
        "names": [meaning(key).name for key in keys],
        "rows": [
            {
                "name": group["name"],
                "n": group["n"],
                "cells": [
                    {
                        "name": meaning(key).name,
                        "value": decimals(group["metrics"][key]["value"]),
                        "interval": interval(group["metrics"][key]),
                    }
                    for key in keys
                ],
            }
            for group in groups
        ],
    }


def confusion_table(evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return counts by true and predicted class, None where there are none or too many classes."""
    counts = evaluation.get("confusion")
    if counts is None or len(counts) > _MOST_CLASSES:
        return None
    names = evaluation.get("classes") or [str(k) for k in range(len(counts))]
    rows = [(name, list(enumerate(row))) for name, row in zip(names, counts, strict=True)]
    return {"names": names, "rows": list(enumerate(rows))}


def evaluation_charts(evaluation: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of an evaluation, in the order of the page."""
    found = []
    if values := evaluation.get("reliability"):
        parts = [values[name] for name in ("edges", "counts", "confidence", "accuracy")]
        caption = (
            "Of all answers given with confidence 0.8, a calibrated model has 80 % right: "
            "points on the dashed line. Orange strokes are the gaps, blue ones 95 % Wilson "
            "intervals; larger points stand for more records, which are counted below."
        )
        found.append(Chart("reliability", "Reliability", charts.reliability(*parts), caption))
    if values := evaluation.get("confidence_histogram"):
        svg = charts.confidence_histogram(values["edges"], values["counts"])
        caption = "How sure the model is: the probability it gives to the class it names."
        found.append(Chart("confidence", "Confidence", svg, caption))
    if (values := evaluation.get("risk_coverage")) and len(values["coverage"]):
        aurc = values.get("aurc")
        svg = charts.risk_coverage(values["coverage"], values["risk"], aurc)
        caption = (
            "The error rate if only the most certain part of the records is answered and the rest "
            "is passed on. The dashed line answers all of them."
        )
        if aurc is not None:
            caption += f" Area under the curve (AURC): {decimals(aurc)}."
        found.append(Chart("risk-coverage", "Risk and coverage", svg, caption))
    if rows := evaluation.get("coverage"):
        names = ("nominal", "observed", "low", "high")
        svg = charts.coverage([tuple(value_of(row[name]) for name in names) for row in rows])
        caption = (
            "How many targets lie inside intervals that promise to hold a given share. On the "
            "dashed line promise and truth agree; below it the model is too sure. Upright "
            "strokes are bootstrap intervals."
        )
        found.append(Chart("coverage", "Interval coverage", svg, caption))
    if values := evaluation.get("pit"):
        svg = charts.pit(values["edges"], values["counts"])
        caption = (
            "Where targets fall in their own predictive distribution. A calibrated model has flat "
            "bars, 99 % of which end in the grey band. A hump means that the model is too unsure, "
            "a bowl that it is too sure, a slope that it is biased."
        )
        found.append(Chart("pit", "Probability integral transform (PIT)", svg, caption))
    return found


def coverage_rows(evaluation: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the table of interval coverage, empty for classes."""
    return [
        {
            "nominal": _percent(row["nominal"], 0),
            "observed": _percent(row["observed"]),
            "interval": interval(row, _percent),
            "width": written(row["width"], 4),
        }
        for row in evaluation.get("coverage") or ()
    ]


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"
