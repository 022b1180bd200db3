"""Noise multipliers of a run, step by step, as runs of (sigma, number of steps)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from dpbnn.privacy.checks import check_between, check_numbers
from dpbnn.privacy.sampling import Sampler

__all__ = ["MOST_STEPS", "Schedule", "first_steps", "read_length", "read_schedule", "scaled"]

Schedule = tuple[tuple[float, int], ...]

MOST_STEPS = 10**8


def read_length(draw: Sampler, epochs: float | None, steps: int | None) -> int | None:
    """Return the number of steps from epochs or steps, or None where neither is given."""
    check_numbers(steps=steps)
    if steps is not None and not (1 <= steps <= MOST_STEPS and steps == math.floor(steps)):
        raise ValueError(f"steps={steps}: must be a whole number from 1 to {MOST_STEPS}")
    if epochs is None:
        return None if steps is None else int(steps)
    found = draw.steps(epochs)
    if steps is not None and steps != found:
        raise ValueError(
            f"epochs={epochs:g} and steps={steps} contradict each other: {epochs:g} epochs are "
            f"{found} steps; give one of the two"
        )
    return found


def read_schedule(
    name: str, value: float | Sequence[float] | None, steps: int | None
) -> Schedule | None:
    """Return sigma, one or one per step, as runs; raises for values that are no sigma.

    Args:
        name: of the argument, for messages.
        value: the argument.
        steps: how many steps there are, if that is known.
    """
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        check_numbers(**{name: value})
    values = [float(v) for v in value] if isinstance(value, Iterable) else [float(value)]
    for sigma in values:
        check_between(0, math.inf, "the ratio of noise std to clip, such as 1.0", **{name: sigma})
    if not isinstance(value, Iterable):
        return ((values[0], 1 if steps is None else steps),)
    if steps is None or len(values) != steps:
        raise ValueError(
            f"{name}: has {len(values)} values for {steps or 'an unknown number of'} steps; "
            f"give one value per step together with steps={len(values)}"
        )
    return tuple((sigma, len(list(run))) for sigma, run in itertools.groupby(values))


def scaled(runs: Schedule, scale: float) -> Schedule:
    """Return a schedule with every sigma times `scale`."""
    return tuple((scale * sigma, count) for sigma, count in runs)


def first_steps(runs: Schedule, steps: int) -> Schedule:
    """Return the first steps of a schedule."""
    found: list[tuple[float, int]] = []
    for sigma, count in runs:
        found.append((sigma, min(count, steps)))
        steps -= found[-1][1]
    return tuple(run for run in found if run[1])
