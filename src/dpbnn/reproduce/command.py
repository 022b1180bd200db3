"""The command `dpbnn reproduce`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("reproduce")
@click.argument("name", required=False)
@click.option("--list", "listed", is_flag=True, help="Say what there is.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for NAME.md, .json and .svg.")
@click.option("--quick", is_flag=True, help="A short version, to see that it works.")
@click.option("--seed", type=int, default=0, show_default=True,
              help="Of initialisation and synthetic data.")  # fmt: skip
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the datasets "
              "[default: DPBNN_DATA].")  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
def reproduce_command(
    name: str | None,
    listed: bool,
    out: Path | None,
    quick: bool,
    seed: int,
    data: Path | None,
    device: str,
) -> None:
    r"""Compute a table or figure of a paper anew.

    \b
    Example:
      dpbnn reproduce --list
      dpbnn reproduce bayesian-dp.fig3 --out results
    """
    from dpbnn import reproduce

    if listed:
        for key, item in reproduce.items().items():
            click.echo(f"{key:<22} {(item.__doc__ or '').splitlines()[0]}")
        return
    if name is None:
        raise click.UsageError("NAME is missing; 'dpbnn reproduce --list' says what there is")
    settings = reproduce.Settings(quick=quick, seed=seed, data=data, device=device)
    result = reproduce.reproduce(name, settings)
    if out is None:
        click.echo(result.markdown())
        return
    for path in reproduce.write(name, result, out):
        click.echo(str(path))
