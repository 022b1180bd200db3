"""Drawing: scales, axes and marks as SVG text, coloured by the page's style sheet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from markupsafe import Markup

Pair = tuple[float, float]


def number(value: float) -> str:
    """Return a short decimal for a coordinate."""
    text = f"{value:.1f}"
    text = text.removesuffix(".0")
    return "0" if text == "-0" else text


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round positions inside [low, high]: multiples of 1, 2 or 5 x 10^k."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"low={low}, high={high}: an axis needs finite ends")
    if high <= low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(k * step, 12) + 0.0 for k in range(first, last + 1)]


def label(value: float) -> str:
    """Return a tick's label."""
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:.6g}".replace("-", "−")


@dataclasses.dataclass(frozen=True)
class Scale:
    """A map from data to the drawing, linear or logarithmic, held inside its range.

    Attributes:
        domain: ends of the data.
        range: ends in the drawing.
        log: whether the map is linear in the logarithm.
    """

    domain: Pair
    range: Pair
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of `value`."""
        low, high = self.domain
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = 0.5 if high == low else (value - low) / (high - low)
        return self.range[0] + min(max(share, 0.0), 1.0) * (self.range[1] - self.range[0])

    def ticks(self, count: int = 5) -> list[float]:
        """Return round positions of the data."""
        if not self.log:
            return ticks(*self.domain, count)
        low, high = self.domain
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**p for p in powers for m in (1, 2, 5)]
        found = [v for v in found if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        whole = [v for v in found if abs(math.log10(v) - round(math.log10(v))) < 1e-9]
        return whole if len(found) > 2 * count and len(whole) > 1 else found


class Drawing:
    """Collects marks; classes name their role, the style sheet gives them colours.

    Args:
        width: width of the view box; the page scales it to the space available.
        height: height of the view box.
        title: what is shown.
        description: what it says, for readers who cannot see it.
    """

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, role: str, tip: str = ""
    ) -> None:
        """Draw a rectangle; sizes below 0 are drawn as 0."""
        self._add("rect", role, tip, x=x, y=y, width=max(width, 0), height=max(height, 0))

    def line(self, points: Iterable[Pair], role: str) -> None:
        """Draw a line through points."""
        self._add("path", role, d=_path(points))

    def band(self, lower: Sequence[Pair], upper: Sequence[Pair], role: str) -> None:
        """Fill between two lines."""
        self._add("path", role, d=f"{_path([*lower, *reversed(upper)])}Z")

    def dots(self, points: Iterable[Pair], role: str) -> None:
        """Draw many points as one element: zero-length strokes with round ends."""
        self._add("path", role, d="".join(f"M{number(x)} {number(y)}h0" for x, y in points))

    def circle(self, x: float, y: float, radius: float, role: str, tip: str = "") -> None:
        """Draw one point, which may have a tip."""
        self._add("circle", role, tip, cx=x, cy=y, r=radius)

    def text(self, x: float, y: float, words: str, role: str = "") -> None:
        """Write text at a point; roles `start`, `middle` and `end` say which part is there."""
        self._add("text", role, inside=_escape(words), x=x, y=y)

    def x_axis(
        self,
        scale: Scale,
        y: float,
        words: str = "",
        *,
        top: float | None = None,
        at: Sequence[float] | None = None,
    ) -> None:
        """Draw a horizontal axis at `y`, with rules up to `top`."""
        for value in scale.ticks() if at is None else at:
            x = scale(value)
            if top is not None:
                self.line([(x, top), (x, y)], "grid")
            self.text(x, y + 15, label(value), "tick middle")
        self.line([(scale.range[0], y), (scale.range[1], y)], "axis")
        if words:
            self.text(sum(scale.range) / 2, y + 32, words, "label middle")

    def y_axis(
        self,
        scale: Scale,
        x: float,
        words: str = "",
        *,
        right: float | None = None,
        at: Sequence[float] | None = None,
        form: Callable[[float], str] = label,
    ) -> None:
        """Draw the labels of a vertical axis left of `x`, with rules up to `right`.

        Its name stands above it, not turned.
        """
        for value in scale.ticks() if at is None else at:
            y = scale(value)
            if right is not None:
                self.line([(x, y), (right, y)], "grid")
            self.text(x - 6, y + 4, form(value), "tick end")
        if words:
            self.text(2, min(scale.range) - 10, words, "label start")

    def markup(self) -> Markup:
        """Return the drawing."""
        title, description = _escape(self.title), _escape(self.description)
        return Markup(
            f'<svg viewBox="0 0 {number(self.width)} '
            f'{number(self.height)}" role="img" aria-label="{title}"><title>{title}</title>'
            f"<desc>{description}</desc>{''.join(self._parts)}</svg>"
        )

    def _add(
        self, name: str, role: str, tip: str = "", inside: str | None = None, **places: float | str
    ) -> None:
        given = {k: v if isinstance(v, str) else number(v) for k, v in places.items()}
        values = " ".join(f'{key}="{value}"' for key, value in {**given, "class": role}.items())
        inside = f"<title>{_escape(tip)}</title>" if tip else inside
        self._parts.append(
            f"<{name} {values}" + ("/>" if inside is None else f">{inside}</{name}>")
        )


def _path(points: Iterable[Pair]) -> str:
    return "".join(f"{'L' if i else 'M'}{number(x)} {number(y)}" for i, (x, y) in enumerate(points))


def _escape(words: str) -> str:
    """Escape for XML, leaving out the characters that XML does not have."""
    kept = "".join(c for c in str(words) if (c >= " " or c in "\t\n") and c not in "\ufffe\uffff")
    return escape(kept.encode("utf-8", "replace").decode("utf-8"))
