"""Tables through the command line: `python -m benchmarks.tables`.

Adult, Abalone (more than nine rings or not) and Abalone (number of rings) are written as CSV,
fitted by `dpbnn fit` at epsilon 1 on the defaults, and evaluated by `dpbnn evaluate`, in a fresh
process each.

`--validate` repeats the comparison that the defaults come from: learning rates and numbers of
steps on splits of the training parts of public tables; no test row is looked at.

`--time` says how long `dpbnn fit` takes on Adult, and how much of that is not training.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import subprocess
import sys
import tempfile
import time
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
    from dpbnn.estimators.recipes import METHODS, settled_plan

    recipe = METHODS["sgld"]
    for name, (x, y, bounds, classes) in training_parts().items():
        x, x_val, y, y_val = train_test_split(x, y, test_size=0.3, random_state=1)
        kind = dpbnn.PrivateBayesClassifier if classes else dpbnn.PrivateBayesRegressor
        ends = (float(y.min()), float(y.max()))
        public = {"classes": np.unique(y)} if classes else {"target_bounds": ends}
        for steps in STEPS:
            for factor in RATES:
                plan = settled_plan(len(x), None, 1e-5, None, None)
                default = recipe.settings(plan, None, not classes, None, None).learning_rate
                model = kind(
                    epsilon=epsilon,
                    bounds=bounds,
                    epochs=steps * plan.sample_rate,
                    learning_rate=factor * default,
                    random_state=0,
                    **public,
                ).fit(x, y)
                metrics = model.evaluate(x_val, y_val, resamples=0).metrics
                task = "classification" if classes else "regression"
                shown = ", ".join(f"{key} {metrics[key].value:.3f}" for key in SHOWN[task])
                print(f"{name}: {steps} steps, {factor:g} x rate: {shown}", flush=True)


def timed() -> None:
    """Print the wall time of `dpbnn fit` on Adult and the part of it that is not training."""
    from dpbnn import cli, runs, training  # noqa: F401, imports are not counted

    loop = training._Run.train
    spent = {}

    def train(run: object, progress: bool) -> None:
        begin = time.perf_counter()
        loop(run, progress)
        spent["training"] = time.perf_counter() - begin

    training._Run.train = train
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, "adult")
        dpbnn.plan(epsilon=1.0, delta=1e-5, n=99, batch_size=9, epochs=1)  # imports accountants
        begin = time.perf_counter()
        with contextlib.suppress(SystemExit):
            cli.main(["fit", str(folder / "train.csv"), "--schema", str(folder / "schema.toml"),
                      "--epsilon", "1", "--out", str(folder / "run"), "--quiet"])  # fmt: skip
        total = time.perf_counter() - begin
    rest = total - spent["training"]
    print(f"fit {total:.2f} s: training {spent['training']:.2f} s, the rest {rest:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--time", action="store_true")
    arguments = parser.parse_args()
    if arguments.time:
        timed()
    elif arguments.validate:
        validate(arguments.epsilon)
    else:
        for name in TABLES:
            measure(name, arguments.seeds, arguments.epsilon)


if __name__ == "__main__":
    main()
