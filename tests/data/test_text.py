"""Text in blocks: the same table, lines and errors as line by line."""

import csv
import io

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpbnn.data import Column, Schema, TableError, read_table, text
from dpbnn.data.table import MISSING, codes, numbers, strings

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


def test_arrow_starts_no_threads(tmp_path, monkeypatch):
    """A command that fails right after reading was aborted while they started."""
    from pyarrow import csv

    read, threads = csv.read_csv, []

    def watched(data, options, *others):
        threads.append(options.use_threads)
        return read(data, options, *others)

    monkeypatch.setattr(csv, "read_csv", watched)
    path = tmp_path / "t.csv"
    path.write_text(plain(20))
    assert read_table(path).n == 20
    assert threads == [False]


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
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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


CELLS = st.sampled_from(
    ["a", "1", " b ", '"x"', '"x,y"', '"p\nq"', '"d""e"', '""', "", '"\r\nz"', '"""q"""', "é"]
)
ODD = st.sampled_from(
    ['"', "a", "", "a,b,c", '5" x,b', 'a,5" x', ' "x",b', "|note", '|"', " ", '"a"b,c']
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lines=st.lists(st.one_of(st.tuples(CELLS, CELLS).map(",".join), ODD), min_size=1, max_size=15),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    block=st.sampled_from([5, 30, 1 << 22]),
    lookahead=st.sampled_from([0, 2, 100]),
    comment=st.sampled_from([None, "|"]),
    on_bad_rows=st.sampled_from(["show", "zero"]),
)
def test_quotes_are_read_as_the_csv_module_reads_them(
    tmp_path, lines, end, block, lookahead, comment, on_bad_rows
):
    path = tmp_path / "table.csv"
    path.write_bytes(("c0,c1\n" + end.join(lines)).encode())
    options = {"comment": comment, "on_bad_rows": on_bad_rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_SAMPLE", 2)
        patch.setattr(text, "_BLOCK", block)
        patch.setattr(text, "_OPEN", lookahead)
        quick = seen(path, **options)
        slow(patch)
        assert quick == seen(path, **options)
        patch.undo()
        slow(patch)
        assert quick == seen(path, **options)


def test_well_quoted_values_go_through_arrow(tmp_path, monkeypatch):
    rows = [("x, y", "1"), ('say "hi"', "2"), ("two\nlines", "3"), ("", "4")] * 500
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([("a", "b"), *rows])
    monkeypatch.setattr(text._Reader, "_by_line", None)
    table = read_table(path)
    assert [*zip(table.raw("a"), table.raw("b"), strict=True)] == rows
    assert table.where(4).endswith("line 7")  # the third row has two lines
    monkeypatch.setattr(text, "_well_quoted", lambda *_: False)
    with pytest.raises(TypeError):
        read_table(path)


def test_broken_quotes_would_be_read_in_another_way_by_arrow(tmp_path, monkeypatch):
    """What `_well_quoted` keeps away from Arrow: the test above must be able to fail."""
    path = tmp_path / "t.csv"
    path.write_text('a,b\n"8"9,1\n"x""",2\n')
    monkeypatch.setattr(text, "_SAMPLE", 1)
    with pytest.raises(TableError, match="quotes"):
        read_table(path)
    monkeypatch.setattr(text, "_well_quoted", lambda *_: True)
    assert read_table(path).raw("a").tolist() == ["89", 'x"']


def test_one_bad_block_does_not_slow_down_the_others(tmp_path, monkeypatch):
    """Only the block with a quote inside a value is read line by line."""
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "1,x\n" * 300 + '2,5" pipe\n' + "3,y\n" * 3000)
    monkeypatch.setattr(text, "_BLOCK", 400)
    slow_blocks = []
    real = text._Reader._by_line
    monkeypatch.setattr(
        text._Reader, "_by_line", lambda *given: slow_blocks.append(1) or real(*given)
    )
    table = read_table(path)
    assert (table.n, len(slow_blocks)) == (3301, 1)
    assert table.raw("b")[300] == '5" pipe'
    assert table.where(3300).endswith("line 3302")


def test_missing_values_in_numbers_are_found_by_arrow(tmp_path, monkeypatch):
    """Python reads no cell one by one, as long as all of them are numbers or missing."""
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "1.5,NA\n,2\n?,nan\n" * 100)
    table = read_table(path)
    monkeypatch.setattr("dpbnn.data.table._distinct", None)
    np.testing.assert_array_equal(table["a"], [1.5, np.nan, np.nan] * 100)
    np.testing.assert_array_equal(table["b"], [np.nan, 2, np.nan] * 100)


def test_decimal_commas_are_found_in_numbers_only(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a;b\n1,5;x,y\n-,5e3;1,2,3\n7,;1.5,2\n")
    table = read_table(path, decimal=",")
    assert table["a"].tolist() == [1.5, -500, 7]
    assert table.raw("b").tolist() == ["x,y", "1,2,3", "1.5,2"]


def test_a_wrong_cut_is_told_apart(tmp_path, monkeypatch):
    """A missing last letter must show; the comparison above would pass over nothing else."""
    path = tmp_path / "table.csv"
    path.write_text("c0,c1\n" + "ab,cd\n" * 9)
    monkeypatch.setattr(text, "_SAMPLE", 2)
    expected = seen(path)
    right = text._cut

    def wrong(*arguments):
        part = right(*arguments)
        short = [strings(t[:-1] for t in column.to_pylist()) for column in part.columns]
        return part._replace(columns=short)

    monkeypatch.setattr(text, "_cut", wrong)
    assert seen(path) != expected
