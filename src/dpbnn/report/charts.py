"""The charts of a report: each takes plain numbers and returns SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from dpbnn.report.plain_words import percent_up
from dpbnn.report.svg import Drawing, Scale

_WIDTH = 380.0
_LEFT, _RIGHT = 42.0, 366.0
_UNIT = [0, 0.2, 0.4, 0.6, 0.8, 1]
_MOST_DRAWS = 100
_DIGIT, _LINE = 5.6, 10.0  # width and height of a count
_Z = 1.959964  # 95 % of a Gaussian


def guess(chance: float, approximate: bool = False) -> Markup:
    """Show the best chance of an attacker's guess between a coin toss and certainty."""
    drawing = Drawing(
        _WIDTH,
        78,
        "How often an attacker can guess right",
        f"A scale from 50 percent, a coin toss, to 100 percent, certainty. This guarantee allows "
        f"{'about' if approximate else 'at most'} {percent_up(chance)}.",
    )
    scale = Scale((0.5, 1.0), (14, _WIDTH - 14))
    drawing.rect(14, 30, _WIDTH - 28, 12, "track")
    drawing.rect(14, 30, scale(chance) - 14, 12, "c2 fill")
    drawing.line([(scale(chance), 24), (scale(chance), 48)], "ink-line")
    place = min(max(scale(chance), 52), _WIDTH - 52)
    words = f"{'about' if approximate else 'at most'} {percent_up(chance)}"
    drawing.text(place, 16, words, "strong middle")
    drawing.text(14, 62, "50 %", "tick start")
    drawing.text(14, 75, "coin toss", "tick start")
    drawing.text(_WIDTH - 14, 62, "100 %", "tick end")
    drawing.text(_WIDTH - 14, 75, "certainty", "tick end")
    return drawing.markup()


def reliability(
    edges: Sequence[float],
    counts: Sequence[int],
    confidence: Sequence[float | None],
    accuracy: Sequence[float | None],
) -> Markup:
    """Show accuracy against confidence by bin, with Wilson intervals, and counts below."""
    bins = [
        (edges[i], edges[i + 1], int(n), confidence[i], accuracy[i])
        for i, n in enumerate(counts)
        if n and _known(confidence[i]) and _known(accuracy[i])
    ]
    drawing = Drawing(
        _WIDTH,
        400,
        "Reliability diagram",
        "Accuracy against mean confidence in each bin; on the diagonal the two agree. "
        + "; ".join(f"confidence {c:.2f}, accuracy {a:.2f}, {n} records" for _, _, n, c, a in bins)
        + ".",
    )
    x = Scale((0, 1), (_LEFT, _RIGHT))
    y = Scale((0, 1), (272, 30))
    most = max([1, *(n for _, _, n, _, _ in bins)])
    drawing.y_axis(y, _LEFT, "accuracy", right=_RIGHT, at=_UNIT)
    drawing.x_axis(x, 272, top=30, at=_UNIT)
    drawing.line([(x(0), y(0)), (x(1), y(1))], "ideal")
    for low, high, n, c, a in bins:
        bottom, top = wilson(a, n)
        drawing.line([(x(c), y(bottom)), (x(c), y(top))], "c1 whisker")
        drawing.line([(x(c), y(c)), (x(c), y(a))], "gap")
        tip = f"{low:.2f} to {high:.2f}: {n} records, confidence {c:.3f}, accuracy {a:.3f}"
        drawing.circle(x(c), y(a), 3 + 4 * math.sqrt(n / most), "c1 mark", tip)
    height = Scale((0, most), (362, 322))
    drawing.text(2, 303, "records", "label start")
    end, above = -math.inf, 0.0  # right end and height of the label before
    for low, high, n, _, _ in bins:
        left, right = x(low) + 0.5, x(high) - 0.5
        drawing.rect(left, height(n), right - left, 362 - height(n), "c1 fill soft", f"{n} records")
        middle, reach, up = (left + right) / 2, _DIGIT * len(_count(n)) / 2, height(n) - 4
        if middle - reach < end and abs(up - above) < _LINE:
            up = above - _LINE if above - _LINE > 300 else above + _LINE
        drawing.text(middle, up, _count(n), "count middle")
        end, above = middle + reach + 2, up
    drawing.line([(_LEFT, 362), (_RIGHT, 362)], "axis")
    drawing.text((_LEFT + _RIGHT) / 2, 392, "confidence", "label middle")
    for value in _UNIT:
        drawing.text(x(value), 377, f"{value:g}", "tick middle")
    return drawing.markup()


