"""dpbnn predict: predictions with their uncertainty, as CSV."""

from __future__ import annotations

import csv
import itertools
import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from dpbnn.cli.options import read, reading_options
from dpbnn.cli.say import Speaker, speaking

if TYPE_CHECKING:
    from dpbnn.predictive import Predictive
    from dpbnn.runs import Run

_PATH = click.Path(path_type=Path)
_ROWS = 8192  # predicted at once


@click.command("predict")
@click.argument("run", type=_PATH)
@click.argument("table", type=_PATH)
@reading_options
@click.option("--out", type=_PATH, help="The CSV file [default: print it].")
@click.option("--level", type=float, default=0.9, show_default=True,
              help="Probability of the interval, for a real target.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@speaking
def predict_command(
    run: Path,
    table: Path,
    out: Path | None,
    level: float,
    device: str,
    speaker: Speaker,
    **options: Any,
) -> None:
    r"""Predict a table, one line of CSV for every row, in the original units.

    \b
    Classes: prediction, one probability p(CLASS) each, std (of the predicted class's probability
    over the posterior), epistemic and aleatoric uncertainty in nats.
    Numbers: mean, std, epistemic and aleatoric std, low and high end of the interval.
    A run with --conformal adds what covers the truth: the set of classes, with | between them, or
    conformal_low and conformal_high.

    \b
    Example:
      dpbnn predict run/ new.csv --out predictions.csv
    """
    from dpbnn.runs import Run
    from dpbnn.storage import replace_file

    if not 0 < level < 1:
        raise ValueError(f"--level {level:g}: must lie between 0 and 1, such as 0.9")
    if speaker.as_json and out is None:
        raise ValueError("--json: needs --out, since the predictions are printed otherwise")
    with speaker.warnings():
        opened = Run.open(run, device)
        x, _ = opened.schema.encode(read(table, options), target=False)
    if out is None:
        _write(sys.stdout, opened, x, level)
        return

    def write(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            _write(file, opened, x, level)

    replace_file(out, write)
    speaker.say(f"Wrote {len(x)} predictions to {out}.")
    speaker.result({"rows": len(x), "predictions": str(out), "privacy": opened.manifest["privacy"]})


def _write(file: IO[str], run: Run, x: Any, level: float) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_header(run))
    for start in range(0, len(x), _ROWS):
        predictive = run.estimator.predictive(x[start : start + _ROWS])
        writer.writerows(
            map(operator.add, _lines(run, predictive, level), _covering(run, predictive))
        )


def _header(run: Run) -> list[str]:
    covers = run.estimator.threshold_ is not None
    if run.schema.classes is not None:
        shares = [f"p({name})" for name in run.schema.classes]
        return ["prediction", *shares, "std", "epistemic", "aleatoric", *["set"] * covers]
    ends = ["conformal_low", "conformal_high"] * covers
    return ["mean", "std", "epistemic", "aleatoric", "low", "high", *ends]


def _covering(run: Run, predictive: Predictive) -> Iterator[list[Any]]:
    """Yield what covers the truth, for every row; nothing where the run has no threshold."""
    estimator: Any = run.estimator
    if estimator.threshold_ is None:
        yield from itertools.repeat([], len(predictive.mean))
    elif run.schema.classes is not None:
        for inside in estimator.covering(predictive):
            yield ["|".join(itertools.compress(run.schema.classes, inside))]
    else:
        for ends in zip(*estimator.covering(predictive), strict=True):
            yield [f"{end:.6g}" for end in ends]


def _lines(run: Run, predictive: Predictive, level: float) -> Iterator[list[Any]]:
    if run.schema.classes is not None:
        chosen = predictive.mode
        spread = predictive.probabilities.std(0, correction=0).gather(1, chosen[:, None])[:, 0]
        names = run.schema.decode_target(chosen.cpu().numpy())
        columns = [*predictive.mean.T, spread, predictive.epistemic, predictive.aleatoric]
        for name, *values in zip(names, *(c.tolist() for c in columns), strict=True):
            yield [name, *(f"{value:.6g}" for value in values)]
        return
    low, high = predictive.interval(level)
    parts = (predictive.epistemic.sqrt(), predictive.aleatoric.sqrt())
    columns = [predictive.mean, predictive.std, *parts, low, high]
    for values in zip(*(column.tolist() for column in columns), strict=True):
        yield [f"{value:.6g}" for value in values]
