"""Bad tables and schemas: each gives one line that names the place and the fix."""

import gzip

import numpy as np
import pytest

from dpbnn.data import Schema, TableError, as_table, read_table

SCHEMA = """
[target]
name = "y"
classes = ["no", "yes"]
[columns.age]
bounds = [0, 100]
[columns.sex]
categories = ["F", "M"]
"""
GOOD = "age,sex,y\n39,F,no\n50,M,yes\n61,F,no\n"


def refused(action, *parts):
    """Return the message of a TableError: one line, not long, with all parts in it."""
    with pytest.raises(TableError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    for part in parts:
        assert part in message, message
    return message


def test_the_good_table_is_good(tmp_path):
    (tmp_path / "t.csv").write_text(GOOD)
    table = read_table(tmp_path / "t.csv")
    schema = Schema.from_toml(SCHEMA)
    schema.check(table)
    schema.encode(table, target=True)


FILES = {
    "empty file": (b"", ["is empty"]),
    "only blank lines": (b"\n\n\n", ["is empty"]),
    "header only": (b"age,sex,y\n", ["header and no rows"]),
    "no header": (b"39,1,0\n50,0,1\n", ["no header", "header=False"]),
    "duplicate columns": (b"age,age,y\n1,2,no\n", ["'age'", "twice", "rename"]),
    "unnamed column": (b"age,,y\n1,2,no\n", ["column 2", "no name"]),
    "ragged row": (GOOD.encode() + b"1,F\n", ["line 5", "2 values", "3 columns"]),
    "ragged row after a blank line": (GOOD.encode() + b"\n1,F\n", ["line 6"]),
    "open quote": (GOOD.encode() + b'1,"F,no\n', ["line 5", "quotes"]),
    "latin-1": ("age,sex,y\n1,M\xe4nnlich,no\n".encode("latin-1"), ["--encoding latin-1"]),
    "utf-16": (GOOD.encode("utf-16"), ["UTF-16", "encoding='utf-16'"]),
    "binary": (bytes(range(256)) * 4, ["t.csv"]),
    "NUL bytes": (GOOD.encode() + b"\x00,F,no\n", ["NUL", "CSV"]),
    "truncated gzip": (gzip.compress(GOOD.encode() * 1000)[:-20], ["gzip", "ends early"]),
    "broken gzip": (b"\x1f\x8b" + b"nonsense" * 10, ["gzip", "damaged"]),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_table(tmp_path, kind):
    content, parts = FILES[kind]
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    refused(lambda: read_table(path, on_bad_rows="show"), str(path), *parts)


def test_the_names_in_the_first_line_of_a_file_are_not_quoted(tmp_path):
    """It may be a record: nobody but the data holder can tell."""
    (tmp_path / "t.csv").write_text("age,Smith,y\n1,F,no\n2,M,yes\n")
    table, schema = read_table(tmp_path / "t.csv"), Schema.from_toml(SCHEMA)
    for action in (lambda: schema.check(table), lambda: schema.encode(table), lambda: table["sex"]):
        assert "Smith" not in refused(action, "'sex'", "3 columns that the first line names")
    refused(lambda: schema.encode(table, on_bad_rows="show"), "'age', 'Smith', 'y'")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("t.xlsx", ["Excel", "CSV"]),
        ("t.json", ["JSON", "CSV"]),
        ("t.pkl", ["pickle"]),
        ("t.parquet", [".parquet", "not that content"]),
        ("t.npy", [".npy", "not that content"]),
        ("t.npz", [".npz", "not that content"]),
    ],
)
def test_a_wrong_ending(tmp_path, name, parts):
    (tmp_path / name).write_text(GOOD)
    refused(lambda: read_table(tmp_path / name), *parts)


def test_folders_and_absent_files(tmp_path):
    refused(lambda: read_table(tmp_path), "is a folder", "file")
    refused(lambda: read_table(tmp_path / "none.csv"), "does not exist", "path")


