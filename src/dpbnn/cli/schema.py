"""Schemas from the command line: from a file, or from a target and a short file of bounds."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import click

from dpbnn.cli.options import read, reading_options
from dpbnn.cli.say import Speaker


def chosen_schema(
    table: Any,
    schema: Path | None,
    target: str | None,
    bounds: Path | None,
    *,
    private: bool,
    task: str | None = None,
    ledger: Path | None = None,
) -> Any:
    """Return the schema that the options state; without privacy it may be learned.

    Args:
        table: the table, read.
        schema: a schema file.
        target: name of the target column, where there is no schema.
        bounds: a TOML file with one line for every column: two numbers are bounds, a list of texts
            is categories.
        private: whether bounds and categories must be public.
        task: "classification", "regression", "count" or "ordinal", where the target's line could
            mean several.
        ledger: what training is charged to; None for a ledger of its own.
    """
    from dpbnn.data import Schema
    from dpbnn.privacy.ledger import Ledger

    if schema is not None:
        if any(given is not None for given in (target, bounds, task)):
            raise ValueError(
                "--schema: states target, bounds and task; leave --target, --bounds and --task out"
            )
        found = Schema.read(schema)
        if private and not found.public:
            raise ValueError(
                f"{schema}: was learned from the data, so training with it is not private; state "
                f"bounds and categories from public knowledge, or pass --non-private"
            )
        if private and found.private_bounds is not None:
            known = ledger is not None and ledger.is_file()
            found.private_bounds.check(Ledger(ledger) if known else None)
        return found
    if target is None:
        raise ValueError("--schema or --target: one of them is needed; see 'dpbnn schema draft'")
    if bounds is not None:
        return Schema.from_dict(_described(bounds, target, task))
    if private:
        raise ValueError(
            "--bounds: missing, and reading bounds off the data would not be private; give a file "
            "with a line such as age = [17, 90] for every column, or --schema"
        )
    return Schema.learned(table, target, task)


def _described(path: Path, target: str, task: str | None) -> dict[str, Any]:
    """Return a schema's values from a file of bounds."""
    try:
        lines = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not valid TOML: {error}; correct that line") from None
    if isinstance(lines.get("target"), dict):
        raise ValueError(f"{path}: is a whole schema; give it as --schema, without --target")
    if target not in lines:
        raise ValueError(
            f"{path}: has no line for the target {target!r}; add its classes, as in {target} = "
            f'["no", "yes"], or its bounds, as in {target} = [0, 100]'
        )
    columns = {}
    for name, value in lines.items():
        if not isinstance(value, list) or not value:
            raise ValueError(
                f"{path}: {name} must be a list: two numbers are bounds, texts are categories"
            )
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value)
        if name == target and task is None and numbers and _look_like_labels(value):
            raise ValueError(
                f"{path}: {name} = {value} can be two classes or the bounds of a number; add "
                f"--task classification or --task regression (or count, or ordinal)"
            )
        classes = name == target and task in ("classification", "ordinal")
        key = "bounds" if numbers and len(value) == 2 and not classes else "categories"
        columns[name] = {key: value if key == "bounds" else [str(v) for v in value]}
    own = columns.pop(target)
    aim = {"name": target, **{{"categories": "classes"}.get(k, k): v for k, v in own.items()}}
    if task in ("count", "ordinal"):
        aim["kind"] = task
    return {"target": aim, "columns": columns}


def _look_like_labels(values: list[Any]) -> bool:
    """Whether two numbers may be the labels of two classes, such as 0 and 1, or -1 and 1."""
    whole = len(values) == 2 and all(float(value).is_integer() for value in values)
    return whole and (abs(values[1] - values[0]) == 1 or sorted(values) == [-1, 1])


@click.group("schema")
def schema_group() -> None:
    """Make schemas, which state what is publicly known of a table's columns."""


@schema_group.command("draft")
@click.argument("table", type=click.Path(path_type=Path))
@reading_options
@click.option("--target", required=True, help="The column to be predicted.")
@click.option("--out", type=click.Path(path_type=Path), help="The file [default: print it].")
def draft_command(table: Path, target: str, out: Path | None, **options: Any) -> None:
    r"""Draft a schema for a table: its columns, with every bound and category left to fill in.

    \b
    Example:
      dpbnn schema draft train.csv --target income --out schema.toml
    """
    from dpbnn.data import Schema

    if out is not None and out.exists():
        raise ValueError(f"{out}: exists already; give another file")
    text = Schema.draft(read(table, options), target)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        click.echo(f"Wrote {out}; fill in every TODO from public knowledge, not from the data.")


@schema_group.command("check")
@click.argument("table", type=click.Path(path_type=Path))
@reading_options
@click.option("--schema", type=click.Path(path_type=Path), required=True, help="The schema.")
@click.option("--show-values", is_flag=True,
              help="Quote bad values and their rows: this prints private data.")  # fmt: skip
