"""Whose records they are: the units of a table, such as its persons, and their records in a batch.

Labels are private, like the records. They are compared with each other and kept nowhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbnn.messages import check_on_bad_rows, refuse_rows

__all__ = ["Units", "numbered"]


@dataclasses.dataclass(frozen=True)
class Units:
    """The records of every unit.

    Attributes:
        order: all records, those of a unit one after another and nobody's last, on the host.
        starts: where each unit's records begin in `order`, and then where nobody's do.
        kept: false for records that contribute nothing, since their label is missing or their unit
            has too many; None where all count.
        most: public number of records of a unit that count; None for any number.
    """

    order: Tensor
    starts: Tensor
    kept: Tensor | None = None
    most: int | None = None

    @classmethod
    def of(
        cls,
        labels: Any,
        n: int | None,
        *,
        unit: str = "person",
        most: int | None = None,
        on_bad_rows: str = "error",
    ) -> Units:
        """Return the units of labelled records, or raise before anything is spent.

        Units are numbered in the order in which they first occur.

        Args:
            labels: one for each record; equal ones are of one unit. Spaces around texts are
                ignored, and a text that reads as a number is that number.
            n: number of units of the plan; None where that is not public.
            unit: what a unit is called.
            most: public number of records of a unit that count.
            on_bad_rows: "zero" lets records without a label, and those of a unit beyond `most`,
                contribute nothing; otherwise they are refused.
        """
        check_on_bad_rows(on_bad_rows)
        whose, missing = numbered(labels)
        show, zero = on_bad_rows == "show", on_bad_rows == "zero"
        if not zero:
            refuse_rows(
                missing, f"no label says which {unit} they belong to", show=show,
                what="records",
                counted=n is not None,
            )  # fmt: skip
        own = whose[~missing]
        count = int(own.max()) + 1 if len(own) else 0
        if n is not None and count != n:
            raise ValueError(
                f"the plan is for n={n} {unit}s and the data has {count} of them; with units, n "
                f"counts {unit}s: plan with n={count}"
            )
        order = torch.where(missing, count, whose).argsort(stable=True)
        sizes = torch.bincount(own, minlength=count)
        starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        kept = ~missing if zero else None
        if most is not None:
            place = torch.zeros_like(order)
            first = starts[:-1].repeat_interleave(sizes)
            place[order[: len(own)]] = torch.arange(len(own)) - first
            beyond = place >= most
            if not zero:
                refuse_rows(
                    beyond, f"their {unit} has more records than max_records={most}", show=show,
                    what="records", counted=n is not None,
                )  # fmt: skip
            else:
                assert kept is not None
                kept = kept & ~beyond
        return cls(order, starts, kept, most)

    def check(self, data: Any) -> None:
        """Raise where the data, a pair of inputs and targets, has another number of records."""
        rows = data[0] if isinstance(data, tuple | list) and len(data) == 2 else ()
        if hasattr(rows, "__len__") and len(rows) != len(self.order):
            raise ValueError("units: give one label for each record of the data")

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return all records of the units drawn, and the unit of each."""
        first, sizes = self.starts[drawn], self.starts.diff()[drawn]
        units = drawn.repeat_interleave(sizes)
        before = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return self.order[first.repeat_interleave(sizes) + torch.arange(len(units)) - before], units

    def records(self, first: int, last: int) -> np.ndarray:
        """Return the records of units first to last - 1, those of a unit one after another."""
        return self.order[self.starts[first] : self.starts[last]].numpy()

    def means(self, first: int, last: int, values: np.ndarray, keep: Tensor | None) -> np.ndarray:
        """Return the mean of each unit's values; bad records count as zero, and others' not at all.

        Args:
            first: the first unit.
            last: the unit after the last one.
            values: of their `records`.
            keep: false for records, of all, that count as zero.
        """
        records = self.records(first, last)
        own = np.ones(len(records)) if self.kept is None else self.kept.numpy()[records]
        values = np.where(own[:, None], values, 0.0)
        if keep is not None:
            values = np.where(keep.numpy()[records, None], values, 0.0)
        values = np.where(np.isfinite(values).all(1, keepdims=True), values, 0.0)
        starts = self.starts[first : last + 1].numpy()
        if first == last:
            return values
        total, count = (
            np.add.reduceat(part, starts[:-1] - starts[0], axis=0) for part in (values, own * 1.0)
        )
        return total / np.maximum(count, 1.0)[:, None]

    def most_rows(self, units: int, public_size: bool = True) -> int | None:
        """Return a public number of records that so many units do not exceed, if there is one.

        Args:
            units: of a batch.
            public_size: whether the number of all records is public.
        """
        own = None if self.most is None else units * self.most
        if not public_size:
            return own
        total = len(self.order)
        return total if own is None else min(total, own)


