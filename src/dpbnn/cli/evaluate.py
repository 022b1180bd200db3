"""dpbnn evaluate and dpbnn report: metrics of a run on test data, and its page."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpbnn.cli.options import read, reading_options
from dpbnn.cli.say import Speaker, speaking

if TYPE_CHECKING:
    from dpbnn.data import Column, Schema, Table
    from dpbnn.evaluation import Evaluation
    from dpbnn.predictive import Predictive
    from dpbnn.report import RunPage
    from dpbnn.runs import Run

_ALIKE = 3  # neighbouring columns with the same bounds that are listed one by one
_PATH = click.Path(path_type=Path)
_NOTE = "These figures are computed from the test data, which are not protected."


@click.command("evaluate")
@click.argument("run", type=_PATH)
@click.argument("table", type=_PATH)
@reading_options
@click.option("--report", type=_PATH, help="The page [default: report.html in the run].")
@click.option(
    "--group",
    metavar="COLUMN",
    help="A public column of the table: metrics are given for each of its values too.",
)
@click.option(
    "--threshold",
    type=float,
    default=0.5,
    show_default=True,
    help="Probability from which a record counts as found, for recall.",
)
@click.option(
    "--positive",
    metavar="CLASS",
    help="The positive one of two classes [default: the second of the schema].",
)
@click.option("--test-data-public", is_flag=True,
              help="Single test records may be shown in the report.")  # fmt: skip
@click.option("--training-table", is_flag=True,
              help="Evaluate on the very table of the training.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@speaking
def evaluate_command(
    run: Path,
    table: Path,
    report: Path | None,
    group: str | None,
    threshold: float,
    positive: str | None,
    test_data_public: bool,
    training_table: bool,
    device: str,
    speaker: Speaker,
    **options: Any,
) -> None:
    r"""Evaluate a run on a test table: metrics.json and report.html in the run directory.

    \b
    Example:
      dpbnn evaluate run/ test.csv --report report.html --group sex
    """
    from dpbnn import report as reports
    from dpbnn.runs import REPORT, Run

    with speaker.warnings():
        opened = Run.open(run, device)
        rows = read(table, options)
        asked = {"threshold": threshold, **_positive(opened, positive)}
        if group is not None:
            asked |= {"groups": _group(rows, group), "group": group}
        predictive, truth, evaluation = evaluated(opened, rows, training_table, **asked)
        covered = coverage(opened, predictive, truth)
    values = {**evaluation.to_dict(), **({"conformal": covered} if covered else {})}
    opened.write_metrics(values)
    contents = page(opened, values, test_data_public=test_data_public)
    if test_data_public:
        contents = _with_records(contents, opened, rows, predictive, truth)
    written = reports.write(contents, report or opened.folder / REPORT)
    speaker.say(evaluation)
    if covered:
        speaker.say(
            f"  {covered['kind']} hold the truth for a share of {covered['observed']:.4f}; "
            f"at least {covered['promised']:.2f} was promised; "
            f"mean size {covered['size'] or math.inf:.4g}"
        )
    speaker.say(_NOTE)
    speaker.say(f"Wrote {opened.folder / 'metrics.json'} and {written}.")
    speaker.result({"run": str(run), "report": str(written), **values})


@click.command("report")
@click.argument("run", type=_PATH)
@click.option("--out", type=_PATH, help="The page [default: report.html in the run].")
@speaking
def report_command(run: Path, out: Path | None, speaker: Speaker) -> None:
    r"""Write a run's page again from what is stored; single test records are not stored.

    \b
    Example:
      dpbnn report run/ --out report.html
    """
    from dpbnn import report as reports
    from dpbnn.runs import REPORT, Run

    opened = Run.open(run)
    written = reports.write(page(opened, opened.metrics), out or opened.folder / REPORT)
    speaker.say(f"Wrote {written}.")
    speaker.result({"run": str(run), "report": str(written)})


def evaluated(
    run: Run, rows: Table, training_table: bool = False, **options: Any
) -> tuple[Predictive, Any, Evaluation]:
    """Return predictions, targets in their own units and their evaluation.

    Args:
        run: the run.
        rows: the test table.
        training_table: whether it may be the one of the training.
        **options: of `dpbnn.evaluate`.
    """
    from dpbnn.evaluation import evaluate

    x, y = run.schema.encode(rows, target=True)
    if not training_table:
        run.check_test_table(x, y)
    truth = y if run.schema.classes is not None else run.schema.decode_target(y)
    predictive = run.estimator.predictive(x)
    options["classes"] = run.schema.classes or ()
    return predictive, truth, evaluate(predictive, truth, **options)


def _positive(run: Run, name: str | None) -> dict[str, int]:
    """Return the number of the positive class, of two."""
    classes = run.schema.classes
    if name is None:
        return {}
    if classes is None or len(classes) != 2 or name not in classes:
        allowed = "a target of two classes" if len(classes or ()) != 2 else " or ".join(classes)
        raise ValueError(f"--positive {name}: needs {allowed}")
    return {"positive": classes.index(name)}


def _group(rows: Table, column: str) -> list[str | None]:
    """Return the group of every row."""
    from dpbnn.data.table import cell

    if column not in rows:
        raise ValueError(f"--group {column}: no column of the table; it has {rows.listed()}")
    found = [cell(value) for value in rows.raw(column)]
    return [None if value in rows.missing else value for value in found]


def coverage(run: Run, predictive: Predictive, truth: Any) -> dict[str, Any] | None:
    """Return how often conformal sets or intervals hold the truth, and their mean size."""
    estimator: Any = run.estimator
    if estimator.threshold_ is None:
        return None
    if run.schema.classes is not None:
        inside = estimator.covering(predictive)
        held, size = inside[range(len(truth)), truth], float(inside.sum(1).mean())
    else:
        low, high = estimator.covering(predictive)
        held, size = (low <= truth) & (truth <= high), float((high - low).mean())
    return {
        "kind": "sets" if run.schema.classes is not None else "intervals",
        "promised": estimator.calibration_["coverage at least"],
        "observed": float(held.mean()),
        "size": size if math.isfinite(size) else None,
    }


def page(run: Run, evaluation: Any, *, test_data_public: bool = False) -> RunPage:
    """Return the page of a run, without any test record."""
    from dpbnn import report as reports
    from dpbnn.cli.bands import band_along

    settings = {**run.manifest["settings"], "model": run.estimator.posterior_.settings}
    if calibration := dict(run.estimator.calibration_):
        if isinstance(evaluation, dict) and "conformal" in evaluation:
            calibration |= {
                f"{name} on the test records": evaluation["conformal"][key]
                for name, key in (("coverage", "observed"), ("mean size", "size"))
            }
        settings["calibration by held-out rows"] = calibration
    return reports.RunPage(
        privacy=run.manifest["privacy"],
        evaluation=evaluation,
        rows=_rows(run),
        public=described(run.schema),
        promise=_promise(run, evaluation),
        title=f"{run.schema.task.capitalize()} of {run.schema.target.name}",
        settings=settings,
        versions=run.manifest["versions"],
        hashes=run.manifest["files"],
        diagnostics=run.estimator.diagnostics_,
        band=band_along(run.schema, run.estimator.predictive),
        test_data_public=test_data_public,
        ledger=run.ledger,
        created=run.manifest["created"][:10],
    )


def _rows(run: Run) -> dict[str, int]:
    """Return the numbers of rows that the statement names, which are public."""
    mechanisms = run.manifest["privacy"].get("mechanisms", ())
    found = {m["label"]: m["n"] for m in mechanisms if m.get("n") is not None}
    calibration = {
        name: found.pop(name, None) for name in ("recalibration", "conformal calibration")
    }
    if run.estimator.get_params().get("recalibrate") == "training":
        calibration["recalibration"] = None  # its rows are among those of the training
    if not found:
        return {}
    held = {name: n for name, n in calibration.items() if n is not None}
    return {"training": max(found.values()), **held}


def described(schema: Schema) -> dict[str, str]:
    """Return columns and target with their public bounds or categories, in words."""
    found = {}
    for words, columns in itertools.groupby(schema.columns, _described):
        names = [column.name for column in columns]
        if len(names) > _ALIKE:
            names = [f"{names[0]} to {names[-1]}, {len(names)} columns"]
        found |= dict.fromkeys(names, words)
    return {**found, f"{schema.target.name} (target)": _described(schema.target)}


def _described(column: Column) -> str:
    from dpbnn.report.template import short

    if column.bounds is not None and column.categories is None:
        low, high = map(float, column.bounds)
        words = f"number, {short(low)} to {short(high)}" + ", in logarithms" * column.log
    else:
        words = f"categories {short(list(column.categories or ()))}" + ", or another" * column.other
    return words if column.missing == "refuse" else f"{words}; missing values: {column.missing}"


def _promise(run: Run, evaluation: Any) -> str:
    """Say what conformal sets or intervals promise and hold, empty where there are none."""
    promised = run.estimator.calibration_.get("coverage at least")
    if promised is None:
        return ""
    kind = "Prediction sets" if run.schema.classes is not None else "Prediction intervals"
    text = (
        f"{kind} hold the truth for at least {100 * promised:g} % of new records, however good the "
        f"model is, as long as those are drawn like the training records."
    )
    found = (evaluation or {}).get("conformal") if isinstance(evaluation, dict) else None
    if found:
        text += f" On the test records they held {100 * found['observed']:.1f} %."
    return text


def _with_records(
    contents: RunPage, run: Run, rows: Table, predictive: Predictive, truth: Any
) -> RunPage:
    """Return the page with the most and least certain test records."""
    from dpbnn import report as reports

    names = [column.name for column in run.schema.columns]
    records = _Records(rows, names)
    classes = run.schema.classes or ()
    examples = reports.select_examples(predictive, truth, rows=records, classes=classes)
    return dataclasses.replace(contents, examples=examples)


class _Records:
    """Rows of a table as mappings, made on demand."""

    def __init__(self, table: Table, names: list[str]) -> None:
        self.table, self.names = table, names

    def __getitem__(self, row: int) -> dict[str, Any]:
        part = self.table.rows(row, row + 1)
        return {name: part.raw(name)[0] for name in self.names}

    def __len__(self) -> int:
        return self.table.n