def confidence_histogram(edges: Sequence[float], counts: Sequence[int]) -> Markup:
    """Show how many test records got which confidence."""
    total = max(sum(counts), 1)
    drawing, x, y = _panel(
        260,
        "Confidence histogram",
        "Share of test records by confidence: "
        + "; ".join(f"{edges[i]:.2f} to {edges[i + 1]:.2f}: {n}" for i, n in enumerate(counts) if n)
        + ".",
        max(counts, default=0) / total * 1.08 or 1,
    )
    drawing.y_axis(y, _LEFT, "share of test records", right=_RIGHT, form=_percent)
    _bars(drawing, x, y, edges, counts, total)
    drawing.x_axis(x, 218, "confidence", at=_UNIT)
    return drawing.markup()


def risk_coverage(coverage: Sequence[float], risk: Sequence[float], aurc: float | None) -> Markup:
    """Show the error on the records answered, against the share of records answered."""
    points = _thin(list(zip(coverage, risk, strict=True)), 300)
    drawing, x, y = _panel(
        260,
        "Risk-coverage curve",
        f"Error rate among the most certain records, as more are answered; at full coverage it is "
        f"{risk[-1]:.3f}" + (f", the area under the curve is {aurc:.4f}." if aurc else "."),
        max(risk) * 1.1 or 1,
    )
    drawing.y_axis(y, _LEFT, "error among answered", right=_RIGHT, form=_percent)
    shape = [(x(c), y(r)) for c, r in points]
    drawing.band([(px, 218) for px, _ in shape], shape, "c1 area")
    drawing.line([(_LEFT, y(risk[-1])), (_RIGHT, y(risk[-1]))], "ideal")
    drawing.line(shape, "c1 curve")
    drawing.x_axis(x, 218, "share of records answered", at=_UNIT)
    return drawing.markup()


def class_draws(draws: Any, classes: Sequence[str], truth: str, most: int = 10) -> Markup:
    """Show each class's probability over posterior draws: every draw, quartiles and mean."""
    draws = np.asarray(draws, dtype=float)
    order = range(len(classes))
    if len(classes) > most:
        order = np.argsort(-draws.mean(0), kind="stable")[:most].tolist()
    width = 300.0
    names = [_shorten(classes[k], 12) for k in order]
    left = 14 + 6.6 * max(len(name) for name in names)
    row = 17.0
    bottom = 6 + row * len(names)
    drawing = Drawing(
        width,
        bottom + 20,
        f"Posterior distribution of the class probabilities; truth {truth}",
        "; ".join(
            f"{classes[k]}: mean {draws[:, k].mean():.2f}, middle half "
            f"{np.quantile(draws[:, k], 0.25):.2f} to {np.quantile(draws[:, k], 0.75):.2f}"
            for k in order
        )
        + ".",
    )
    x = Scale((0, 1), (left, width - 10))
    for value in (0, 0.5, 1):
        drawing.line([(x(value), 4), (x(value), bottom)], "grid")
        drawing.text(x(value), bottom + 14, f"{value:g}", "tick middle")
    shown = draws[_spread(len(draws), _MOST_DRAWS)]
    for i, k in enumerate(order):
        y = 6 + row * (i + 0.5)
        role = "c3" if classes[k] == truth else "c1"
        bold = " strong" if classes[k] == truth else ""
        drawing.text(left - 8, y + 4, names[i], f"tick end{bold}")
        offset = [((7 * j) % 11 - 5) * 0.9 for j in range(len(shown))]
        points = [(x(p), y + d) for p, d in zip(shown[:, k], offset, strict=True)]
        drawing.dots(points, f"{role} strip")
        low, high = np.quantile(draws[:, k], [0.25, 0.75])
        tip = f"{classes[k]}: mean {draws[:, k].mean():.3f}, quartiles {low:.3f} and {high:.3f}"
        drawing.rect(x(low) - 0.5, y - 5, x(high) - x(low) + 1, 10, f"{role} box", tip)
        mean = x(draws[:, k].mean())
        drawing.line([(mean, y - 6.5), (mean, y + 6.5)], "ink-line")
    return drawing.markup()