def check_command(table: Path, schema: Path, show_values: bool, **options: Any) -> None:
    r"""Check a table against a schema, before anything is spent.

    Without --show-values, and in all other commands, messages count bad values by column and quote
    none of them.

    \b
    Example:
      dpbnn schema check train.csv --schema schema.toml --show-values
    """
    from dpbnn.data import Schema
    from dpbnn.data.checking import problems
    from dpbnn.data.schema import read_toml
    from dpbnn.data.table import TableError

    options["on_bad_rows"] = "show" if show_values else "error"
    speaker = Speaker(quiet=False, as_json=False)
    values, unread, rows = read_toml(schema), [], None
    with speaker.warnings():
        try:
            rows = read(table, options)
        except TableError as error:
            unread = [str(error)]
        found = [*unread, *problems(values, rows, show_values)]
    for problem in found:
        click.echo(f"dpbnn: {problem}", err=True)
    if found or rows is None:
        raise click.exceptions.Exit(2)
    extra = Schema.from_dict(values).ignored(rows)
    if extra:
        named = rows.listed(extra, show=show_values)
        verb = "is" if len(extra) == 1 else "are"
        text = f"{table}: {named} {verb} not in the schema and not used"
        click.echo(f"dpbnn: warning: {text}", err=True)
    speaker.say(f"{table}: {rows.n} rows, all of them fit {schema}.")


@schema_group.command("bounds")
@click.argument("table", type=click.Path(path_type=Path))
@reading_options
@click.option("--schema", type=click.Path(path_type=Path), required=True,
              help="The schema, with bounds that are still TODO.")  # fmt: skip
@click.option("--epsilon", type=float, required=True, help="What the bounds cost, such as 0.1.")
@click.option("--delta", type=float, help="Delta [default: the ledger's, or min(1e-5, 1/(10 n))].")
@click.option("--ledger", type=click.Path(path_type=Path), required=True,
              help="The ledger that pays; training must use it too.")  # fmt: skip
@click.option("--budget", type=float, help="Epsilon that a new ledger allows, for the bounds and "
              "all that follows [default: no limit].")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The new schema.")
def bounds_command(
    table: Path,
    schema: Path,
    epsilon: float,
    delta: float | None,
    ledger: Path,
    budget: float | None,
    out: Path,
    **options: Any,
) -> None:
    r"""Learn the bounds that are TODO in a schema, privately.

    One noisy release finds the bounds of all these columns together. Training with the new schema
    must be charged to the same ledger: 'dpbnn fit --ledger'.

    \b
    Example:
      dpbnn schema bounds train.csv --schema schema.toml --epsilon 0.1 \
        --ledger ledger.jsonl --budget 1 --out schema-bounds.toml
    """
    import dpbnn
    from dpbnn.data.draft import one_line
    from dpbnn.data.paid import learn_bounds
    from dpbnn.data.schema import read_toml
    from dpbnn.estimators.budget import default_delta
    from dpbnn.privacy.checks import round_up

    values = read_toml(schema)
    rows = read(table, options)
    if out.exists():
        raise ValueError(f"{out}: exists already; give another file")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ValueError(f"{out}: its folder does not exist or cannot be written to; make it first")
    new = not ledger.exists()
    if budget is not None and not new:
        raise ValueError(f"--budget: {ledger} has its own budget; leave the option out")
    first = delta or default_delta(rows.n)
    book = dpbnn.Ledger(ledger, epsilon=budget, delta=first if new else delta)
    delta = delta or (book.budget[1] if book.budget else first)
    try:
        if not book.relation.public_size:
            raise ValueError(f"{ledger}: hides the number of rows; use a ledger under zero-out")
        with Speaker(quiet=False, as_json=False).warnings():
            plan = dpbnn.plan(
                epsilon=epsilon, delta=delta, n=rows.n, sampling="full-batch", steps=1,
                relation=book.relation,
            )  # fmt: skip
        filled, hidden = learn_bounds(values, rows, plan=plan, ledger=book)
    except BaseException:
        if new and book.untouched:
            ledger.unlink()
            ledger.with_name(f"{ledger.name}.head").unlink()
        raise
    note = f"# Learned privately, paid for by {ledger}: train with --ledger {ledger}.\n"
    out.write_text(note + one_line(filled), encoding="utf-8")
    found = len(filled.get("private_bounds", {}).get("columns", ()))
    click.echo(f"Wrote {out}: bounds of {found} column{'s' * (found != 1)}.")
    spent = round_up(book.statement(delta=delta).epsilon)
    click.echo(
        f"{ledger}: epsilon {spent} at delta {delta:g} is spent; fit with --ledger {ledger}."
    )
    for name in hidden:
        click.echo(
            f"dpbnn: warning: column {name!r}: noise hides its values, so its bounds are still "
            f"TODO; state public ones",
            err=True,
        )
