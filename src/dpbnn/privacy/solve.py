"""Solves for the noise or the length of a run, given its cost. It knows no events and no data.

**Guarantee.** The cost of what is returned was computed, and is at most the target. A cheaper model
of the cost only says where to look.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dpbnn.privacy.checks import round_up
from dpbnn.privacy.schedule import MOST_STEPS

_CLOSE = 0.998  # a solved epsilon lies in [_CLOSE * target, target]


def noise_scale(
    cost: Callable[[float], float],
    target: float,
    model: Callable[[float], float] | None = None,
    close: float = _CLOSE,
) -> float:
    """Return a scale of the noise whose epsilon lies within [close * target, target].

    Epsilon falls in the scale. The secant in logarithms, epsilon against its model, says where to
    look next; a bracket keeps it from going astray.

    Args:
        cost: epsilon at a scale.
        target: the largest epsilon that is accepted.
        model: something near epsilon that takes less time; 1/scale by default.
        close: the smallest share of the target that is accepted.
    """
    low, high = 0.0, math.inf
    middle = target * (1 + close) / 2
    scale = 1.0 if model is None else _inverse(model, middle) or 1.0
    known: list[tuple[float, float]] = []
    for _ in range(200):
        value = cost(scale)
        if close * target <= value <= target:
            return scale
        low, high = (scale, high) if value > target else (low, scale)
        modelled = 1 / scale if model is None else _tried(model, scale)
        if modelled is not None and 0 < modelled < math.inf and 0 < value < math.inf:
            known.append((math.log(modelled), math.log(value)))
        guess = _inverse(model, _secant(known[-2:], math.log(middle)))
        if guess is not None and low < guess < high:
            scale = min(max(guess, scale / 8), scale * 8)
        elif math.isinf(high):
            scale = 2 * low
        elif low == 0:
            scale = high / 2
        else:
            scale = math.sqrt(low * high)
        if low > 0 and high / low < 1 + 1e-9:
            return high
        if scale > 1e9:
            break
    raise ValueError(f"epsilon={target}: no noise multiplier up to 1e9 reaches it; raise epsilon")


def step_count(cost: Callable[[int], float], target: float) -> int:
    """Return the largest number of steps whose epsilon is at most the target."""
    if cost(1) > target:
        raise ValueError(
            f"epsilon={target}: a single release at this noise costs {round_up(cost(1))}; "
            f"raise noise_multiplier or epsilon"
        )
    low, high = 1, 2
    while cost(high) <= target:
        low, high = high, 4 * high
        if low > MOST_STEPS:
            raise ValueError(
                f"epsilon={target}: allows more than {MOST_STEPS} steps at this noise; "
                f"give steps or epochs and leave noise_multiplier out"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= target else (low, middle)
    return low


def _secant(known: list[tuple[float, float]], target: float) -> float:
    """Return where the line through the last points (x, y) has y = target, from its logarithm."""
    if not known:
        return math.nan
    (x0, y0), (x1, y1) = known[0], known[-1]
    slope = (x1 - x0) / (y1 - y0) if y1 != y0 else 1.0
    return math.exp(min(max(x1 + (target - y1) * slope, -50.0), 50.0))


def _inverse(model: Callable[[float], float] | None, value: float) -> float | None:
    """Return the scale at which the model has this value, if there is one."""
    if not value > 0:
        return None
    if model is None:
        return 1 / value
    return _tried(lambda wanted: noise_scale(model, wanted, close=1 - 1e-7), value)


def _tried(function: Callable[[float], float], value: float) -> float | None:
    """Return what a function of the model gives, or None where it is out of range."""
    try:
        return function(value)
    except (ValueError, OverflowError):
        return None
