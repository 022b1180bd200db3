"""Schemas: a public description of a table, and the encoding that it defines.

The encoding may not depend on the data. `Schema.learned` is the exception, and its result says so.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from dpbnn.data.column import Column, all_missing
from dpbnn.data.draft import drafted, one_line
from dpbnn.data.faults import Faults, bad_rows
from dpbnn.data.frames import as_table
from dpbnn.data.learned import learned_column, learned_target
from dpbnn.data.paid import PaidBounds
from dpbnn.data.table import Table, TableError, TableWarning
from dpbnn.data.target import (
    TARGET_KEYS,
    check_inputs,
    check_target,
    encoded,
    target_of_values,
    values_of_target,
)
from dpbnn.messages import check_on_bad_rows

_CHUNK = 4_000_000  # numbers encoded at once
_LOOK = 128  # rows checked at once; a check ends as soon as it can
_COLUMN_KEYS = ("kind", "bounds", "categories", "missing", "other", "log")
_KEYS = ("task", "public", "target", "columns", "ignore", "unit", "private_bounds")


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns of a table, its target, and what is publicly known of them.

    The encoding is a function of the schema alone: no mean, range or category is ever taken from
    the data, except by `Schema.learned`, whose result says that it is not private.

    Attributes:
        columns: the inputs, in the order in which they are encoded.
        target: what is to be predicted: classes as its categories, or bounds.
        task: "classification" or "regression"; follows from the target if left out.
        ignore: columns of the table that are left out on purpose.
        public: False where bounds and categories were learned from the data.
        unit: column that says whose record each one is, such as "patient_id". It is no input; the
            guarantee of a fit is then for a person with all its records. "" for a record.
        private_bounds: which bounds were learned privately, and the ledger that paid for them.
    """

    columns: tuple[Column, ...]
    target: Column
    task: str = ""
    ignore: tuple[str, ...] = ()
    public: bool = True
    unit: str = ""
    private_bounds: PaidBounds | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "ignore", tuple(self.ignore))
        if not self.task:
            regression = self.target.categories is None
            object.__setattr__(self, "task", "regression" if regression else "classification")
        names = [*(column.name for column in self.columns), *self._unused, self.target.name]
        for name, count in Counter(names).items():
            if count > 1:
                raise TableError(
                    f"schema, column {name!r}: is there twice among columns, target, unit and "
                    f"ignore; name it once"
                )
        if not self.columns:
            raise TableError("schema: has no columns; declare at least one under [columns.NAME]")
        check_inputs(self.columns)
        check_target(self.target, self.task)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Schema:
        """Read a schema from a TOML file.

        Args:
            path: the file; see `to_toml` and docs/tables.md for its form.
        """
        return cls.from_dict(read_toml(path))

    @classmethod
    def from_toml(cls, text: str) -> Schema:
        """Return the schema that is written in TOML."""
        return cls.from_dict(_parsed(text, "schema"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schema:
        """Return the schema of plain values, in the form of a TOML file."""
        _keys("schema", values, _KEYS)
        target = values.get("target")
        if not isinstance(target, Mapping) or "name" not in target:
            raise TableError(
                "schema: has no target; state it as [target] with name and classes or bounds"
            )
        _keys("schema, [target]", target, TARGET_KEYS)
        columns, paid = values.get("columns", {}), values.get("private_bounds")
        if not isinstance(columns, Mapping):
            raise TableError("schema: columns must be tables; write [columns.NAME] for each")
        return cls(
            columns=tuple(column_of_values(name, value) for name, value in columns.items()),
            target=target_of_values(target),
            task=values.get("task", ""),
            ignore=tuple(values.get("ignore", ())),
            public=bool(values.get("public", True)),
            unit=values.get("unit", ""),
            private_bounds=None if paid is None else PaidBounds.from_dict(paid),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as plain values; `from_dict` gives it back."""
        own: dict[str, Any] = {"task": self.task}
        own |= {} if self.public else {"public": False}
        own |= {"ignore": list(self.ignore)} if self.ignore else {}
        own |= {"unit": self.unit} if self.unit else {}
        columns = {column.name: _values(column) for column in self.columns}
        paid = self.private_bounds
        last = {} if paid is None else {"private_bounds": paid.to_dict()}
        return {**own, "target": values_of_target(self.target), "columns": columns, **last}

    def to_toml(self) -> str:
        """Return the schema as TOML; `read` and `from_toml` give it back."""
        note = "" if self.public else "# Learned from the data: NOT PRIVATE.\n"
        return note + one_line(self.to_dict())

    @classmethod
    def draft(cls, table: Any, target: str) -> str:
        """Return a schema in TOML to be filled in from public knowledge.

        It takes only the names and types of the columns from the table (number, text, boolean,
        date). Every bound and category is left as TODO: the smallest age in a table is somebody's
        age. Booleans need none; identifiers and dates are left out and flagged; what a name such
        as age suggests is a comment.

        Args:
            table: a table, or what `as_table` takes.
            target: name of the column to be predicted.
        """
        return drafted(as_table(table), target)

    @classmethod
    def learned(cls, table: Any, target: str, task: str | None = None) -> Schema:
        """Return a schema with bounds and categories read from the data: NOT PRIVATE.

        The result has `public=False`; private training refuses it.

        Args:
            table: a table, or what `as_table` takes.
            target: name of the column to be predicted.
            task: "classification", "regression", "count" or "ordinal"; by default a text target is
                classified.
        """
        table = as_table(table)
        aim = learned_target(table, target, task)
        columns = tuple(learned_column(table, name) for name in table.names if name != target)
        return cls(columns, aim, public=False)

    @property
    def _unused(self) -> tuple[str, ...]:
        return (*self.ignore, *([self.unit] if self.unit else ()))

    def units(self, table: Any) -> np.ndarray | None:
        """Return whose record each one is, by the column `unit`; None where there is none."""
        table = as_table(table)
        if self.unit and self.unit not in table:
            raise TableError(
                f"{table.source}: the unit {self.unit!r} of the schema is absent; the table has "
                f"{table.listed()}; correct the name in the schema"
            )
        return unit_labels(table, self.unit) if self.unit else None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the encoded columns, in order."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of their numbers; None for a regression."""
        return self.target.categories if self.task == "classification" else None

    def encode(
        self,
        table: Any,
        *,
        target: bool | None = None,
        out: str | os.PathLike[str] | None = None,
        on_bad_rows: str = "error",
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return inputs [rows, features] in float32, and targets if the table holds them.

        Targets are class numbers or counts (int64), or numbers scaled from the bounds to [-1, 1]
        (float32; `decode_target` gives the original units).

        Args:
            table: a table, or what `as_table` takes.
            target: whether the table must hold the target; by default it is used if present.
            out: a new .npy file for the inputs, written in chunks and memory-mapped, for tables
                larger than memory.
            on_bad_rows: "error" says how many values of a column are bad, and quotes none; "show"
                names the first bad value and its row; "zero" sets the inputs of bad rows to NaN:
                in training with on_bad_rows="zero" they contribute nothing.
        """
        check_on_bad_rows(on_bad_rows)
        show = on_bad_rows == "show"
        table = as_table(table, on_bad_rows=on_bad_rows)
        self._present(table, self.columns, show)
        if target is None:
            target = self.target.name in table
        elif target:
            self._present(table, (self.target,), show)
        extra = self.ignored(table)
        if extra:
            warnings.warn(
                f"{table.source}: {table.listed(extra, show=show)} "
                f"{'is' if len(extra) == 1 else 'are'} not in the schema and not used",
                TableWarning,
                stacklevel=2,
            )
        shape = (table.n, len(self.features))
        whole = self.task == "classification" or self.target.kind == "count"
        kind = np.int64 if whole else np.float32
        y = np.zeros(table.n, dtype=kind) if target else None
        if out is None:
            x = np.zeros(shape, dtype=np.float32)
            self._fill(table, x, y, on_bad_rows)
            return x, y
        path = Path(out)
        part = path.with_name(path.name + ".part")
        try:
            mapped = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=shape)
            self._fill(table, mapped, y, on_bad_rows)
            mapped.flush()
            del mapped  # Windows cannot move a mapped file
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return np.load(path, mmap_mode="r"), y

    def ignored(self, table: Any) -> tuple[str, ...]:
        """Return the columns of a table that are not in the schema."""
        known = {self.target.name, *self._unused, *(column.name for column in self.columns)}
        return tuple(name for name in as_table(table).names if name not in known)

    def check(self, table: Any, *, on_bad_rows: str = "error") -> None:
        """Raise TableError where a table cannot be trained on, before anything is spent.

        There must be two rows, two classes and a value in every column. Errors are for the data
        holder; they quote no value and are never released.

        Args:
            table: a table, or what `as_table` takes.
            on_bad_rows: as in `encode`; "zero" skips the checks that look at values.
        """
        check_on_bad_rows(on_bad_rows)
        table = as_table(table, on_bad_rows=on_bad_rows)
        self._present(table, (*self.columns, self.target), on_bad_rows == "show")
        if table.n < 2:
            raise TableError(
                f"{table.source}: has {table.n} row{'s' * (table.n != 1)}; training needs at "
                f"least 2, give the whole table"
            )
        if on_bad_rows == "zero":
            return
        for column in (*self.columns, self.target):
            if all_missing(column, table):
                raise TableError(
                    f"{table.source}: column {column.name!r} has no value in any row; delete it "
                    f"from the schema or correct the table"
                )
        if self.task == "classification":
            self._check_classes(table)

    def decode_target(self, mean: Any, std: Any = None) -> Any:
        """Return predictions in the original units, or class numbers as names.

        Args:
            mean: class numbers, counts, or scaled values in [-1, 1].
            std: standard deviations on the same scale; then (mean, std) is returned.
        """
        if self.classes is not None:
            return np.asarray(self.classes, dtype=object)[np.asarray(mean)]
        middle, half = (0.0, 1.0) if self.target.kind == "count" else self.target.scale
        original = np.asarray(mean, dtype=np.float64) * half + middle
        return original if std is None else (original, np.asarray(std, dtype=np.float64) * half)

    def _fill(self, table: Table, x: np.ndarray, y: np.ndarray | None, on_bad_rows: str) -> None:
        step = max(1, _CHUNK // max(1, x.shape[1]))
        found = Faults(table, on_bad_rows)
        for start in range(0, table.n, step):
            part = table.rows(start, start + step)
            bad = np.zeros(part.n, dtype=bool)
            first = 0
            for column in self.columns:
                raw = part.column(column.name)
                width = len(column.features)
                block = x[start : start + part.n, first : first + width]
                _, faults = column.encode(raw, part.missing, block)
                bad |= found.add(part, column.name, raw, faults)
                first += width
            if y is not None:
                raw = part.column(self.target.name)
                values, faults = encoded(self.target, self.task, raw, part.missing)
                bad |= found.add(part, self.target.name, raw, faults)
                y[start : start + part.n] = values
            if bad.any():
                x[start : start + part.n][bad] = np.nan
        found.refuse()

    def _present(self, table: Table, columns: Iterable[Column], show: bool) -> None:
        for column in columns:
            if column.name not in table:
                what = "target" if column is self.target else "column"
                raise TableError(
                    f"{table.source}: the {what} {column.name!r} of the schema is absent; the "
                    f"table has {table.listed(show=show)}; correct the name in the schema"
                )

    def _check_classes(self, table: Table) -> None:
        seen: set[int] = set()
        for start in range(0, table.n, _LOOK):
            values = table.column(self.target.name, slice(start, start + _LOOK))
            code, faults = encoded(self.target, self.task, values, table.missing)
            seen.update(code[~bad_rows(len(code), faults)].tolist())
            if len(seen) > 1:
                return
        if seen:
            raise TableError(
                f"{table.source}: target {self.target.name!r} has one class in every row; training "
                f"needs rows of 2 classes or more"
            )


def unit_labels(table: Table, name: str) -> np.ndarray:
    """Return whose record each one is, by a column; None for those that do not say it."""
    cells: np.ndarray = table.raw(name)  # each as it is, whatever the others are
    if cells.dtype != object:
        return cells
    return np.array([None if c in table.missing else c for c in cells], dtype=object)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the values in a TOML file, which may be a schema with TODO in it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise TableError(
            f"schema {path}: cannot be read: {reason}; give the path of a schema in TOML"
        ) from None
    return _parsed(text, str(path))


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{source}: is not valid TOML: {error}; correct that line") from None


def column_of_values(name: str, values: Any) -> Column:
    """Return a column from plain values, as in a TOML file."""
    if not isinstance(values, Mapping):
        section = tomli_w.dumps({"columns": {name: {}}}).strip()
        raise TableError(
            f"schema, column {name!r}: must be a table; write {section} with bounds or categories"
        )
    _keys(f"schema, column {name!r}", values, _COLUMN_KEYS)
    return Column(name, **{key: _tuple(value) for key, value in values.items()})


def _values(column: Column) -> dict[str, Any]:
    given = {
        field.name: getattr(column, field.name)
        for field in dataclasses.fields(Column)
        if field.name in _COLUMN_KEYS and getattr(column, field.name) != field.default
    }
    given.pop("kind")
    given |= column.as_dates()
    return {key: list(v) if isinstance(v, tuple) else v for key, v in given.items()}


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _keys(where: str, values: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in values:
        if key not in allowed:
            raise TableError(
                f"{where}: {key!r} means nothing here; the keys are {', '.join(allowed)}"
            )
