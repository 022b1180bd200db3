"""evaluate(): all metrics of predictions on test data, with bootstrap intervals."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpbnn.evaluation import baseline, classification, ordinal, ranking, regression, selective
from dpbnn.evaluation import groups as by_group
from dpbnn.evaluation.checked import Classified, Floats, Integers, Targeted, array
from dpbnn.evaluation.classification import Reliability
from dpbnn.evaluation.groups import Group
from dpbnn.evaluation.regression import LEVELS, Coverage
from dpbnn.evaluation.resampling import Metric, Sums, resampled
from dpbnn.evaluation.selective import RiskCoverage
from dpbnn.notebook import Shown
from dpbnn.predictive import ClassPredictive, CountPredictive, Predictive, RealPredictive

SCHEMA = 1
_CURVE = 200  # largest number of points in a stored curve


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram:
    """Counts by bin.

    Attributes:
        edges: ends of the bins, [bins + 1].
        counts: records in every bin.
    """

    edges: Floats
    counts: Integers


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation(Shown):
    """Metrics of predictions on test data, and the data of their diagrams.

    Attributes:
        task: "classification" or "regression".
        n: number of records.
        metrics: by name, in the order of the table. Classification: accuracy, auroc,
            average_precision, recall, nll, brier, ece, ece_mass, mce, classwise_ece, global_gap,
            aurc; for classes with an order also rps and mae. Regression and counts: rmse, mae, r2,
            log_likelihood, crps.
        level: probability of the bootstrap intervals.
        baseline: metrics of one prediction for all records, made of the test truth: the shares of
            the classes, or mean and variance of the targets.
        groups: metrics by subgroup, where groups were given.
        group: name of the column that the groups come from.
        classes: names of the classes, where they were given.
        threshold: of recall (classification).
        positive: number of the positive class, of two.
        confusion: number of records by true and predicted class (classification).
        reliability: confidence against accuracy, in 15 bins of equal width (classification).
        confidence_histogram: of the largest probability, in 20 bins (classification).
        risk_coverage: error rate among the most certain records, at most 200 points of the curve
            (classification).
        coverage: nominal and observed coverage of intervals (regression).
        pit: histogram of the probability integral transform in 20 bins (regression). A count is
            spread evenly over the bins between F(y - 1) and F(y).
    """

    task: str
    n: int
    metrics: dict[str, Metric]
    level: float = 0.95
    baseline: dict[str, float] = dataclasses.field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    group: str = ""
    classes: tuple[str, ...] = ()
    threshold: float = 0.5
    positive: int = 1
    confusion: Integers | None = None
    reliability: Reliability | None = None
    confidence_histogram: Histogram | None = None
    risk_coverage: RiskCoverage | None = None
    coverage: tuple[Coverage, ...] = ()
    pit: Histogram | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; NaN is None, infinity the text "inf"."""
        return {"schema": SCHEMA, **plain(self)}

    def to_json(self) -> str:
        """Return the evaluation as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Evaluation:
        """Rebuild an evaluation from `to_dict`."""
        values = dict(values)
        schema = values.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(
                f"schema={schema!r}: this version reads evaluations of schema {SCHEMA}"
            )
        kinds: dict[str, type] = {
            "reliability": Reliability,
            "confidence_histogram": Histogram,
            "risk_coverage": RiskCoverage,
            "pit": Histogram,
        }
        for name, kind in kinds.items():
            if values[name] is not None:
                values[name] = _read(kind, values[name])
        values["metrics"] = {n: _read(Metric, m) for n, m in values["metrics"].items()}
        values["coverage"] = tuple(_read(Coverage, c) for c in values["coverage"])
        values["baseline"] = {n: _number(v) for n, v in values.get("baseline", {}).items()}
        values["classes"] = tuple(values.get("classes", ()))
        values["groups"] = tuple(
            Group(g["name"], g["n"], {n: _read(Metric, m) for n, m in g["metrics"].items()})
            for g in values.get("groups", ())
        )
        if values.get("confusion") is not None:
            values["confusion"] = np.array(values["confusion"], dtype=np.int64)
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Evaluation:
        """Rebuild an evaluation from `to_json`."""
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        lines = [
            f"{self.task.capitalize()} on {self.n} records, {self.level:.0%} bootstrap intervals"
        ]
        for name, m in self.metrics.items():
            beside = f"   baseline {self.baseline[name]:.4f}" if name in self.baseline else ""
            lines.append(f"  {self.label(name):<38}{m!s:<26}{beside}".rstrip())
        for row in self.coverage:
            share = Metric(row.observed, row.low, row.high)
            name = f"{row.nominal:.0%} interval, coverage"
            lines.append(f"  {name:<38}{share!s:<26}   mean width {row.width:.4g}")
        for group in self.groups:
            where = f"{self.group}={group.name}" if self.group else group.name
            lines.append(f"{where}: {group.n} record{'s' * (group.n != 1)}")
            lines += [f"  {self.label(name):<38}{m}" for name, m in group.metrics.items()]
        return "\n".join(lines)

    def label(self, name: str) -> str:
        """Return the name of a metric in tables."""
        if name == "recall":
            return f"recall at threshold {self.threshold:g}"
        return LABELS.get(name, name)


LABELS = {
    "accuracy": "accuracy",
    "auroc": "area under the ROC curve (AUROC)",
    "average_precision": "average precision",
    "recall": "recall",
    "nll": "log-loss (NLL)",
    "brier": "Brier score",
    "rps": "ranked probability score (RPS)",
    "ece": "calibration error (ECE, 15 bins)",
    "ece_mass": "calibration error (ECE, equal mass)",
    "mce": "maximum calibration error (MCE)",
    "classwise_ece": "classwise calibration error",
    "global_gap": "|accuracy - mean confidence|",
    "aurc": "area under risk-coverage (AURC)",
    "rmse": "root mean squared error (RMSE)",
    "mae": "mean absolute error (MAE)",
    "r2": "R^2",
    "log_likelihood": "log-likelihood per record",
    "crps": "CRPS",
    "coverage_90": "90% interval, coverage",
}
"""Names of the metrics in tables."""

_RANGES = {
    **dict.fromkeys(LABELS, (0.0, 1.0)),
    "brier": (0.0, 2.0),
    **dict.fromkeys(("nll", "rps", "rmse", "mae", "crps"), (0.0, math.inf)),
    "log_likelihood": (-math.inf, math.inf),
    "r2": (-math.inf, 1.0),
}


def evaluate(
    predictive: Any,
    y: Any,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    threshold: float = 0.5,
    positive: int = 1,
    classes: Sequence[Any] = (),
    groups: Sequence[Any] | None = None,
    group: str = "",
) -> Evaluation:
    """Return all metrics of a prediction, with bootstrap intervals and the data of the diagrams.

    The numbers are not private in the test data: no noise is added and no budget is charged. The
    baseline is made of the test truth alone, so the training data is not read for it.

    Args:
        predictive: from `posterior.predict(x)`; or class probabilities [N, K].
        y: labels [N] from 0 to K - 1, or targets [N] or [N, D].
        resamples: of the bootstrap; 0 leaves the intervals out.
        level: probability of the intervals.
        seed: of the bootstrap.
        threshold: of recall: the probability from which a record counts as found.
        positive: number of the positive class of two, for recall and average precision.
        classes: names of the classes, for tables.
        groups: public value of every record, such as an age group: metrics are given by value too.
        group: name of the column that the groups come from, for tables.
    """
    options = {"resamples": resamples, "level": level, "seed": seed}
    if isinstance(predictive, RealPredictive | CountPredictive):
        t = Targeted.of(predictive, y)
        found = _regression(t, options)
        parts = () if groups is None else by_group.of_targets(t, groups, options)
        return dataclasses.replace(
            found, baseline=baseline.of_targets(t), groups=parts, group=group
        )
    c = Classified.of(predictive, y)
    if classes and len(classes) != c.classes:
        raise ValueError(f"classes: {len(classes)} names for {c.classes} classes; give one each")
    found = _classification(c, options, threshold, positive)
    return dataclasses.replace(
        found,
        baseline=baseline.of_classes(c, threshold, positive),
        groups=()
        if groups is None
        else by_group.of_classes(c, groups, options, threshold, positive),
        group=group,
        classes=tuple(str(name) for name in classes),
    )


def _classification(
    c: Classified, options: dict[str, Any], threshold: float, positive: int
) -> Evaluation:
    found = classification.metrics_of(c) | ranking.metrics_of(c, threshold, positive)
    found["ece_mass"] = classification.metrics_of(c, kind="mass")["ece"]
    found |= ordinal.metrics_of(c)
    found["aurc"] = lambda sums: selective.aurcs(c, sums)
    metrics = {name: found[name] for name in LABELS if name in found}
    curve = selective.risk_coverage_of(c, "confidence")
    kept = np.unique(np.linspace(0, len(c) - 1, min(len(c), _CURVE)).round().astype(int))
    return Evaluation(
        task="classification",
        n=len(c),
        metrics=resampled(metrics, len(c), ranges=_RANGES, **options),
        level=options["level"],
        threshold=threshold,
        positive=positive,
        confusion=ranking.confusion_of(c),
        reliability=classification.reliability_of(c, classification.even_edges(15)),
        confidence_histogram=_histogram(c.confidence),
        risk_coverage=RiskCoverage(curve.coverage[kept], curve.risk[kept], curve.aurc),
    )


def _regression(t: Targeted, options: dict[str, Any]) -> Evaluation:
    densities, scores = regression.log_densities(t), regression.scores(t)
    ranks, error = regression.ranks(t), regression.errors(t)
    squares, sizes = t.per_record(error**2), t.per_record(np.abs(error))
    inside = {level: t.per_record(regression.covered(ranks, level)) for level in LEVELS}
    metrics: dict[str, Callable[[Sums], Floats]] = {
        "rmse": lambda sums: np.sqrt(sums.mean(squares)),
        "mae": lambda sums: sums.mean(sizes),
        "r2": lambda sums: regression.r2s(error, t.y, sums),
        "log_likelihood": lambda sums: sums.mean(densities),
        "crps": lambda sums: sums.mean(scores),
    }
    for level in LEVELS:
        metrics[str(level)] = lambda sums, level=level: sums.mean(inside[level])  # type: ignore[misc]
    ranges = {**_RANGES, **{str(level): (0.0, 1.0) for level in LEVELS}}
    found = resampled(metrics, len(t), ranges=ranges, **options)
    shares = {level: found.pop(str(level)) for level in LEVELS}
    return Evaluation(
        task="regression",
        n=len(t),
        metrics=found,
        level=options["level"],
        coverage=tuple(
            Coverage(level, m.value, m.low, m.high, regression.width(t, level))
            for level, m in shares.items()
        ),
        pit=_spread_histogram(*ranks),
    )


def evaluate_each(
    predictive: Predictive, y: Any, names: Sequence[str] = (), **options: Any
) -> dict[str, Evaluation]:
    """Return the evaluation of each of several targets by itself, by name.

    Args:
        predictive: of several numbers or counts [N, D], or of several labels [N, D, classes].
        y: targets [N, D].
        names: of the targets; their positions by default.
        **options: of `evaluate`.
    """
    mean, targets = predictive.mean, array(y, "y")
    several = isinstance(predictive, ClassPredictive | RealPredictive | CountPredictive)
    shape = tuple(mean.shape[:-1] if isinstance(predictive, ClassPredictive) else mean.shape)
    if not several or len(shape) != 2 or targets.shape != shape:
        raise ValueError(
            f"y has shape {list(targets.shape)} and the prediction {list(mean.shape)}; give "
            f"several targets for each record, or use evaluate for a single one"
        )
    chosen = [str(name) for name in names] or [str(k) for k in range(shape[1])]
    if len(set(chosen)) != shape[1]:
        raise ValueError(f"names: give {shape[1]} different names, one for each target")
    return {
        name: evaluate(predictive.target(k), targets[:, k], **options)  # type: ignore[attr-defined]
        for k, name in enumerate(chosen)
    }


def _spread_histogram(below: Floats, upto: Floats) -> Histogram:
    """Return how many records fall in each bin; those of a count are spread between its ranks.

    Reference: Czado, Gneiting, Held, Predictive model assessment for count data, 2009.
    """
    below, upto = below.reshape(-1), upto.reshape(-1)
    point = upto <= below
    found = _histogram(upto[point])
    if point.all():
        return found
    low, high = below[~point, None], upto[~point, None]
    share = np.clip((found.edges - low) / (high - low), 0, 1).sum(0)
    return Histogram(found.edges, np.round(found.counts + np.diff(share), 1))


def _histogram(values: Floats) -> Histogram:
    counts, edges = np.histogram(np.clip(values, 0, 1), bins=20, range=(0, 1))
    return Histogram(edges, counts)


def plain(value: Any) -> Any:
    """Return plain values for JSON; NaN is None, infinity the text "inf"."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, np.ndarray)):
        return [plain(item) for item in (value.tolist() if hasattr(value, "tolist") else value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _read(kind: type, values: dict[str, Any]) -> Any:
    def read(value: Any) -> Any:
        return np.array([_number(v) for v in value]) if isinstance(value, list) else _number(value)

    return kind(**{name: read(value) for name, value in values.items()})
