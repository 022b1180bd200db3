"""Coverage of the truth by 90 % intervals: `python -m benchmarks.coverage --results FILE`.

Simulation-based calibration: the truth is drawn from the prior, data from the truth, and a method's
posterior must hold the truth in 90 % of its 90 % intervals, at every epsilon.

    linear    y = x^T b + noise; intervals of the coefficients b, and of new y (predictive)
    logistic  P(y = 1 | x) = 1/(1 + exp(-x^T b)); intervals of the coefficients
    network   one hidden layer of 32 units with weights N(0, 1); bands of P(y = 1 | x) at new inputs
    curve     y = f(x) + noise, f such a network of standard deviation 1; bands of f at new inputs
    smooth    12 columns, of which a smooth function of three decides; bands of P(y = 1 | x)

Inputs of linear, logistic and smooth are standard normal with correlations 0.5^|i - j|.
Coefficients are N(0, 1), and the estimators get that prior in the units of their weights. Every
(task, method, epsilon, data set) is one line of the results; what is there is not run again.
`--render` prints them as Markdown.
Where a method does not apply, the reason is recorded and printed.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Record, read, run, waiting
from dpbnn.data.standardising import PUBLIC

LEVEL = 0.9
EPSILONS = ("0.1", "0.3", "1", "3", "none")
NAMES = ("task", "method", "epsilon", "rows", "set")
COLUMNS = 4
BOUND, TARGET = 5.0, 10.0  # public bounds of inputs and of the target, both sides
NOISE = 1.0  # of the linear task; half of it in curve
WIDTH = 32  # of the networks that truths are drawn from
NEW = 200  # inputs at which predictions and bands are checked
DRAWS = 400
WANTED = {"coefficients": (0.85, 0.95), "bands": (0.80, 0.96), "predictive": (0.87, 0.94)}


class NoIntervalsError(ValueError):
    """The posterior is a single point."""


def functions(estimator: Any, x: np.ndarray) -> np.ndarray:
    """Return what every posterior draw says at x, [draws, rows]: the mean, or the logit.

    They are in the units of the data, whatever the estimator does to inputs and targets. The draws
    are the same at all rows of one call.
    """
    posterior = estimator.posterior_
    if "propagate" in inspect.signature(posterior.predict).parameters:  # ask for draws
        posterior.predict = functools.partial(type(posterior).predict, posterior, propagate=False)
    found = estimator.predictive(x)
    if hasattr(found, "log_probabilities"):
        logs = found.log_probabilities.double().cpu().numpy()
        drawn = logs[..., 1] - logs[..., 0]
    else:
        drawn = found.means.double().cpu().numpy().reshape(len(found.means), -1)
    if len(drawn) < 2:
        raise NoIntervalsError("one point estimate, no draws")
    return drawn


def coefficients(estimator: Any) -> np.ndarray:
    """Return draws of the coefficients of a linear model, [draws, columns], in the data's units.

    Differences of `functions` between -1 and 1 in one column, which lie within the bounds.
    """
    columns = estimator.n_features_in_
    steps = np.concatenate([np.eye(columns), -np.eye(columns)])
    drawn = functions(estimator, steps)
    return (drawn[:, :columns] - drawn[:, columns:]) / 2


def _inputs(rng: np.random.Generator, rows: int, columns: int = COLUMNS) -> np.ndarray:
    place = np.arange(columns)
    factor = np.linalg.cholesky(0.5 ** np.abs(place[:, None] - place))
    return rng.standard_normal((rows, columns)) @ factor.T


def _checked(drawn: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Return coverage, mean width, mean squared error and slope of the mean on the truth."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return _scores(low, high, drawn.mean(0), truth)


def _scores(
    low: np.ndarray, high: np.ndarray, mean: np.ndarray, truth: np.ndarray
) -> dict[str, float]:
    return {
        "coverage": float(np.mean((low <= truth) & (truth <= high))),
        "width": float(np.mean(high - low)),
        "mse": float(np.mean((mean - truth) ** 2)),
        "slope": float(mean @ truth / (truth @ truth)),
    }


def _prior(
    options: dict[str, Any], rows: int, scaled: float, standardised: float, public: float
) -> Any:
    """Return N(0, 1) of the coefficients in the units of the weights.

    Those are the bounds'; standard deviations where a method standardises; or the public spread
    where it would but the noise is too large, which public numbers tell.
    """
    import dpbnn
    from dpbnn.estimators import budget, recipes

    name = options.get("method", "auto")
    recipe = recipes.METHODS["moments" if name == "auto" else name]
    if not recipe.standardise:
        return dpbnn.Gaussian(scaled)
    epsilon, weights = options["epsilon"], np.ones(COLUMNS)
    made = epsilon is None or budget.standardising_plan(
        rows, weights, epsilon, budget.default_delta(rows), recipe.noise
    )
    return dpbnn.Gaussian(standardised if made else public)


def _linear(options: dict[str, Any], rng: np.random.Generator, rows: int) -> dict[str, Any]:
    import dpbnn

    x, new = _inputs(rng, rows), _inputs(rng, NEW)
    truth = rng.standard_normal(COLUMNS)
    y, later = (part @ truth + NOISE * rng.standard_normal(len(part)) for part in (x, new))
    model = dpbnn.PrivateBayesRegressor(
        bounds=(-BOUND, BOUND), target_bounds=(-TARGET, TARGET), hidden=(),
        prior=_prior(
            options, rows, BOUND / TARGET, 1 / math.sqrt(COLUMNS + NOISE**2), BOUND / TARGET
        ),
        samples=DRAWS, **options,
    )  # fmt: skip
    model.fit(x, y)
    found = model.predictive(new)
    low, high = (end.double().cpu().numpy().ravel() for end in found.interval(LEVEL))
    mean = found.mean.double().cpu().numpy().ravel()
    checked = {"predictive": _scores(low, high, mean, later)}
    try:
        checked["coefficients"] = _checked(coefficients(model), truth)
    except NoIntervalsError as error:
        checked["coefficients"] = {"skipped": str(error)}
    return checked


def _logistic(options: dict[str, Any], rng: np.random.Generator, rows: int) -> dict[str, Any]:
    import dpbnn

    x = _inputs(rng, rows)
    truth = rng.standard_normal(COLUMNS)
    y = (rng.random(rows) < 1 / (1 + np.exp(-x @ truth))).astype(int)
    model = dpbnn.PrivateBayesClassifier(
        bounds=(-BOUND, BOUND), classes=(0, 1), hidden=(),
        prior=_prior(
            options, rows, BOUND / math.sqrt(2), 1 / math.sqrt(2), BOUND * PUBLIC / math.sqrt(2)
        ),
        samples=DRAWS, **options,
    )  # fmt: skip
    return {"coefficients": _checked(coefficients(model.fit(x, y)), truth)}


def _drawn_network(
    rng: np.random.Generator, rows: int, outputs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs of records and new ones, and what a network of weights N(0, 1) says there."""
    x, new = (rng.uniform(-1, 1, (count, COLUMNS)) for count in (rows, NEW))
    first = rng.standard_normal((COLUMNS + 1, WIDTH))
    second = rng.standard_normal((WIDTH + 1, outputs))
    said = (
        np.maximum(part @ first[:-1] + first[-1], 0) @ second[:-1] + second[-1] for part in (x, new)
    )
    return x, new, *said


