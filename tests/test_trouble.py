"""Kinds of trouble that new users met, each with its right outcome."""

import json
import stat

import numpy as np
import pytest
from command_line import run

import dpbnn
from dpbnn.data import Bounds, Column, Schema, datasets, load_table, private_bounds
from dpbnn.estimators.scaling import parsed_bounds

ROWS = "age,sex,y\n" + "39,F,0\n50,M,1\n61,F,0\n20,M,1\n" * 10
BOUNDS = 'age = [0, 100]\nsex = ["F", "M"]\ny = {}\n'
SCHEMA = """
[target]
name = "y"
classes = [0, 1]
[columns.age]
bounds = [0, 100]
[columns.sex]
categories = ["F", "M"]
"""
ABOUT = ("--target", "y", "--bounds", "bounds.toml")
SHORT = ("--epochs", "5", "--quiet")


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "table.csv").write_text(ROWS)
    (tmp_path / "test.csv").write_text(ROWS.replace("39,F,0\n", "", 1))
    (tmp_path / "bounds.toml").write_text(BOUNDS.format("[0, 1]"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(capsys, *more, out="run"):
    return run(capsys, "fit", "table.csv", *ABOUT, "--epsilon", "1", "--out", out, *SHORT, *more)


@pytest.mark.parametrize("target", ["[0, 1]", "[1, 2]", "[-1, 1]", "[1, 0]", "[0.0, 1.0]"])
def test_a_target_that_may_be_classes_or_bounds_is_refused_before_spending(place, capsys, target):
    (place / "bounds.toml").write_text(BOUNDS.format(target))
    code, _, err = fit(capsys)
    assert code == 2
    assert "can be two classes or the bounds of a number" in err
    assert "--task" in err
    assert not (place / "run").exists()


@pytest.mark.parametrize(("target", "task"), [("[0, 5]", None), ("[0, 1]", "regression")])
def test_clear_bounds_are_a_regression(place, capsys, target, task):
    (place / "bounds.toml").write_text(BOUNDS.format(target))
    more = () if task is None else ("--task", task)
    code, _, err = fit(capsys, *more)
    assert code == 0, err
    assert 'task = "regression"' in (place / "run" / "schema.toml").read_text()


def test_evaluate_refuses_the_training_table_unless_asked(place, capsys):
    assert fit(capsys, "--task", "classification")[0] == 0
    code, _, err = run(capsys, "evaluate", "run", "table.csv")
    assert code == 2
    assert "is the one that the run was trained on" in err
    assert not (place / "run" / "metrics.json").exists()
    assert run(capsys, "evaluate", "run", "table.csv", "--training-table", "--quiet")[0] == 0
    assert run(capsys, "evaluate", "run", "test.csv", "--quiet")[0] == 0


def test_the_fingerprint_is_private_salted_and_no_part_of_the_manifest(place, capsys):
    for name in ("one", "two"):
        assert fit(capsys, "--task", "classification", out=name)[0] == 0
    kept = [json.loads((place / name / "private.json").read_text()) for name in ("one", "two")]
    assert kept[0]["table"] != kept[1]["table"]  # the same table, another salt
    assert stat.S_IMODE((place / "one" / "private.json").stat().st_mode) == 0o600
    manifest = (place / "one" / "manifest.json").read_text()
    assert kept[0]["table"] not in manifest
    assert "private.json" not in manifest
    (place / "one" / "private.json").unlink()
    assert run(capsys, "evaluate", "one", "table.csv", "--quiet")[0] == 0


def test_compare_states_the_tuning_runs_that_were_declared(place, capsys):
    common = ("compare", "table.csv", *ABOUT, "--task", "classification", "--methods", "sgd",
              "--epsilons", "1", "--test", "test.csv", "--yes", "--epochs", "3")  # fmt: skip
    for declared, words in ((("--tuning-runs", "7"), "7 tuning runs declared"),
                            ((), "number of tuning runs not declared")):  # fmt: skip
        code, out, err = run(capsys, *common, *declared, "--out", f"out{len(declared)}")
        assert code == 0, err
        assert words in " ".join(out.split())


ADULT = (
    "age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,sex,"
    "capital-gain,capital-loss,hours-per-week,native-country,income"
)


def test_adult_from_the_raw_files_to_the_page_in_two_commands(either_folder, place, capsys):
    """Files as they are published: no header, a comment line, other spellings in the test file."""
    train, test = (str(path) for path in datasets._files("adult", either_folder))
    whole, _, schema = load_table("adult", either_folder)
    (place / "adult.toml").write_text(schema.to_toml())
    written = ("--names", ADULT, "--comment", "|")
    few = ("--epochs", "8") if whole.n > 20_000 else ()
    code, out, err = run(capsys, "fit", train, *written, "--schema", "adult.toml", "--epsilon", "1",
                         *few, "--out", "adult")  # fmt: skip
    assert code == 0, err
    assert "classification of 'income'" in out
    code, out, err = run(capsys, "evaluate", "adult", test, *written, "--report", "page.html",
                         "--group", "sex", "--json")  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["metrics"]["accuracy"]["value"] > 0.79
    assert found["metrics"]["auroc"]["value"] > 0.8
    page = (place / "page.html").read_text()
    assert "Classification of income" in page
    assert "native-country" in page
    opened = dpbnn.load_run("adult")
    assert 0.9 < opened.privacy.epsilon <= 1.0


@pytest.mark.parametrize("epsilon", [1.0, None])
def test_a_schema_learned_from_the_data_enters_no_private_fit(place, epsilon):
    """And what was fitted before the estimator saw the data is in every statement."""
    learned = Schema.learned("table.csv", "y", "classification")
    model = dpbnn.PrivateBayesClassifier(schema=learned, epsilon=epsilon, epochs=2)
    if epsilon is None:
        assert not model.fit("table.csv").privacy_.private
        return
    with pytest.raises(ValueError, match="learned from the data"):
        model.fit("table.csv")
    model.set_params(schema=Schema.from_toml(SCHEMA)).fit("table.csv")
    assert "a scaler's means" in " ".join(str(model.privacy_).split())


def test_booleans_are_the_same_in_a_frame_and_in_a_file(place):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"smokes": [True, False] * 20, "y": [True, False] * 20})
    frame.to_csv("booleans.csv", index=False)
    smokes = Column("smokes", categories=(True, False))
    schema = Schema((smokes,), Column("y", categories=(True, False)))
    one, other = (schema.encode(form) for form in (frame, "booleans.csv"))
    assert np.array_equal(one[0], other[0])
    assert np.array_equal(one[1], other[1])
    model = dpbnn.PrivateBayesClassifier(schema=schema, epsilon=5.0, epochs=5).fit(frame)
    assert model.predict("booleans.csv").dtype == bool


