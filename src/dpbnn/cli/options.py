"""Options of commands that read a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dpbnn.data import Table


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say how a text file is written."""
    options = (
        click.option("--encoding", default="utf-8", show_default=True,
                     help="Encoding of text files."),
        click.option("--separator",
                     help="Separator of the values [default: found from the first lines]."),
        click.option("--decimal", default=".", show_default=True, help="Decimal mark, . or ,"),
        click.option("--comment", metavar="MARK", help="Skip lines that begin with this mark."),
        click.option("--names", help="Names of the columns, separated by commas, for a text file "
                     "without a header."),
    )  # fmt: skip
    return with_options(command, options)


def with_options(
    command: Callable[..., Any], options: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """Give a command several options; the help shows them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def read(table: Path, options: dict[str, Any]) -> Table:
    """Read a table as the options say."""
    from dpbnn.data import read_table

    names = options["names"]
    return read_table(
        table,
        header=names is None,
        names=None if names is None else [name.strip() for name in names.split(",")],
        separator=options["separator"],
        decimal=options["decimal"],
        encoding=options["encoding"],
        comment=options["comment"],
        on_bad_rows=options.get("on_bad_rows", "error"),
    )
