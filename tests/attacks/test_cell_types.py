"""How one record's cells are read must not depend on what other records hold.

pandas and NumPy give a column one type for all its cells: a single text, or a single missing value,
changes the type of all others.
"""

import datetime
import io
import warnings

import broken_versions as broken
import numpy as np
import pandas as pd
import pytest
from twins import fails_on, twins_of

import dpbnn
from dpbnn.data import Column, Schema
from dpbnn.data.column import cut
from dpbnn.data.frames import as_table
from dpbnn.messages import as_numbers

DAY = datetime.datetime(2020, 1, 2, 12, 30, 0, 125_000)
CELLS = {
    "whole numbers": [1, 2, 3],
    "numbers": [1.0, 2.5, 2.0],
    "booleans": [True, False, True],
    "texts": ["1", "2.0", "x"],
    "texts of booleans": ["True", "False", "True"],
    "codes": ["01", "02", "01"],
    "dates": [DAY.date(), DAY.date(), DAY.date()],
    "times": [DAY, DAY, pd.Timestamp(DAY)],
    "days as numbers": [20200102, 20200103, 20200104],
}
ODD = [None, float("nan"), "zzz", 7, 2.5, True, DAY.date(), float("inf"), 10**30, [1], pd.NaT]
COLUMNS = {
    "number": Column("v", bounds=(0, 100)),
    "number or missing": Column("v", bounds=(0, 100), missing="indicator"),
    "category": Column("v", categories=("1", "02", "x", "true"), other=True, missing="category"),
    "date": Column("v", bounds=("2000-01-01", "2030-01-01"), missing="indicator"),
}
TARGETS = {
    "classes": Column("v", categories=("01", "2")),
    "booleans": Column("v", categories=("true", "false")),
    "count": Column("v", "count", bounds=(0, 9)),
    "number": Column("v", bounds=(0, 9)),
    "cut": cut("v", (1.0, 2.0), ("low", "middle", "high")),
}
SCHEMAS = {
    name: Schema((own,), Column("t", categories=("a", "b"))) for name, own in COLUMNS.items()
}
SCHEMAS |= {
    f"target: {name}": Schema((Column("w", bounds=(0, 1)),), own) for name, own in TARGETS.items()
}


def csv(cells):
    text = pd.Series(cells, name="v", dtype=object).to_csv(index=False)
    return pd.read_csv(io.StringIO(text))


BOXES = {
    "list": lambda cells: {"v": cells},
    "series": lambda cells: {"v": pd.Series(cells)},
    "csv": csv,
}


def read(schema, cells, box):
    """Return the encoded rows of all cells but the last one."""
    table = as_table(BOXES[box](cells), on_bad_rows="zero")
    target = schema.target.name == "v"
    if target:
        table = table.with_column("w", np.zeros(table.n))
    x, y = schema.encode(table, target=target, on_bad_rows="zero")
    known = np.where(np.isnan(x[:, :1]), np.nan, y[:, None]) if target else x
    return np.concatenate([x, known], 1)[:-1]


@fails_on(68, broken.booleans_are_numbers_in_whole_columns_alone, name="number or missing",
          kind="booleans", box="series")  # fmt: skip
@fails_on(68, broken.dates_are_read_from_texts_alone, name="date", kind="days as numbers",
          box="csv")  # fmt: skip
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_item_68_no_cell_changes_how_the_cells_of_other_records_are_read(name, kind, box):
    schema, cells = SCHEMAS[name], CELLS[kind]
    alone = read(schema, [*cells, cells[0]], box)
    for odd in ODD:
        np.testing.assert_array_equal(alone, read(schema, [*cells, odd], box), repr(odd))


LABELS = {
    "numbers": ([0, 1], [0, 1, 1, 0]),
    "texts of numbers": (["0", "1"], [0, 1, 1, 0]),
    "codes": (["00", "01"], ["00", "01", "01", "00"]),
    "booleans": ([False, True], [False, True, True, False]),
    "booleans for numbers": ([0, 1], [False, True, True, False]),
    "texts of booleans": (["True", "False"], [False, True, True, False]),
    "texts": (["a", "b"], ["a", "b", "b", "a"]),
}


@fails_on(68, broken.labels_are_compared_as_they_come, kind="numbers", box="csv")
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("kind", LABELS)
def test_item_68_no_label_changes_how_the_labels_of_other_records_are_read(kind, box):
    classes, labels = LABELS[kind]
    found = []
    for odd in (labels[0], None, "zzz", 2.5, 7):
        model = dpbnn.PrivateBayesClassifier(bounds=(0, 1), classes=classes, on_bad_rows="zero")
        y = BOXES[box]([*labels, odd])["v"]
        found.append(model._table(np.zeros((5, 1)), y)[1].values[:4].tolist())
    assert sorted(found[0]) == [0, 0, 1, 1]
    assert all(numbers == found[0] for numbers in found)


@fails_on(68, broken.texts_of_booleans_are_no_numbers)
def test_item_68_no_cell_of_a_table_of_numbers_changes_how_others_are_read():
    frames = [csv([True, False, True, odd]) for odd in (True, None, "zzz")]
    found = [as_numbers(frame)[:3].tolist() for frame in frames]
    assert found == [[[1.0], [0.0], [1.0]]] * 3


@fails_on(68, broken.booleans_are_numbers_in_whole_columns_alone)
def test_item_68_a_missing_cell_moves_a_fit_by_one_record():
    """A whole fit, of a table with an answer that is missing, and without that record."""
    schema = Schema(
        (Column("v", bounds=(0, 1), missing="indicator"), Column("w", bounds=(0, 1))),
        Column("t", categories=("a", "b")),
    )
    rng = np.random.default_rng(0)
    v, w = rng.random(40) < 0.5, rng.random(40)
    t = np.where(v, "a", "b").astype(object)

    def fit(answer):
        own = pd.DataFrame({"v": [*v[:-1], answer], "w": [*w[:-1], np.nan], "t": t})
        model = dpbnn.PrivateBayesClassifier(
            schema=schema, epsilon=5.0, epochs=3, on_bad_rows="zero", random_state=0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model.fit(own).posterior_.model

    dpbnn.replay(fit, True, None, trace=False).check()


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
