"""The papers' tables and figures, one function each; `dpbnn reproduce NAME` runs one."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable
from typing import Any

from dpbnn.reproduce.result import Curve, Figure, Result, Settings, Summary, write

__all__ = [
    "NEEDS",
    "PAPERS",
    "Curve",
    "Figure",
    "Result",
    "Settings",
    "Summary",
    "items",
    "reproduce",
    "write",
]

PAPERS = {
    "dp-bnn": ("dp_bnn_theory", "dp_bnn_mnist", "dp_bnn_regression", "dp_bnn_figures"),
    "dp-sep": ("dp_sep_mixture", "dp_sep_uci", "dp_sep_theorem"),
    "bayesian-dp": ("bayesian_dp",),
    "dp-bbb": ("dp_bbb_items",),
    "": ("records", "records_validation", "speed"),
}
"""The modules of a paper; their `ITEMS` are functions from `Settings` to `Result`, by name."""

NEEDS = {
    "bayesian-dp.cifar10": "it needs CIFAR10 and VGG-16 with weights of ImageNet, which this "
    "library does not download (`--fast` takes synthetic features instead). Write x_train [50000, "
    "width], y_train, x_test [10000, width] and y_test, the outputs of VGG-16's convolutions on "
    "the images enlarged to 128 x 128, to DPBNN_DATA/cifar10/vgg16-features.npz by numpy.savez",
}
"""Files that an item needs and that are not among the library's datasets."""

Item = Callable[[Settings], Result]


def items(paper: str | None = None) -> dict[str, Item]:
    """Return everything that can be reproduced, by name, such as "bayesian-dp.fig3".

    Args:
        paper: one of `PAPERS`, for its items alone; the modules of others are not imported then.
    """
    return {
        f"{key}.{name}" if key else name: item
        for key, modules in PAPERS.items()
        if paper is None or key == paper
        for module in modules
        for name, item in importlib.import_module(f"dpbnn.reproduce.{module}").ITEMS.items()
    }


def reproduce(name: str, settings: Settings | None = None) -> Result:
    """Return a table or figure of a paper, computed now or from cells that are finished.

    Args:
        name: one of `items()`.
        settings: how thoroughly, with which seed and data; the full run by default.
    """
    known = items(name.partition(".")[0] if "." in name else "")
    if name not in known:
        raise ValueError(f"{name!r}: nothing of that name; give one of {', '.join(items())}")
    settings = dataclasses.replace(settings or Settings(), used=[])
    begin = time.monotonic()
    result = known[name](settings)
    return dataclasses.replace(result, record=_record(name, settings, time.monotonic() - begin))


def _record(name: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """Return where the numbers come from: command, device, versions, time."""
    from dpbnn.reproduce.cells import device_name, versions

    finished = [line for line in settings.used if "value" in line]
    spent = sum(line["seconds"] for line in finished)
    options = {"fast": settings.fast, "seed": settings.seed, "seeds": settings.seeds}
    words = [
        "dpbnn reproduce",
        name,
        *(["--fast"] if settings.fast else []),
        *([f"--seed {settings.seed}"] if settings.seed else []),
        *([f"--seeds {settings.seeds}"] if settings.seeds else []),
    ]
    used = [line["device"] for line in finished] or [device_name(settings.device)]
    if not all(name.startswith("CPU") for name in used):
        words.append("--device cuda")
    found = [line["versions"] for line in finished] or [versions()]
    return {
        "name": name,
        "command": " ".join(words),
        "settings": options,
        "device": "; ".join(dict.fromkeys(used)),
        "versions": {
            key: ", ".join(dict.fromkeys(v[key] for v in found if key in v)) for key in found[0]
        },
        "seconds": round(spent or seconds, 1),
        "cells": len(settings.used),
        "unfinished": len(settings.used) - len(finished),
    }
