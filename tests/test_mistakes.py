"""Mistakes of users that once had a raw traceback, an unclear line, or cost epsilon."""

import json
import warnings

import numpy as np
import pytest
from command_line import run

import dpbnn
from dpbnn.cli.say import Speaker
from dpbnn.data import Schema, TableError

ROWS = "who,age,sex,y\n" + "a,39,F,no\nb,50,M,yes\nc,61,F,no\nd,20,M,yes\n" * 10
SCHEMA = """
ignore = ["who"]
[target]
name = "y"
classes = ["no", "yes"]
[columns.age]
bounds = [0, 100]
[columns.sex]
categories = ["F", "M"]
"""
FIT = ("fit", "table.csv", "--schema", "schema.toml", "--epsilon", "1", "--epochs", "3",
       "--quiet", "--out")  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "table.csv").write_text(ROWS)
    (tmp_path / "test.csv").write_text(ROWS.replace("a,39,F,no\n", "", 1))
    (tmp_path / "schema.toml").write_text(SCHEMA)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "words"), [
    (("evaluate", "run", "test.csv", "--device", "tpu"), "device='tpu': cannot be used here"),
    (("predict", "run", "test.csv", "--device", "tpu"), "device='tpu': cannot be used here"),
    (("evaluate", "test.csv", "run"), "test.csv: is a file: pass a folder written by"),
    (("report", "run", "--out", "no/page.html"), "no/page.html: No such file or directory"),
    (("predict", "run", "test.csv", "--out", "no/p.csv"), "no/p.csv: No such file or directory"),
    ((*FIT, "new", "--seed", "-1"), "'--seed': -1 is not in the range"),
    ((*FIT, "new", "--class-weight", "yes=-1"), "class_weight['yes']=-1.0: must be a finite"),
    (("fit", "table.csv", "--target", "y", "--bounds", "schema.toml", "--epsilon", "1", "--out",
      "new"), "schema.toml: is a whole schema; give it as --schema"),
])  # fmt: skip
def test_a_command_says_in_one_line_what_is_wrong(place, capsys, arguments, words):
    assert run(capsys, *FIT, "run")[0] == 0
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
    assert not (place / "new").exists()


def test_account_takes_the_folder_of_a_run(place, capsys):
    assert run(capsys, *FIT, "run")[0] == 0
    found = [json.loads(run(capsys, "account", path, "--json")[1])["statement"]
             for path in ("run", "run/ledger.jsonl")]  # fmt: skip
    assert found[0]["epsilon"] == found[1]["epsilon"] > 0


def test_warnings_are_printed_when_they_occur_and_once(capsys):
    with Speaker(quiet=True, as_json=False).warnings():
        for text in ("one", "one", "two"):
            warnings.warn(text, stacklevel=1)
        shown = capsys.readouterr().err
    assert shown == "dpbnn: warning: one\ndpbnn: warning: two\n"


def test_labels_that_are_no_classes_are_not_called_one_class(place):
    """All labels are unknown: the reason is the schema's classes."""
    schema = Schema.from_toml(SCHEMA.replace('["no", "yes"]', '["nein", "ja"]'))
    model = dpbnn.PrivateBayesClassifier(schema=schema, ledger=dpbnn.Ledger(), epochs=2)
    with pytest.raises(TableError, match="40 values cannot be used; one is none of 'nein', 'ja'"):
        model.fit("table.csv")
    assert model.ledger.releases == 0


def test_one_person_alone_is_refused_before_spending(place, capsys):
    (place / "schema.toml").write_text(SCHEMA.replace('ignore = ["who"]', 'unit = "who"'))
    (place / "table.csv").write_text("who,age,sex,y\n" + "a,39,F,no\na,50,M,yes\n" * 20)
    code, _, err = run(capsys, *FIT, "run")
    assert code == 2
    assert "all rows are of one who, and training needs 2 or more" in err
    assert not (place / "run").exists()


@pytest.mark.parametrize(("text", "words"), [
    ("," + ROWS.replace("\n", "\n7,"), "column 1 has no name; name every column in the header, or"),
    (ROWS.replace("\n", ",\n").replace("y,", "y", 1), "one line: has 5 values where 4 columns are"),
    ("\ufeff" + ROWS.replace(",no", ",", 1), "1 value cannot be used; one is missing; fill it in"),
    (ROWS.replace(",39,", ',"39,5",', 1), "one has a comma; read the table with decimal=','"),
    (ROWS.replace(",39,", ",39 secret,", 1), "one is not a number; correct it, or declare"),
    (ROWS.replace(",F,", ',"secret\nward",', 1), "column 'sex': 1 value cannot be used"),
    (ROWS.replace(",no", ",secret", 1), "column 'y': 1 value cannot be used; one is none of 'no'"),
    (ROWS.replace("age", "who", 1), "column 2's name is there twice; rename one of the two"),
])  # fmt: skip
def test_odd_files_are_refused_in_one_line_that_quotes_no_cell(place, text, words):
    (place / "table.csv").write_text(text, encoding="utf-8")
    ledger = dpbnn.Ledger()
    model = dpbnn.PrivateBayesClassifier(schema="schema.toml", ledger=ledger, epochs=2)
    with pytest.raises(TableError) as error:
        model.fit("table.csv")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)
    assert ledger.releases == 0


