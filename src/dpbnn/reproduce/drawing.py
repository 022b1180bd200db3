"""A figure as a stand-alone SVG file."""

from __future__ import annotations

import math

from dpbnn.report.svg import Drawing, Scale
from dpbnn.reproduce.result import Curve, Figure

__all__ = ["svg"]

_COLOURS = ("#1b6ca8", "#c4572e", "#3a8f4d", "#7b5ea7", "#8a6d3b", "#555555")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "1 4")
_PANEL, _HEIGHT, _LEFT, _TOP, _BOTTOM = 330.0, 346.0, 58.0, 74.0, 266.0


def svg(title: str, figure: Figure) -> str:
    """Return the figure: one panel per panel name, one legend below.

    Args:
        title: of the figure.
        figure: its curves.
    """
    panels = list(dict.fromkeys(curve.panel for curve in figure.curves))
    names = list(dict.fromkeys(curve.name for curve in figure.curves))
    points = [p for curve in figure.curves for p in _points(curve)]
    if not points:
        raise ValueError(f"{title}: no curve has a finite value > 0; there is nothing to draw")
    ends = [(min(values), max(values)) for values in zip(*points, strict=True)]
    lowest, highest = (math.floor(math.log10(ends[1][0])), math.ceil(math.log10(ends[1][1])))
    width = max(_PANEL * len(panels), 60 + 150 * len(names))
    words = "; ".join(
        f"{c.panel} {c.name}: from {_points(c)[0][1]:.3g} to {_points(c)[-1][1]:.3g}".strip()
        for c in figure.curves
        if _points(c)
    )
    drawing = Drawing(width, _HEIGHT, title, f"{figure.y} against {figure.x}. {words}.")
    drawing.text(8, 20, title, "title start")
    for index, panel in enumerate(panels):
        left = _PANEL * index + _LEFT
        x = Scale(ends[0], (left, left + _PANEL - _LEFT - 14))
        y = Scale((10.0**lowest, 10.0 ** max(highest, lowest + 1)), (_BOTTOM, _TOP), log=True)
        drawing.y_axis(y, left, figure.y if not index else "", right=x.range[1])
        drawing.x_axis(x, _BOTTOM, figure.x)
        drawing.text(sum(x.range) / 2, _TOP - 28, panel, "label middle")
        for curve in figure.curves:
            if curve.panel == panel:
                line = [(x(a), y(b)) for a, b in _points(curve)]
                drawing.line(line, f"curve k{names.index(curve.name) % len(_COLOURS)}")
    for index, name in enumerate(names):
        place = 20.0 + 150 * index
        role = f"curve k{index % len(_COLOURS)}"
        drawing.line([(place, _HEIGHT - 22), (place + 26, _HEIGHT - 22)], role)
        drawing.text(place + 32, _HEIGHT - 18, name, "tick start")
    head, _, rest = str(drawing.markup()).partition("<svg ")
    opening, _, body = rest.partition(">")
    namespace = 'xmlns="http://www.w3.org/2000/svg"'
    return f"{head}<svg {namespace} {opening}><style>{_style()}</style>{body}\n"


def _points(curve: Curve) -> list[tuple[float, float]]:
    pairs = zip(curve.x, curve.y, strict=True)
    return [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and b > 0]


def _style() -> str:
    lines = "".join(
        f".k{i}{{stroke:{colour};stroke-dasharray:{dash or 'none'}}}"
        for i, (colour, dash) in enumerate(zip(_COLOURS, _DASHES, strict=True))
    )
    return (
        "svg{background:#fff;font:11px sans-serif}.title{font-size:13px;font-weight:bold}"
        ".grid{stroke:#ddd;fill:none}.axis{stroke:#444;fill:none}.curve{fill:none;stroke-width:1.8}"
        f".middle{{text-anchor:middle}}.end{{text-anchor:end}}{lines}"
    )
