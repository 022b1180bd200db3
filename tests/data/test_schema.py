"""Schemas: the encoding is a function of the schema alone, and exactly the stated one."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbnn.data import Column, Schema, TableError, TableWarning, as_table, read_table

SCHEMA = """
task = "classification"
ignore = ["id"]

[target]
name = "y"
classes = ["no", "yes"]

[columns.age]
bounds = [0, 100]
missing = "indicator"

[columns.gain]
bounds = [0, 999]
log = true

[columns.sex]
categories = ["F", "M"]
missing = "category"
other = true

[columns."odd name.x"]
categories = [1, 2.5, true]
missing = "zeros"
"""
TABLE = {
    "id": [1, 2, 3, 4],
    "age": [0.0, 50.0, 250.0, np.nan],
    "gain": [0.0, 9.0, 999.0, 1e300],
    "sex": ["F", "M", "X", None],
    "odd name.x": ["1.0", "2.5", "True", ""],
    "y": ["no", "yes", "yes", "no"],
}


@pytest.fixture
def schema():
    return Schema.from_toml(SCHEMA)


def test_the_stated_encoding(schema):
    x, y = schema.encode(TABLE)
    assert schema.features == (
        "age", "age missing", "gain", "sex=F", "sex=M", "sex=other", "sex=missing",
        "odd name.x=1", "odd name.x=2.5", "odd name.x=true",
    )  # fmt: skip
    third = 2 * np.log(10) / np.log(1000) - 1
    expected = [
        [-1, 0, -1, 1, 0, 0, 0, 1, 0, 0],
        [0, 0, third, 0, 1, 0, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1, 0, 0, 0, 1],
        [0, 1, 1, 0, 0, 0, 1, 0, 0, 0],
    ]
    np.testing.assert_allclose(x, expected, atol=1e-6)
    assert x.dtype == np.float32
    assert y.tolist() == [0, 1, 1, 0]
    assert y.dtype == np.int64
    assert schema.decode_target(y).tolist() == TABLE["y"]


def test_rows_are_encoded_one_by_one_the_same(schema):
    """A row's encoding does not depend on the other rows."""
    whole, _ = schema.encode(TABLE)
    for row in range(4):
        alone, _ = schema.encode(as_table(TABLE).take([row]))
        np.testing.assert_array_equal(alone[0], whole[row])


def test_toml_gives_the_schema_back(schema, tmp_path):
    assert Schema.from_toml(schema.to_toml()) == schema
    (tmp_path / "schema.toml").write_text(schema.to_toml(), encoding="utf-8")
    assert Schema.read(tmp_path / "schema.toml") == schema
    assert Schema.from_dict(schema.to_dict()) == schema


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(
    lambda s: s.strip() == s and s != "TODO"
)


@settings(max_examples=40)
@given(
    st.lists(names, min_size=3, max_size=5, unique=True),
    st.lists(names, min_size=2, max_size=4, unique=True),
    st.tuples(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12)).filter(lambda b: b[0] < b[1]),
)
def test_any_schema_survives_toml(columns, categories, bounds):
    first, *others, target = columns
    schema = Schema(
        columns=(
            Column(first, bounds=bounds, missing="middle"),
            *(Column(name, categories=tuple(categories)) for name in others),
        ),
        target=Column(target, categories=tuple(categories)),
    )
    assert Schema.from_toml(schema.to_toml()) == schema


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.tuples(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300)).filter(
        lambda b: b[1] / 2 - b[0] / 2 > 1e-290
    ),
)
def test_numbers_always_land_in_the_unit_range(values, bounds):
    column = Column("a", bounds=bounds)
    block, faults = column.encode(np.array(values))
    assert not faults
    assert block.min() >= -1
    assert block.max() <= 1


def test_a_regression_target_there_and_back():
    schema = Schema((Column("a", bounds=(0, 1)),), Column("y", bounds=(10, 30)))
    assert schema.task == "regression"
    assert schema.classes is None
    _, y = schema.encode({"a": [0, 1, 1], "y": [10, 25, 99]})
    np.testing.assert_allclose(y, [-1, 0.5, 1])
    mean, std = schema.decode_target(y, [0.1, 0.1, 0.2])
    np.testing.assert_allclose(mean, [10, 25, 30])
    np.testing.assert_allclose(std, [1, 1, 2])


def test_a_numeric_target_is_cut_into_classes():
    schema = Schema.from_dict(
        {
            "target": {"name": "rings", "cuts": [9, 12], "classes": ["low", "mid", "high"]},
            "columns": {"a": {"bounds": [0, 1]}},
        }
    )
    assert schema.task == "classification"
    _, y = schema.encode({"a": [0] * 5, "rings": [1, 9, 9.5, 12, 13]})
    assert y.tolist() == [0, 0, 1, 1, 2]
    assert Schema.from_toml(schema.to_toml()) == schema


def test_a_table_without_target_is_encoded_for_prediction(schema):
    table = {name: column for name, column in TABLE.items() if name != "y"}
    x, y = schema.encode(table)
    assert y is None
    np.testing.assert_array_equal(x, schema.encode(TABLE, target=False)[0])
    with pytest.raises(TableError, match=r"target 'y'.*absent"):
        schema.encode(table, target=True)


def test_undeclared_columns_are_told_and_ignored_ones_are_not(schema, recwarn):
    schema.encode(TABLE)
    assert not recwarn.list
    with pytest.warns(TableWarning, match=r"'extra'.*not used"):
        schema.encode({**TABLE, "extra": [0] * 4})
    assert schema.ignored({**TABLE, "extra": [0] * 4}) == ("extra",)


