"""dpbnn fit: from a table and a budget to a run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dpbnn
from dpbnn.cli.options import read, reading_options, with_options
from dpbnn.cli.say import Speaker, speaking

if TYPE_CHECKING:
    from dpbnn.data import Schema, Table
    from dpbnn.estimators.estimator import PrivateBayes

_PATH = click.Path(path_type=Path)
_ABOUT = ("schema", "target", "bounds", "task")


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say what a table holds."""
    options = (
        click.option("--schema", type=_PATH, help="The schema, in TOML; see 'dpbnn schema draft'."),
        click.option("--target", help="The column to predict, if there is no schema."),
        click.option("--bounds", type=_PATH, help="TOML instead of a schema, one line for every "
                     "column and the target, such as age = [17, 90] or sex = [\"F\", \"M\"]."),
        click.option("--task",
                     type=click.Choice(["classification", "regression", "count", "ordinal"]),
                     help="Kind of the target, if there is no schema and two numbers could be "
                     "classes or bounds. For ordinal, list the lowest class first."),
        click.option("--on-bad-rows", type=click.Choice(["error", "zero"]), default="error",
                     show_default=True, help="Refuse bad rows, or let them contribute nothing."),
    )  # fmt: skip
    return with_options(reading_options(command), options)


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of the training."""
    options = (
        click.option("--delta", type=float, help="Delta of the guarantee [default: the ledger's, "
                     "or min(1e-5, 1/(10 n))]."),
        click.option("--epochs", type=float, help="Passes over the data [default: as many as "
                     "800 steps with auto, 400 steps with others]."),
        click.option("--batch-size", type=float, help="Expected batch size [default: all rows "
                     "up to 2048 of them, 1024 beyond]."),
        click.option("--hidden", default="auto", show_default=True,
                     help="Widths of the hidden layers, such as 64,32; 0 for none; auto is 32, or "
                     "32,32 for numbers if the budget allows it."),
        click.option("--learning-rate", type=float,
                     help="Learning rate of the method [default: a fixed rule]."),
        click.option("--clip", type=float, help="Largest norm of one row's gradient."),
        click.option("--samples", type=int, default=100, show_default=True,
                     help="Posterior samples in a prediction."),
        click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True,
                     help="Seed of initialisation and prediction; the noise has none."),
        click.option("--device", help="cpu or cuda [default: cpu]."),
        click.option("--ledger", type=_PATH, help="Spend from this ledger and its budget."),
        click.option("--max-records", type=int, help="Most rows of one person, a public limit, "
                     "for a schema with a unit; further rows are bad rows."),
        click.option("--tuning-runs", type=int, help="How many other runs on this data were used "
                     "to choose the settings; the statement declares it."),
    )  # fmt: skip
    return with_options(command, options)


@click.command("fit")
@click.argument("table", type=_PATH)
@table_options
@click.option("--method", default="auto", show_default=True,
              help="auto, sgld, sghmc, sgd, bbp, vi, mcdropout, moments, noiseaware or "
              "sep.")  # fmt: skip
@click.option("--epsilon", type=float, help="The budget of this run.")
@click.option("--non-private", is_flag=True, help="Train WITHOUT privacy.")
@click.option("--recalibrate", metavar="HOW", help="How predictions get a temperature. training: "
              "from the training rows, for a small part of the budget [default]. A share of "
              "epsilon, such as 0.1: from a fifth of the rows, which are held out. none: "
              "predictions stay as they are.")  # fmt: skip
@click.option("--conformal", type=float, metavar="ALPHA", help="Add sets or intervals that miss "
              "the truth with probability ALPHA + 0.01 at most. They cost a fifth of epsilon and "
              "hold out a fifth of the rows. ALPHA 0.1 at epsilon 1 needs 8800 rows.")  # fmt: skip
@click.option("--class-weight", multiple=True, metavar="LABEL=WEIGHT", help="Public weight of the "
              "records of a class in training, such as ill=5; probabilities are corrected for it. "
              "May be given several times.")  # fmt: skip
@training_options
@click.option("--out", type=_PATH, required=True, help="The run directory to make.")
@click.option("--overwrite", is_flag=True, help="Replace a run; the new one continues its ledger.")
@click.option("--resume", is_flag=True, help="Resume a fit that was interrupted; give the same "
              "table and options again.")  # fmt: skip
@speaking
def fit_command(
    table: Path,
    epsilon: float | None,
    non_private: bool,
    method: str,
    out: Path,
    overwrite: bool,
    resume: bool,
    ledger: Path | None,
    speaker: Speaker,
    **options: Any,
) -> None:
    r"""Train a Bayesian network on a table under a privacy budget.

    \b
    Example:
      dpbnn fit train.csv --schema schema.toml --epsilon 1 --out run/
    """
    from dpbnn.estimators.fitting import train
    from dpbnn.estimators.storage import plain_calibration
    from dpbnn.estimators.workspace import check_folder

    if (epsilon is None) == (not non_private):
        raise ValueError(
            "--epsilon: give a budget, such as --epsilon 1, or --non-private, and not both"
        )
    check_folder(out, resume=resume)
    with speaker.warnings():
        schema, rows = read_training_table(table, options, private=not non_private, ledger=ledger)
        speaker.say(
            f"{table}: {rows.n} rows, {len(schema.columns)} columns ({len(schema.features)} after "
            f"encoding), {_task(schema)} of {schema.target.name!r}."
        )
        if non_private:
            speaker.say("*** NOT PRIVATE *** --non-private trains without any guarantee.")
        estimator = unfitted(schema, method, epsilon, ledger, options)
        estimator.set_params(progress=speaker.progress)
        settings = {"table": table.name}
        train(
            estimator, rows, max_records=options["max_records"], out=out, resume=resume,
            overwrite=overwrite, settings=settings,
        )  # fmt: skip
    for name, value in estimator.calibration_.items():
        speaker.say(f"Calibration, {name}: {value:.4g}")
    speaker.say(f"Wrote {out}.")
    speaker.say(estimator.privacy_)
    values = {"rows": rows.n, "calibration": plain_calibration(estimator)}
    speaker.result({"run": str(out), **values, "privacy": estimator.privacy_.to_dict()})


def read_training_table(
    table: Path, options: dict[str, Any], *, private: bool, ledger: Path | None = None
) -> tuple[Schema, Table]:
    """Return the schema and the raw table, or raise before anything is spent."""
    from dpbnn.cli.schema import chosen_schema

    rows = read(table, options)
    about = {name: options[name] for name in _ABOUT}
    found = chosen_schema(rows, **about, private=private, ledger=ledger)
    found.check(rows, on_bad_rows=options["on_bad_rows"])
    return found, rows


def unfitted(
    schema: Schema, method: str, epsilon: float | None, ledger: Any, options: dict[str, Any]
) -> PrivateBayes:
    """Return the estimator that the options ask for, which takes raw tables."""
    arguments = {
        "method": method,
        "epsilon": epsilon,
        "schema": schema,
        "hidden": _widths(options["hidden"]),
        "ledger": ledger,
        "random_state": options["seed"],
        **{
            name: options[name]
            for name in (
                "delta", "epochs", "batch_size", "learning_rate", "clip", "samples", "device",
                "tuning_runs", "on_bad_rows",
            )
        },
        "recalibrate": _recalibrate(options.get("recalibrate")),
        "conformal": options.get("conformal"),
    }  # fmt: skip
    if schema.classes is not None:
        weights = _class_weight(options.get("class_weight") or (), schema)
        return dpbnn.PrivateBayesClassifier(class_weight=weights, **arguments)
    if options.get("class_weight"):
        raise ValueError("--class-weight: the target is a number and has no classes; leave it out")
    return dpbnn.PrivateBayesRegressor(**arguments)


def _task(schema: Schema) -> str:
    kinds = {"count": "counts", "ordinal": "classification in order"}
    return kinds.get(schema.target.kind, schema.task)


def _class_weight(texts: Sequence[str], schema: Schema) -> dict[Any, float] | None:
    """Return weights by the label, as estimators have it; None where there are none."""
    from dpbnn.estimators import frames

    names, labels = [str(name) for name in schema.classes or ()], frames.labels(schema).tolist()
    found: dict[Any, float] = {}
    for text in texts:
        label, _, weight = text.rpartition("=")
        try:
            found[labels[names.index(label)]] = float(weight)
        except ValueError:
            raise ValueError(
                f"--class-weight {text}: must be LABEL=WEIGHT with one of {', '.join(names)}, such "
                f"as {names[-1]}=5"
            ) from None
    return found or None


def _recalibrate(text: str | None) -> float | str | None:
    if text in (None, "training", "none"):
        return None if text == "none" else "training"
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--recalibrate {text}: must be training, none, or a share of epsilon such as 0.1"
        ) from None


def _widths(text: str) -> tuple[int, ...] | str:
    if text == "auto":
        return text
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = (-1,)
    if widths == (0,):
        return ()
    if any(width < 1 for width in widths):
        raise ValueError(
            f"--hidden {text}: must be widths such as 64 or 64,32, 0 for none, or auto"
        )
    return widths
