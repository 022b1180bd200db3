"""What commands print: text for people, or one JSON object for programs."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import click


class Speaker:
    """Prints text unless told to be quiet or to print JSON.

    Args:
        quiet: print nothing but warnings.
        as_json: print one JSON object, given by `result`, and nothing else on standard output.
    """

    def __init__(self, quiet: bool, as_json: bool) -> None:
        self.quiet, self.as_json = quiet, as_json

    @property
    def progress(self) -> bool:
        """Whether training shows how far it is."""
        return not self.quiet and not self.as_json

    def say(self, text: object = "") -> None:
        """Print a line or more for a person."""
        if self.progress:
            click.echo(str(text))

    def result(self, values: dict[str, Any]) -> None:
        """Print the result for a program."""
        if self.as_json:
            click.echo(json.dumps(values, indent=2, allow_nan=False))

    @contextlib.contextmanager
    def warnings(self) -> Iterator[None]:
        """Print warnings as lines on standard error, when they occur, each once."""
        shown: set[str] = set()

        def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            text = str(message)
            if issubclass(category, UserWarning) and text not in shown:
                shown.add(text)
                click.echo(f"dpbnn: warning: {text}", err=True)

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield


def speaking(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --quiet and --json, and the speaker that they ask for."""

    @functools.wraps(command)
    def run(*, quiet: bool, as_json: bool, **arguments: Any) -> Any:
        return command(speaker=Speaker(quiet, as_json), **arguments)

    quiet = click.option("--quiet", is_flag=True, help="Print nothing but warnings.")
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(quiet(run))
