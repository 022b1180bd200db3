"""A figure as a stand-alone SVG file."""

from __future__ import annotations

import math

from dpbnn.report.svg import Drawing, Scale
from dpbnn.reproduce.result import Curve, Figure

__all__ = ["svg"]

_COLOURS = ("#1b6ca8", "#c4572e", "#3a8f4d", "#7b5ea7", "#8a6d3b", "#555555")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "1 4")
_PANEL, _LEFT, _TOP, _BOTTOM, _STEP = 330.0, 58.0, 74.0, 266.0, 262.0
_LEGEND, _LINE = 150.0, 18.0


def svg(title: str, figure: Figure) -> str:
    """Return the figure: one panel per panel name, one legend below.

    Args:
        title: of the figure.
        figure: its curves.
    """
    panels = list(dict.fromkeys(curve.panel for curve in figure.curves))
    names = list(dict.fromkeys(curve.name for curve in figure.curves))
    ends = _ends(figure)
    if not ends:
        above = " > 0" if figure.log else ""
        raise ValueError(f"{title}: no curve has a finite value{above}; there is nothing to draw")
    across = min(figure.columns, len(panels))
    rows = math.ceil(len(panels) / across)
    width = max(_PANEL * across, 60 + _LEGEND * min(len(names), 4))
    fit = max(1, int((width - 40) // _LEGEND))
    foot = _STEP * (rows - 1) + 318
    height = foot + _LINE * math.ceil(len(names) / fit) + 10
    words = "; ".join(
        f"{c.panel} {c.name}: from {line[0][1]:.3g} to {line[-1][1]:.3g}".strip()
        for c in figure.curves
        if (line := _points(c, figure.log))
    )
    drawing = Drawing(width, height, title, f"{figure.y} against {figure.x}. {words}.")
    drawing.text(8, 20, title, "title start")
    for index, panel in enumerate(panels):
        row, column = divmod(index, across)
        left, down = _PANEL * column + _LEFT, _STEP * row
        x = Scale(ends[0], (left, left + _PANEL - _LEFT - 14))
        y = _vertical(ends[1], figure.log, down)
        drawing.y_axis(y, left, "", right=x.range[1])
        if not column:
            drawing.text(2, down + _TOP - 10, figure.y, "label start")
        drawing.x_axis(x, down + _BOTTOM, figure.x if row == rows - 1 else "")
        drawing.text(sum(x.range) / 2, down + _TOP - 28, panel, "label middle")
        inside = [c for c in figure.curves if c.panel == panel]
        for curve in sorted(inside, key=lambda c: c.kind != "band"):
            _draw(drawing, curve, x, y, f"k{names.index(curve.name) % len(_COLOURS)}", figure.log)
    for index, name in enumerate(names):
        place, line = 20.0 + _LEGEND * (index % fit), foot + _LINE * (index // fit)
        role = f"curve k{index % len(_COLOURS)}"
        drawing.line([(place, line - 4), (place + 26, line - 4)], role)
        drawing.text(place + 32, line, name, "tick start")
    head, _, rest = str(drawing.markup()).partition("<svg ")
    opening, _, body = rest.partition(">")
    namespace = 'xmlns="http://www.w3.org/2000/svg"'
    return f"{head}<svg {namespace} {opening}><style>{_style()}</style>{body}\n"


def _vertical(ends: tuple[float, float], log: bool, down: float) -> Scale:
    span = (down + _BOTTOM, down + _TOP)
    if not log:
        return Scale(ends, span)
    lowest, highest = math.floor(math.log10(ends[0])), math.ceil(math.log10(ends[1]))
    return Scale((10.0**lowest, 10.0 ** max(highest, lowest + 1)), span, log=True)


def _draw(drawing: Drawing, curve: Curve, x: Scale, y: Scale, colour: str, log: bool) -> None:
    line = [(x(a), y(b)) for a, b in _points(curve, log)]
    if curve.kind == "line":
        drawing.line(line, f"curve {colour}")
    elif curve.kind == "dots":
        drawing.dots(line, f"dot {colour}")
    elif curve.kind == "bars":
        wide = max(2.0, 0.8 * (x.range[1] - x.range[0]) / max(1, len(curve.x)))
        for across, up in line:
            drawing.rect(across - wide / 2, up, wide, y.range[0] - up, f"bar f{colour[1:]}")
    elif curve.kind == "band":
        upper = [(x(a), y(b)) for a, b in zip(curve.x, curve.top, strict=True)]
        drawing.band(line, upper, f"bar f{colour[1:]}")
    else:
        raise ValueError(f"kind={curve.kind!r}: must be 'line', 'dots', 'bars' or 'band'")


def _points(curve: Curve, log: bool) -> list[tuple[float, float]]:
    least = 0 if log else -math.inf
    pairs = zip(curve.x, curve.y, strict=True)
    return [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and b > least]


def _ends(figure: Figure) -> list[tuple[float, float]]:
    """Return the ends of the data along both axes; bars stand on 0."""
    found = []
    for curve in figure.curves:
        found += _points(curve, figure.log)
        if curve.kind == "band":
            found += list(zip(curve.x, curve.top, strict=True))
        if curve.kind == "bars":
            found += [(a, 0.0) for a in curve.x]
    return [(min(values), max(values)) for values in zip(*found, strict=True)] if found else []


def _style() -> str:
    lines = "".join(
        f".k{i}{{stroke:{colour};stroke-dasharray:{dash or 'none'}}}.f{i}{{fill:{colour}}}"
        f".dot.k{i}{{stroke-dasharray:none}}"
        for i, (colour, dash) in enumerate(zip(_COLOURS, _DASHES, strict=True))
    )
    return (
        "svg{background:#fff;font:11px sans-serif}.title{font-size:13px;font-weight:bold}"
        ".grid{stroke:#ddd;fill:none}.axis{stroke:#444;fill:none}.curve{fill:none;stroke-width:1.8}"
        ".dot{fill:none;stroke-width:4;stroke-linecap:round;opacity:.7}.bar{opacity:.35}"
        f".middle{{text-anchor:middle}}.end{{text-anchor:end}}{lines}"
    )
