"""Columns as places in the bytes of a file: the same texts, numbers and errors as line by line."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpbnn.data import Column, Schema, TableError, cells, read_table, text
from dpbnn.data.cells import Block
from dpbnn.data.table import MISSING, codes, numbers

pytestmark = pytest.mark.filterwarnings("ignore::dpbnn.data.table.TableWarning")
WORDS = st.sampled_from(
    ["", " ", "?", "NA", "nan", "inf", "-inf", "1", "-1.50", "+2e3", "1e999", "1_000", "0x10", "a",
     "b", " a ", "b\t", "\x1fa", "A" * 7, "A" * 8, "A" * 9, "é", "\xa0é ", "日本", "ab" * 40,
     "Married-civ-spouse", "Married-civ-spousf", "true", "3.0", "3"]
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
def test_cells_are_what_the_csv_module_reads(tmp_path, body, block, decimal, encoding):
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
    """An end one byte early must show; the comparison above would pass over nothing else."""
    path = tmp_path / "table.csv"
    path.write_text("c0,c1\n" + "ab,cd\n" * 9)
    monkeypatch.setattr(text, "_SAMPLE", 2)
    expected = seen(path)
    right = text._cut

    def wrong(*arguments):
        cut = right(*arguments)
        return Block(cut.data, cut.starts, cut.ends - 1, cut.spaced)

    monkeypatch.setattr(text, "_cut", wrong)
    assert seen(path) != expected


@pytest.mark.parametrize(("mix", "slots"), [(0, 16), (1, 16), (3, 1)])
def test_texts_that_share_a_key_or_a_slot_stay_apart(monkeypatch, mix, slots):
    """Without mixing, the keys of long texts are their last words; with few slots most collide."""
    monkeypatch.setattr(cells, "_MIX", np.uint64(mix))
    monkeypatch.setattr(cells, "_SLOTS", slots)
    texts = [["12345678same", "87654321same", "a", "b", ""] * 800 + [f"rare{i}" for i in range(99)]]
    (column,) = cells.columns([Block.of(texts)])
    found = column.distinct()
    if found is not None:
        own, at = found
        assert [own[i] for i in at] == texts[0]
    assert column.tolist() == texts[0]
    expected = codes(texts[0], {"87654321same": 1, "rare7": 2})
    np.testing.assert_array_equal(codes(column, {"87654321same": 1, "rare7": 2}), expected)


def test_a_column_that_repeats_itself_is_read_once():
    (column,) = cells.columns([Block.of([["yes", "no", "yes", "maybe"] * 1000])])
    own, at = column.distinct()
    assert sorted(own) == ["maybe", "no", "yes"]
    assert len(at) == len(column) == 4000
    (column,) = cells.columns([Block.of([[str(i) for i in range(4000)]])])
    assert column.distinct() is None


def test_blocks_follow_one_another():
    blocks = [Block.of([["a", "é"], ["1", "2"]]), Block.of([["日本"], ["3"]])]
    first, second = cells.columns(blocks)
    assert list(first) == ["a", "é", "日本"]
    assert (second[-1], list(second[1:])) == ("3", ["2", "3"])