@pytest.mark.parametrize(("values", "words"), [
    (lambda pandas: pandas.period_range("2020", periods=40, freq="D"), "of type Period"),
    (lambda pandas: pandas.cut(np.arange(40), 3), "of type Interval"),
    (lambda pandas: np.ones(40) * 1j, "holds complex numbers; give numbers or text"),
    (lambda pandas: pandas.to_timedelta(np.arange(40), "D"), "time spans; turn them into numbers"),
    (lambda pandas: pandas.array([1, None] * 20, dtype="Int64"), "20 values cannot be used"),
    (lambda pandas: [[1, 2]] * 40, "of type list; give numbers or text"),
    (lambda pandas: [None] * 40, "'age' has no value in any row"),
])  # fmt: skip
def test_odd_columns_of_frames_are_refused_before_spending(place, values, words):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv("table.csv").assign(age=values(pandas))
    ledger = dpbnn.Ledger()
    model = dpbnn.PrivateBayesClassifier(schema="schema.toml", ledger=ledger, epochs=2)
    with pytest.raises(TableError) as error:
        model.fit(frame)
    assert words in str(error.value)
    assert ledger.releases == 0


def test_an_estimator_says_that_it_is_evaluated_on_its_training_table(place):
    model = dpbnn.PrivateBayesClassifier(schema="schema.toml", epochs=2).fit("table.csv")
    with pytest.warns(UserWarning, match="these are the records of the training"):
        model.evaluate("table.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.evaluate("test.csv")


def test_a_drafted_target_is_named_by_its_own_key():
    with pytest.raises(TableError, match="target 'y': classes: still TODO"):
        Schema.from_toml(SCHEMA.replace('["no", "yes"]', '["TODO"]'))


@pytest.mark.parametrize(("settings", "words"), [
    ({"conformal": "yes"}, "conformal='yes': must be a share of misses"),
    ({"ledger": 3}, "ledger=3: must be a ledger"),
    ({"class_weight": {1: -1}}, "must be a finite number > 0"),
    ({"class_weight": {1: "much"}}, "is of type str; give one number"),
])  # fmt: skip
def test_settings_of_a_wrong_kind_are_named(settings, words):
    x = np.random.default_rng(0).uniform(size=(40, 2))
    arguments = {"classes": [0, 1], "bounds": (0, 1), "epochs": 2, **settings}
    with pytest.raises(ValueError, match=r"must be|give one number") as error:
        dpbnn.PrivateBayesClassifier(**arguments).fit(x, (x[:, 0] > 0.5).astype(int))
    assert words in str(error.value)


def test_inputs_of_a_wrong_kind_are_named():
    pandas = pytest.importorskip("pandas")
    y = [0, 1] * 20
    model = dpbnn.PrivateBayesClassifier(bounds=(0, 1), classes=[0, 1], ledger=dpbnn.Ledger())
    with pytest.raises(ValueError, match="X: two columns have the same name"):
        model.fit(pandas.DataFrame(np.zeros((40, 2)), columns=["a", "a"]), y)
    with pytest.raises(ValueError, match="X: is text; the path of a table goes with schema="):
        model.fit("table.csv", y)
    assert model.ledger.releases == 0
    fitted = model.set_params(epochs=2).fit(np.random.default_rng(0).uniform(size=(40, 2)), y)
    with pytest.raises(ValueError, match="y: missing; pass the true targets"):
        fitted.evaluate(np.zeros((4, 2)))


def test_two_targets_for_one_estimator_are_refused_with_the_ways_out():
    x, ledger = np.linspace(0, 1, 40)[:, None], dpbnn.Ledger()
    model = dpbnn.PrivateBayesRegressor(bounds=(0, 1), target_bounds=(0, 1), ledger=ledger)
    with pytest.raises(ValueError, match=r"y should be a 1d .*one estimator for each target"):
        model.fit(x, np.hstack([x, x]))
    assert ledger.releases == 0