def real_draws(draws: Any, truth: float, std: float) -> Markup:
    """Show the means that posterior draws predict, the 95 % span with noise, and the truth."""
    draws = np.asarray(draws, dtype=float)
    mean, reach = draws.mean(), _Z * std
    low, high = min(draws.min(), mean - reach, truth), max(draws.max(), mean + reach, truth)
    margin = (high - low or 1) * 0.06
    drawing = Drawing(
        300,
        64,
        "Posterior distribution of the prediction",
        f"Means of the draws from {draws.min():.4g} to {draws.max():.4g}, their mean {mean:.4g}; "
        f"with noise 95 percent from {mean - reach:.4g} to {mean + reach:.4g}; the true value is "
        f"{truth:.4g}.",
    )
    x = Scale((low - margin, high + margin), (12, 288))
    drawing.rect(x(mean - reach), 20, x(mean + reach) - x(mean - reach), 8, "c6 area wide")
    shown = draws[_spread(len(draws), _MOST_DRAWS)]
    offset = [((7 * j) % 11 - 5) * 1.4 for j in range(len(shown))]
    drawing.dots([(x(v), 24 + d) for v, d in zip(shown, offset, strict=True)], "c1 strip")
    first, third = np.quantile(draws, [0.25, 0.75])
    drawing.rect(x(first), 15, max(x(third) - x(first), 1), 18, "c1 box")
    drawing.line([(x(mean), 12), (x(mean), 36)], "ink-line")
    drawing.circle(x(truth), 24, 5, "c3 mark", f"true value {truth:.4g}")
    drawing.x_axis(x, 44)
    return drawing.markup()


def band(
    x: Any,
    mean: Any,
    epistemic: Any,
    aleatoric: Any,
    *,
    x_label: str,
    y_label: str,
    points: tuple[Any, Any] | None = None,
    truth: Any = None,
    bounds: tuple[float, float] | None = None,
) -> Markup:
    """Show predictions with two bands (95 %): posterior uncertainty, and that plus noise."""
    order = np.argsort(np.asarray(x, dtype=float), kind="stable")
    x, mean, epistemic, aleatoric = (
        np.asarray(v, dtype=float)[order] for v in (x, mean, epistemic, aleatoric)
    )
    inner, outer = (
        [np.clip(mean + side * _Z * std, *(bounds or (-np.inf, np.inf))) for side in (-1, 1)]
        for std in (epistemic, np.sqrt(epistemic**2 + aleatoric**2))
    )
    heights = list(outer)
    if points is not None:
        heights.append(np.asarray(points[1], dtype=float))
    if truth is not None:
        truth = np.asarray(truth, dtype=float)[order]
        heights.append(truth)
    low, high = min(h.min() for h in heights), max(h.max() for h in heights)
    margin = (high - low or 1) * 0.04
    width = 560.0
    drawing = Drawing(
        width,
        330,
        f"Prediction of {y_label} along {x_label}",
        f"Mean with 95 percent bands. Posterior std lies between {epistemic.min():.3g} and "
        f"{epistemic.max():.3g}, std of the noise between {aleatoric.min():.3g} and "
        f"{aleatoric.max():.3g}.",
    )
    across = Scale((float(x[0]), float(x[-1])), (54, width - 14))
    up = Scale((low - margin, high + margin), (286, 30))
    drawing.y_axis(up, 54, y_label, right=width - 14)
    keep = _spread(len(x), 300)
    px = [across(v) for v in x[keep]]

    def at(values: np.ndarray) -> list[tuple[float, float]]:
        return [(p, up(v)) for p, v in zip(px, values[keep], strict=True)]

    drawing.band(at(outer[0]), at(outer[1]), "c6 area wide")
    drawing.band(at(inner[0]), at(inner[1]), "c1 area deep")
    if points is not None:
        shown = _spread(len(points[0]), 500)
        pairs = np.stack([np.asarray(points[0]), np.asarray(points[1])], 1).astype(float)[shown]
        inside = [(a, b) for a, b in pairs if x[0] <= a <= x[-1]]
        drawing.dots([(across(a), up(b)) for a, b in inside], "ink dot")
    drawing.line(at(mean), "c1 curve")
    if truth is not None:
        drawing.line(at(truth), "c2 ideal")
    drawing.x_axis(across, 286, x_label, at=across.ticks(8))
    return drawing.markup()