def test_weak_promises_are_warned_of():
    with pytest.warns(UserWarning, match="epsilon = 1000 promises little"):
        plan = dpbnn.plan(epsilon=1000, delta=1e-5, n=600, batch_size=60, epochs=1)
    assert any("promises little" in caveat for caveat in plan.statement().caveats)
    with pytest.warns(UserWarning, match="not below 1/n"):
        dpbnn.plan(epsilon=1, delta=0.01, n=600, batch_size=60, epochs=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"classes": 2}, "classes=2: must list all labels"),
        ({"device": "mps:77"}, "device='mps:77': cannot be used here"),
        ({"device": "gpu"}, "device='gpu': cannot be used here"),
    ],
)
def test_wrong_settings_are_one_short_line(settings, words):
    x = np.random.default_rng(0).uniform(size=(40, 2))
    arguments = {"classes": [0, 1], "bounds": (0, 1), "epochs": 2, **settings}
    with pytest.raises(ValueError, match=r"must list|cannot be used") as error:
        dpbnn.PrivateBayesClassifier(**arguments).fit(x, (x[:, 0] > 0.5).astype(int))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 330


def test_private_bounds_go_into_an_estimator_as_they_are():
    """Two columns of very different scales: a transposed pair would leave them unusable."""
    rng = np.random.default_rng(0)
    x = rng.normal([50, 5000], [10, 500], (4000, 2))
    found = private_bounds(x, noise_multiplier=2.0)
    scaling = parsed_bounds(found, 2)
    np.testing.assert_array_equal(scaling.low, found.low)
    np.testing.assert_array_equal(scaling.high, found.high)
    assert ((scaling.low < [40, 4500]) & (scaling.high > [60, 5500])).all()
    y = (x[:, 0] > 50).astype(int)
    settings = {"epsilon": 8.0, "classes": [0, 1], "epochs": 40, "batch_size": 4000}
    model = dpbnn.PrivateBayesClassifier(bounds=found, random_state=0, **settings).fit(x, y)
    assert model.score(x, y) > 0.9
    np.testing.assert_array_equal(model.bounds_, found)


@pytest.mark.parametrize("given", [
    ([0, 10], [5, 20]), [(0, 5), (10, 20)], np.array([[0.0, 1.0], [0.0, 5.0]]), ([0, 0], [1, 5]),
])  # fmt: skip
def test_two_pairs_for_two_columns_are_refused(given):
    with pytest.raises(ValueError, match=r"can be \(lows, highs\) or one .*dpbnn\.data\.Bounds"):
        parsed_bounds(given, 2)


@pytest.mark.parametrize(("given", "columns", "low", "high"), [
    (Bounds([0, 10], [5, 20]), 2, [0, 10], [5, 20]),
    (Bounds([0, 0], [1, 5]), 2, [0, 0], [1, 5]),
    ([(10, 20), (0, 5)], 2, [10, 0], [20, 5]),  # (lows, highs) would be reversed
    (([10, 0], [20, 5]), 2, [10, 0], [20, 5]),
    ([(0, 1), (1, 5)], 2, [0, 1], [1, 5]),  # both readings are the same
    ([(0, 1), (10, 20), (5, 5)], 3, [0, 10, 5], [1, 20, 5]),
    (np.array([[0, 1], [10, 20], [5, 6]]), 3, [0, 10, 5], [1, 20, 6]),
    (([0, 10, 5], [1, 20, 5]), 3, [0, 10, 5], [1, 20, 5]),
    ([(3, 4)], 1, [3], [4]),
    ((3, 4), 2, [3, 3], [4, 4]),
    ((0, [1, 2]), 2, [0, 0], [1, 2]),
])  # fmt: skip
def test_bounds_are_ends_or_one_pair_per_column(given, columns, low, high):
    found = parsed_bounds(given, columns)
    assert (found.low.tolist(), found.high.tolist()) == (low, high)
