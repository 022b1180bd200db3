"""Cells: the single runs that a table is made of, kept in a file so that no run is made twice."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dpbnn
from dpbnn.reproduce.result import Settings

__all__ = ["Cells", "device_name", "versions"]

Cell = dict[str, Any]


class Cells:
    """Finished cells by what they are: all that decides the outcome of a run, but for its noise.

    A line of the file has the cell, its value, the seconds it took, device and versions. Several
    tables may share a file, and a file from another machine may be continued here.

    Args:
        name: of the file, without ".cells.jsonl".
        settings: of the reproduction.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.settings = settings
        self.path = None if settings.out is None else settings.out / f"{name}.cells.jsonl"
        self.begin = time.monotonic()
        self.lines: dict[str, dict[str, Any]] = {}
        if self.path is not None and self.path.exists():
            for text in _whole_lines(self.path):
                line = json.loads(text)
                self.lines[_key(line["cell"])] = line

    def all(
        self, cells: Sequence[Cell], compute: Callable[[Cell], dict[str, Any]]
    ) -> list[tuple[Cell, dict[str, Any]]]:
        """Return the cells that are finished, with their values; run the missing ones first.

        Cells that the time limit, or `only`, leaves out are not in the list; the record of the
        result says how many there are.

        Args:
            cells: what to run; JSON values.
            compute: from a cell to its value, JSON values too.
        """
        found = []
        for cell in cells:
            cell = {**cell, "fast": True} if self.settings.fast else cell
            line = self.lines.get(_key(cell)) or self._run(cell, compute)
            self.settings.used.append(line or {"cell": cell})
            if line is not None:
                found.append((cell, line["value"]))
        return found

    def _run(self, cell: Cell, compute: Callable[[Cell], dict[str, Any]]) -> dict[str, Any] | None:
        wanted = self.settings.only
        if wanted and not any(word in _key(cell) for word in wanted):
            return None
        begin = time.monotonic()
        if begin - self.begin > self.settings.limit:
            return None
        value = json.loads(json.dumps(compute(cell)))
        line = {
            "cell": cell,
            "value": value,
            "seconds": round(time.monotonic() - begin, 2),
            "device": device_name(self.settings.device),
            "versions": versions(),
        }
        self.lines[_key(cell)] = line
        if self.path is not None:
            _append(self.path, json.dumps(line))
        return line


def device_name(device: str) -> str:
    """Return what a device is called."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    return f"CPU ({platform.machine()})"


def versions() -> dict[str, str]:
    """Return the versions that a number depends on."""
    found = {"dpbnn": dpbnn.__version__, "python": platform.python_version()}
    found |= {"torch": torch.__version__, "numpy": np.__version__}
    with contextlib.suppress(PackageNotFoundError):
        found["dp-accounting"] = version("dp-accounting")
    return found


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, and cut off a last one that a kill left without its end."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return whole.splitlines()


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
