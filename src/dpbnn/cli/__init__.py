"""The command `dpbnn`: one file per command."""

from dpbnn.cli.program import cli, main

__all__ = ["cli", "main"]
