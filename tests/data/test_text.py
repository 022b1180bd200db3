"""Text in blocks: the same table, lines and errors as line by line."""

import csv
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbnn.data import TableError, read_table, text
from dpbnn.data.table import numbers

CELL = st.text(st.sampled_from('ab1.5 -\t"é\xa0'), max_size=6)


def slow(monkeypatch):
    monkeypatch.setattr(text, "_cut", lambda *_: None)


def held(path):
    table = read_table(path, separator=",")
    where = [table.where(row) for row in range(table.n)]
    return {name: table.raw(name).tolist() for name in table.names}, where


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(CELL, min_size=3, max_size=3), min_size=1, max_size=12),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    blank=st.booleans(),
)
def test_blocks_and_lines_give_the_same_table(tmp_path_factory, rows, end, blank):
    path = tmp_path_factory.mktemp("text") / "t.csv"
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator=end)
    writer.writerows([["u", "v", "w"], *rows])
    path.write_text(stream.getvalue() + end * 2 * blank, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_SAMPLE", 2)
        patch.setattr(text, "_BLOCK", 20)
        found = held(path)
        slow(patch)
        assert held(path) == found
    assert [list(row) for row in zip(*found[0].values(), strict=True)] == [
        [cell.strip() for cell in row] for row in rows
    ]


def plain(n):
    return "a,b\n" + "".join(f"{i},x{i}\n" for i in range(n))


def test_blocks_are_what_plain_lines_go_through(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text(plain(500))
    monkeypatch.setattr(text, "_BLOCK", 100)
    seen = []
    cut = text._cut
    monkeypatch.setattr(text, "_cut", lambda *given: seen.append(cut(*given)) or seen[-1])
    table = read_table(path)
    np.testing.assert_array_equal(table["a"], np.arange(500))
    assert len(seen) > 10
    assert all(block is not None for block in seen)
    assert table.where(499).endswith("line 501")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("7", "line 402: has 1 values where 2 columns are"),
        ("7,8,9", "line 402: has 3 values"),
        ('"7,8', "unexpected end of data"),
        ("7,\0", "NUL bytes"),
    ],
)
@pytest.mark.parametrize("block", [100, 1 << 22])
def test_errors_in_later_blocks_name_their_line(tmp_path, monkeypatch, line, message, block):
    monkeypatch.setattr(text, "_BLOCK", block)
    path = tmp_path / "t.csv"
    path.write_text(plain(400) + line + "\n" + "1,2\n" * 100)
    with pytest.raises(TableError, match=message) as error:
        read_table(path, separator=",", on_bad_rows="show")
    assert "\n" not in str(error.value)
    with pytest.raises(TableError) as error:
        read_table(path, separator=",")
    assert "402" not in str(error.value)


@pytest.mark.parametrize("block", [100, 1 << 22])
def test_bad_lines_become_rows_of_missing_values(tmp_path, monkeypatch, block):
    """Under on_bad_rows="zero" no line changes the number of rows or ends the reading."""
    monkeypatch.setattr(text, "_BLOCK", block)
    path = tmp_path / "t.csv"
    for line in ("7", "7,8,9", '7,"8"9', "7,\0", "7,\xff"):
        path.write_bytes(plain(400).encode() + line.encode("latin-1") + b"\n" + b"1,2\n" * 100)
        table = read_table(path, separator=",", on_bad_rows="zero")
        assert table.n == 501
        assert table.raw("b")[400] in ("", "\ufffd")
        assert table.raw("a")[401] == "1"
    path.write_text(plain(400) + '"7,8\n' + "1,2\n" * 100)
    with pytest.raises(TableError, match="one line"):  # nobody knows how many rows there are
        read_table(path, separator=",", on_bad_rows="zero")


def test_quotes_and_empty_lines_far_down_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_BLOCK", 300)
    path = tmp_path / "t.csv"
    path.write_text(plain(200) + '\n200,"x, or y"\n' + "201, z \n" + "202,z\n\n\n")
    table = read_table(path)
    assert table.n == 203
    assert table.raw("b")[-3:].tolist() == ["x, or y", "z", "z"]
    assert table.where(200).endswith("line 203")


def test_a_number_may_stand_for_missing(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,x\n-999,y\n0,z\n")
    np.testing.assert_array_equal(read_table(path, missing=["-999"])["a"], [1, np.nan, 0])
    np.testing.assert_array_equal(read_table(path, missing=["0"])["a"], [1, -999, np.nan])


def test_numbers_in_lists_and_arrays_are_the_same():
    texts = ["1", "-2.5e3", "nan", "NA", "", "inf"]
    for given_texts in (texts, [*texts, "1_0"], [*texts, "word"], ["3", "4"], []):
        found, bad = numbers(given_texts)
        again, same = numbers(np.array(given_texts, dtype=object))
        np.testing.assert_array_equal(found, again)
        assert (bad is None) == (same is None)
    assert numbers(["1_0", "2"])[1].tolist() == [True, False]
