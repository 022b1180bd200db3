"""dpbnn compare: methods and budgets side by side, paid for together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dpbnn
from dpbnn.cli.evaluate import asked, metric_options
from dpbnn.cli.fit import read_training_table, table_options, training_options, unfitted
from dpbnn.cli.options import read
from dpbnn.cli.say import Speaker, speaking
from dpbnn.privacy.checks import round_up

if TYPE_CHECKING:
    from dpbnn.data import Schema, Table
    from dpbnn.estimators.estimator import PrivateBayes
    from dpbnn.estimators.persons import Persons
    from dpbnn.privacy.plan import Plan
    from dpbnn.report import ComparisonRow
    from dpbnn.runs import Run

_PATH = click.Path(path_type=Path)


@click.command("compare")
@click.argument("table", type=_PATH)
@table_options
@click.option("--methods", default="auto,sgld", show_default=True,
              help="Names of methods, separated by commas.")  # fmt: skip
@click.option("--epsilons", required=True, help="Budgets of single runs, such as 0.5,1,2.")
@click.option("--test", type=_PATH, required=True, help="The test table, for all runs.")
@metric_options
@training_options
@click.option("--out", type=_PATH, required=True, help="The folder to make: a run directory "
              "for each, their ledger, and compare.html.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Spend the composed budget that is shown.")
@speaking
def compare_command(
    table: Path,
    methods: str,
    epsilons: str,
    test: Path,
    group: str | None,
    threshold: float,
    positive: str | None,
    out: Path,
    yes: bool,
    ledger: Path | None,
    speaker: Speaker,
    **options: Any,
) -> None:
    r"""Compare methods and budgets on one table; all runs are paid for together.

    \b
    Example:
      dpbnn compare train.csv --schema schema.toml --methods auto,sgld --epsilons 0.5,1,2 \
        --test test.csv --out comparison/ --yes
    """
    import numpy as np

    from dpbnn.estimators.fitting import planned
    from dpbnn.estimators.recipes import METHODS

    cells = [(method, epsilon) for method in _names(methods) for epsilon in _budgets(epsilons)]
    if out.exists():
        book = out / "ledger.jsonl"
        more = f", and --ledger {book}, which holds what was spent there" * book.exists()
        raise ValueError(f"{out}: exists already; give another folder{more}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: its parent is not a folder; make that one first")
    with speaker.warnings():
        schema, table_rows = read_training_table(table, options, private=True, ledger=ledger)
        persons = _persons(schema, table_rows, options)
        x, _ = schema.encode(table_rows, target=True, on_bad_rows=options["on_bad_rows"])
        tested = read(test, options)
        inputs, _ = schema.encode(tested, target=True, on_bad_rows=options["on_bad_rows"])
        if np.array_equal(inputs, x, equal_nan=True):
            raise ValueError(f"{test}: is the training table; give other records as --test")
        if options["on_bad_rows"] == "zero":
            tested = tested.take(~np.isnan(inputs).any(1))
        figures = asked(schema.classes or (), tested, group, threshold, positive)
    for method, _ in cells:
        if schema.classes is not None and not METHODS[method].classifies:
            raise ValueError(f"--methods {method}: is for regression; leave it out")
        if schema.target.weights is not None and METHODS[method].method.noise_aware:
            raise ValueError(f"--methods {method}: has no class weights; leave it out")
    classes = None if schema.classes is None else len(schema.classes)
    estimators = [unfitted(schema, *cell, ledger, options) for cell in cells]
    for estimator in estimators:
        estimator._check_settings()
    plans = [planned(estimator, *x.shape, classes, persons) for estimator in estimators]
    total = dpbnn.compose(*plans)
    whose = f" of {persons.count} {persons.unit}s" if persons.count else ""
    speaker.say(
        f"{table}: {len(x)} rows{whose}; {len(cells)} run{'s' * (len(cells) != 1)}: "
        f"{_shown(cells)}."
    )
    speaker.say(
        f"Together they spend epsilon {round_up(total.epsilon)} at delta {total.delta:g} "
        f"(composed by {total.accountant})."
    )
    book = ledger or out / "ledger.jsonl"
    if ledger is None:
        speaker.say(
            f"Without --ledger, {book} is a new ledger: it does not know what other runs, or one "
            f"that was interrupted, have spent on this table."
        )
    if not yes:
        raise ValueError(
            f"--yes: missing; these runs spend epsilon {round_up(total.epsilon)} at delta "
            f"{total.delta:g}; add --yes to start them"
        )
    if ledger is not None and ledger.exists():
        dpbnn.Ledger(ledger).check(total.events)
    out.mkdir()
    rows = []
    for (method, epsilon), plan in zip(cells, plans, strict=True):
        speaker.say(f"{method} at epsilon {epsilon:g}")
        estimator = unfitted(schema, method, epsilon, None, options)
        fitted = _fitted(estimator, table_rows, options["max_records"], plan, out, book, table.name,
                         speaker)  # fmt: skip
        rows.append(_tested(fitted, tested, figures, plan, speaker))
    _finish(rows, total, out, book, speaker, options["tuning_runs"])


def _persons(schema: Schema, rows: Table, options: dict[str, Any]) -> Persons:
    """Return whose rows they are; a row is nobody's but its own where the schema has no unit."""
    from dpbnn.estimators.persons import Persons, unit_name

    return Persons.of(
        schema.units(rows), unit_name(schema.unit), rows.n, options["on_bad_rows"],
        options["max_records"],
    )  # fmt: skip


