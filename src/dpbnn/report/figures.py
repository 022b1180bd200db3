"""An evaluation as the page shows it: a table of metrics, and charts with captions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from markupsafe import Markup

from dpbnn.report import charts


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


@dataclasses.dataclass(frozen=True)
class Chart:
    """A drawing with its heading."""

    id: str
    name: str
    svg: Markup
    caption: str


_MEANINGS = {
    "accuracy": Meaning("accuracy", "share of records classified right", "higher"),
    "nll": Meaning("log-loss (NLL)", "mean surprise at the true class, in nats", "lower"),
    "brier": Meaning("Brier score", "squared distance of the probabilities to the truth", "lower"),
    "ece": Meaning(
        "ECE", "expected calibration error: mean gap of confidence and accuracy", "lower"
    ),
    "ece_mass": Meaning("ECE, equal mass", "the same with equally filled bins", "lower"),
    "mce": Meaning("MCE", "largest gap of confidence and accuracy in any bin", "lower"),
    "classwise_ece": Meaning("classwise ECE", "the gap for every class by itself, mean", "lower"),
    "global_gap": Meaning(
        "global gap", "mean confidence against accuracy, over all records at once", "lower"
    ),
    "aurc": Meaning("AURC", "mean error while answering the most certain first", "lower"),
    "rmse": Meaning("RMSE", "root of the mean squared error, in units of the target", "lower"),
    "log_likelihood": Meaning(
        "log-likelihood", "mean log density at the target, in nats", "higher"
    ),
    "crps": Meaning(
        "CRPS", "distance of the predictive distribution to the target, in its units", "lower"
    ),
}


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
    """Return a number with four decimals, or with four digits where it is 10 or more."""
    value = value_of(number)
    if math.isnan(value):
        return "—"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"
    return text.replace("-", "−")


def interval(values: Mapping[str, Any], show: Callable[[Any], str] = decimals) -> str:
    """Return an interval `low` to `high` in words, empty where there is none."""
    low, high = value_of(values.get("low")), value_of(values.get("high"))
    return "" if math.isnan(low) or math.isnan(high) else f"{show(low)} to {show(high)}"


def metric_rows(metrics: Mapping[str, Mapping[str, Any]]) -> list[MetricRow]:
    """Return the table of metrics."""
    rows = []
    for key, metric in metrics.items():
        known = meaning(key)
        hint = f"{known.better} is better" if known.better else ""
        text = "; ".join(part for part in (known.text, hint) if part)
        rows.append(MetricRow(known.name, text, decimals(metric["value"]), interval(metric)))
    return rows


def evaluation_charts(evaluation: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of an evaluation, in the order of the page."""
    found = []
    if values := evaluation.get("reliability"):
        parts = [values[name] for name in ("edges", "counts", "confidence", "accuracy")]
        caption = (
            "Of all answers given with confidence 0.8, say, a calibrated model has 80 % right: "
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
            "Where targets fall in their own predictive distribution. Flat is calibrated, a "
            "hump is too unsure, a bowl too sure, a slope is bias. Grey: 99 % of the bars "
            "of a calibrated model lie there."
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
            "width": f"{row['width']:.4g}",
        }
        for row in evaluation.get("coverage") or ()
    ]


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"
