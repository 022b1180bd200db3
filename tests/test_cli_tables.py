"""Bad tables through the command: one line, exit code 2, no run directory, nothing spent."""

import gzip

import pytest
from command_line import run

import dpbnn

SCHEMA = """
[target]
name = "y"
classes = ["no", "yes"]
[columns.age]
bounds = [0, 100]
[columns.sex]
categories = ["F", "M"]
"""
GOOD = "age,sex,y\n" + "39,F,no\n50,M,yes\n61,F,no\n20,M,yes\n" * 5
WIDE = ",".join(f"c{i}" for i in range(10_000))

TABLES = {
    "empty": (b"", "is empty"),
    "header only": (b"age,sex,y\n", "no rows"),
    "one row": (b"age,sex,y\n39,F,no\n", "1 row"),
    "one class": (b"age,sex,y\n39,F,no\n50,M,no\n", "one class in every row"),
    "all missing": (b"age,sex,y\n,F,no\n,M,yes\n", "'age' has no value in any row"),
    "wrong type": (GOOD.encode() + b"old,F,no\n", "1 value cannot be used; one is not a number"),
    "a missing value": (GOOD.encode() + b"?,F,no\n", "missing"),
    "infinity": (GOOD.encode() + b"inf,F,no\n", "infinite"),
    "too large a number": (GOOD.encode() + b"1e999,F,no\n", "infinite"),
    "duplicate columns": (b"age,sex,sex,y\n39,F,F,no\n", "column 3's name is there twice"),
    "unknown category": (GOOD.encode() + b"39,X,no\n", "none of 'F', 'M'"),
    "unknown class": (GOOD.encode() + b"39,F,maybe\n", "none of 'no', 'yes'"),
    "missing target": (GOOD.encode() + b"39,F,\n", "'y'"),
    "target absent": (b"age,sex\n39,F\n50,M\n", "the target 'y' of the schema is absent"),
    "column absent": (b"age,y\n39,no\n50,yes\n", "the column 'sex' of the schema is absent"),
    "ragged": (GOOD.encode() + b"39,F\n", "2 values"),
    "open quote": (GOOD.encode() + b'39,"F,no\n', "quotes"),
    "latin-1": ("age,sex,y\n39,M\xe4nnlich,no\n".encode("latin-1"), "--encoding latin-1"),
    "utf-16": (GOOD.encode("utf-16"), "UTF-16"),
    "truncated gzip": (gzip.compress(GOOD.encode() * 1000)[:-20], "ends early"),
    "binary": (bytes(range(256)) * 4, "table.csv"),
    "10000 columns and no target": (f"{WIDE}\n".encode() + b"1," * 9999 + b"1\n", "absent"),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "schema.toml").write_text(SCHEMA)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(capsys, *more):
    return run(capsys, "fit", "table.csv", "--schema", "schema.toml", "--epsilon", "1", "--epochs",
               "5", "--out", "run", "--quiet", *more)  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_a_bad_table_leaves_nothing_behind(capsys, place, kind):
    content, part = TABLES[kind]
    (place / "table.csv").write_bytes(content)
    book = dpbnn.Ledger(place / "shared.jsonl", epsilon=2.0, delta=1e-5)
    before = sorted(path.name for path in place.iterdir())
    code, out, err = fit(capsys, "--ledger", "shared.jsonl")
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if "warning" not in line]
    assert len(lines) == 1, err
    assert lines[0].startswith("dpbnn: ")
    assert part in lines[0]
    assert sorted(path.name for path in place.iterdir()) == before
    assert book.releases == 0


@pytest.mark.parametrize(
    "content",
    [
        GOOD.encode(),
        GOOD.replace("\n", "\r\n", 9).encode(),
        gzip.compress(GOOD.encode()),
        GOOD.encode() + b"1e300,F,no\n-1e300,M,yes\n",
        b"\xef\xbb\xbf" + GOOD.encode(),
    ],
    ids=["plain", "mixed line ends", "gzip", "huge values", "byte order mark"],
)
def test_odd_but_good_tables_are_fitted(capsys, place, content):
    (place / "table.csv").write_bytes(content)
    code, _, err = fit(capsys)
    assert (code, err) == (0, "")
    assert (place / "run" / "manifest.json").is_file()
    assert dpbnn.Ledger(place / "run" / "ledger.jsonl").releases == 5


def test_bad_rows_can_be_left_out_of_the_training(capsys, place):
    (place / "table.csv").write_text(GOOD + "old,F,no\n39,X,yes\n39,F,maybe\n")
    assert fit(capsys)[0] == 2
    code, _, _ = fit(capsys, "--on-bad-rows", "zero")
    assert code == 0


def test_schema_check_quotes_values_where_it_is_asked_to(capsys, place):
    (place / "table.csv").write_text(GOOD + "old,F,no\n")
    check = ("schema", "check", "table.csv", "--schema", "schema.toml")
    code, out, err = run(capsys, *check)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "column 'age': 1 value cannot be used; one is not a number" in err
    assert "old" not in err
    assert "22" not in err
    code, out, err = run(capsys, *check, "--show-values")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "table.csv, line 22, column 'age': 'old' is not a number" in err
    (place / "table.csv").write_text(GOOD)
    assert run(capsys, *check) == (0, "table.csv: 20 rows, all of them fit schema.toml.\n", "")
