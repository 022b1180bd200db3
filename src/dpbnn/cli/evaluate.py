"""dpbnn evaluate and dpbnn report: metrics of a run on test data, and its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpbnn.cli.options import read, reading_options, with_options
from dpbnn.cli.say import Speaker, speaking

if TYPE_CHECKING:
    from dpbnn.data import Table
    from dpbnn.runs import Run

_PATH = click.Path(path_type=Path)
_NOTE = "These figures are computed from the test data, which are not protected."
_RAW = (
    "These figures are computed from the training table, without noise: epsilon does not cover "
    "them. Do not give them away."
)


def metric_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say which figures are computed."""
    options = (
        click.option("--group", metavar="COLUMN", help="A public column of the test table: metrics "
                     "are given for each of its values too."),
        click.option("--threshold", type=float, default=0.5, show_default=True,
                     help="Probability from which a record counts as found, for recall."),
        click.option("--positive", metavar="CLASS", help="The positive one of two classes "
                     "[default: the second of the schema]."),
    )  # fmt: skip
    return with_options(command, options)


def asked(
    classes: Sequence[str], rows: Table, group: str | None, threshold: float, positive: str | None
) -> dict[str, Any]:
    """Return the options of `dpbnn.evaluation.evaluate` that a command's own ask for.

    Args:
        classes: names of the classes; none for a number.
        rows: the test table.
        group: as in `metric_options`.
        threshold: likewise.
        positive: likewise.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"--threshold {threshold:g}: must lie between 0 and 1, such as 0.5")
    found: dict[str, Any] = {"threshold": threshold, **_positive(classes, positive)}
    return found if group is None else {**found, "groups": _group(rows, group), "group": group}


@click.command("evaluate")
@click.argument("run", type=_PATH)
@click.argument("table", type=_PATH)
@reading_options
@click.option("--report", type=_PATH, help="The page [default: report.html in the run].")
@metric_options
@click.option("--test-data-public", is_flag=True,
              help="Show single test records in the report: the test data is public.")  # fmt: skip
@click.option("--training-table", is_flag=True,
              help="Allow the training table as the test table.")  # fmt: skip
@click.option("--target", metavar="COLUMN",
              help="The column of the true values, for an estimator without a schema.")  # fmt: skip
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
    target: str | None,
    device: str,
    speaker: Speaker,
    **options: Any,
) -> None:
    r"""Evaluate a run on a test table; write metrics.json and report.html into the run.

    \b
    Example:
      dpbnn evaluate run/ test.csv --report report.html --group sex
    """
    from dpbnn.estimators.pages import names_of
    from dpbnn.estimators.workspace import METRICS, REPORT
    from dpbnn.runs import Run

    with speaker.warnings():
        opened = Run.open(run, device)
        rows = read(table, options)
        own = asked(names_of(opened.estimator), rows, group, threshold, positive)
        inputs, truth = _columns(opened, rows, target)
        found = opened.tested(inputs, truth, training_table=training_table, **own)
    written = report or opened.folder / REPORT
    values = opened.write_page(written, found, rows if test_data_public else None)
    speaker.say(found.evaluation)
    if covered := found.coverage:
        speaker.say(
            f"  {covered['kind']} hold the truth for {100 * covered['observed']:.1f} % of the "
            f"records; at least {100 * covered['promised']:g} % was promised; "
            f"mean size {covered['size'] or math.inf:.4g}"
        )
    speaker.say(_RAW if found.training_table else _NOTE)
    speaker.say(f"Wrote {opened.folder / METRICS} and {written}.")
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
    from dpbnn.runs import Run

    written = Run.open(run).report(out)
    speaker.say(f"Wrote {written}.")
    speaker.result({"run": str(run), "report": str(written)})


def _columns(run: Run, rows: Table, target: str | None) -> tuple[Table, Any]:
    """Return the test inputs, and the targets where no schema says which column they are."""
    if run.schema is not None:
        if target not in (None, run.schema.target.name):
            raise ValueError(
                f"--target {target}: the schema of the run says {run.schema.target.name!r}"
            )
        return rows, None
    if target is None or target not in rows:
        given = "missing" if target is None else f"{target} is not in the table"
        raise ValueError(
            f"--target: {given}; the run has no schema, so name the column of the true values; the "
            f"table has {rows.listed()}"
        )
    others = {name: rows.column(name) for name in rows.names if name != target}
    return type(rows)(others, source=rows.source, missing=rows.missing), rows[target]


def _positive(classes: Sequence[str], name: str | None) -> dict[str, int]:
    """Return the number of the positive class, of two."""
    if name is None:
        return {}
    if len(classes) != 2 or name not in classes:
        allowed = "a target of two classes" if len(classes) != 2 else " or ".join(classes)
        raise ValueError(f"--positive {name}: needs {allowed}")
    return {"positive": classes.index(name)}


def _group(rows: Table, column: str) -> list[str | None]:
    """Return the group of every row."""
    from dpbnn.data.table import cell

    if column not in rows:
        raise ValueError(f"--group {column}: is not in the table, which has {rows.listed()}")
    found = [cell(value) for value in rows.raw(column)]
    return [None if value in rows.missing else value for value in found]
