"""dpbnn fit: from a table and a budget to a run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dpbnn
from dpbnn.cli.options import read, reading_options, with_options
from dpbnn.cli.say import Speaker, speaking

if TYPE_CHECKING:
    from dpbnn.data import Schema
    from dpbnn.estimators.estimator import PrivateBayes

_PATH = click.Path(path_type=Path)
_ABOUT = ("schema", "target", "bounds", "task")
_READING = ("encoding", "separator", "decimal", "names")


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say what a table holds."""
    options = (
        click.option("--schema", type=_PATH, help="The schema, in TOML; see 'dpbnn schema draft'."),
        click.option("--target", help="The column to be predicted, where there is no schema."),
        click.option("--bounds", type=_PATH, help="TOML with a line for every column, such as "
                     "age = [17, 90] or sex = [\"F\", \"M\"], the target's too."),
        click.option("--task", type=click.Choice(["classification", "regression"]),
                     help="Where the target's two numbers are classes, not bounds."),
        click.option("--on-bad-rows", type=click.Choice(["error", "zero"]), default="error",
                     show_default=True, help="Refuse bad rows, or let them contribute nothing."),
    )  # fmt: skip
    return with_options(reading_options(command), options)


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of the training."""
    options = (
        click.option("--delta", type=float, help="Delta of the guarantee [default: the ledger's, "
                     "or min(1e-5, 1/(10 n))]."),
        click.option("--epochs", type=float, help="Passes over the data [default: 800 steps "
                     "with auto, 400 with others]."),
        click.option("--batch-size", type=float, help="Expected batch size [default: all rows "
                     "up to 2048 of them, 1024 beyond]."),
        click.option("--hidden", default="32", show_default=True,
                     help="Widths of the hidden layers, such as 64,32; 0 for none."),
        click.option("--learning-rate", type=float, help="Of the method [default: a fixed rule]."),
        click.option("--clip", type=float, help="Largest norm of one row's gradient."),
        click.option("--samples", type=int, default=100, show_default=True,
                     help="Posterior samples in a prediction."),
        click.option("--seed", type=int, default=0, show_default=True,
                     help="Of initialisation and prediction; noise has none."),
        click.option("--device", help="cpu or cuda [default: cpu]."),
        click.option("--ledger", type=_PATH, help="Spend from this ledger and its budget."),
        click.option("--tuning-runs", type=int, help="How many other runs on this data chose the "
                     "settings, for the statement."),
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
@click.option("--recalibrate", metavar="HOW", help="Where a temperature of the predictions comes "
              "from: training, for a small part of the budget [default]; a share of epsilon, such "
              "as 0.1, which also holds out a fifth of the rows; or none.")  # fmt: skip
@click.option("--conformal", type=float, metavar="ALPHA", help="Sets or intervals that miss the "
              "truth with probability ALPHA + 0.01 at most; costs a fifth of epsilon and holds out "
              "a fifth of the rows.")  # fmt: skip
@training_options
@click.option("--out", type=_PATH, required=True, help="The run directory to be made.")
@click.option("--overwrite", is_flag=True, help="Replace a run; the new one continues its ledger.")
@speaking
def fit_command(
    table: Path,
    epsilon: float | None,
    non_private: bool,
    method: str,
    out: Path,
    overwrite: bool,
    ledger: Path | None,
    speaker: Speaker,
    **options: Any,
) -> None:
    r"""Train a Bayesian network on a table under a privacy budget.

    \b
    Example:
      dpbnn fit train.csv --schema schema.toml --epsilon 1 --out run/
    """
    from dpbnn.runs import new_run, plain_calibration

    if (epsilon is None) == (not non_private):
        raise ValueError(
            "--epsilon: give a budget, such as --epsilon 1, or --non-private, and not both"
        )
    with speaker.warnings(), new_run(out, overwrite=overwrite, ledger=ledger) as workspace:
        schema, x, y, units = read_training_table(table, options, private=not non_private)
        speaker.say(
            f"{table}: {len(x)} rows, {len(schema.columns)} columns ({x.shape[1]} after encoding), "
            f"{schema.task} of {schema.target.name!r}."
        )
        if non_private:
            speaker.say("*** NOT PRIVATE *** --non-private trains without any guarantee.")
        estimator = fitted(schema, x, y, method, epsilon, workspace.book, speaker, options, units)
        settings = {
            "table": table.name,
            "method": method,
            "epsilon": epsilon,
            **settings_of(options),
        }
        workspace.save(estimator, schema, settings, (x, y))
    for name, value in estimator.calibration_.items():
        speaker.say(f"Calibration, {name}: {value:.4g}")
    speaker.say(f"Wrote {out}.")
    speaker.say(estimator.privacy_)
    values = {"rows": len(x), "calibration": plain_calibration(estimator)}
    speaker.result({"run": str(out), **values, "privacy": estimator.privacy_.to_dict()})


def read_training_table(
    table: Path, options: dict[str, Any], *, private: bool
) -> tuple[Schema, Any, Any, Any]:
    """Return the schema, the encoded table and its units, or raise before anything is spent."""
    from dpbnn.cli.schema import chosen_schema

    rows = read(table, options)
    about = {name: options[name] for name in _ABOUT}
    found = chosen_schema(rows, **about, private=private)
    found.check(rows, on_bad_rows=options["on_bad_rows"])
    x, y = found.encode(rows, target=True, on_bad_rows=options["on_bad_rows"])
    return found, x, y, found.units(rows)


def fitted(
    schema: Schema,
    x: Any,
    y: Any,
    method: str,
    epsilon: float | None,
    ledger: Callable[[float], Any],
    speaker: Speaker,
    options: dict[str, Any],
    units: Any = None,
) -> PrivateBayes:
    """Return an estimator fitted to an encoded table, which predicts in the original units."""
    from dpbnn.estimators.persons import Persons, unit_name
    from dpbnn.estimators.recipes import default_delta

    by: dict[str, Any] = {} if units is None else {"units": units, "unit": unit_name(schema.unit)}
    count = len(x) if units is None else Persons.of(
        units, by["unit"], len(x), options["on_bad_rows"]
    ).count  # fmt: skip
    book = ledger(options["delta"] or default_delta(count))
    estimator = unfitted(schema, method, epsilon, book, options)
    estimator.set_params(progress=speaker.progress)
    return estimator.fit(x, y if schema.classes is not None else schema.decode_target(y), **by)


def unfitted(
    schema: Schema, method: str, epsilon: float | None, ledger: Any, options: dict[str, Any]
) -> PrivateBayes:
    """Return the estimator that the options ask for."""
    arguments = {
        "method": method,
        "epsilon": epsilon,
        "bounds": (-1.0, 1.0),
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
        return dpbnn.PrivateBayesClassifier(classes=range(len(schema.classes)), **arguments)
    return dpbnn.PrivateBayesRegressor(target_bounds=schema.target.bounds, **arguments)


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the training that were given, as plain values."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if value is not None and name not in (*_ABOUT, *_READING)
    }


def _recalibrate(text: str | None) -> float | str | None:
    if text in (None, "training", "none"):
        return None if text == "none" else "training"
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--recalibrate {text}: must be training, none, or a share of epsilon such as 0.1"
        ) from None


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = (-1,)
    if widths == (0,):
        return ()
    if any(width < 1 for width in widths):
        raise ValueError(f"--hidden {text}: must be widths such as 64 or 64,32, or 0 for none")
    return widths
