"""Schemas from the command line: from a file, or from a target and a short file of bounds."""

from __future__ import annotations

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
) -> Any:
    """Return the schema that the options state; without privacy it may be learned.

    Args:
        table: the table, read.
        schema: a schema file.
        target: name of the target column, where there is no schema.
        bounds: a TOML file with one line for every column: two numbers are bounds, a list of texts
            is categories.
        private: whether bounds and categories must be public.
        task: "classification" or "regression", where the target's line could mean both.
    """
    from dpbnn.data import Schema

    if schema is not None:
        if target is not None or bounds is not None:
            raise ValueError("--schema: states target and bounds; leave --target and --bounds out")
        found = Schema.read(schema)
        if private and not found.public:
            raise ValueError(
                f"{schema}: was learned from the data, so training with it is not private; state "
                f"bounds and categories from public knowledge, or pass --non-private"
            )
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
                f"--task classification or --task regression"
            )
        classes = name == target and task == "classification"
        key = "bounds" if numbers and len(value) == 2 and not classes else "categories"
        columns[name] = {key: value if key == "bounds" else [str(v) for v in value]}
    own = columns.pop(target)
    aim = {"name": target, **{{"categories": "classes"}.get(k, k): v for k, v in own.items()}}
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

    found = Schema.read(schema)
    options["on_bad_rows"] = "show" if show_values else "error"
    speaker = Speaker(quiet=False, as_json=False)
    with speaker.warnings():
        rows = read(table, options)
        found.check(rows, on_bad_rows=options["on_bad_rows"])
        found.encode(rows, target=True, on_bad_rows=options["on_bad_rows"])
    speaker.say(f"{table}: {rows.n} rows, all of them fit {schema}.")
