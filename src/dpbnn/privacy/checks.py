"""Checks of settings, and numbers and errors in messages: in the same words in every room."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import warnings
from numbers import Real
from typing import Any

__all__ = [
    "check_between",
    "check_count",
    "check_numbers",
    "check_one_process",
    "check_positive",
    "first_line",
    "quoted",
    "round_up",
    "warn_if_weak",
    "weak_points",
]

_LONGEST = 40  # letters of a unit's name
_WEAK = 10  # epsilon above which little is promised
_PLAIN = (str, int, float, type(None))


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its kind where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def quoted(value: Any) -> str:
    """Return a wrong setting for a message: plain values as they are, of others the type alone.

    Data that was passed in the place of a setting is not quoted.
    """
    held = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    held = held if isinstance(held, (list, tuple)) else [held]
    plain = len(held) <= 4 and all(isinstance(part, _PLAIN) for part in held)
    return repr(value) if plain else f"<{type(value).__name__}>"


def round_up(value: float, digits: int = 4) -> str:
    """Return `value` with `digits` significant digits, never below it."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1)
    return f"{math.ceil(value / unit - 1e-9) * unit:.{digits}g}"


def check_numbers(**values: Any) -> None:
    """Raise for values that are no numbers, such as text; None is left out."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise ValueError(
                f"{name}={quoted(value)}: is of type {type(value).__name__}; give one number"
            )


def check_positive(**values: Any) -> None:
    """Raise for values that are not finite and above zero; None is left out."""
    check_numbers(**values)
    for name, value in values.items():
        if value is not None and not (0 < value < math.inf):
            raise ValueError(f"{name}={value}: must be a finite number > 0")


def check_between(low: float, high: float, meaning: str, **values: Any) -> None:
    """Raise for values outside the open interval; None is left out."""
    check_numbers(**values)
    for name, value in values.items():
        if value is not None and not (low < value < high):
            raise ValueError(f"{name}={value}: must lie in ({low:g}, {high:g}); give {meaning}")


def check_count(least: int = 1, **values: Any) -> None:
    """Raise for values that are no whole numbers of at least `least`; None is left out."""
    check_numbers(**values)
    for name, value in values.items():
        if value is not None and not (least <= value < math.inf and value == math.floor(value)):
            raise ValueError(f"{name}={value}: must be a whole number >= {least}")


def checked_unit(name: str) -> str:
    """Return the name of a unit, or raise where it is none that a statement can print."""
    plain = isinstance(name, str) and name == " ".join(name.split()) and name.isprintable()
    if not plain or len(name) > _LONGEST:
        raise ValueError(
            f"unit: must be a public name of at most {_LONGEST} letters, such as 'person'"
        )
    if name.lower() in ("record", "row"):  # a statement for one of them means a single row
        raise ValueError(
            f"unit: {name!r} is what a single row is called; give another name, such as 'person'"
        )
    return name


def check_one_process() -> None:
    """Raise where several processes would make the releases of one script, and state their own.

    So it is under torchrun and its like, and in a process that `multiprocessing` has spawned from a
    script which is not guarded: that runs the whole script again before it begins its work.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    dist: Any = sys.modules.get("torch.distributed")  # this module does without torch
    joined = dist.get_world_size() if dist and dist.is_available() and dist.is_initialized() else 1
    if size.strip() not in ("", "0", "1") or joined > 1:
        given = f"a process group of {joined}" if joined > 1 else f"WORLD_SIZE={size}"
        raise RuntimeError(
            f"{given}: several processes were started together, and each would make "
            f"releases of its own and state only those; start one process, or unset WORLD_SIZE"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a worker process runs the script that started it, and would make its releases once "
            "more; put `if __name__ == '__main__':` around what the script runs"
        )


def weak_points(epsilon: float | None, delta: float, n: int | None) -> list[str]:
    """Return what makes a guarantee promise little, in words; nothing where it promises enough."""
    found = []
    if epsilon is not None and _WEAK < epsilon < math.inf:
        found.append(
            f"epsilon = {epsilon:g} promises little: probabilities may differ by a factor of "
            f"e^{epsilon:g}; 1 is common, and above {_WEAK} little is left"
        )
    if n is not None and delta >= 1 / n:
        found.append(
            f"delta = {delta:g} is not below 1/n = {1 / n:g}: publishing one record at random "
            f"would meet it; 1e-5 or less says more"
        )
    return found


def warn_if_weak(epsilon: float | None, delta: float, n: int) -> None:
    """Warn where a budget promises little, at the line of the user that asked for it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("dpbnn"):
        level, frame = level + 1, frame.f_back
    for words in weak_points(epsilon, delta, n):
        warnings.warn(words, stacklevel=level)
