"""The command `dpbnn`."""

from __future__ import annotations

import sys
from errno import ENOENT

import click

import dpbnn
from dpbnn.cli.account import account_command, plan_command
from dpbnn.cli.compare import compare_command
from dpbnn.cli.demo import demo_command
from dpbnn.cli.evaluate import evaluate_command, report_command
from dpbnn.cli.fit import fit_command
from dpbnn.cli.predict import predict_command
from dpbnn.cli.schema import schema_group
from dpbnn.reproduce.command import reproduce_command

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=_CONTEXT)
@click.version_option(dpbnn.__version__, prog_name="dpbnn")
def cli() -> None:
    """Differentially private Bayesian neural networks."""


for _command in (
    plan_command, account_command, schema_group, fit_command, predict_command, evaluate_command,
    report_command, compare_command, demo_command, reproduce_command,
):  # fmt: skip
    cli.add_command(_command)


def _keep_lines(command: click.Command) -> None:
    """Turn the marks before examples in help texts into the backspace that click expects."""
    command.help = (command.help or "").replace("\\b\n", "\b\n")
    for inner in getattr(command, "commands", {}).values():
        _keep_lines(inner)


_keep_lines(cli)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; an error is one line on standard error.

    Exit codes: 0 success; 1 the budget does not hold the run; 2 bad input; 130 interrupted.
    """
    try:
        code = cli.main(args=arguments, prog_name="dpbnn", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        code = 2
    except click.ClickException as error:
        click.echo(f"dpbnn: {error.format_message().rstrip('.')}; see 'dpbnn --help'", err=True)
        code = 2
    except (click.Abort, KeyboardInterrupt, SystemExit) as stop:
        own = stop.__cause__ or stop  # click has put its own error around an interrupt
        for note in getattr(own, "__notes__", ()):
            click.echo(f"dpbnn: {note}", err=True)
        code = stop.code if isinstance(stop, SystemExit) else 130
    except dpbnn.BudgetExceeded as error:
        click.echo(f"dpbnn: {error}", err=True)
        code = 1
    except (ValueError, dpbnn.LedgerCorrupted) as error:
        click.echo(f"dpbnn: {error}", err=True)
        code = 2
    except OSError as error:
        where = str(error.filename).removesuffix(".partial")  # of a file that was being written
        cure = "; correct the path, or make the folder first" if error.errno == ENOENT else ""
        told = error if error.filename is None else f"{where}: {error.strerror}{cure}"
        click.echo(f"dpbnn: {told}", err=True)
        code = 2
    except RuntimeError as error:
        from dpbnn.messages import HiddenError  # torch comes with it

        if not isinstance(error, HiddenError):
            raise
        click.echo(f"dpbnn: {error}", err=True)
        code = 2
    sys.exit(code)