def test_bad_rows_can_count_as_nothing(schema):
    table = {
        **TABLE,
        "age": ["1", "old", "inf", ""],
        "y": ["no", "yes", "yes", "maybe"],
    }
    x, y = schema.encode(table, on_bad_rows="zero")
    assert np.isnan(x).all(1).tolist() == [False, True, True, True]
    assert np.isfinite(x[0]).all()
    assert ((y >= 0) & (y < 2)).all()
    with pytest.raises(ValueError, match="on_bad_rows"):
        schema.encode(TABLE, on_bad_rows="skip")


def test_a_declared_category_is_no_missing_value():
    column = Column("country", categories=("NA", "US"), missing="zeros")
    block, _ = column.encode(np.array(["NA", "US", "?"], dtype=object))
    np.testing.assert_array_equal(block, [[1, 0], [0, 1], [0, 0]])


def test_categories_match_numbers_and_booleans_however_they_are_written():
    column = Column("c", categories=(1, 2))
    for raw in (np.array([1.0, 2.0]), np.array([1, 2]), np.array(["1.0", "2"], dtype=object)):
        np.testing.assert_array_equal(column.encode(raw)[0], np.eye(2))
    for categories in ((True, False), ("True", "False")):
        block, _ = Column("c", categories=categories).encode(np.array([True, False]))
        np.testing.assert_array_equal(block, np.eye(2))
    padded = Column("c", categories=("01", "1"))
    block, _ = padded.encode(np.array(["01", "1"], dtype=object))
    np.testing.assert_array_equal(block, np.eye(2))


def test_a_table_larger_than_a_chunk_goes_to_a_mapped_file(tmp_path, schema, monkeypatch):
    monkeypatch.setattr("dpbnn.data.schema._CHUNK", 50)
    generator = np.random.default_rng(0)
    np.save(tmp_path / "t.npy", generator.normal(size=(1234, 7)) * 10)
    table = read_table(tmp_path / "t.npy")
    columns = tuple(Column(f"x{i}", bounds=(-20, 20)) for i in range(6))
    schema = Schema(columns, Column("x6", bounds=(-20, 20)))
    x, y = schema.encode(table, out=tmp_path / "x.npy")
    assert isinstance(x, np.memmap)
    plain, y_plain = schema.encode(table)
    np.testing.assert_array_equal(x, plain)
    np.testing.assert_array_equal(y, y_plain)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), plain)


def test_a_failed_encoding_leaves_no_file(tmp_path, schema):
    with pytest.raises(TableError):
        schema.encode({**TABLE, "y": ["no", "yes", "yes", "?"]}, out=tmp_path / "x.npy")
    assert not list(tmp_path.iterdir())


def test_a_draft_says_nothing_of_the_values():
    table = {"age": [17, 93], "city": ["Graz", "Oslo"], "y": ["no", "yes"]}
    draft = Schema.draft(table, "y")
    for value in ("17", "93", "Graz", "Oslo", '"no"', "yes"):
        assert value not in draft
    other = {"age": [1, 2, 3], "city": ["a", "b", "c"], "y": ["d", "e", "f"]}
    assert Schema.draft(other, "y") == draft
    with pytest.raises(TableError, match=r"TODO.*public"):
        Schema.from_toml(draft)
    filled = draft.replace('["TODO", "TODO"]', "[0, 100]").replace('["TODO"]', '["no", "yes"]')
    assert Schema.from_toml(filled).features == ("age", "city=no", "city=yes")


def test_a_learned_schema_says_that_it_is_not_private():
    table = {
        "a": [1.0, 3.0, np.nan],
        "same": [2, 2, 2],
        "c": ["x", None, "y"],
        "y": ["no", "yes", "no"],
    }
    schema = Schema.learned(table, "y")
    assert not schema.public
    assert "NOT PRIVATE" in schema.to_toml()
    assert not Schema.from_toml(schema.to_toml()).public
    assert schema.columns[0].bounds == (1.0, 3.0)
    assert schema.classes == ("no", "yes")
    x, _ = schema.encode(table)
    assert np.isfinite(x).all()
    unseen, _ = schema.encode({"a": [99], "same": [3], "c": ["z"]})
    assert np.isfinite(unseen).all()
    numbers = Schema.learned({"a": [1, 2, 3], "y": [10, 2, 10]}, "y", task="classification")
    assert numbers.classes == ("2", "10")
    assert Schema.learned({"a": [1, 2, 3], "y": [10, 2, 10]}, "y").target.bounds == (2.0, 10.0)


def test_learned_categories_have_one_order():
    """Text that reads as NaN is not smaller or larger than a number."""
    values = ["5", "-nan", "a", "1", "nAn", "b", "3", "-NAN", "2"]
    schema = Schema.learned({"a": values, "y": [*range(9)]}, "y")
    assert schema.columns[0].categories == (
        "1", "2", "3", "5", "-NAN", "-nan", "a", "b", "nAn",
    )  # fmt: skip


def test_a_good_table_passes_the_check(schema):
    schema.check(TABLE)


def test_many_columns_work():
    names = [f"c{i}" for i in range(10_000)]
    schema = Schema(tuple(Column(n, bounds=(0, 1)) for n in names), Column("y", bounds=(0, 1)))
    x, _ = schema.encode({**{n: np.array([0.0, 1.0]) for n in names}, "y": [0, 1]})
    assert x.shape == (2, 10_000)


def test_schemas_and_columns_are_frozen(schema):
    with pytest.raises(dataclasses.FrozenInstanceError):
        schema.task = "regression"


def test_adult_is_encoded_in_little_time(either_folder):
    from dpbnn.data import load_table

    train, _, schema = load_table("adult", either_folder)
    begin = time.process_time()
    x, _ = schema.encode(train)
    assert time.process_time() - begin < 1.0
    assert x.shape == (train.n, 107)
