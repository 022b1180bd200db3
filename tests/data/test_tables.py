"""Reading tables: every form that holds the same table gives the same table."""

import gzip
import time
from collections import Counter

import numpy as np
import pytest

from dpbnn.data import Column, Schema, Table, TableError, as_table, read_table

NAMES = ("age", "sex", "income")
TEXT = "age,sex,income\n39,Male,2.5\n50,Female,-1e3\n?,Male,0\n"


def same(table, names=NAMES):
    assert table.names == names
    assert table.n == 3
    np.testing.assert_array_equal(table[names[0]], [39.0, 50.0, np.nan])
    assert table[names[1]].tolist() == ["Male", "Female", "Male"]
    np.testing.assert_array_equal(table[names[2]], [2.5, -1000.0, 0.0])


def written(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.replace(",", ";"),
        TEXT.replace(",", "\t"),
        TEXT.replace(",", "   "),
        TEXT.replace(",", " , "),
        TEXT.replace("\n", "\r\n"),
        TEXT.replace("\n", "\r"),
        "age,sex,income\r\n39,Male,2.5\n50,Female,-1e3\r\n?,Male,0",
        "\ufeff" + TEXT,
        "\n" + TEXT.replace("50", "\n\n50") + "\n\n",
        '"age","sex","income"\n"39","Male","2.5"\n"50","Female","-1e3"\n"","Male","0"\n',
        TEXT.replace("?", ""),
        TEXT.replace("?", "NA"),
        TEXT.replace("?", "NaN"),
        TEXT.replace("?", "null"),
    ],
)
def test_text_of_many_forms(tmp_path, text):
    same(read_table(written(tmp_path / "t.csv", text)))


def test_compressed_with_and_without_the_ending(tmp_path):
    for name in ("t.csv.gz", "t.csv"):
        (tmp_path / name).write_bytes(gzip.compress(TEXT.encode()))
        same(read_table(tmp_path / name))


def test_names_in_place_of_a_header(tmp_path):
    path = written(tmp_path / "t.data", TEXT.split("\n", 1)[1])
    same(read_table(path, header=False, names=NAMES))
    same(read_table(path, header=False), ("x0", "x1", "x2"))
    same(read_table(written(tmp_path / "t.csv", TEXT), names=("a", "b", "c")), ("a", "b", "c"))


def test_encodings_comments_and_decimal_commas(tmp_path):
    path = written(tmp_path / "latin.csv", "stra\xdfe;h\xf6he\n|note\nK\xf6ln;3,5\n", "latin-1")
    table = read_table(path, encoding="latin-1", comment="|", decimal=",")
    assert table["stra\xdfe"].tolist() == ["K\xf6ln"]
    assert table["h\xf6he"].tolist() == [3.5]
    same(read_table(written(tmp_path / "wide.csv", TEXT, "utf-16"), encoding="utf-16"))


def test_quoted_separators_and_line_ends_stay_in_the_value(tmp_path):
    path = written(tmp_path / "t.csv", 'a,b\n"x, y",1\n"two\nlines",2\nz,3\n')
    table = read_table(path)
    assert table["a"].tolist() == ["x, y", "two\nlines", "z"]
    assert table.where(2).endswith("line 5")


def test_a_header_of_counted_columns_is_a_header(tmp_path):
    table = read_table(written(tmp_path / "t.csv", "0,1\n5,6\n7,8\n"))
    assert table.names == ("0", "1")
    assert table.n == 2


def test_missing_texts_can_be_chosen(tmp_path):
    path = written(tmp_path / "t.csv", "country,x\nNA,1\n-,2\n")
    assert read_table(path, missing=["-"])["country"].tolist() == ["NA", None]


def test_parquet_pandas_numpy_and_mappings_hold_the_same_table(tmp_path):
    columns = {
        "age": [39.0, 50.0, np.nan],
        "sex": ["Male", "Female", "Male"],
        "income": np.array([2.5, -1000.0, 0.0], dtype=np.float32),
    }
    same(as_table(columns))
    np.savez(tmp_path / "t.npz", **{k: np.asarray(v) for k, v in columns.items()})
    same(read_table(tmp_path / "t.npz"))
    rows = [(39.0, "Male", 2.5), (50.0, "Female", -1000.0), (np.nan, "Male", 0.0)]
    structured = np.array(rows, dtype=[("age", float), ("sex", "U8"), ("income", float)])
    same(as_table(structured))
    np.save(tmp_path / "t.npy", structured)
    same(read_table(tmp_path / "t.npy"))
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(columns)
    same(as_table(frame))
    same(as_table(frame.convert_dtypes()))
    same(as_table(frame.assign(sex=frame["sex"].astype("category"))))
    pytest.importorskip("pyarrow")
    frame.to_parquet(tmp_path / "t.parquet")
    same(read_table(tmp_path / "t.parquet"))
    same(read_table(tmp_path / "t.parquet", names=("a", "b", "c")), ("a", "b", "c"))


