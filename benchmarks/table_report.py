"""Results of `benchmarks.tables` as Markdown: means, ranks, and counts of what must be shown.

A figure is the mean over seeds. A learner is first on a table if no peer's mean is better; the mean
baseline and what is not private are no peers.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.table_data import TABLES

RIVALS = ("dp-ebm", "diffprivlib", "moment-ridge")
SHOWN = {"classification": ("nll", "auroc", "ece", "ece_by_chance", "accuracy"),
         "regression": ("log_likelihood", "rmse", "coverage", "width")}  # fmt: skip
HIGHER = {"auroc", "accuracy", "log_likelihood"}
TITLES = {"nll": "NLL", "auroc": "AUROC", "ece": "ECE", "ece_by_chance": "ECE by chance",
          "log_likelihood": "log-likelihood", "rmse": "RMSE",
          "coverage": "coverage of 90 % intervals", "accuracy": "accuracy",
          "width": "width of 90 % intervals"}  # fmt: skip
COVERED = (0.87, 0.94)
TARGETS = {"power": 4.25, "kin8nm": 0.125}  # RMSE of the defaults at epsilon 1

Record = dict[str, Any]


class Results:
    """Records, by table, learner and epsilon."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = [r for r in records if "error" not in r]
        self.failed = [r for r in records if "error" in r]
        self.broken = {(r["table"], r["learner"], r["epsilon"]) for r in self.failed}
        self._cells: dict[tuple[Any, ...], list[Record]] = {}
        for record in self.records:
            where = (record["table"], record["learner"], record["epsilon"])
            self._cells.setdefault(where, []).append(record)
        learners = {r["learner"]: None for r in sorted(self.records, key=_place)}
        self.learners = list(learners)
        found = {r["epsilon"] for r in self.records}
        self.epsilons = sorted(found - {None}) + ([None] if None in found else [])

    def tables(self, task: str) -> list[str]:
        """Return the tables of a task, in the order of `table_data`."""
        wanted = task == "classification"
        here = {r["table"] for r in self.records if (r["classes"] > 0) == wanted}
        return [name for name in TABLES if name in here]

    def values(self, table: str, learner: str, epsilon: Any, metric: str) -> list[float]:
        """Return a metric's values over the seeds."""
        own = self._cells.get((table, learner, epsilon), [])
        return [r[metric] for r in own if metric in r]

    def mean(self, table: str, learner: str, epsilon: Any, metric: str) -> float | None:
        """Return the mean over seeds, None without any."""
        found = self.values(table, learner, epsilon, metric)
        return statistics.fmean(found) if found else None

    def loss(self, table: str, learner: str, epsilon: Any, metric: str) -> float | None:
        """Return the mean with the sign that makes less better."""
        found = self.mean(table, learner, epsilon, metric)
        return None if found is None else -found if metric in HIGHER else found

    def best(self, table: str, epsilon: Any, metric: str) -> float | None:
        """Return the least loss of the peers."""
        found = [self.loss(table, rival, epsilon, metric) for rival in RIVALS]
        return min((loss for loss in found if loss is not None), default=None)


def report(records: list[Record], judged: str) -> str:
    """Return all of it as Markdown."""
    results = Results(records)
    parts = [_musts(results, judged), _ranks(results), _monotone(results, judged)]
    for task, metrics in SHOWN.items():
        parts += [_means(results, task, metric) for metric in metrics]
    parts.append(_failures(results))
    return "\n\n".join(part for part in parts if part)


def _musts(results: Results, judged: str) -> str:
    """Return the counts of what the defaults must show, one column per epsilon."""
    budgets = [e for e in results.epsilons if e is not None]
    lines = [
        f"### What `{judged}` must show: tables that pass of tables",
        "",
        _row(["", *(f"epsilon {_word(e)}" for e in budgets)]),
        _rule(len(budgets) + 1),
    ]
    for label, count in (
        ("first in NLL", lambda e: _near(results, judged, e, "nll")),
        ("first in log-likelihood", lambda e: _near(results, judged, e, "log_likelihood")),
        ("AUROC first or within 0.005", lambda e: _near(results, judged, e, "auroc", add=0.005)),
        ("RMSE first or within 2 %", lambda e: _near(results, judged, e, "rmse", times=1.02)),
        ("ECE <= 0.03, n >= 5000", lambda e: _small_error(results, judged, e)),
        ("coverage in [0.87, 0.94]", lambda e: _covers(results, judged, e)),
        ("fit <= 5 s on one core, n <= 50 000", lambda e: _quick(results, judged, e)),
    ):
        lines.append(_row([label, *(_count(count(e)) for e in budgets)]))
    for name, most in TARGETS.items():
        cells = [_count(_target(results, judged, e, name)) for e in budgets]
        lines.append(_row([f"RMSE of {name} <= {most} (epsilon 1)", *cells]))
    return "\n".join(lines)


Verdicts = dict[str, bool]


def _near(
    results: Results, judged: str, epsilon: float, metric: str, add: float = 0, times: float = 1
) -> Verdicts:
    task = next(t for t, metrics in SHOWN.items() if metric in metrics)
    found = {}
    for name in results.tables(task):
        own, best = results.loss(name, judged, epsilon, metric), results.best(name, epsilon, metric)
        if own is not None and best is not None:
            found[name] = own <= best * times + add
        elif (name, judged, epsilon) in results.broken:
            found[name] = False
    return found


def _small_error(results: Results, judged: str, epsilon: float) -> Verdicts:
    large = {r["table"] for r in results.records if r["rows"] >= 5000}
    means = {n: results.mean(n, judged, epsilon, "ece") for n in results.tables("classification")}
    return {n: m <= 0.03 for n, m in means.items() if n in large and m is not None}


