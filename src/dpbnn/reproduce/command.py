"""The command `dpbnn reproduce`."""

from __future__ import annotations

import math
from pathlib import Path

import click


@click.command("reproduce")
@click.argument("name", required=False)
@click.option("--list", "listed", is_flag=True, help="List all items.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for NAME.md, .json, .svg and "
              "for finished runs, which are not made again.")  # fmt: skip
@click.option("--fast", is_flag=True, help="A short version, to see that it works.")
@click.option("--seed", type=int, default=0, show_default=True,
              help="Seed of initialisation and synthetic data.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1),
              help="How many seeds, simulations or splits [default: the item's own].")  # fmt: skip
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the datasets, or of "
              "other images in MNIST's file format [default: DPBNN_DATA].")  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--limit", type=float, default=math.inf, metavar="SECONDS",
              help="Start no further run after so many seconds; run again to go on.")  # fmt: skip
@click.option("--only", multiple=True, metavar="WORD",
              help="Start only runs whose settings contain this word.")  # fmt: skip
def reproduce_command(
    name: str | None,
    listed: bool,
    out: Path | None,
    fast: bool,
    seed: int,
    seeds: int | None,
    data: Path | None,
    device: str,
    limit: float,
    only: tuple[str, ...],
) -> None:
    r"""Compute a table or figure of a paper again.

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
        raise click.UsageError("NAME is missing; 'dpbnn reproduce --list' lists all names")
    settings = reproduce.Settings(
        fast=fast, seed=seed, data=data, device=device, seeds=seeds, out=out, limit=limit,
        only=only,
    )  # fmt: skip
    result = reproduce.reproduce(name, settings)
    left = result.record["unfinished"]
    if left:
        click.echo(f"{left} of {result.record['cells']} runs are still to be made", err=True)
    if out is None:
        click.echo(result.markdown())
        return
    for path in reproduce.write(name, result, out):
        click.echo(str(path))
