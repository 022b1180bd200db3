"""Results of a reproduction: a table with notes and perhaps a figure, and their files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Curve", "Figure", "Result", "Settings", "Summary", "write"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a reproduction is run.

    Attributes:
        fast: a short version, to see that everything works.
        seed: of initialisation, synthetic data and weight draws; noise and sampling have none.
        data: folder of the datasets; DPBNN_DATA by default.
        device: where networks are trained.
        seeds: how many seeds, simulations or splits; the item's own number by default.
        out: folder where finished cells are kept; None keeps none.
        limit: seconds after which no further cell is started.
        only: cells to run, those whose text holds one of these; all if empty.
        used: the lines of the cells that went into the result, filled by `Cells`.
    """

    fast: bool = False
    seed: int = 0
    data: Path | None = None
    device: str = "cpu"
    seeds: int | None = None
    out: Path | None = None
    limit: float = math.inf
    only: tuple[str, ...] = ()
    used: list[dict[str, Any]] = dataclasses.field(default_factory=list, compare=False)

    def count(self, full: int, fast: int = 1) -> int:
        """Return how many seeds to run: those asked for, or the item's own number."""
        return self.seeds or (fast if self.fast else full)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        name: in the legend.
        x: positions.
        y: values; those that are not finite are left out.
        panel: which of the figure's panels it is in.
        kind: "line", "dots", "bars", or "band" from y up to `top`.
        top: upper edge of a band.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    panel: str = ""
    kind: str = "line"
    top: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Figure:
    """Lines over common axes, in panels side by side.

    Attributes:
        x: name of the horizontal axis.
        y: name of the vertical axis.
        curves: the lines.
        log: whether the vertical axis is logarithmic.
        columns: panels in a row.
    """

    x: str
    y: str
    curves: tuple[Curve, ...]
    log: bool = True
    columns: int = 3


@dataclasses.dataclass(frozen=True)
class Summary:
    """A result in one row of the page: every text is made from the numbers of the run.

    Attributes:
        paper: what the paper prints.
        protocol: what its protocol gives here.
        corrected: what a correct protocol gives here.
        epsilon: the epsilon that the private runs have, by PLD.
        verdict: one line.
    """

    paper: str
    protocol: str
    corrected: str
    epsilon: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class Result:
    """A table or figure of a paper, as it came out here.

    Attributes:
        title: what it shows.
        columns: names of the columns.
        rows: values, as many as there are columns in each.
        notes: what the reader must know: settings, differences from the paper, what is estimated.
        figure: the curves, if it is a figure.
        summary: the result in one row.
        record: name, command, versions, device and seconds; `reproduce` fills it in.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()
    figure: Figure | None = None
    summary: Summary | None = None
    record: dict[str, Any] = dataclasses.field(default_factory=dict)

    def markdown(self) -> str:
        """Return the title, the table and the notes."""
        lines = [f"# {self.title}", "", *table(self.columns, self.rows)]
        lines += ["", *(f"- {note}" for note in self.notes), ""]
        if self.summary is not None:
            lines += [f"Verdict: {self.summary.verdict}", ""]
        return "\n".join(lines)

    def json(self) -> str:
        """Return everything, the curves included, as JSON; numbers that are not finite are null."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        values: dict[str, Any] = {"title": self.title, "rows": rows, "notes": self.notes}
        if self.summary is not None:
            values["summary"] = dataclasses.asdict(self.summary)
        if self.record:
            values["record"] = self.record
        text = json.dumps(_finite(values), indent=1)
        if self.figure is None:
            return text
        curves = json.dumps(_finite(dataclasses.asdict(self.figure)))  # one line, they are long
        return f'{text[:-2]},\n "figure": {curves}\n}}'


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [_row(columns), _row(["---"] * len(columns))]
    return lines + [_row([cell(value) for value in row]) for row in rows]


def write(name: str, result: Result, folder: Path) -> list[Path]:
    """Write a result as Markdown, JSON and, if it is a figure, SVG; return the files.

    Args:
        name: of the files.
        result: what to write.
        folder: where to; made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"md": result.markdown(), "json": result.json() + "\n"}
    if result.figure is not None:
        from dpbnn.reproduce.drawing import svg

        texts["svg"] = svg(result.title, result.figure)
    files = []
    for suffix, text in texts.items():
        path = folder / f"{name}.{suffix}"
        path.write_text(text, encoding="utf-8")
        files.append(path)
    return files


def cell(value: Any) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