def coverage(rows: Sequence[tuple[float, float, float, float]]) -> Markup:
    """Show the share of targets inside the predicted intervals, against what was promised.

    Each row is (promised, found, low, high) with the ends of an interval of what was found, NaN
    where there is none.
    """
    words = "; ".join(f"promised {p:.0%}, found {a:.1%}" for p, a, _, _ in rows) + "."
    drawing, x, y = _panel(300, "Coverage of predictive intervals", words)
    drawing.y_axis(y, _LEFT, "share of targets inside", right=_RIGHT, at=_UNIT)
    drawing.x_axis(x, 258, "promised probability", top=30, at=_UNIT)
    drawing.line([(x(0), y(0)), (x(1), y(1))], "ideal")
    drawing.line([(x(p), y(a)) for p, a, _, _ in rows], "c1 thin")
    for p, a, low, high in rows:
        if _known(low) and _known(high):
            drawing.line([(x(p), y(low)), (x(p), y(high))], "c1 whisker")
        drawing.circle(x(p), y(a), 4.5, "c1 mark", f"promised {p:.0%}, found {a:.1%}")
    return drawing.markup()


def pit(edges: Sequence[float], counts: Sequence[int]) -> Markup:
    """Show the histogram of predictive probabilities below the target; flat where calibrated."""
    total, bins = sum(counts), len(counts)
    spread = 2.575829 * math.sqrt(total * (1 / bins) * (1 - 1 / bins))
    drawing, x, y = _panel(
        300,
        "Probability integral transform",
        f"Counts in {bins} bins of the predictive distribution function at the target: "
        f"{', '.join(str(n) for n in counts)}; a calibrated model has {total / bins:.1f} in each.",
        max(max(counts, default=1), total / bins + spread) * 1.1 or 1,
    )
    drawing.y_axis(y, _LEFT, "test records", right=_RIGHT)
    _bars(drawing, x, y, edges, counts)
    high, low = y(total / bins + spread), y(max(total / bins - spread, 0))
    drawing.rect(_LEFT, high, _RIGHT - _LEFT, low - high, "expected")
    drawing.line([(_LEFT, y(total / bins)), (_RIGHT, y(total / bins))], "ideal")
    drawing.x_axis(x, 258, "predictive distribution function at the target", at=_UNIT)
    return drawing.markup()