def numbered(labels: Any) -> tuple[Tensor, Tensor]:
    """Return a number for every label, the same for equal ones, and which labels are missing.

    Numbers rise in the order in which labels first occur; those of missing ones mean nothing. 7,
    "7", 7.0 and "007" are equal: pandas reads a column in parts, whose types may differ, and the
    records of one person must not become two units. Floats too large to tell whole numbers apart
    are refused, and a text with U+FFFD, the mark of what could not be read, is a missing label: two
    persons must not become one.
    """
    given = getattr(labels, "to_pylist", getattr(labels, "tolist", None))
    values = labels if given is None else given()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError("units: give one label for each record, such as a column of patient ids")
    exact_below = _exact_below(getattr(labels, "dtype", None))
    known: dict[Any, int] = {}
    found, missing = [], []
    for label in values:
        if isinstance(label, bytes):
            label = label.decode("utf-8", "replace")
        if isinstance(label, str):
            label = label.strip()
            none = not label or "\ufffd" in label
        elif isinstance(label, float | np.floating):
            none = bool(label != label)
            _check_exact(label, exact_below)
        elif isinstance(label, int):
            none = False
        else:
            none = label is None or _not_a_label(label)
        missing.append(none)
        found.append(0 if none else known.setdefault(label, len(known)))
    of = torch.tensor(_read(known) or [0], dtype=torch.int64)
    return of[torch.tensor(found, dtype=torch.int64)], torch.tensor(missing, dtype=torch.bool)


def _read(labels: Iterable[Any]) -> list[int]:
    """Return the number of each label, where texts that read as finite numbers are numbers."""
    known: dict[Any, int] = {}
    found = []
    for label in labels:
        read = label
        if isinstance(label, float | np.floating):
            read = decimal.Decimal(repr(float(label)))
        elif isinstance(label, str) and "_" not in label:
            with contextlib.suppress(ValueError, OverflowError, decimal.InvalidOperation):
                read = decimal.Decimal(label) if math.isfinite(float(label)) else label
        found.append(known.setdefault(read, len(known)))
    return found


def _exact_below(dtype: Any) -> float:
    """Return the number below which floats of a type hold every whole number."""
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return 2 / torch.finfo(dtype).eps
    held = dtype if isinstance(dtype, np.dtype) and dtype.kind == "f" else np.float64
    return 2 / float(np.finfo(held).eps)


def _check_exact(label: Any, exact_below: float) -> None:
    if isinstance(label, np.floating):
        exact_below = min(exact_below, _exact_below(label.dtype))
    if abs(label) >= exact_below:
        raise ValueError(
            f"units: some labels are floating-point numbers of {exact_below:.0f} or more, where "
            f"two persons may have the same; give whole numbers or text"
        )


def _not_a_label(label: Any) -> bool:
    """Return whether a label is a missing one, such as NaN; raise where it is of no such type."""
    if type(label).__name__ in ("NAType", "NaTType"):  # of pandas, which cannot be compared
        return True
    by_value = type(label).__eq__ is not object.__eq__ and not hasattr(label, "detach")
    if by_value and not isinstance(label, complex | np.complexfloating):
        try:
            hash(label)
            return bool(label != label)
        except Exception:  # whatever its own methods raise
            pass
    raise ValueError("units: labels must be texts or numbers, one for each record")
