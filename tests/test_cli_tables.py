"""Bad tables through the command: one line, exit code 2, no run directory, nothing spent."""

import gzip
import tomllib

import numpy as np
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


def test_schema_check_lists_every_problem_at_once(capsys, place):
    """Of the schema and of the table; each is one line, and none quotes a value."""
    more = (
        '[columns.a]\nbounds = ["TODO", "TODO"]\n[columns.b]\nbounds = [9, 1]\n'
        "[columns.gone]\nbounds = [0, 1]\n"
    )
    (place / "schema.toml").write_text("speed = 3\n" + SCHEMA + more)
    rows = "age,sex,y,a,b\nold,F,no,1,1\n50,X,maybe,1,1\n,X,yes,1,1\ninf,F,no,1,1\n"
    (place / "table.csv").write_text(rows)
    check = ("schema", "check", "table.csv", "--schema", "schema.toml")
    code, out, err = run(capsys, *check)
    assert (code, out) == (2, "")
    expected = [
        "column 'a': bounds: still TODO",
        "column 'b': bounds = [9, 1]: are reversed",
        "schema: 'speed' means nothing here",
        "the column 'gone' of the schema is absent",
        "column 'age': 3 values cannot be used; one is not a number",
        "column 'sex': 2 values cannot be used; one is none of 'F', 'M'",
        "column 'y': 1 value cannot be used; one is none of 'no', 'yes'",
    ]
    lines = err.splitlines()
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert line.startswith("dpbnn: ")
        assert part in line
    for secret in ("old", "maybe", "'X'", "line 2"):
        assert secret not in err
    code, out, err = run(capsys, *check, "--show-values")
    assert (code, out) == (2, "")
    for part in ("line 2, column 'age': 'old'", "line 4, column 'age': a value is missing",
                 "line 5, column 'age': 'inf'", "line 3, column 'sex': 'X'",
                 "line 4, column 'sex': 'X'", "line 3, column 'y': 'maybe'"):  # fmt: skip
        assert part in err


@pytest.mark.parametrize("kind", TABLES)
def test_schema_check_and_fit_refuse_the_same_tables(capsys, place, kind):
    content, part = TABLES[kind]
    (place / "table.csv").write_bytes(content)
    code, out, err = run(capsys, "schema", "check", "table.csv", "--schema", "schema.toml")
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if "warning" not in line]
    assert any(part in line for line in lines), err
    assert all(line.startswith("dpbnn: ") for line in lines)


def test_schema_check_names_unused_columns(capsys, place):
    (place / "table.csv").write_text(GOOD.replace("y\n", "y,extra\n", 1).replace("no\n", "no,1\n")
                                     .replace("yes\n", "yes,1\n"))  # fmt: skip
    code, out, err = run(capsys, "schema", "check", "table.csv", "--schema", "schema.toml")
    assert code == 0
    assert "1 column that the first line names is not in the schema and not used" in err
    assert "all of them fit" in out


DRAFT = """
[target]
name = "y"
classes = ["no", "yes"]
[columns.age]
bounds = ["TODO", "TODO"]
[columns.sex]
categories = ["F", "M"]
"""


@pytest.fixture
def large(place):
    """3000 rows, and a draft whose age is TODO."""
    (place / "draft.toml").write_text(DRAFT)
    ages = np.clip(np.random.default_rng(0).normal(45, 15, 3000), 18, 95).round()
    rows = "".join(
        f"{age:g},{'FM'[i % 2]},{('no', 'yes')[int(age > 45)]}\n" for i, age in enumerate(ages)
    )
    (place / "table.csv").write_text("age,sex,y\n" + rows)
    return place


def learn(capsys, *more, out="new.toml"):
    return run(capsys, "schema", "bounds", "table.csv", "--schema", "draft.toml", "--epsilon",
               "0.1", "--ledger", "book.jsonl", "--out", out, *more)  # fmt: skip


def test_bounds_are_learned_and_training_goes_on_with_their_ledger(capsys, large):
    code, out, err = learn(capsys, "--budget", "1")
    assert (code, err) == (0, "")
    assert "bounds of 1 column" in out
    assert "epsilon 0.09" in out
    assert dpbnn.Ledger(large / "book.jsonl").releases == 1
    low, high = tomllib.loads((large / "new.toml").read_text())["columns"]["age"]["bounds"]
    assert low < 45 < high
    common = ("fit", "table.csv", "--schema", "new.toml", "--epochs", "2", "--quiet")
    dpbnn.Ledger(large / "other.jsonl", epsilon=1.0, delta=1e-5)
    for more in ((), ("--ledger", "other.jsonl"), ("--ledger", "new.jsonl")):
        code, _, err = run(capsys, *common, "--epsilon", "0.5", "--out", "run", *more)
        assert code == 2
        assert "learned privately and paid for by another ledger" in err
        assert not (large / "run").exists()
    assert not (large / "new.jsonl").exists()
    code, _, err = run(
        capsys, *common, "--epsilon", "0.5", "--out", "run", "--ledger", "book.jsonl"
    )
    assert code == 0, err
    from dpbnn.runs import Run

    privacy = Run.open(large / "run").manifest["privacy"]
    labels = [mechanism["label"] for mechanism in privacy["mechanisms"]]
    assert labels[0] == "private bounds of a schema"
    assert privacy["epsilon"] > 0.5  # the bounds are in it
    assert privacy["caveats"] == []  # they are private, and no scores that chose a setting
    assert privacy["epsilon"] == pytest.approx(dpbnn.Ledger(large / "book.jsonl").epsilon())
    code, _, err = run(capsys, *common, "--non-private", "--out", "open")
    assert code == 0, err


def test_a_second_call_is_charged_and_the_budget_ends_it(capsys, large):
    assert learn(capsys, "--budget", "0.12")[0] == 0
    code, _, err = learn(capsys, out="again.toml")
    assert (code, len(err.splitlines())) == (1, 1)
    assert not (large / "again.toml").exists()
    assert dpbnn.Ledger(large / "book.jsonl").releases == 1
    code, _, err = learn(capsys, "--budget", "5", out="again.toml")
    assert code == 2
    assert "has its own budget" in err


@pytest.mark.parametrize(("change", "words"), [
    (lambda place: (place / "draft.toml").write_text(SCHEMA), "nothing to learn"),
    (lambda place: (place / "table.csv").write_text(GOOD), "too few records"),
    (lambda place: (place / "new.toml").write_text(""), "exists already"),
    (lambda place: (place / "table.csv").write_text("sex,y\nF,no\n"), "has no column 'age'"),
])  # fmt: skip
def test_what_cannot_be_learned_costs_nothing(capsys, large, change, words):
    change(large)
    code, _, err = learn(capsys)
    assert (code, len(err.splitlines())) == (2, 1)
    assert words in err
    assert not (large / "book.jsonl").exists()