def metric_by_epsilon(
    name: str, groups: Mapping[str, Sequence[tuple[float | None, float, float, float]]]
) -> Markup:
    """Show one metric of several runs against epsilon, a line and colour for each method.

    Each run is (epsilon, value, low, high) with low and high NaN where there is no interval; a
    value that is not finite is left out. Runs without a guarantee (epsilon None) stand on the
    right, under "none".
    """
    groups = {m: [run for run in group if _known(run[1])] for m, group in groups.items()}
    runs = [run for group in groups.values() for run in group]
    finite = sorted({e for e, *_ in runs if e is not None})
    heights = [v for _, *values in runs for v in values if _known(v)] or [0.0, 1.0]
    low, high = min(heights), max(heights)
    margin = (high - low or abs(high) or 1) * 0.12
    drawing = Drawing(
        _WIDTH,
        290,
        f"{name} by epsilon",
        "; ".join(
            f"{method}, epsilon {'none' if e is None else f'{e:.3g}'}: {v:.4g}"
            for method, group in groups.items()
            for e, v, _, _ in group
        )
        + ".",
    )
    left, right, bottom = 50.0, _RIGHT, 248.0
    split = any(e is None for e, *_ in runs) and bool(finite)
    end = right - 46 if split else right
    y = Scale((max(low - margin, 0) if low >= 0 else low - margin, high + margin), (bottom, 30))
    drawing.y_axis(y, left, name, right=right)
    span = (finite[0] * 0.8, finite[-1] * 1.25) if finite else (0.5, 2.0)
    x = Scale(span, (left + 6, end - 6), log=True)
    aside = right - 20 if split else (left + right) / 2

    for i, (method, group) in enumerate(groups.items()):
        role = f"c{i % 6 + 1}"
        # Runs at one epsilon stand side by side.
        shift = 7.0 * (i - (len(groups) - 1) / 2)
        known = sorted(run for run in group if run[0] is not None)
        drawing.line([(x(e) + shift, y(v)) for e, v, _, _ in known], f"{role} thin")
        for e, v, least, most in group:
            px = (aside if e is None else x(e)) + shift
            if _known(least) and _known(most):
                drawing.line([(px, y(least)), (px, y(most))], f"{role} whisker")
            place = "no guarantee" if e is None else f"epsilon {e:.3g}"
            _symbol(drawing, i, px, y(v), role, f"{method}, {place}: {v:.4g}")
    drawing.line([(left, bottom), (right, bottom)], "axis")
    labelled = -math.inf
    for value in finite if len(finite) <= 6 else x.ticks(4):
        if x(value) - labelled > 30:  # runs of one budget differ a little in what they spent
            labelled = x(value)
            drawing.text(labelled, bottom + 15, f"{value:.2g}", "tick middle")
    if len(finite) < len({e for e, *_ in runs}):
        drawing.text(aside, bottom + 15, "none", "tick middle")
    if split:
        drawing.line([(end, 30), (end, bottom)], "ideal")
    drawing.text((left + right) / 2, bottom + 34, "epsilon (log scale)", "label middle")
    return drawing.markup()


def key_symbol(index: int) -> Markup:
    """Return the mark of a method, as `metric_by_epsilon` draws it, for a legend."""
    drawing = Drawing(14, 14, "mark", "the mark of this method in the charts")
    _symbol(drawing, index, 7, 7, f"c{index % 6 + 1}", "")
    return drawing.markup()


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share among n."""
    if n <= 0:
        return 0.0, 1.0
    z2 = _Z**2 / n
    middle = (share + z2 / 2) / (1 + z2)
    half = _Z / (1 + z2) * math.sqrt(share * (1 - share) / n + z2 / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def _panel(height: float, title: str, words: str, top: float = 1.0) -> tuple[Drawing, Scale, Scale]:
    """Return a drawing whose axes go from 0 to 1 across and from 0 to `top` upwards."""
    across, up = Scale((0, 1), (_LEFT, _RIGHT)), Scale((0, top), (height - 42, 30))
    return Drawing(_WIDTH, height, title, words), across, up


def _bars(
    drawing: Drawing,
    x: Scale,
    y: Scale,
    edges: Sequence[float],
    counts: Sequence[int],
    unit: int = 1,
) -> None:
    """Draw a bar for every bin, as high as its count in units."""
    for low, high, n in zip(edges[:-1], edges[1:], counts, strict=True):
        left, top, tip = x(low) + 0.5, y(n / unit), f"{low:.2f} to {high:.2f}: {n} records"
        drawing.rect(left, top, x(high) - 0.5 - left, y.range[0] - top, "c1 fill", tip)


def _symbol(drawing: Drawing, index: int, x: float, y: float, role: str, tip: str) -> None:
    """Draw a circle, square or diamond, so that colour is not the only difference."""
    if index % 3 == 0:
        drawing.circle(x, y, 4.5, f"{role} mark", tip)
    elif index % 3 == 1:
        drawing.rect(x - 4, y - 4, 8, 8, f"{role} mark", tip)
    else:
        drawing.band([(x - 5.5, y), (x, y - 5.5)], [(x, y + 5.5), (x + 5.5, y)], f"{role} mark")


def _percent(share: float) -> str:
    return f"{100 * share:.3g}\N{NO-BREAK SPACE}%"


def _count(n: int) -> str:
    if n < 10_000:
        return str(n)
    return f"{n / 1000:.0f}k" if n < 999_500 else f"{n / 1e6:.1f}M"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _shorten(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _spread(size: int, most: int) -> np.ndarray:
    """Return up to `most` indices below `size`, evenly spread, ends included."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))


def _thin(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    return [points[i] for i in _spread(len(points), most)]
