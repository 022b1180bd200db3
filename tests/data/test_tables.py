"""Reading tables: every form that holds the same table gives the same table."""

import gzip
import time

import numpy as np
import pytest

from dpbnn.data import Table, TableError, as_table, read_table

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


def test_missing_values_of_arrow_categories_stay_missing():
    """`to_numpy` of a dictionary array gives them the last category."""
    arrow = pytest.importorskip("pyarrow")
    coded = arrow.array(["a", None, "b"]).dictionary_encode()
    whole = arrow.array([7, None, 8]).dictionary_encode()
    for kind in (arrow.table, arrow.RecordBatch.from_pydict):
        table = as_table(kind({"c": coded, "n": whole}))
        assert table.raw("c").tolist() == ["a", None, "b"]
        assert np.array_equal(table["n"], [7, np.nan, 8], equal_nan=True)