def _network(options: dict[str, Any], rng: np.random.Generator, rows: int) -> dict[str, Any]:
    import dpbnn

    x, new, *logits = _drawn_network(rng, rows, 2)
    chance, later = (1 / (1 + np.exp(part[:, 0] - part[:, 1])) for part in logits)
    y = (rng.random(rows) < chance).astype(int)
    model = dpbnn.PrivateBayesClassifier(
        bounds=(-1, 1), classes=(0, 1), hidden=(WIDTH,), samples=DRAWS, **options
    )
    drawn = 1 / (1 + np.exp(-functions(model.fit(x, y), new)))
    return {"bands": _checked(drawn, later)}


def _curve(options: dict[str, Any], rng: np.random.Generator, rows: int) -> dict[str, Any]:
    import dpbnn

    x, new, said, later = _drawn_network(rng, rows, 1)
    truth, later = ((part[:, 0] - said.mean()) / said.std() for part in (said, later))
    y = truth + NOISE / 2 * rng.standard_normal(rows)
    model = dpbnn.PrivateBayesRegressor(
        bounds=(-1, 1), target_bounds=(-TARGET / 2, TARGET / 2), samples=DRAWS, **options
    )
    return {"bands": _checked(functions(model.fit(x, y), new), later)}


def _smooth(options: dict[str, Any], rng: np.random.Generator, rows: int) -> dict[str, Any]:
    import dpbnn

    x, new = _inputs(rng, rows, 12), _inputs(rng, NEW, 12)
    first, second = rng.standard_normal((3, WIDTH)), rng.standard_normal(WIDTH)
    said, later = (np.tanh(part[:, :3] @ first) @ second for part in (x, new))
    chance, later = (
        1 / (1 + np.exp(-1.5 * (part - said.mean()) / said.std())) for part in (said, later)
    )
    model = dpbnn.PrivateBayesClassifier(
        bounds=(-BOUND, BOUND), classes=(0, 1), samples=DRAWS, **options
    )
    model.fit(x, (rng.random(rows) < chance).astype(int))
    drawn = 1 / (1 + np.exp(-functions(model, new)))
    return {"bands": _checked(drawn, later)}


TASKS: dict[str, Callable[[dict[str, Any], np.random.Generator, int], dict[str, Any]]] = {
    "linear": _linear, "logistic": _logistic, "network": _network, "curve": _curve,
    "smooth": _smooth,
}  # fmt: skip


