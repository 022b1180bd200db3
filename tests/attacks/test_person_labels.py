"""Labels of persons that could make two persons one, or one person two."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

import dpbnn
from dpbnn.units import Units, numbered

LARGE = [2**53, 2**53 + 1, None, 2**53 + 1, 7]


def large_ids(kind):
    """The same column of ids with a missing one, as libraries hold it."""
    if kind == "list":
        return [math.nan if value is None else value for value in LARGE]
    if kind == "pandas":
        return pytest.importorskip("pandas").array(LARGE, dtype="Int64")
    if kind == "polars":
        return pytest.importorskip("polars").Series(LARGE)
    return pa.array(LARGE, pa.int64())


@pytest.mark.parametrize("kind", ["list", "pandas", "polars", "arrow", "parquet"])
def test_large_ids_stay_apart_where_one_is_missing(kind, tmp_path):
    schema = dpbnn.data.Schema.from_dict(
        {"target": {"name": "y", "bounds": [0, 1]}, "columns": {"x": {"bounds": [0, 1]}},
         "unit": "who"})  # fmt: skip
    ids, numbers = large_ids(kind), [0.5] * len(LARGE)
    table = {"who": ids, "x": numbers, "y": numbers}
    if kind == "pandas":
        table = pytest.importorskip("pandas").DataFrame(table)
    elif kind == "polars":
        table = pytest.importorskip("polars").DataFrame(table)
    elif kind in ("arrow", "parquet"):
        table = pa.table(table)
    if kind == "parquet":
        parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
        table = dpbnn.data.read_table(tmp_path / "t.parquet")
    for labels in (schema.units(table), ids if kind != "parquet" else LARGE):
        numbers, missing = numbered(labels)
        assert missing.tolist() == [False, False, True, False, False]
        assert numbers[~missing].tolist() == [0, 1, 1, 2]


def test_texts_of_large_numbers_are_the_numbers_they_say():
    same = [2**53 + 1, str(2**53 + 1), f"{2**53 + 1}.0", f"+{2**53 + 1}", "9.007199254740993e15"]
    labels = [*same, f"{2**53}.0", "0.1", 0.1, "0.10000000000000000001"]
    assert numbered(labels)[0].tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    "labels",
    [np.array([2.0**53, 1.0]), np.array([2.0**24, 1.0], np.float32), torch.tensor([2.0**24, 1.0]),
     [-(2.0**53), 1], [math.inf, 1], [np.float32(2.0**24), 1]],
)  # fmt: skip
def test_floats_too_large_for_whole_numbers_are_refused(labels):
    with pytest.raises(ValueError, match="units: some labels are floating-point numbers"):
        Units.of(labels, None, on_bad_rows="zero")


@pytest.mark.parametrize(
    "label", [[1], {}, object(), 1j, np.complex64(1), np.zeros(2), torch.zeros(2), torch.ones(())]
)
def test_labels_that_cannot_be_compared_are_refused_in_one_line(label):
    with pytest.raises(ValueError, match=r"^units: labels must be texts or numbers") as refused:
        Units.of(["a", label, "b"], None, on_bad_rows="zero")
    assert "\n" not in str(refused.value)


def test_labels_that_could_not_be_read_are_nobodys():
    """Two of them may be of two persons."""
    assert numbered(["a", b"\xe9", b"\xe8", "b"])[1].tolist() == [False, True, True, False]
    schema = dpbnn.data.Schema.from_dict(
        {"target": {"name": "y", "bounds": [0, 1]}, "columns": {"x": {"bounds": [0, 1]}},
         "unit": "who"})  # fmt: skip
    who = np.array(["a", None, None, "b"], dtype=object)
    who[1], who[2] = [1], 2j
    table = dpbnn.data.as_table(
        {"who": who, "x": np.zeros(4), "y": np.zeros(4)}, on_bad_rows="zero"
    )
    assert numbered(schema.units(table))[1].tolist() == [False, True, True, False]
