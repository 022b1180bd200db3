"""The papers' tables and figures, one function each; `dpbnn reproduce NAME` runs one."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from dpbnn.reproduce.result import Curve, Figure, Result, Settings, write

__all__ = ["PAPERS", "Curve", "Figure", "Result", "Settings", "items", "reproduce", "write"]

PAPERS = {"bayesian-dp": "dpbnn.reproduce.bayesian_dp"}
"""A module per paper; its `ITEMS` are functions from `Settings` to `Result`, by name."""

Item = Callable[[Settings], Result]


def items() -> dict[str, Item]:
    """Return everything that can be reproduced, by name, such as "bayesian-dp.fig3"."""
    return {
        f"{paper}.{name}": item
        for paper, module in PAPERS.items()
        for name, item in importlib.import_module(module).ITEMS.items()
    }


def reproduce(name: str, settings: Settings | None = None) -> Result:
    """Return a table or figure of a paper, computed now.

    Args:
        name: one of `items()`.
        settings: how thoroughly, with which seed and data; the full run by default.
    """
    known = items()
    if name not in known:
        raise ValueError(f"{name!r}: nothing of that name; give one of {', '.join(known)}")
    return known[name](settings or Settings())
