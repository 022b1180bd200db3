"""Raw tables and data frames, as estimators see them: encoded by a public schema.

Nothing may be learned from a frame here, neither a bound nor a category nor the type of a label:
all of it comes from the schema. Errors quote no cell.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpbnn.data.frames import as_table
from dpbnn.data.schema import Schema
from dpbnn.data.table import Table, TableError, cell
from dpbnn.privacy.checks import quoted

__all__ = [
    "encoded",
    "inputs",
    "is_table",
    "labels",
    "matrix",
    "schema_of",
    "table_with",
    "targets",
]


def schema_of(given: Any, regression: bool, private: bool) -> Schema | None:
    """Return the schema that an estimator was given, or raise where it cannot be used.

    Args:
        given: a `Schema`, the path of one, or None.
        regression: whether the estimator predicts numbers.
        private: whether it trains under a budget.
    """
    if given is None:
        return None
    if not isinstance(given, Schema | str | os.PathLike):
        raise ValueError(
            f"schema={quoted(given)}: must be a dpbnn.data.Schema, or the path of one in TOML"
        )
    schema = given if isinstance(given, Schema) else Schema.read(given)
    if (schema.task == "regression") != regression:
        name = "PrivateBayesClassifier" if regression else "PrivateBayesRegressor"
        raise ValueError(
            f"schema: is for a {schema.task} of {schema.target.name!r}; use dpbnn.{name}"
        )
    if private and not schema.public:
        raise ValueError(
            "schema: its bounds and categories were learned from the data, which is not private; "
            "state what is publicly known; 'dpbnn schema draft' writes a first version"
        )
    return schema


def labels(schema: Schema) -> np.ndarray:
    """Return the classes as users have them, in the order of the schema.

    They are whole numbers, numbers or booleans where all classes of the schema read as such, and
    texts otherwise. The schema alone decides, so no record can change their type.
    """
    classes = schema.classes or ()
    if all(text.lower() in ("true", "false") for text in classes):
        return np.array([text.lower() == "true" for text in classes])
    try:
        numbers = [float(text) for text in classes]
    except ValueError:
        return np.array(classes)
    if any(cell(number) != text for number, text in zip(numbers, classes, strict=True)):
        return np.array(classes)  # such as 01, or an infinity
    whole = all(number.is_integer() for number in numbers)
    return np.array([int(number) for number in numbers] if whole else numbers)


def table_with(schema: Schema, X: Any, y: Any, on_bad_rows: str) -> Table:
    """Return the table of a frame and, where they are given, of its targets.

    Args:
        schema: names the columns.
        X: a data frame or table, which may hold the target; or the path of one.
        y: the targets; None takes them from X.
        on_bad_rows: as in `Schema.encode`.
    """
    named = getattr(getattr(X, "dtype", None), "names", None)
    if named is None and (isinstance(X, np.ndarray | list | tuple) or hasattr(X, "detach")):
        raise ValueError(
            "X: has no column names, and the schema needs them; pass a data frame, a mapping "
            "from names to columns, or a file"
        )
    if type(X).__name__ == "LazyFrame":
        raise ValueError("X: is a LazyFrame, which holds no rows yet; pass X.collect()")
    table = as_table(X, on_bad_rows=on_bad_rows)
    if y is None:
        return table
    name = schema.target.name
    if getattr(y, "ndim", 1) == 2 and not hasattr(y, "columns") and y.shape[1] == 1:
        y = y[:, 0]
    if hasattr(y, "columns") and len(y.columns) == 1:
        own = as_table(y, on_bad_rows=on_bad_rows)
        column = own.column(own.names[0])
    else:
        column = as_table({name: y}, source="y", on_bad_rows=on_bad_rows).column(name)
    if len(column) != table.n:
        raise ValueError(f"y: has {len(column)} rows and X {table.n}; give one target per row")
    return table.with_column(name, column)


def encoded(
    schema: Schema, X: Any, y: Any, on_bad_rows: str, *, training: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs [rows, features] and class numbers or scaled targets, by the schema alone.

    Args:
        schema: of the table.
        X: as in `table_with`.
        y: likewise.
        on_bad_rows: as in `Schema.encode`.
        training: refuse also what cannot be trained on, such as a single class.
    """
    table = table_with(schema, X, y, on_bad_rows)
    if training:
        schema.check(table, on_bad_rows=on_bad_rows)
    x, found = schema.encode(table, target=True, on_bad_rows=on_bad_rows)
    assert found is not None
    return x, found


def inputs(schema: Schema, X: Any, on_bad_rows: str) -> np.ndarray:
    """Return inputs [rows, features] by the schema; the target may be absent."""
    return schema.encode(
        table_with(schema, X, None, on_bad_rows), target=False, on_bad_rows=on_bad_rows
    )[0]


def targets(schema: Schema, y: Any) -> np.ndarray:
    """Return class numbers by the schema, -1 for a label that is none of its classes."""
    column = as_table({"y": y}, source="y", on_bad_rows="zero").column("y")
    found, faults = schema.target.classes(column)
    for fault in faults:
        found[fault.rows] = -1
    return found


def is_table(X: Any) -> bool:
    """Return whether X is a table of a file, or the path of one."""
    return isinstance(X, Table | str | os.PathLike)


def matrix(table: Any, names: Sequence[str] | None, count: int) -> np.ndarray:
    """Return the columns of a table as numbers, for an estimator without a schema.

    Args:
        table: or the path of one.
        names: of the columns, in the order of the estimator; None takes all of them as they come.
        count: of the estimator's columns.
    """
    table = as_table(table)
    if names is None and len(table.names) != count:
        raise TableError(
            f"{table.source}: has {len(table.names)} columns and the model was trained on {count} "
            f"without names; give those columns alone, in the same order"
        )
    found = []
    for name in table.names if names is None else names:
        values = table[name]
        if values.dtype == object:
            raise TableError(
                f"{table.source}: column {name!r} holds values that are no numbers; the model was "
                f"trained on numbers, so correct them"
            )
        found.append(values)
    return np.stack(found, 1) if found else np.empty((table.n, 0))
