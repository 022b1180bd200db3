"""Settings of `records`, compared on the last sixth of the training images."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from dpbnn.reproduce.cells import Cells
from dpbnn.reproduce.records import (
    RECORDS,
    Loaded,
    Record,
    _langevin,
    _moments,
    _pixels,
    _small_mlp,
    _tanh_cnn,
    _tanh_mlp,
    run,
)
from dpbnn.reproduce.result import Result, Settings, Summary

__all__ = ["records_validation"]

_ONE = {"views": 0, "batch": 4096, "epochs": 40}
GRID: dict[str, dict[str, dict[str, Any]]] = {
    "CNN on pixels": {
        **{
            f"rate {rate}, clip {clip}": {
                **_ONE, "method": _pixels(rate, clip), "network": _tanh_cnn, "mu": 0.05
            }
            for rate, clip in ((1.0, 0.1), (2.0, 0.1), (4.0, 0.1), (0.5, 0.5), (1.0, 0.5))
        },
        **{
            f"rate {rate}, clip 0.1, batch {batch}, {epochs} epochs": {
                "views": 0, "method": _pixels(rate, 0.1), "network": _tanh_cnn, "batch": batch,
                "epochs": epochs,
            }
            for rate, batch, epochs in (
                (2.0, 2048, 40), (2.0, 4096, 60), (3.0, 8192, 60), (2.0, 8192, 80),
                (4.0, 8192, 40), (1.0, 2048, 40),
            )
        },
        **{
            f"five views, rate {rate}, clip 0.1, batch {batch}, {epochs} epochs": {
                "method": _pixels(rate, 0.1), "batch": batch, "epochs": epochs
            }
            for rate, batch, epochs in (
                (1.0, 2048, 40), (2.0, 4096, 40), (2.0, 2048, 40), (2.0, 4096, 70), (4.0, 4096, 40)
            )
        },
        "five views, mean logits, rate 2.0, clip 0.1, batch 2048, 40 epochs": {
            "method": _pixels(2.0, 0.1), "batch": 2048, "epochs": 40, "logits": True
        },
    },
    "MLP on pixels": {
        **{
            f"rate {rate}, clip {clip}": {
                **_ONE, "method": _pixels(rate, clip), "network": _tanh_mlp, "mu": 0.05
            }
            for rate, clip in ((0.5, 0.5), (1.0, 0.5), (2.0, 0.1), (4.0, 0.1))
        },
        **{
            f"{network.__name__}, rate {rate}, clip 0.1, batch {batch}, {epochs} epochs": {
                "views": 0, "method": _pixels(rate, 0.1), "network": network, "batch": batch,
                "epochs": epochs,
            }
            for network, rate, batch, epochs in (
                (_tanh_mlp, 2.0, 8192, 40), (_small_mlp, 2.0, 4096, 40),
                (_small_mlp, 2.0, 8192, 40), (_small_mlp, 4.0, 8192, 40),
                (_small_mlp, 4.0, 8192, 80), (_tanh_mlp, 4.0, 8192, 60),
            )
        },
        **{
            f"five views, rate {rate}, clip 0.1, batch {batch}, {epochs} epochs": {
                "method": _pixels(rate, 0.1), "batch": batch, "epochs": epochs
            }
            for rate, batch, epochs in (
                (2.0, 4096, 40), (4.0, 8192, 60), (4.0, 8192, 100), (8.0, 8192, 60), (4.0, 4096, 60)
            )
        },
        **{
            f"five views, mean logits, rate {rate}, clip {clip}, batch {batch}, {epochs} epochs": {
                "method": _pixels(rate, clip), "batch": batch, "epochs": epochs, "logits": True
            }
            for rate, clip, batch, epochs in (
                (4.0, 0.1, 8192, 60), (2.0, 0.1, 4096, 40), (0.8, 0.5, 8192, 60)
            )
        },
    },
    "BBP head, five views": {
        f"rho {rho}": {"method": functools.partial(_moments, rho=rho)}
        for rho in (-5.0, -6.0, -7.0)
    },
    "SGHMC head, five views": {
        f"temperature {heat:g}": {"method": functools.partial(_langevin, temperature=heat)}
        for heat in (1.0, 0.1, 0.01)
    },
}  # fmt: skip
"""Settings that `records-validation` compares on the last sixth of the training images."""


def _changed(name: str, setting: str) -> Record:
    """Return a record with the changes of a setting; the mean of logits is one of them."""
    return dataclasses.replace(RECORDS[name], **{"logits": False, **GRID[name][setting]})


def records_validation(settings: Settings) -> Result:
    """Settings of `records` compared on the last sixth of the training images."""
    load = Loaded(settings, True)
    raw = load.raw.name
    cells = [
        {
            "run": name,
            "setting": setting,
            "seed": settings.seed,
            "settings": _changed(name, setting).settings(),
            **({} if raw == "mnist, validation" else {"images": raw}),
        }
        for name, grid in GRID.items()
        for setting in grid
    ]
    cells = cells[::6] if settings.fast else cells

    def one(cell: dict[str, Any]) -> dict[str, Any]:
        record = _changed(cell["run"], cell["setting"])
        return run(record, load(record), cell["seed"], settings.device, settings.fast)

    found = Cells("records-validation", settings).all(cells, one)
    best = {
        name: max((p for p in found if p[0]["run"] == name), key=lambda p: p[1]["accuracy"],
                  default=None)
        for name in GRID
    }  # fmt: skip
    taken = [n for n, pair in best.items() if pair and _same(pair[0], RECORDS[n])]
    return Result(
        title="Settings of the records, on the last sixth of the training images",
        columns=("run", "setting", "accuracy", "NLL", "ECE", "epsilon (PLD)"),
        rows=tuple(
            (c["run"], _words(c), *(v[k] for k in ("accuracy", "nll", "ece", "epsilon")))
            for c, v in found
        ),
        notes=(
            f"{len(found)} runs, one seed each, which are not in epsilon. Where batch and epochs "
            "are not named, they are 4096 and 40 on pixels, and 2048 and 45 for the heads",
        ),
        summary=Summary(
            paper="-",
            protocol="-",
            corrected="; ".join(
                f"{n}: {_words(p[0])} ({p[1]['accuracy']:.4f})" for n, p in best.items() if p
            )
            or "-",
            epsilon="outside",
            verdict=f"records has the setting of the best accuracy in {len(taken)} of "
            f"{sum(1 for pair in best.values() if pair)} kinds"
            if found
            else "not complete",
        ),
    )


def _words(cell: dict[str, Any]) -> str:
    """Return the name of a setting, with the network in words."""
    units = {"_tanh_mlp": "256 tanh units", "_small_mlp": "64 tanh units"}
    name, _, rest = cell["setting"].partition(", ")
    return f"{units[name]}, {rest}" if name in units else cell["setting"]


def _same(cell: dict[str, Any], record: Record) -> bool:
    return bool(cell["settings"] == record.settings())


ITEMS = {"records-validation": records_validation}
