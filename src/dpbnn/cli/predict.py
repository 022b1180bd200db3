"""dpbnn predict: predictions with their uncertainty, as CSV."""

from __future__ import annotations

import csv
import dataclasses
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
    from dpbnn.data import Schema, Table
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
              help="Probability of the interval, for numbers and ordered classes.")  # fmt: skip
@click.option(
    "--id",
    "identifier",
    metavar="COLUMN",
    help="A column of the table to write first in every line of the output.",
)
@click.option(
    "--on-bad-rows",
    type=click.Choice(["error", "keep"]),
    default="error",
    show_default=True,
    help="Rows that cannot be used: error refuses the table, keep "
    "writes a line without prediction that says why in the column problem.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@speaking
def predict_command(
    run: Path,
    table: Path,
    out: Path | None,
    level: float,
    identifier: str | None,
    on_bad_rows: str,
    device: str,
    speaker: Speaker,
    **options: Any,
) -> None:
    r"""Predict a table, one line of CSV for every row, in the original units.

    \b
    Classes: prediction, one probability p(CLASS) each, std (of the predicted class's probability
    over the posterior), epistemic and aleatoric uncertainty in nats.
    Numbers and counts: mean, std, epistemic and aleatoric std, low and high end of the interval.
    Ordered classes: as for classes, and low and high, the ends of the interval.
    A run with --conformal adds what covers the truth: the set of classes, with | between them, or
    conformal_low and conformal_high.

    \b
    Example:
      dpbnn predict run/ new.csv --out predictions.csv --id patient --on-bad-rows keep
    """
    from dpbnn.runs import Run
    from dpbnn.storage import replace_file

    if not 0 < level < 1:
        raise ValueError(f"--level {level:g}: must lie between 0 and 1, such as 0.9")
    if speaker.as_json and out is None:
        raise ValueError("--json: needs --out, since the predictions are printed otherwise")
    with speaker.warnings():
        opened = Run.open(run, device)
        rule = "zero" if on_bad_rows == "keep" else "error"
        rows = read(table, {**options, "on_bad_rows": rule})
        x, problems = _encoded(opened, rows, rule, kept=identifier)
    output = _Output(
        opened,
        x,
        level,
        None if identifier is None else (identifier, _identifiers(rows, identifier)),
        problems,
    )
    if out is None:
        output.write(sys.stdout)
        return

    def write(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            output.write(file)

    replace_file(out, write)
    bad = len(output.problems or ())
    speaker.say(f"Wrote {len(x) - bad} predictions to {out}.")
    if bad:
        speaker.say(f"{bad} row{'s' * (bad != 1)} could not be used; the column problem says why.")
    speaker.result(
        {
            "rows": len(x),
            "bad_rows": bad,
            "predictions": str(out),
            "privacy": opened.manifest["privacy"],
        }
    )


def _encoded(
    run: Run, rows: Table, rule: str, kept: str | None
) -> tuple[Any, dict[int, str] | None]:
    """Return the inputs, and why rows cannot be used where they are kept."""
    schema = run.schema
    if schema is not None:
        x, _ = schema.encode(rows, target=False, on_bad_rows=rule)
        return x, _problems(schema, rows, x) if rule == "zero" else None
    if rule == "zero":
        raise ValueError("--on-bad-rows keep: needs a run with a schema; leave it out")
    if kept is not None and not hasattr(run.estimator, "feature_names_in_"):
        rows = type(rows)({n: rows.column(n) for n in rows.names if n != kept}, source=rows.source)
    return run.estimator.inputs(rows), None


def _identifiers(rows: Table, name: str) -> list[str]:
    """Return the texts of the column that is carried through."""
    from dpbnn.data.table import cell

    if name not in rows:
        raise ValueError(f"--id {name}: is not in the table, which has {rows.listed()}")
    return [cell(value) or "" for value in rows.raw(name)]


def _problems(schema: Schema, rows: Table, x: Any) -> dict[int, str]:
    """Return why rows cannot be used, by their position; no value is quoted."""
    import numpy as np

    bad = np.flatnonzero(np.isnan(x).any(1)).tolist()
    found = {row: _problem(schema, rows.rows(row, row + 1)) for row in bad}
    empty = np.arange(rows.n)
    for name in rows.names:
        if len(empty):
            absent = [_absent(value, rows.missing) for value in rows.raw(name)[empty]]
            empty = empty[absent]
    for row in empty.tolist():
        found[row] = "the line holds no value, or another number of values than the header"
    return found


def _absent(value: Any, missing: frozenset[str]) -> bool:
    from dpbnn.data.table import cell

    text = cell(value)
    return text is None or text in missing


def _problem(schema: Schema, row: Table) -> str:
    """Return what is wrong with the first bad value of a row."""
    for column in schema.columns:
        raw = row.column(column.name)
        for fault in column.encode(raw, row.missing)[1]:
            return f"column {column.name!r}: the value {fault.why(raw[0])}"
    raise AssertionError("the row has no fault")


@dataclasses.dataclass(frozen=True)
class _Output:
    """The lines of the output.

    Attributes:
        run: the run.
        x: encoded inputs.
        level: probability of the interval.
        identifiers: name and values of the column that is carried through.
        problems: why rows cannot be used, by position; None where all can.
    """

    run: Run
    x: Any
    level: float
    identifiers: tuple[str, list[str]] | None = None
    problems: dict[int, str] | None = None

    def write(self, file: IO[str]) -> None:
        """Write the header and one line for every row."""
        writer = csv.writer(file, lineterminator="\n")
        own = _header(self.run)
        problem = [] if self.problems is None else ["problem"]
        first = [] if self.identifiers is None else [self.identifiers[0]]
        if set(first) & {*own, *problem}:
            raise ValueError(f"--id {first[0]}: is a column of the output too; rename it")
        writer.writerow([*first, *own, *problem])
        for start in range(0, len(self.x), _ROWS):
            writer.writerows(self._block(start, min(start + _ROWS, len(self.x)), len(own)))

    def _block(self, start: int, stop: int, width: int) -> Iterator[list[Any]]:
        problems = self.problems or {}
        good = [row for row in range(start, stop) if row not in problems]
        lines: Iterator[list[Any]] = iter(())
        if good:
            predictive = self.run.estimator.predicted(self.x[good])
            covering = _covering(self.run, predictive)
            lines = map(operator.add, _lines(self.run, predictive, self.level), covering)
        for row in range(start, stop):
            first = [] if self.identifiers is None else [self.identifiers[1][row]]
            line = [""] * width if row in problems else next(lines)
            last = [] if self.problems is None else [problems.get(row, "")]
            yield [*first, *line, *last]


def _header(run: Run) -> list[str]:
    from dpbnn.estimators.pages import names_of

    covers = run.estimator.threshold_ is not None
    if classes := names_of(run.estimator):
        shares = [f"p({name})" for name in classes]
        ends = ["low", "high"] * run.estimator.ordered
        return ["prediction", *shares, "std", "epistemic", "aleatoric", *ends, *["set"] * covers]
    ends = ["conformal_low", "conformal_high"] * covers
    return ["mean", "std", "epistemic", "aleatoric", "low", "high", *ends]


def _covering(run: Run, predictive: Predictive) -> Iterator[list[Any]]:
    """Yield what covers the truth, for every row; nothing where the run has no threshold."""
    from dpbnn.estimators.pages import names_of

    estimator: Any = run.estimator
    if estimator.threshold_ is None:
        yield from itertools.repeat([], len(predictive.mean))
    elif classes := names_of(estimator):
        for inside in estimator.covering(predictive):
            yield ["|".join(itertools.compress(classes, inside))]
    else:
        for ends in zip(*estimator.covering(predictive), strict=True):
            yield [f"{end:.6g}" for end in ends]


def _class_ends(predictive: Any, level: float, classes: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the lowest and highest class of the interval, for every row."""
    tail = (1 - level) / 2
    ends = (predictive.class_quantile(q).tolist() for q in (tail, 1 - tail))
    for low, high in zip(*ends, strict=True):
        yield [classes[low], classes[high]]


def _lines(run: Run, predictive: Predictive, level: float) -> Iterator[list[Any]]:
    from dpbnn.estimators.pages import names_of

    if classes := names_of(run.estimator):
        chosen = predictive.mode
        spread = predictive.probabilities.std(0, correction=0).gather(1, chosen[:, None])[:, 0]
        columns = [*predictive.mean.T, spread, predictive.epistemic, predictive.aleatoric]
        ends = _class_ends(predictive, level, classes) if run.estimator.ordered else None
        for which, *values in zip(chosen.tolist(), *(c.tolist() for c in columns), strict=True):
            more = [] if ends is None else next(ends)
            yield [classes[which], *(f"{value:.6g}" for value in values), *more]
        return
    low, high = predictive.interval(level)
    parts = (predictive.epistemic.sqrt(), predictive.aleatoric.sqrt())
    columns = [predictive.mean, predictive.std, *parts, low, high]
    for values in zip(*(column.tolist() for column in columns), strict=True):
        yield [f"{value:.6g}" for value in values]
