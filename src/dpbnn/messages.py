"""Messages that quote no private data: no cell, no label, no row number.

An error's text can be copied into a log, a ticket or a chat, past every budget. So a message says
how many rows are bad and what is allowed, which is public, and nothing that a row holds. The
caller may ask for more with on_bad_rows="show".
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

__all__ = [
    "HiddenError",
    "alone",
    "as_numbers",
    "check_on_bad_rows",
    "kind_of",
    "refuse_rows",
    "unquoted",
]

SHOWN = 5  # bad rows that a message names, where it may
_CHOICES = ("error", "zero", "show")


class HiddenError(RuntimeError):
    """An error on private data whose own text is not shown, since it may quote the data."""


def check_on_bad_rows(on_bad_rows: str) -> None:
    """Raise unless the value is "error", "zero" or "show"."""
    if on_bad_rows not in _CHOICES:
        raise ValueError(f"on_bad_rows={on_bad_rows!r}: must be 'error', 'zero' or 'show'")


def kind_of(error: BaseException) -> str:
    """Return an error's type and the place in the code that raised it, but not its text."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def alone(error: BaseException) -> NoReturn:
    """Raise an error without the one that is being handled, which may quote private data.

    `raise ... from None` only hides that one: it stays in `__context__`, where loggers find it.
    """
    try:
        raise error
    finally:
        error.__cause__ = error.__context__ = None


@contextlib.contextmanager
def unquoted(
    problem: str,
    cure: str,
    kind: type[Exception] = HiddenError,
    let: tuple[type[Exception], ...] = (),
    public: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Raise an error of our own in place of one whose text may quote private data.

    The new error names the type of the old one and where it was raised. Nothing else of the old
    one is kept, neither as its cause nor as its context.

    Args:
        problem: what cannot be done.
        cure: what to do about it.
        kind: of the new error.
        let: errors that pass as they are, since their texts quote nothing private.
        public: does the same with public values; the text of an error that it raises is shown.
    """
    try:
        yield
    except (HiddenError, torch.OutOfMemoryError, *let):
        raise
    except Exception as error:
        reason = f"{kind_of(error)}; its text may quote private data"
    else:
        return
    try:
        if public is not None:
            public()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    alone(kind(f"{problem} ({reason}); {cure}"))


def refuse_rows(
    bad: torch.Tensor,
    expected: str,
    *,
    show: bool,
    what: str = "rows",
    most: int | None = None,
    counted: bool = True,
) -> None:
    """Raise where rows are bad: how many there are, and which ones if they may be shown.

    Args:
        bad: which rows are bad.
        expected: what is allowed.
        show: whether the first ones are named.
        what: what the rows are called.
        most: number of bad rows at which the search for them has ended.
        counted: whether their number is said; it is no public number under add/remove.
    """
    count = int(bad.sum())
    if not count:
        return
    number = f"{count}{' or more' if count == most else ''}" if counted or show else "some"
    what = what.removesuffix("s") if number == "1" else what
    named, cure = "", "pass on_bad_rows='show' to see which, or 'zero'"
    if show:
        named = f", the first ones {bad.nonzero()[:SHOWN, 0].tolist()}"
        cure = "pass on_bad_rows='zero'"
    raise ValueError(
        f"{number} {what} cannot be used{named}: {expected}; remove or correct them, or "
        f"{cure} to let them contribute nothing"
    )


def as_numbers(values: Any) -> Any:
    """Return values in which every cell that is no number has become NaN.

    Only arrays and lists of objects or text are looked at; others are returned as they are.

    Args:
        values: an array, a tensor, a data frame or series, or nested lists.
    """
    if isinstance(values, torch.Tensor):
        return values
    try:
        array = np.asarray(values)
    except Exception:  # rows of different lengths; a cell that cannot be converted
        array = _objects(values)
    if array.ndim == 0 or array.dtype.kind not in "OUST":
        return array if array.dtype.kind in "biuf" else values
    flat = [_number(value) for value in array.reshape(-1).tolist()]
    return np.array(flat, dtype=np.float64).reshape(array.shape)


def _objects(values: Any) -> np.ndarray:
    """Return rows as objects, where they are no array: [rows, columns] if they are equally long."""
    rows = list(values)
    widths = {len(row) if isinstance(row, list | tuple) else 0 for row in rows}
    shape = (len(rows), *(widths if len(widths) == 1 and 0 not in widths else ()))
    array = np.empty(shape, dtype=object)
    for i, row in enumerate(rows):
        if len(shape) == 1:
            array[i] = row
        else:
            for j, value in enumerate(row):
                array[i, j] = value
    return array


def _number(value: Any) -> float:
    """Return a cell as a number; texts of booleans too, which are numbers in a column of their own.

    One text among booleans makes pandas read all of them as texts.
    """
    try:
        return float(value)
    except Exception:  # whatever a cell's own conversion raises
        known = {"true": 1.0, "false": 0.0}
        return known.get(value.strip().lower(), math.nan) if isinstance(value, str) else math.nan
