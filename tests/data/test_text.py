"""Text in blocks: the same table, lines and errors as line by line."""

import csv
import io

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpbnn.data import Column, Schema, TableError, read_table, text
from dpbnn.data.table import MISSING, codes, numbers

pytestmark = pytest.mark.filterwarnings("ignore::dpbnn.data.table.TableWarning")

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


def test_infinity_may_stand_for_missing(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,inf\n2,3\n")
    table = read_table(path, missing=["inf"])
    for part in (table, table.rows(0, 1), table.take([0, 1])):
        assert np.isnan(part["b"][0])


def test_numbers_in_lists_and_arrays_are_the_same():
    texts = ["1", "-2.5e3", "nan", "NA", "", "inf"]
    for given_texts in (texts, [*texts, "1_0"], [*texts, "word"], ["3", "4"], []):
        found, bad = numbers(given_texts)
        again, same = numbers(np.array(given_texts, dtype=object))
        np.testing.assert_array_equal(found, again)
        assert (bad is None) == (same is None)
    assert numbers(["1_0", "2"])[1].tolist() == [True, False]


def test_comments_far_down_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_BLOCK", 300)
    path = tmp_path / "t.csv"
    path.write_text("|first\n" + plain(200) + '|a comment, of "two" values\n200,z|y\n')
    table = read_table(path, comment="|")
    assert table.raw("b")[-2:].tolist() == ["x199", "z|y"]
    assert table.where(200).endswith("line 204")


WORDS = st.sampled_from(
    ["", " ", "?", "NA", "nan", "inf", "-inf", "1", "-1.50", "+2e3", "1e999", "1_000", "0x10", "a",
     "b", " a ", "b\t", "\x1fa", "A" * 7, "A" * 8, "A" * 9, "é", "\xa0é ", "日本", "ab" * 40,
     "Married-civ-spouse", "Married-civ-spousf", "true", "3.0", "3", "\ufeffa", "nan(1)", "١"]
)  # fmt: skip
TEXTS = st.text(
    st.characters(blacklist_characters='\r\n",\0', blacklist_categories=["Cs"]), max_size=20
)


@st.composite
def files(draw):
    width = draw(st.integers(1, 4))
    value = WORDS if draw(st.booleans()) else st.one_of(WORDS, TEXTS)
    rows = draw(st.lists(st.lists(value, min_size=width, max_size=width), max_size=30))
    rows = rows * draw(st.integers(1, 3))
    ends = draw(st.sampled_from([("\n",), ("\r\n",), ("\n", "\r\n"), ("\r",), ("\n", "\n\n")]))
    lines = [",".join(row) for row in rows]
    if lines and draw(st.integers(0, 4)) == 0:
        lines[draw(st.integers(0, len(lines) - 1))] = draw(
            st.sampled_from(["", " ", '"', 'a,"b', "a,b,c,d,e", ",", "\r", "a\rb,c"])
        )
    names = ",".join(f"c{i}" for i in range(width))
    body = "".join(line + draw(st.sampled_from(ends)) for line in (names, *lines))
    return body if draw(st.booleans()) else body.rstrip("\r\n")


def seen(path, **options):
    """Return all that a table shows, or the error."""
    try:
        table = read_table(path, separator=",", **options)
    except TableError as error:
        return str(error)
    own = {"a": 0, "b": 1, "3": 2, "Married-civ-spouse": 3, "true": 4, "NA": 5}
    shown = [(table.n, table.names, [table.where(row) for row in range(table.n)])]
    for name in table.names:
        column = table.column(name)
        values, unread = numbers(column, MISSING)
        shown += [
            table.raw(name).tolist(),
            [column[row] for row in range(table.n)],
            list(column[1:5]),
            values.tobytes(),
            None if unread is None else unread.tolist(),
            codes(column, own, MISSING).tolist(),
            repr(table[name].tolist()),
            table.take(np.arange(table.n) % 2 == 0).raw(name).tolist(),
        ]
        for known in (Column(name, bounds=(0, 9)), Column(name, categories=tuple(own))):
            schema = Schema((known,), Column("y", categories=("a", "b")))
            try:
                shown.append(schema.encode(table, target=False)[0].tobytes())
            except TableError as error:
                shown.append(str(error))
    return shown


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    body=files(),
    block=st.sampled_from([1, 40, 1 << 22]),
    decimal=st.sampled_from([".", ","]),
    encoding=st.sampled_from(["utf-8", "utf-16"]),
)
def test_columns_are_what_the_csv_module_reads(tmp_path, body, block, decimal, encoding):
    path = tmp_path / "table.csv"
    path.write_bytes(body.encode(encoding))
    options = {"decimal": decimal, "encoding": encoding}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_SAMPLE", 2)
        patch.setattr(text, "_BLOCK", block)
        quick = seen(path, **options)
        patch.setattr(text, "_cut", lambda *_: None)
        assert quick == seen(path, **options)


def test_a_wrong_cut_is_told_apart(tmp_path, monkeypatch):
    """A missing last letter must show; the comparison above would pass over nothing else."""
    path = tmp_path / "table.csv"
    path.write_text("c0,c1\n" + "ab,cd\n" * 9)
    monkeypatch.setattr(text, "_SAMPLE", 2)
    expected = seen(path)
    right = text._cut

    def wrong(*arguments):
        return [text._texts(t[:-1] for t in column.to_pylist()) for column in right(*arguments)]

    monkeypatch.setattr(text, "_cut", wrong)
    assert seen(path) != expected
