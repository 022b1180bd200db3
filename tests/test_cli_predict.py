"""dpbnn predict and evaluate: an id column, bad rows one by one, groups, recall, the page."""

import csv
import io
import json

import numpy as np
import pytest
from command_line import run

SCHEMA = """
[target]
name = "ill"
classes = ["yes", "no"]
[columns.age]
bounds = [0, 100]
[columns.bmi]
bounds = [10, 60]
missing = "indicator"
[columns.sex]
categories = ["F", "M"]
missing = "zeros"
"""
HEADER = "patient,age,bmi,sex"


def table(n, seed):
    rng = np.random.default_rng(seed)
    age, bmi = rng.uniform(0, 100, n), rng.uniform(10, 60, n)
    ill = age + 20 * rng.normal(size=n) > 50
    sex = rng.choice(["F", "M"], n)
    lines = [f"{HEADER},ill"]
    lines += [f"p{i},{a:.1f},{b:.1f},{s},{'yes' if y else 'no'}"
              for i, (a, b, s, y) in enumerate(zip(age, bmi, sex, ill, strict=True))]  # fmt: skip
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("predict")
    (place / "schema.toml").write_text(SCHEMA)
    (place / "train.csv").write_text(table(1500, 0))
    (place / "test.csv").write_text(table(200, 1))
    return place


@pytest.fixture
def fitted(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    if not (folder / "run").exists():
        assert run(capsys, "fit", "train.csv", "--schema", "schema.toml", "--epsilon", 8, "--out",
                   "run", "--epochs", 20, "--conformal", 0.3, "--quiet")[0] == 0  # fmt: skip
    return folder


def test_an_id_column_is_carried_through(fitted, capsys):
    (fitted / "new.csv").write_text(f"{HEADER}\n007,50,20,F\n,1,20,M\nx y,99,,F\n")
    code, out, _ = run(capsys, "predict", "run", "new.csv", "--id", "patient")
    assert code == 0
    found = list(csv.DictReader(io.StringIO(out)))
    assert next(iter(found[0])) == "patient"
    assert [row["patient"] for row in found] == ["007", "", "x y"]
    assert found[0]["prediction"] in ("yes", "no")
    plain = run(capsys, "predict", "run", "new.csv")[1]
    assert [line.split(",", 1)[1] for line in out.splitlines()] == plain.splitlines()

    code, _, err = run(capsys, "predict", "run", "new.csv", "--id", "nobody")
    assert code == 2
    assert "--id nobody: is not in the table" in err
    (fitted / "clash.csv").write_text("prediction,age,bmi,sex\n1,50,20,F\n")
    code, _, err = run(capsys, "predict", "run", "clash.csv", "--id", "prediction")
    assert code == 2
    assert "--id prediction: is a column of the output too" in err


def test_bad_rows_are_kept_one_by_one(fitted, capsys):
    """A line of the wrong length would be predicted as all missing where the schema allows that."""
    good = ["a,50,20,F", "e,20,,M"]
    lines = [good[0], "b,oldest,20,F", "c,50,20,X", "d,,20,F", good[1], "f,50", "g,inf,20,M", ",,,"]
    (fitted / "new.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    code, _, err = run(capsys, "predict", "run", "new.csv", "--id", "patient")
    assert code == 2
    assert [line for line in err.splitlines() if "warning" not in line] == err.splitlines()[-1:]
    code, out, _ = run(capsys, "predict", "run", "new.csv", "--id", "patient", "--on-bad-rows",
                       "keep", "--out", "p.csv")  # fmt: skip
    assert code == 0
    assert "Wrote 2 predictions" in out
    assert "6 rows could not be used; the column problem says why" in out
    found = list(csv.DictReader((fitted / "p.csv").open()))
    assert [bool(row["prediction"]) for row in found] == [line in good for line in lines]
    assert [row["patient"] for row in found] == ["a", "b", "c", "d", "e", "", "g", ""]
    for row, words in zip(found, (
        "", "column 'age': the value is not a number", "column 'sex': the value is none of",
        "column 'age': the value is missing", "", "another number of values than the header",
        "column 'age': the value is infinite", "the line holds no value",
    ), strict=True):  # fmt: skip
        assert words in row["problem"]
        assert bool(row["problem"]) == bool(words)
        if words:
            assert all(not row[name] for name in row if name not in ("patient", "problem"))
    assert "oldest" not in (fitted / "p.csv").read_text()
    (fitted / "only.csv").write_text(f"{HEADER}\n" + "\n".join(good) + "\n")
    alone = run(capsys, "predict", "run", "only.csv")[1].splitlines()[1:]
    kept = [list(row.values())[1:-1] for row in found if row["prediction"]]
    assert kept == [line.split(",") for line in alone]


def test_evaluate_by_group_with_a_positive_class(fitted, capsys):
    code, out, _ = run(capsys, "evaluate", "run", "test.csv", "--group", "sex", "--positive", "yes",
                       "--threshold", 0.3)  # fmt: skip
    assert code == 0
    assert "sex=F: " in out
    assert "recall at threshold 0.3" in out
    metrics = json.loads((fitted / "run" / "metrics.json").read_text())
    assert metrics["positive"] == 0
    assert [g["name"] for g in metrics["groups"]] == ["F", "M"]
    assert sum(g["n"] for g in metrics["groups"]) == 200
    with_yes = metrics["metrics"]["recall"]["value"]
    page = (fitted / "run" / "report.html").read_text()
    for words in (
        "By sex", "Confusion matrix", "class yes, from probability 0.3", "baseline",
        "Prediction sets hold the truth for at least 69 % of new records",
        "On the test records they held", "1200 rows for training", "number, 10 to 60",
        "categories F, M", "missing values: the middle of the bounds, and marked", "ill (target)",
        "yes, no",
    ):  # fmt: skip
        assert words in page
    run(capsys, "evaluate", "run", "test.csv", "--threshold", 0.3)
    other = json.loads((fitted / "run" / "metrics.json").read_text())
    assert other["metrics"]["recall"]["value"] != with_yes
    assert other["metrics"]["auroc"] == metrics["metrics"]["auroc"]
    assert run(capsys, "report", "run", "--out", "again.html")[0] == 0


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--group", "nothing", "--group nothing: is not in the table"),
        ("--group", "patient", "200 different values, at most 100"),
        ("--positive", "maybe", "--positive maybe: needs yes or no"),
        ("--threshold", 0, "--threshold 0: must lie between 0 and 1"),
    ],
)
def test_bad_options_of_evaluate_are_named(fitted, capsys, option, value, words):
    code, _, err = run(capsys, "evaluate", "run", "test.csv", option, value)
    assert code == 2
    assert words in err
    assert [line for line in err.splitlines() if "warning" not in line] == err.splitlines()[-1:]