def _covers(results: Results, judged: str, epsilon: float) -> Verdicts:
    means = {n: results.mean(n, judged, epsilon, "coverage") for n in results.tables("regression")}
    return {n: COVERED[0] <= m <= COVERED[1] for n, m in means.items() if m is not None}


def _quick(results: Results, judged: str, epsilon: float) -> Verdicts:
    spent = {n: results.values(n, judged, epsilon, "seconds") for n in TABLES}
    return {n: statistics.median(s) <= 5 for n, s in spent.items() if s}


def _target(results: Results, judged: str, epsilon: float, name: str) -> Verdicts:
    found = results.mean(name, judged, epsilon, "rmse") if epsilon == 1 else None
    return {} if found is None else {f"{name} {found:.4g}": found <= TARGETS[name]}


def _count(verdicts: Verdicts) -> str:
    if not verdicts:
        return "-"
    missed = [name for name, passed in verdicts.items() if not passed]
    said = f"{len(verdicts) - len(missed)} of {len(verdicts)}"
    return said + (f" (not {', '.join(missed)})" if missed else "")


def _ranks(results: Results) -> str:
    """Return every learner's mean rank and how often it is first, in likelihood."""
    private = [x for x in results.learners if x not in ("boosting",)]
    budgets = [e for e in results.epsilons if e is not None]
    lines = ["### Mean rank among private learners, and tables on which it is first"]
    for task, metrics in SHOWN.items():
        metric = metrics[0]
        lines += ["", _row([TITLES[metric], *(f"epsilon {_word(e)}" for e in budgets)]),
                  _rule(len(budgets) + 1)]  # fmt: skip
        for learner in private:
            cells = [_rank(results, private, learner, task, metric, e) for e in budgets]
            if any(cell != "-" for cell in cells):
                lines.append(_row([learner, *cells]))
    return "\n".join(lines)


def _rank(
    results: Results, private: list[str], learner: str, task: str, metric: str, epsilon: float
) -> str:
    ranks = []
    for name in results.tables(task):
        losses = {x: results.loss(name, x, epsilon, metric) for x in private}
        known = {x: loss for x, loss in losses.items() if loss is not None}
        if learner in known:
            ranks.append(1 + sum(loss < known[learner] for loss in known.values()))
    if not ranks:
        return "-"
    return f"{statistics.fmean(ranks):.2f}, first on {ranks.count(1)} of {len(ranks)}"


def _monotone(results: Results, judged: str) -> str:
    """Return where the mean loss rises by more than its standard error as epsilon rises.

    The standard error is that of the mean of paired differences, over the seeds.
    """
    budgets, steps, rises = results.epsilons, 0, []
    for task, metrics in SHOWN.items():
        for name in results.tables(task):
            for less, more in itertools.pairwise(budgets):
                metric = metrics[0]
                before, after = (
                    {r["seed"]: r[metric] for r in results.records
                     if (r["table"], r["learner"], r["epsilon"]) == (name, judged, e)}
                    for e in (less, more)
                )  # fmt: skip
                seeds = before.keys() & after.keys()
                if not seeds:
                    continue
                steps += 1
                sign = -1 if metric in HIGHER else 1
                change = [sign * (after[seed] - before[seed]) for seed in seeds]
                error = statistics.stdev(change) / math.sqrt(len(change)) if len(seeds) > 1 else 0.0
                rise = statistics.fmean(change)
                if rise > error:
                    rises.append(f"{name}, {_word(less)} to {_word(more)}: "
                                 f"{TITLES[metric]} worse by {rise:.3g} ± {error:.2g}")  # fmt: skip
    said = f"### Monotone: `{judged}` does not get worse in {steps - len(rises)} of {steps} steps"
    return "\n".join([said, "", *(f"- {rise}" for rise in rises)])


def _means(results: Results, task: str, metric: str) -> str:
    """Return a metric's means, one row per table and epsilon, the best private learner bold."""
    names = results.tables(task)
    budgets = results.epsilons
    columns = [
        x for x in results.learners
        if any(results.values(n, x, e, metric) for n in names for e in budgets)
    ]  # fmt: skip
    if not names:
        return ""
    lines = [f"### {TITLES[metric]}", "", _row(["table (rows x columns)", "epsilon", *columns]),
             _rule(len(columns) + 2)]  # fmt: skip
    sizes = {r["table"]: f"{r['rows']} x {r['columns']}" for r in results.records}
    for name in names:
        for epsilon in budgets:
            means = [results.mean(name, x, epsilon, metric) for x in columns]
            losses = [results.loss(name, x, epsilon, metric) for x in columns]
            if metric in ("coverage", "width", "ece", "ece_by_chance"):
                losses = [None] * len(columns)
            least = min((loss for loss in losses if loss is not None), default=None)
            if least is None and all(mean is None for mean in means):
                continue
            cells = [
                "-" if mean is None else f"{mean:.4g}" if loss is None or loss > least
                else f"**{mean:.4g}**" for mean, loss in zip(means, losses, strict=True)
            ]  # fmt: skip
            lines.append(_row([f"{name} ({sizes[name]})", _word(epsilon), *cells]))
    return "\n".join(lines)


def _failures(results: Results) -> str:
    if not results.failed:
        return ""
    said = sorted({f"- {r['learner']} on {r['table']}: {r['error']}" for r in results.failed})
    return "\n".join([f"### {len(results.failed)} jobs failed", "", *said])


def _place(record: Record) -> tuple[int, str]:
    order = ("dpbnn", *RIVALS, "base-rate", "boosting")
    name = record["learner"]
    return (order.index(name) if name in order else 0, name)


def _word(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:g}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns
