"""dpbnn plan and dpbnn account: what a run will cost, and what has been spent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dpbnn
from dpbnn.privacy.checks import round_up

if TYPE_CHECKING:
    from rich.table import Table

    from dpbnn.privacy.plan import Plan


@click.command("plan")
@click.option("--epsilon", type=float, help="Budget; computed if it is left out.")
@click.option("--delta", type=float, required=True, help="Delta of the guarantee, below 1/n.")
@click.option(
    "--noise-multiplier", type=float, help="Noise std / clip; solved for if it is left out."
)
@click.option("--n", type=int, required=True, help="Public number of records, or of units.")
@click.option("--unit", default="", metavar="NAME", help="What is protected with all its "
              "records, such as patient; n and the batch size count these units.")  # fmt: skip
@click.option("--batch-size", type=float, help="Expected batch size.")
@click.option("--epochs", type=float, help="Passes over the data; solved for if left out.")
@click.option("--steps", type=int, help="Number of releases, instead of --epochs.")
@click.option("--sampling", default="poisson", show_default=True,
              help="poisson, fixed-size, partition or full-batch.")  # fmt: skip
@click.option("--relation", default="zero-out", show_default=True,
              help="zero-out, add/remove or replace-one.")  # fmt: skip
@click.option(
    "--accountant", help="pld, rdp, exact or gdp-clt [default: the tightest rigorous one]."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan_command(as_json: bool, unit: str, **arguments: Any) -> None:
    r"""Say what a run costs, or how much noise a budget needs, before any data is seen.

    Give two of --epsilon, --noise-multiplier and --epochs (or --steps).

    \b
    Example:
      dpbnn plan --epsilon 1 --delta 1e-5 --n 60000 --batch-size 256 --epochs 15
    """
    from dpbnn.privacy.units import by_unit

    plan = by_unit(dpbnn.plan(**arguments), unit)
    if as_json:
        attack = plan.statement().to_dict()["attack"]
        values = {**plan.to_dict(), "epsilons": plan.epsilons(), "attack": attack}
        click.echo(json.dumps(values, indent=2))
        return
    print_table(plan_table(plan))


@click.command("account")
@click.argument("ledger", type=click.Path(path_type=Path))
@click.option("--delta", type=float, help="Delta of the guarantee [default: the ledger's].")
@click.option("--repair", is_flag=True, help="Repair a ledger that is refused as damaged: what may "
              "have been spent counts as spent. The damaged files are kept.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def account_command(ledger: Path, delta: float | None, repair: bool, as_json: bool) -> None:
    r"""Say what a ledger has spent, and state the guarantee.

    \b
    Example:
      dpbnn account run/ledger.jsonl --delta 1e-5
      dpbnn account --repair run/ledger.jsonl
    """
    if (ledger / "ledger.jsonl").is_file():
        ledger = ledger / "ledger.jsonl"
    if not ledger.is_file() and not (repair and ledger.with_name(f"{ledger.name}.head").is_file()):
        raise ValueError(
            f"{ledger}: no such file; give the path of a ledger that a run has written"
        )
    book = dpbnn.Ledger.repair(ledger) if repair else dpbnn.Ledger(ledger)
    statement = book.statement(delta=delta)
    budget = book.budget
    if as_json:
        values = {"releases": book.releases, "budget": budget, "statement": statement.to_dict()}
        click.echo(json.dumps(values, indent=2))
        return
    click.echo(f"{ledger}: {book.releases} release{'s' * (book.releases != 1)}")
    if budget is not None:
        spent = book.epsilon()
        click.echo(
            f"Budget: epsilon {budget[0]:g} at delta {budget[1]:g}; "
            f"spent {round_up(spent)}, left {max(0.0, budget[0] - spent):.4g}"
        )
    click.echo(str(statement))


def plan_table(plan: Plan) -> Table:
    """Return the plan as a table, with epsilon by every accountant and noise against signal."""
    from rich.table import Table

    unit = plan.sampler.unit or "record"
    table = Table("quantity", "value", "meaning", title="Privacy plan", title_justify="left")
    table.add_row(
        "epsilon", round_up(plan.epsilon), f"by {plan.accountant}, at delta {plan.delta:g}"
    )
    for name, value in plan.epsilons().items():
        rigorous = dpbnn.ACCOUNTANTS[name].rigorous
        kind = "upper bound" if rigorous else "approximation, can lie below the truth"
        table.add_row(f"  {name}", round_up(value), "equality" if name == "exact" else kind)
    if attack := plan.statement().attack:
        if attack.mu is not None:
            table.add_row("mu", round_up(attack.mu), f"{attack.scope}, upper bound")
        right = f"{round_up(100 * attack.right, 3)} %"
        table.add_row("best attack", right, f"of guesses whether one {unit} was used are right "
                      "at most; by a coin toss 50 %")  # fmt: skip
        for share, power in attack.power.items():
            table.add_row(f"  at {100 * share:g} % false alarms", f"{round_up(100 * power, 3)} %",
                          f"of the used {unit}s are found, at most")  # fmt: skip
    table.add_row("noise multiplier", f"{plan.noise_multiplier:.5g}", "noise std / clip")
    table.add_row("steps", str(plan.steps), f"{plan.epochs:.4g} passes over n = {plan.n} {unit}s")
    table.add_row("sampling", plan.sampling, f"rate {plan.sample_rate:.4g}, expected batch "
                  f"{plan.batch_size:g} {unit}s")  # fmt: skip
    table.add_row("relation", str(plan.relation), plan.relation.describe(unit))
    signal = plan.noise_multiplier / plan.batch_size
    table.add_row("noise / signal", f"{signal:.3g}", "per coordinate and step: noise std over the "
                  "largest clipped sum")  # fmt: skip
    total = plan.noise_multiplier / (plan.batch_size * plan.steps**0.5)
    table.add_row("  over all steps", f"{total:.3g}", "the same for the average of all steps")
    return table


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 100, highlight=False).print(table)