def test_damaged_and_pickled_array_files(tmp_path):
    np.save(tmp_path / "t.npy", np.array([{"a": 1}], dtype=object))
    refused(lambda: read_table(tmp_path / "t.npy"), "Python objects")
    whole = (tmp_path / "t.npy").read_bytes()
    (tmp_path / "short.npy").write_bytes(whole[:20])
    refused(lambda: read_table(tmp_path / "short.npy"), "damaged")
    (tmp_path / "t.npz").write_bytes(b"PK\x03\x04 and nothing else")
    refused(lambda: read_table(tmp_path / "t.npz"), "damaged")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and nothing else")
    refused(lambda: read_table(tmp_path / "t.parquet"), "Parquet")


def test_wrong_settings_of_reading(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(GOOD)
    refused(lambda: read_table(path, names=["a"]), "3 values", "1 names")
    refused(lambda: read_table(path, separator="x"), "separator='x'")
    refused(lambda: read_table(path, decimal="x"), "decimal='x'")
    refused(lambda: read_table(path, encoding="klingon"), "klingon", "utf-8")


ROWS = {
    "text in a number": ("x,F,no", ["line 5", "'age'", "'x' is not a number"]),
    "decimal comma": ('"3,5",F,no', ["line 5", "'age'", "decimal=','"]),
    "underscores": ("1_000,F,no", ["line 5", "'age'", "not a number"]),
    "infinity": ("inf,F,no", ["line 5", "'age'", "infinite"]),
    "minus infinity": ("-Infinity,F,no", ["line 5", "'age'", "infinite"]),
    "a number beyond all numbers": ("1e999,F,no", ["line 5", "'age'", "infinite"]),
    "missing number": ("?,F,no", ["line 5", "'age'", "missing", "'middle'", "'indicator'"]),
    "missing category": ("1,,no", ["line 5", "'sex'", "missing", "'zeros'", "'category'"]),
    "unknown category": ("1,X,no", ["line 5", "'sex'", "'X'", "'F', 'M'", "other = true"]),
    "unknown class": ("1,F,maybe", ["line 5", "'y'", "'maybe'", "'no', 'yes'", "classes"]),
    "missing target": ("1,F,NA", ["line 5", "'y'", "missing", "delete the row"]),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_bad_row_is_named_with_its_line(tmp_path, kind):
    row, parts = ROWS[kind]
    path = tmp_path / "t.csv"
    path.write_text(GOOD + row + "\n")
    table, schema = read_table(path), Schema.from_toml(SCHEMA)
    refused(lambda: schema.encode(table, on_bad_rows="show"), str(path), *parts)
    said = refused(lambda: schema.encode(table), str(path), "1 value cannot be used", "'show'")
    assert "line 5" not in said


def test_huge_values_are_clipped_not_refused(tmp_path):
    (tmp_path / "t.csv").write_text(GOOD + "1e300,F,no\n-1e300,F,no\n")
    x, _ = Schema.from_toml(SCHEMA).encode(read_table(tmp_path / "t.csv"))
    assert x[3:, 0].tolist() == [1.0, -1.0]


def test_bad_numbers_in_arrays_are_named_with_their_row():
    schema = Schema.from_toml(SCHEMA)
    table = {"age": np.array([1.0, np.inf]), "sex": ["F", "M"], "y": ["no", "yes"]}
    refused(lambda: schema.encode(table, on_bad_rows="show"), "row 1", "'age'", "infinite")
    table = {"age": [1, "old"], "sex": ["F", "M"], "y": ["no", "yes"]}
    refused(lambda: schema.encode(table, on_bad_rows="show"), "row 1", "'age'", "'old'")


TABLES = {
    "target absent": ({"age": [1, 2], "sex": ["F", "M"]}, ["target 'y'", "absent", "'age', 'sex'"]),
    "column absent": ({"sex": ["F", "M"], "y": ["no", "yes"]}, ["column 'age'", "absent"]),
    "no rows": ({"age": [], "sex": [], "y": []}, ["0 rows", "at least 2"]),
    "one row": ({"age": [1], "sex": ["F"], "y": ["no"]}, ["1 row;", "at least 2"]),
    "one class": (
        {"age": [1, 2], "sex": ["F", "M"], "y": ["no", "no"]},
        ["'y'", "one class in every row", "2 classes"],
    ),
    "all numbers missing": (
        {"age": [np.nan, np.nan], "sex": ["F", "M"], "y": ["no", "yes"]},
        ["'age'", "no value in any row"],
    ),
    "all categories missing": (
        {"age": [1, 2], "sex": ["", "?"], "y": ["no", "yes"]},
        ["'sex'", "no value in any row"],
    ),
    "all targets missing": (
        {"age": [1, 2], "sex": ["F", "M"], "y": [None, None]},
        ["'y'", "no value in any row"],
    ),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_that_cannot_be_trained_on(kind):
    table, parts = TABLES[kind]
    refused(lambda: Schema.from_toml(SCHEMA).check(table), *parts)


@pytest.mark.parametrize("bad", ["0001-01-01T00:00:00+23:00", "9999-12-31T23:00:00-10:00", "soon"])
def test_a_date_that_cannot_be_used_is_a_bad_row(bad):
    schema = Schema.from_dict(
        {"target": {"name": "y", "bounds": [0, 1]},
         "columns": {"when": {"bounds": ["2000-01-01", "2020-12-31"]}}})  # fmt: skip
    rows = {"when": ["2001-01-01", bad, "2003-01-01T00:00:00+02:00"], "y": [0.0, 0.5, 1.0]}
    x, _ = schema.encode(rows, on_bad_rows="zero")
    assert np.isnan(x[:, 0]).tolist() == [False, True, False]
    with pytest.raises(TableError, match="1 value cannot be used; one is not a date"):
        schema.encode(rows)


def test_dates_are_held_and_refused_as_numbers():
    dates = np.array(["2020-01-01", "NaT"], dtype="datetime64[D]")
    table = as_table({"age": dates, "sex": ["F", "M"], "y": ["no", "yes"]})
    assert table["age"].tolist() == ["2020-01-01", None]
    refused(lambda: Schema.from_toml(SCHEMA).encode(table), "'age'", "is a date", "two dates")


OBJECTS = {
    "unequal columns": ({"a": [1], "b": [1, 2]}, ["'a' has 1", "'b' has 2"]),
    "one axis": (np.zeros(3), ["number of axes is 1", "[rows, columns]"]),
    "three axes": (np.zeros((2, 2, 2)), ["number of axes is 3"]),
    "time spans": ({"d": np.array([5], dtype="timedelta64[D]")}, ["'d'", "time spans", "days"]),
    "complex": ({"c": np.array([1j])}, ["'c'", "complex"]),
    "lists in cells": ({"c": np.array([[1], None], dtype=object)}, ["'c'", "list"]),
    "a matrix as a column": ({"c": np.zeros((2, 2))}, ["'c'", "2 axes"]),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_that_is_no_table(kind):
    given, parts = OBJECTS[kind]
    refused(lambda: as_table(given), *parts)


def test_a_frame_with_duplicate_columns():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([[1, 2]], columns=["a", "a"])
    refused(lambda: as_table(frame), "'a'", "twice")


COLUMNS = {
    "bounds reversed": ("bounds = [9, 1]", ["reversed", "[1, 9]"]),
    "bounds equal": ("bounds = [5, 5]", ["no room", "widen"]),
    "bounds infinite": ("bounds = [0, inf]", ["finite"]),
    "bounds nan": ("bounds = [nan, 1]", ["finite"]),
    "bounds too wide": ("bounds = [-1.7e308, 1.7e308]", ["finite"]),
    "three bounds": ("bounds = [0, 1, 2]", ["two numbers"]),
    "bounds as text": ('bounds = "0 to 1"', ["two numbers"]),
    "bounds TODO": ('bounds = ["TODO", "TODO"]', ["TODO", "publicly known"]),
    "half TODO": ('bounds = [0, "TODO"]', ["TODO"]),
    "categories TODO": ('categories = "TODO"', ["TODO"]),
    "nothing known": ("", ["neither bounds nor categories"]),
    "categories twice": ('categories = ["F", "M", "F"]', ["'F'", "twice"]),
    "categories twice, one a number": ('categories = [1, "1"]', ["'1'", "twice"]),
    "no categories": ("categories = []", ["no categories"]),
    "an empty category": ('categories = ["", "x"]', ["empty", "missing = 'category'"]),
    "nested categories": ('categories = [["x"]]', ["list"]),
    "a category called other": ('categories = ["other"]\nother = true', ["'other'", "rename"]),
    "both": ('bounds = [0, 1]\ncategories = ["x"]', ["bounds", "numeric"]),
    "unknown kind": ('kind = "image"\nbounds = [0, 1]', ["'image'", "'numeric'"]),
    "unknown rule": ('bounds = [0, 1]\nmissing = "mean"', ["'mean'", "'middle'"]),
    "wrong rule": ('categories = ["x"]\nmissing = "middle"', ["'middle'", "'zeros'"]),
    "logarithm below zero": ("bounds = [-1, 1]\nlog = true", ["log = true", ">= 0"]),
    "logarithm of categories": ('categories = ["x"]\nlog = true', ["log", "numeric"]),
    "text for true": ('bounds = [0, 1]\nlog = "yes"', ["log='yes'", "true or false"]),
    "unknown key": ("bounds = [0, 1]\nmaximum = 3", ["'maximum'", "bounds"]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_bad_column_in_a_schema(kind):
    text, parts = COLUMNS[kind]
    schema = f'[target]\nname = "y"\nbounds = [0, 1]\n[columns.a]\n{text}\n'
    refused(lambda: Schema.from_toml(schema), "column 'a'", *parts)


ONE = "[columns.a]\nbounds = [0, 1]\n"
SCHEMAS = {
    "no target": (ONE, ["no target", "[target]"]),
    "no columns": ('[target]\nname = "y"\nbounds = [0, 1]\n', ["no columns"]),
    "nothing known of the target": ('[target]\nname = "y"\n' + ONE, ["'y'", "neither classes"]),
    "one class": ('[target]\nname = "y"\nclasses = ["a"]\n' + ONE, ["'y'", "2 classes", "1"]),
    "classes twice": ('[target]\nname = "y"\nclasses = ["a", "a"]\n' + ONE, ["'a'", "twice"]),
    "classes TODO": ('[target]\nname = "y"\nclasses = ["TODO"]\n' + ONE, ["'y'", "TODO"]),
    "classes of a regression": (
        'task = "regression"\n[target]\nname = "y"\nclasses = ["a", "b"]\n' + ONE,
        ["'y'", "bounds"],
    ),
    "bounds of a classification": (
        'task = "classification"\n[target]\nname = "y"\nbounds = [0, 1]\n' + ONE,
        ["'y'", "classes"],
    ),
    "an unknown task": (
        'task = "ranking"\n[target]\nname = "y"\nbounds = [0, 1]\n' + ONE,
        ["'ranking'"],
    ),
    "cuts and classes disagree": (
        '[target]\nname = "y"\ncuts = [1, 2]\nclasses = ["a", "b"]\n' + ONE,
        ["'y'", "one class more"],
    ),
    "falling cuts": (
        '[target]\nname = "y"\ncuts = [2, 1]\nclasses = ["a", "b", "c"]\n' + ONE,
        ["'y'", "rising"],
    ),
    "target among the columns": ('[target]\nname = "a"\nbounds = [0, 1]\n' + ONE, ["'a'", "twice"]),
    "unknown key": ('speed = 3\n[target]\nname = "y"\nbounds = [0, 1]\n' + ONE, ["'speed'"]),
    "no TOML": ("age: 3", ["TOML"]),
    "column twice": ('[target]\nname = "y"\nbounds = [0, 1]\n' + ONE + ONE, ["TOML"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_bad_schema(kind):
    text, parts = SCHEMAS[kind]
    refused(lambda: Schema.from_toml(text), "schema", *parts)


def test_a_schema_that_is_not_there(tmp_path):
    refused(lambda: Schema.read(tmp_path / "none.toml"), "none.toml", "TOML")
    (tmp_path / "odd.toml").write_bytes(b"\xff\xfe")
    refused(lambda: Schema.read(tmp_path / "odd.toml"), "UTF-8")
