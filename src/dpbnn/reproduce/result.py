"""Results of a reproduction: a table with notes and perhaps a figure, and their files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Curve", "Figure", "Result", "Settings", "write"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a reproduction is run.

    Attributes:
        quick: a short version, to see that everything works.
        seed: of initialisation, synthetic data and weight draws; noise and sampling have none.
        data: folder of the datasets; DPBNN_DATA by default.
        device: where networks are trained.
    """

    quick: bool = False
    seed: int = 0
    data: Path | None = None
    device: str = "cpu"


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        name: in the legend.
        x: positions.
        y: values; those that are not finite are left out.
        panel: which of the figure's panels it is in.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    panel: str = ""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Lines over common axes, in panels side by side; the vertical axis is logarithmic.

    Attributes:
        x: name of the horizontal axis.
        y: name of the vertical axis.
        curves: the lines.
    """

    x: str
    y: str
    curves: tuple[Curve, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """A table or figure of a paper, as it came out here.

    Attributes:
        title: what it shows.
        columns: names of the columns.
        rows: values, as many as there are columns in each.
        notes: what the reader must know: settings, differences from the paper, what is estimated.
        figure: the curves, if it is a figure.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()
    figure: Figure | None = None

    def markdown(self) -> str:
        """Return the title, the table and the notes."""
        lines = [f"# {self.title}", "", _row(self.columns), _row(["---"] * len(self.columns))]
        lines += [_row([_cell(value) for value in row]) for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes), ""])

    def json(self) -> str:
        """Return everything, the curves included, as JSON; numbers that are not finite are null."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        values: dict[str, Any] = {"title": self.title, "rows": rows, "notes": self.notes}
        if self.figure is not None:
            values["figure"] = dataclasses.asdict(self.figure)
        return json.dumps(_finite(values), indent=2)


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


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