def _fitted(
    estimator: PrivateBayes,
    rows: Table,
    most: int | None,
    plan: Plan,
    out: Path,
    book: Path,
    table: str,
    speaker: Speaker,
) -> Run:
    """Fit one cell of the comparison, and return its run."""
    from dpbnn.estimators.fitting import train
    from dpbnn.runs import Run

    folder = out / f"{estimator.method}-{estimator.epsilon:g}"
    delta = None if book.exists() else plan.delta
    estimator.set_params(ledger=dpbnn.Ledger(book, delta=delta), progress=speaker.progress)
    with speaker.warnings():
        train(estimator, rows, max_records=most, out=folder, settings={"table": table})
    return Run.open(folder)


def _tested(
    run: Run, tested: Table, figures: dict[str, Any], plan: Plan, speaker: Speaker
) -> ComparisonRow:
    """Evaluate one cell, write its page, and return its row."""
    from dpbnn import report
    from dpbnn.estimators.workspace import REPORT

    found = run.tested(tested, **figures)
    run.write_page(run.folder / REPORT, found)
    speaker.say(found.evaluation)
    method = run.estimator.method
    own = plan.statement(
        labels=[method] * len(plan.events), clip=run.estimator.posterior_.settings["clip"]
    )
    page = f"{run.folder.name}/{REPORT}"
    return report.ComparisonRow(method, own, found.evaluation, report=page)


def _finish(
    rows: list[Any],
    total: Any,
    out: Path,
    book: Path,
    speaker: Speaker,
    tuning_runs: int | None,
) -> None:
    from dpbnn import report

    statement = dpbnn.Ledger(book).statement(delta=total.delta, tuning_runs=tuning_runs)
    written = report.write_comparison(rows, out / "compare.html", total=statement)
    speaker.say(f"Wrote {written}. Choosing one of the runs by these figures is not accounted for.")
    speaker.say(statement)
    speaker.result(
        {
            "report": str(written),
            "privacy": statement.to_dict(),
            "runs": [
                {
                    "method": row.method,
                    "epsilon": row.privacy.epsilon,
                    "evaluation": row.evaluation.to_dict(),
                }
                for row in rows
            ],
        }
    )


def _names(methods: str) -> list[str]:
    from dpbnn.estimators.recipes import METHODS

    names = list(dict.fromkeys(name.strip() for name in methods.split(",")))
    for name in names:
        if name not in METHODS:
            raise ValueError(f"--methods {name}: must be among {', '.join(METHODS)}")
    return names


def _budgets(epsilons: str) -> list[float]:
    try:
        values = list(dict.fromkeys(float(part) for part in epsilons.split(",")))
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise ValueError(f"--epsilons {epsilons}: must be numbers above 0, such as 0.5,1,2")
    if len({f"{value:g}" for value in values}) < len(values):
        raise ValueError(f"--epsilons {epsilons}: two are alike to six digits; leave one out")
    return values


def _shown(cells: list[tuple[str, float]]) -> str:
    return ", ".join(f"{method} at {epsilon:g}" for method, epsilon in cells)
