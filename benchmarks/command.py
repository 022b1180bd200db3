"""Tables through the command line: `python -m benchmarks.command`.

Adult, Abalone (more than nine rings or not) and Abalone (number of rings) are written as CSV,
fitted by `dpbnn fit` at epsilon 1 on the defaults, and evaluated by `dpbnn evaluate`, in a fresh
process each.

`--validate` repeats the comparison that the defaults come from: learning rates and numbers of
steps on splits of the training parts of public tables; no test row is looked at. `--batches` does
so for batch sizes.

`--calibrate` fits Adult with `--recalibrate` none, training and 0.1, and with `--conformal 0.1`.

`--time` says how long `dpbnn fit` takes on Adult, and how much of that is not training.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import numpy as np
from sklearn import datasets
from sklearn.model_selection import train_test_split

import dpbnn
from dpbnn.data import load, load_table

TABLES = ("adult", "abalone", "abalone-rings")
SHOWN = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "log_likelihood")}
RATES = (0.25, 1.0, 4.0)  # times the default
STEPS = (400, 1000)
BATCHES = (1024, 2048, 4096, 8192)


def write(folder: Path, name: str) -> None:
    """Write a dataset's tables as CSV, and its schema."""
    train, test, schema = load_table(name)
    for part, table in (("train", train), ("test", test)):
        with (folder / f"{part}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.names)
            writer.writerows(zip(*(table.raw(column) for column in table.names), strict=True))
    (folder / "schema.toml").write_text(schema.to_toml())


def command(*arguments: str | Path) -> dict:
    """Run the command in a process of its own and return the JSON that it prints."""
    call = [sys.executable, "-m", "dpbnn", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(call, capture_output=True, text=True, check=True).stdout)


def measure(name: str, seeds: int, epsilon: float) -> None:
    """Print the test figures of a table, one line."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, name)
        for seed in range(seeds):
            run = folder / f"run{seed}"
            fit = command("fit", folder / "train.csv", "--schema", folder / "schema.toml",
                          "--epsilon", str(epsilon), "--seed", str(seed), "--out", run)  # fmt: skip
            evaluation = command("evaluate", run, folder / "test.csv")
            coverage = {row["nominal"]: row["observed"] for row in evaluation["coverage"]}
            values = {k: evaluation["metrics"][k]["value"] for k in SHOWN[evaluation["task"]]}
            if coverage:
                values["coverage of 90 % intervals"] = coverage[0.9]
            found.append({**values, "epsilon": fit["privacy"]["epsilon"]})
    line = ", ".join(
        f"{key} {mean(f[key] for f in found):.4f} "
        f"({min(f[key] for f in found):.4f} to {max(f[key] for f in found):.4f})"
        for key in found[0]
    )
    print(f"{name}: {line}", flush=True)


def calibrate(seeds: int, epsilon: float) -> None:
    """Print what a private temperature and private sets change on Adult, for two methods."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, "adult")
        for method in ("sgld", "sgd"):
            for how, alpha in (("none", None), ("training", None), ("0.1", None), ("none", "0.1")):
                more = ("--recalibrate", how, *(("--conformal", alpha) if alpha else ()))
                found = []
                for seed in range(seeds):
                    run = folder / "-".join((method, *more, str(seed)))
                    fit = command("fit", folder / "train.csv", "--schema", folder / "schema.toml",
                                  "--method", method, "--epsilon", str(epsilon),
                                  "--seed", str(seed), *more, "--out", run)  # fmt: skip
                    values = command("evaluate", run, folder / "test.csv")
                    figures = {k: values["metrics"][k]["value"] for k in SHOWN["classification"]}
                    sets = values.get("conformal", {})
                    figures |= {k: sets[k] for k in ("observed", "size") if sets}
                    temperature = fit["calibration"].get("temperature")
                    found.append(figures | ({"T": temperature} if temperature else {}))
                shown = ", ".join(f"{k} {mean(f[k] for f in found):.4f}" for k in found[0])
                print(f"{method} {' '.join(more)}: {shown}", flush=True)


def training_parts() -> dict:
    """Return the training parts of public tables: inputs, targets, range of the inputs, classes."""
    parts = {}
    for name, source in (
        ("digits", datasets.load_digits),
        ("breast cancer", datasets.load_breast_cancer),
        ("wine", datasets.load_wine),
        ("diabetes", datasets.load_diabetes),
    ):
        x, y = source(return_X_y=True)
        x, _, y, _ = train_test_split(x, y, test_size=0.2, random_state=0)
        parts[name] = (x, y, (x.min(0), x.max(0)), name != "diabetes")
    for name in TABLES:
        data = load(name)
        parts[name] = (data.x_train, data.y_train, (-1, 1), data.task == "classification")
    return parts


def validate(epsilon: float) -> None:
    """Print validation figures of learning rates and numbers of steps, for every table."""
    from dpbnn.estimators.budget import settled_plan
    from dpbnn.estimators.recipes import METHODS

    for name, part in training_parts().items():
        n = int(0.7 * len(part[0]))
        plan = settled_plan(n, None, 1e-5, None, None)
        default = METHODS["sgld"].settings(plan, None, not part[-1], None, None).learning_rate
        for steps in STEPS:
            for factor in RATES:
                rate = factor * default
                found = held_out(part, 1, epsilon, epochs=steps * plan.sample_rate,
                                 learning_rate=rate)  # fmt: skip
                print(f"{name}: {steps} steps, {factor:g} x rate: {found}", flush=True)


def batches(epsilon: float, seeds: int) -> None:
    """Print validation figures of batch sizes at 400 steps, for tables larger than a batch."""
    for name, part in training_parts().items():
        n = int(0.7 * len(part[0]))
        for size in (b for b in BATCHES if b < 2 * n and n > 2048):
            size = min(size, n)
            found = held_out(part, seeds, epsilon, batch_size=size, epochs=400 * size / n)
            print(f"{name} ({n} rows), batches of {size}: {found}", flush=True)


def held_out(part: tuple, seeds: int, epsilon: float, **settings: object) -> str:
    """Return figures of fits on 70 % of a training part, on the other rows; means of the seeds."""
    x, y, bounds, classes = part
    x, x_val, y, y_val = train_test_split(x, y, test_size=0.3, random_state=1)
    kind = dpbnn.PrivateBayesClassifier if classes else dpbnn.PrivateBayesRegressor
    ends = (float(y.min()), float(y.max()))
    public = {"classes": np.unique(y)} if classes else {"target_bounds": ends}
    found = [
        kind(epsilon=epsilon, bounds=bounds, random_state=seed, **public, **settings)
        .fit(x, y)
        .evaluate(x_val, y_val, resamples=0)
        .metrics
        for seed in range(seeds)
    ]
    keys = SHOWN["classification" if classes else "regression"]
    return ", ".join(f"{key} {mean(f[key].value for f in found):.3f}" for key in keys)


def timed() -> None:
    """Print the wall time of `dpbnn fit` on Adult: the training loop, imports and the rest."""
    from dpbnn import cli, runs, training  # noqa: F401

    spent = {"training": 0.0, "imports": 0.0}
    inside: list[str] = []
    training._Run.train = _counted(training._Run.train, "training", spent, inside)
    loading = importlib._bootstrap  # what every import statement calls
    loading._find_and_load = _counted(loading._find_and_load, "imports", spent, inside)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, "adult")
        spent["imports"] = 0.0
        begin = time.perf_counter()
        with contextlib.suppress(SystemExit):
            cli.main(["fit", str(folder / "train.csv"), "--schema", str(folder / "schema.toml"),
                      "--epsilon", "1", "--out", str(folder / "run"), "--quiet"])  # fmt: skip
        total = time.perf_counter() - begin - spent["imports"]
    rest = total - spent["training"]
    print(
        f"fit {total:.2f} s: training {spent['training']:.2f} s, the rest {rest:.2f} s "
        f"({rest / total:.0%}); imports on the way, not counted: {spent['imports']:.2f} s"
    )


def _counted(function: Callable, label: str, spent: dict, inside: list[str]) -> Callable:
    """Return a function whose time is added up under a label, and taken off the outer label."""

    def call(*arguments: object) -> object:
        if label in inside:
            return function(*arguments)
        inside.append(label)
        begin = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            elapsed = time.perf_counter() - begin
            inside.pop()
            spent[label] += elapsed
            if inside:
                spent[inside[-1]] -= elapsed

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--batches", action="store_true")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--time", action="store_true")
    arguments = parser.parse_args()
    if arguments.time:
        timed()
    elif arguments.calibrate:
        calibrate(arguments.seeds, arguments.epsilon)
    elif arguments.batches:
        batches(arguments.epsilon, arguments.seeds)
    elif arguments.validate:
        validate(arguments.epsilon)
    else:
        for name in TABLES:
            measure(name, arguments.seeds, arguments.epsilon)


if __name__ == "__main__":
    main()