_LEFT_OUT: dict[tuple[str, str], str] = {}  # what this process has found not to apply


def one(job: Record) -> Record:
    """Simulate a data set, fit it, and return what its intervals hold."""
    rng = np.random.default_rng([list(TASKS).index(job["task"]), job["set"]])
    options = {"epsilon": job["epsilon"], "random_state": job["set"]}
    where = (job["task"], job["method"])
    if job["method"] != "default":
        options["method"] = job["method"]
    try:
        if where not in _LEFT_OUT:
            return {"found": TASKS[job["task"]](options, rng, job["rows"])}
    except ValueError as error:
        if not (isinstance(error, NoIntervalsError) or str(error).startswith("method=")):
            raise
        _LEFT_OUT[where] = str(error)
    return {"skipped": _LEFT_OUT[where]}


def report(records: list[Record]) -> str:
    """Return coverage with its Monte-Carlo error as Markdown, one table per quantity."""
    parts = []
    for task in TASKS:
        own = [r for r in records if r["task"] == task and "found" in r]
        for quantity in dict.fromkeys(q for r in own for q in r["found"]):
            parts.append(_table(task, quantity, own))
    reasons = {(r["task"], r["method"], r["skipped"]) for r in records if "skipped" in r}
    reasons |= {
        (r["task"], f"{r['method']}, {quantity}", found["skipped"])
        for r in records
        for quantity, found in r.get("found", {}).items()
        if "skipped" in found
    }
    if reasons:
        lines = [f"- {task}, {method}: {reason}" for task, method, reason in sorted(reasons)]
        parts.append("\n".join(["### Left out", "", *lines]))
    failed = [r for r in records if "error" in r]
    if failed:
        lines = sorted({f"- {r['task']}, {r['method']}: {r['error']}" for r in failed})
        parts.append("\n".join([f"### {len(failed)} jobs failed", "", *lines]))
    return "\n\n".join(parts)


def _table(task: str, quantity: str, records: list[Record]) -> str:
    found = {r["epsilon"] for r in records}
    budgets = sorted(found - {None}) + ([None] if None in found else [])
    words = [f"epsilon {'none' if e is None else f'{e:g}'}" for e in budgets]
    low, high = WANTED[quantity]
    lines = [
        f"### {task}: {quantity}, coverage of 90 % intervals (wanted {low} to {high})",
        "",
        f"| method | {' | '.join(words)} |",
        "|" + "---|" * (len(budgets) + 1),
    ]
    for method in dict.fromkeys(r["method"] for r in records):
        cells = []
        for epsilon in budgets:
            own = [
                r["found"][quantity] for r in records
                if (r["method"], r["epsilon"]) == (method, epsilon)
                and "coverage" in r["found"].get(quantity, {})
            ]  # fmt: skip
            cells.append(_cell(own, low, high))
        if any(cell != "-" for cell in cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    lines += ["", "Coverage ± its Monte-Carlo standard error (data sets), bold where wanted; mean "
              "width; root of the mean squared error; slope of the mean on the truth."]  # fmt: skip
    return "\n".join(lines)


def _cell(own: list[dict[str, float]], low: float, high: float) -> str:
    if not own:
        return "-"
    values = [found["coverage"] for found in own]
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    said = f"{mean:.3f} ± {error:.3f}"
    said = f"**{said}**" if low <= mean <= high else said
    width = statistics.fmean(found["width"] for found in own)
    size = math.sqrt(statistics.fmean(found["mse"] for found in own))
    slope = statistics.fmean(found["slope"] for found in own)
    return f"{said} ({len(own)}); {width:.2g}; {size:.2g}; {slope:.2f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("coverage.jsonl"))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument(
        "--methods", nargs="+", default=["default", "sgld", "vi", "bbp", "sep", "sgd"],
        metavar="NAME", help="default is the estimators' own",
    )  # fmt: skip
    parser.add_argument("--epsilons", nargs="+", default=list(EPSILONS), metavar="NUMBER|none")
    parser.add_argument("--sets", type=int, default=200, help="data sets of every setting")
    parser.add_argument("--first", type=int, default=0, metavar="SET", help="number of the first")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--render", action="store_true", help="print the results as Markdown")
    arguments = parser.parse_args()
    if arguments.render:
        print(report(read(arguments.results, NAMES)))
        return
    jobs = [
        {"task": task, "method": method, "epsilon": json.loads(word.replace("none", "null")),
         "rows": arguments.rows, "set": number}
        for number in range(arguments.first, arguments.first + arguments.sets)
        for task in arguments.tasks
        for method in arguments.methods
        for word in arguments.epsilons
    ]  # fmt: skip
    run(one, waiting(jobs, arguments.results), arguments.jobs, arguments.results)


if __name__ == "__main__":
    main()