class PolarsSeries:
    """What polars' Series offers here."""

    def __init__(self, values):
        self._values = values

    def is_null(self):
        raise NotImplementedError

    def to_numpy(self):
        return self._values


class PolarsFrame:
    """What polars' DataFrame offers here."""

    columns = NAMES
    dtypes = ("Float64", "String", "Float64")

    def to_series(self, index):
        values = {
            0: np.array([39.0, 50.0, np.nan]),
            1: np.array(["Male", "Female", "Male"], dtype=object),
            2: np.array([2.5, -1000.0, 0.0]),
        }
        return PolarsSeries(values[index])


def test_parquet_files_take_as_many_names_as_columns(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet", names=["c", "d"]).names == ("c", "d")
    with pytest.raises(TableError, match="has 2 columns and 1 names were given"):
        read_table(tmp_path / "t.parquet", names=["c"])


def test_polars_frames_by_their_interface():
    same(as_table(PolarsFrame()))


def test_polars_frames():
    polars = pytest.importorskip("polars")
    columns = {"age": [39, 50, None], "sex": ["Male", "Female", "Male"], "income": [2.5, -1e3, 0.0]}
    same(as_table(polars.DataFrame(columns)))


def test_arrays_and_tensors_get_counted_names():
    import torch

    values = np.arange(6.0).reshape(3, 2)
    for table in (as_table(values), as_table(torch.from_numpy(values))):
        assert table.names == ("x0", "x1")
        assert table["x1"].tolist() == [1.0, 3.0, 5.0]
    assert as_table(values, names=("a", "b")).names == ("a", "b")


def test_an_array_file_is_mapped_not_read(tmp_path):
    np.save(tmp_path / "t.npy", np.ones((1000, 3)))
    table = read_table(tmp_path / "t.npy")
    assert isinstance(table.raw("x0").base, np.memmap)


def test_rows_keep_their_lines_through_slices_and_choices(tmp_path):
    table = read_table(written(tmp_path / "t.csv", TEXT))
    assert table.rows(1, 3).where(0).endswith("line 3")
    assert table.take([2, 0]).where(0).endswith("line 4")
    assert table.take(np.array([False, True, True])).where(0).endswith("line 3")
    plain = as_table({"a": [1, 2, 3]})
    assert plain.rows(1, 3).where(0).endswith("row 1")
    assert plain.take([2]).where(0).endswith("row 2")
    assert plain.take([2]).rows(0, 1).where(0).endswith("row 2")


def test_a_table_is_a_mapping():
    table = Table({"a": np.array([1, 2]), "b": np.array(["x", None], dtype=object)})
    assert list(table) == ["a", "b"]
    assert len(table) == 2
    assert "a" in table
    assert "c" not in table
    assert table["b"].tolist() == ["x", None]
    with pytest.raises(TableError, match=r"no column 'c'.*'a', 'b'"):
        table["c"]


def test_numbers_are_what_python_reads_without_underscores():
    assert as_table({"a": ["1", " 2.5 ", "1e3"]})["a"].tolist() == [1.0, 2.5, 1000.0]
    assert as_table({"a": ["1", "1_000"]})["a"].tolist() == ["1", "1_000"]


def test_adult_is_read_in_little_time(either_folder):
    """CPU time, so that busy machines do not matter; well below 1.5 s."""
    path = either_folder / "uci" / "adult" / "adult.data.gz"
    begin = time.process_time()
    table = read_table(path, header=False)
    assert time.process_time() - begin < 1.5
    rows = gzip.decompress(path.read_bytes()).strip().count(b"\n") + 1
    assert (table.n, len(table)) == (rows, 15)


def test_progress_is_shown_when_asked_for(tmp_path, capsys):
    same(read_table(written(tmp_path / "t.csv", TEXT), progress=True))
    assert "reading t.csv" in capsys.readouterr().err


def test_rows_keep_their_numbers_however_often_some_are_taken():
    table = as_table({"a": np.arange(10)}).rows(2, 9).take([1, 3, 5]).take([1, 2]).rows(1, 2)
    assert table.where(0).endswith("row 7")


def parquet(path, rows=10_000, group=1000):
    """A file of many row groups: a number, a text, a boolean that is missing in the last group."""
    import pyarrow as pa
    import pyarrow.parquet

    flag = [None if i >= rows - group else bool(i % 2) for i in range(rows)]
    columns = {
        "a": np.arange(rows, dtype=np.float64),
        "whole": pa.array([None if i == 5 else i for i in range(rows)]),
        "text": pa.array([f" t{i % 7} " if i % 3 else None for i in range(rows)]),
        "flag": pa.array(flag),
        "wide": np.zeros(rows),
    }
    pyarrow.parquet.write_table(pa.table(columns), path, row_group_size=group)
    return read_table(path)


def test_parquet_is_read_a_row_group_at_a_time(tmp_path, monkeypatch):
    import pyarrow.parquet

    seen = []
    real = pyarrow.parquet.ParquetFile.read_row_group

    def counted(self, group, columns=None, **options):
        seen.append((group, *columns))
        return real(self, group, columns=columns, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", counted)
    table = parquet(tmp_path / "t.parquet")
    assert (table.n, seen) == (10_000, [])
    part = table.rows(2500, 3500)
    assert seen == []
    np.testing.assert_array_equal(part["a"], np.arange(2500, 3500))
    assert seen == [(2, "a"), (3, "a")]
    assert part.where(0).endswith("row 2500")
    assert len(part.rows(10, 20)["a"]) == 10
    seen.clear()
    columns = (Column("a", bounds=(0, 1e4)), Column("whole", bounds=(0, 1e4), missing="middle"))
    schema = Schema(columns, Column("flag", categories=(False, True)), ignore=("text", "wide"))
    monkeypatch.setattr("dpbnn.data.schema._CHUNK", 700)
    x, _ = schema.encode(table.rows(0, 9000), out=tmp_path / "x.npy")
    assert {name for _, name in seen} == {"a", "whole", "flag"}
    assert max(Counter(seen).values()) == 1  # one pass, though groups and chunks do not agree
    np.testing.assert_allclose(x[:, 0], np.arange(9000) / 5000 - 1, atol=1e-6)
    assert x[5, 1] == 0


def test_parquet_columns_are_those_of_the_arrow_table(tmp_path):
    import pyarrow.parquet

    table = parquet(tmp_path / "t.parquet")
    whole = as_table(pyarrow.parquet.read_table(tmp_path / "t.parquet"))
    for name in table.names:
        assert table.raw(name).tolist() == pytest.approx(whole.raw(name).tolist(), nan_ok=True)
    assert table["text"][:3].tolist() == [None, "t1", "t2"]
    assert table["flag"][:2].tolist() == ["false", "true"]
    assert table.take([9999, 4])["a"].tolist() == [9999, 4]


def test_memory_of_a_parquet_pass_is_that_of_a_row_group(tmp_path):
    import pyarrow as pa

    table = parquet(tmp_path / "t.parquet", rows=400_000, group=10_000)
    schema = Schema((Column("a", bounds=(0, 1)),), Column("wide", bounds=(-1, 1)),
                    ignore=("whole", "text", "flag"))  # fmt: skip
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    schema.encode(table, out=tmp_path / "x.npy")
    assert pool.bytes_allocated() - before < 400_000 * 8 / 4


def test_text_of_frames_and_files_is_held_by_arrow(tmp_path):
    import pyarrow as pa

    frames = [pa.table({"a": [" x ", None, "y"]})]
    pandas = pytest.importorskip("pandas")
    frames += [pandas.DataFrame({"a": pandas.Series([" x ", None, "y"], dtype=kind)})
               for kind in ("string", "category", "str")]  # fmt: skip
    polars = pytest.importorskip("polars")
    frames.append(polars.DataFrame({"a": [" x ", None, "y"]}))
    for frame in frames:
        table = as_table(frame)
        assert isinstance(table.column("a"), pa.ChunkedArray)
        assert table["a"].tolist() == ["x", None, "y"]
        assert table.take(np.array([True, False, True]))["a"].tolist() == ["x", "y"]
        assert table.take([-1])["a"].tolist() == ["y"]
        assert Column("a", categories=("x", "y"), missing="category").encode(table.column("a"))[
            0
        ].argmax(1).tolist() == [0, 2, 1]
    mixed = pandas.DataFrame({"a": pandas.Series(["x", 2, True], dtype="category")})
    assert as_table(mixed)["a"].tolist() == ["x", "2", "true"]


def test_missing_values_of_arrow_categories_stay_missing():
    """`to_numpy` of a dictionary array gives them the last category."""
    arrow = pytest.importorskip("pyarrow")
    coded = arrow.array(["a", None, "b"]).dictionary_encode()
    whole = arrow.array([7, None, 8]).dictionary_encode()
    for kind in (arrow.table, arrow.RecordBatch.from_pydict):
        table = as_table(kind({"c": coded, "n": whole}))
        assert table.raw("c").tolist() == ["a", None, "b"]
        assert np.array_equal(table["n"], [7, np.nan, 8], equal_nan=True)
