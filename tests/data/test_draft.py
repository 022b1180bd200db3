"""Drafts: names and types only; identifiers and dates set aside; suggestions are comments."""

import tomllib

import numpy as np
import pytest

from dpbnn.data import Schema, TableError, as_table, read_table

ROWS = {
    "patient_id": [101, 102, 103, 104],
    "admitted": ["2024-01-31", "2023-05-06", "", "2022-12-01"],
    "age": [39, 50, 61, 20],
    "Percent_body_fat": [10.5, 20.5, 30.5, 12.5],
    "sex": ["w", "m", "m", "w"],
    "smoker": [True, False, True, False],
    "garage": [1, 2, 3, 4],
    "y": [True, True, False, False],
}


def csv_file(folder):
    path = folder / "t.csv"
    lines = [",".join(map(str, row)) for row in zip(*ROWS.values(), strict=True)]
    path.write_text("\n".join([",".join(ROWS), *lines]) + "\n")
    return read_table(path)


def pandas_frame(folder):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS)
    return frame.assign(admitted=pandas.to_datetime(frame["admitted"].replace("", None)))


def pandas_objects(folder):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS)
    return frame.assign(smoker=frame["smoker"].astype(object), y=frame["y"].astype("boolean"))


def polars_frame(folder):
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(ROWS, strict=False)
    return frame.with_columns(
        polars.col("admitted").replace("", None).str.to_date("%Y-%m-%d", strict=False)
    )


def parquet_file(folder):
    import pyarrow as pa
    import pyarrow.parquet

    dates = [None if not d else np.datetime64(d).astype(object) for d in ROWS["admitted"]]
    pyarrow.parquet.write_table(pa.table({**ROWS, "admitted": dates}), folder / "t.parquet")
    return read_table(folder / "t.parquet")


SOURCES = [csv_file, pandas_frame, pandas_objects, polars_frame, parquet_file]


def plain(draft):
    return "\n".join(line for line in draft.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("source", SOURCES)
def test_all_sources_give_one_draft(tmp_path, source):
    """A boolean column is one in pandas, polars, Parquet and text."""
    draft = Schema.draft(source(tmp_path), "y")
    found = tomllib.loads(draft)
    assert found == {
        "ignore": ["patient_id", "admitted"],
        "target": {"name": "y", "classes": ["false", "true"]},
        "columns": {
            "age": {"bounds": ["TODO", "TODO"]},
            "Percent_body_fat": {"bounds": ["TODO", "TODO"]},
            "sex": {"categories": ["TODO"]},
            "smoker": {"categories": ["false", "true"]},
            "garage": {"bounds": ["TODO", "TODO"]},
        },
    }
    assert '# patient_id = "identifier"' in draft
    assert '# admitted = "dates"' in draft


@pytest.mark.parametrize("source", SOURCES)
def test_a_filled_draft_encodes_all_sources_in_one_way(tmp_path, source):
    draft = plain(Schema.draft(source(tmp_path), "y"))
    filled = draft.replace('["TODO", "TODO"]', "[0, 200]").replace('["TODO"]', '["w", "m"]')
    x, y = Schema.from_toml(filled).encode(source(tmp_path), target=True)
    assert y.tolist() == [1, 1, 0, 0]
    names = Schema.from_toml(filled).features
    assert x[:, names.index("smoker=true")].tolist() == [1, 0, 1, 0]
    assert x[:, names.index("sex=m")].tolist() == [0, 1, 1, 0]
    np.testing.assert_allclose(x[:, names.index("age")], np.array([39, 50, 61, 20]) / 100 - 1)


def test_suggestions_are_comments_and_never_used():
    draft = Schema.draft(ROWS, "y")
    for line in (
        "# Suggestion, from the name alone: bounds = [0, 120]",
        "# Suggestion, from the name alone: bounds = [0, 100]",
        '# Suggestion, from the name alone: categories = ["female", "male"]',
    ):
        assert line in draft.splitlines()
    assert draft.count("Suggestion") == 3  # a garage is no age
    with pytest.raises(TableError, match="TODO"):
        Schema.from_toml(draft)
    other = {name: values[::-1] for name, values in ROWS.items()}
    assert Schema.draft({**other, "age": [1, 2, 3, 4]}, "y") == draft


@pytest.mark.parametrize("name", [
    "id", "ID", "patientId", "customer-id", "Unnamed: 0", "uuid", "patient", "Customer",
])  # fmt: skip
def test_identifiers_are_known_by_their_names(name):
    found = tomllib.loads(Schema.draft({name: [1, 2], "width": [1, 2], "y": [1, 2]}, "y"))
    assert found["ignore"] == [name]
    assert [*found["columns"]] == ["width"]


def test_what_is_said_of_a_person_is_no_identifier():
    rows = {"customer age": [1, 2], "client": [True, False], "y": [1, 2]}
    found = tomllib.loads(Schema.draft(rows, "y"))
    assert "ignore" not in found
    assert [*found["columns"]] == ["customer age", "client"]


@pytest.mark.parametrize("values", [
    ["2024-01-31", "2024-02-01T10:30:00"], ["31.01.2024", "1.2.2024"], ["01/31/2024", "NA"],
    ["2024/01/31", "2024/1/1"],
])  # fmt: skip
def test_dates_in_text_are_flagged_and_not_drafted_as_numbers(values):
    found = tomllib.loads(Schema.draft({"when": values, "a": [1, 2], "y": [1, 2]}, "y"))
    assert found["ignore"] == ["when"]
    schema = Schema.from_dict({"target": {"name": "y", "bounds": [0, 3]},
                               "columns": {"when": {"bounds": [0, 1]}}})  # fmt: skip
    with pytest.raises(TableError, match=r"is a date; write dates as 2024-01-31"):
        schema.encode({"when": values, "y": [1, 2]})


def test_columns_of_odd_names_survive():
    table = {"a b.c": [1, 2], "[x]": [True, False], "y": [0.5, 1]}
    found = tomllib.loads(Schema.draft(table, "y"))
    assert [*found["columns"]] == ["a b.c", "[x]"]
    assert as_table(table).names == ("a b.c", "[x]", "y")
