"""Kinds of trouble that new users met, each with its right outcome.

Targets that can be read in two ways, tuning runs, test data, bounds, what is learned from the data,
time series, wrong settings, threads, chains, attacks, raw frames, schemas, bad rows. Those of
counts, ordered classes and weights are in test_target_kinds.py, of persons in
test_person_estimators.py.
"""

import json
import stat

import numpy as np
import pytest
import torch
from command_line import run
from torch import nn

import dpbnn
from dpbnn.data import Bounds, Column, Schema, datasets, load_table, private_bounds
from dpbnn.estimators.scaling import parsed_bounds
from dpbnn.privacy.gate import Gate
from dpbnn.report.plain_words import guess_chance

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


def test_a_task_beside_a_schema_is_refused(place, capsys):
    (place / "schema.toml").write_text(SCHEMA)
    code, _, err = run(capsys, "fit", "table.csv", "--schema", "schema.toml", "--task",
                       "regression", "--epsilon", "1", "--out", "run")  # fmt: skip
    assert code == 2
    assert "leave --target, --bounds and --task out" in err
    assert not (place / "run").exists()


def test_a_first_line_that_is_no_record_gets_a_hint(place, capsys):
    (place / "schema.toml").write_text(SCHEMA)
    (place / "raw.csv").write_text("|a remark\n" + ROWS.split("\n", 1)[1])
    check = ("schema", "check", "raw.csv", "--names", "age,sex,y", "--schema", "schema.toml")
    code, _, err = run(capsys, *check)
    assert code == 2
    assert "its first line has 1 value and 3 names were given" in err
    assert "--comment" in err
    assert "remark" not in err
    code, _, err = run(capsys, *check, "--comment", "|")
    assert code == 0, err


def test_compare_gives_the_figures_that_were_asked_for_and_refuses_first(place, capsys):
    common = ("compare", "table.csv", *ABOUT, "--task", "classification", "--epsilons", "1",
              "--test", "test.csv", "--yes", "--epochs", "3")  # fmt: skip
    for wrong, words in (
        (("--methods", "sgd,sep"), "is for regression"),
        (("--methods", "sgd", "--threshold", "2"), "between 0 and 1"),
        (("--methods", "sgd", "--positive", "maybe"), "needs 0 or 1"),
        (("--methods", "sgd", "--group", "gender"), "is not in the table"),
    ):
        code, _, err = run(capsys, *common, *wrong, "--out", "no")
        assert code == 2
        assert words in err
        assert not (place / "no").exists()
    code, out, err = run(capsys, *common, "--methods", "sgd", "--group", "sex", "--threshold",
                         "0.3", "--positive", "0", "--out", "cells", "--json")  # fmt: skip
    assert code == 0, err
    found = json.loads(out)["runs"][0]["evaluation"]
    assert {"auroc", "average_precision", "recall", "accuracy"} <= found["metrics"].keys()
    assert [group["name"] for group in found["groups"]] == ["F", "M"]
    assert found["threshold"] == 0.3
    assert found["positive"] == 0
    assert len(found["confusion"]) == 2
    assert "accuracy" in found["baseline"]
    page = (place / "cells" / "sgd-1" / "report.html").read_text()
    assert "class 0, from probability 0.3" in page
    assert "baseline" in (place / "cells" / "compare.html").read_text().lower()


def test_compare_of_a_regression_refuses_methods_for_classes_first(place, capsys):
    (place / "bounds.toml").write_text(BOUNDS.format("[0, 5]"))
    code, _, err = run(
        capsys, "compare", "table.csv", *ABOUT, "--epsilons", "1", "--test", "test.csv", "--yes",
        "--methods", "sgd,noiseaware", "--epochs", "3", "--out", "no",
    )  # fmt: skip
    assert code == 2
    assert "is for classes" in err
    assert not (place / "no").exists()


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


def test_a_misspelt_name_in_bounds_is_refused_before_spending():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [20.0, 60.0] * 20, "income": [1.0, 3.0] * 20})
    ledger = dpbnn.Ledger()
    bounds = {"age": (0, 120), "income": (0, 10), "incmoe": (0, 10)}
    model = dpbnn.PrivateBayesClassifier(bounds=bounds, classes=[0, 1], ledger=ledger)
    with pytest.raises(ValueError, match="'incmoe' is no column of the data"):
        model.fit(frame, [0, 1] * 20)
    assert ledger.releases == 0


class Series(nn.Module):
    """A network for time series [rows, times, 4] around one layer of a kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind is nn.TransformerEncoderLayer:
            self.layer, width = kind(4, 2, 8, dropout=0.0, batch_first=True), 4
        elif kind is nn.LSTMCell:
            self.layer, width = kind(4, 6), 6
        else:
            self.layer, width = kind(4, 6, batch_first=True), 6
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        if self.kind is nn.LSTMCell:
            state = None
            for time in range(x.shape[1]):
                state = self.layer(x[:, time], state)
            return self.out(state[0])
        found = self.layer(x)
        return self.out((found if self.kind is nn.TransformerEncoderLayer else found[0])[:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.TransformerEncoderLayer])
@pytest.mark.parametrize("method", [dpbnn.SGD(), dpbnn.BBP()], ids=["sgd", "bbp"])
def test_networks_for_time_series_are_trained(kind, method):
    torch.manual_seed(0)
    x, y = torch.randn(40, 5, 4), torch.randint(2, (40,))
    plan = dpbnn.plan(epsilon=3.0, delta=1e-4, n=40, batch_size=20, steps=2)
    posterior = dpbnn.fit(Series(kind), (x, y), method=method, plan=plan, progress=False)
    assert posterior.predict(x[:3], 4).mean.shape == (3, 2)
    assert posterior.privacy.epsilon <= 3.0


def test_a_small_fit_does_not_wait_for_other_threads(monkeypatch):
    """Two threads of a small step wait for each other at barriers, for long on busy cores."""
    seen, original = [], Gate.__call__

    def call(self, *arguments, **options):
        seen.append(torch.get_num_threads())
        return original(self, *arguments, **options)

    monkeypatch.setattr(Gate, "__call__", call)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = np.random.default_rng(0).uniform(size=(60, 2))
        settings = {"bounds": (0, 1), "classes": [0, 1], "epochs": 4, "recalibrate": None}
        model = dpbnn.PrivateBayesClassifier("sgd", **settings)
        model.fit(x, (x[:, 0] > 0.5).astype(int))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen[-4:] == [1] * 4  # the steps of the training


def test_a_page_of_a_chain_says_what_its_networks_are_and_what_that_means(tmp_path):
    x = np.random.default_rng(0).uniform(-1, 1, (200, 2))
    y = (x[:, 0] > 0).astype(int)
    model = dpbnn.PrivateBayesClassifier(
        "sgld", epsilon=1.0, delta=1e-5, bounds=(-1, 1), classes=[0, 1], random_state=0
    ).fit(x, y)
    page = " ".join(model.report(tmp_path / "page.html").read_text().split())
    if model.diagnostics_.mixed:
        assert "draws of a chain that has mixed" in page
    else:
        assert "not independent draws from the posterior" in page
        assert "Do not read epistemic uncertainty or bands as the width of the posterior" in page
    assert "Epsilon does not depend on mixing" in page or model.diagnostics_.mixed


def test_what_an_attacker_can_do_is_stated_tightly_everywhere(place, capsys):
    """The mechanism's own curve, not what (epsilon, delta) alone would allow."""
    plan = dpbnn.plan(epsilon=3.0, delta=1e-5, n=1000, sampling="full-batch", steps=40)
    alone = 100 * guess_chance(plan.epsilon, plan.delta)
    attack = plan.statement().attack
    assert 50 < 100 * attack.right < alone - 15
    text = " ".join(str(plan.statement()).split())
    assert "mu = " in text
    assert "at 1 % false positives" in text
    assert "at 10 % false positives" in text
    code, out, _ = run(capsys, "plan", "--epsilon", "3", "--delta", "1e-5", "--n", "1000",
                       "--sampling", "full-batch", "--steps", "40")  # fmt: skip
    assert code == 0
    for words in ("mu", "best attack", "at 1 % false alarms", "at 10 % false alarms"):
        assert words in out
    assert fit(capsys, "--task", "classification")[0] == 0
    assert run(capsys, "report", "run", "--out", "page.html", "--quiet")[0] == 0
    page = " ".join((place / "page.html").read_text().split())
    assert "10 % false positives" in page
    assert "epsilon and delta alone would allow" in page


def test_a_raw_frame_goes_in_and_its_own_labels_come_out():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({
        "age": [20.0, None, 60.0, 33.0] * 15, "sex": pandas.Categorical(["f", "m", None, "f"] * 15),
        "seen": pandas.to_datetime(["2020-01-01", "2021-05-06", None, "2022-12-31"] * 15),
        "state": ["well", "ill", "ill", "well"] * 15,
    })  # fmt: skip
    schema = Schema.from_toml("""
        [target]
        name = "state"
        classes = ["well", "ill"]
        [columns.age]
        bounds = [0, 120]
        missing = "indicator"
        [columns.sex]
        categories = ["f", "m"]
        missing = "category"
        [columns.seen]
        bounds = [2000-01-01, 2030-01-01]
        missing = "middle"
    """)
    model = dpbnn.PrivateBayesClassifier(schema=schema, epsilon=3.0, epochs=2).fit(frame)
    assert set(model.predict(frame.drop(columns="state"))) <= {"well", "ill"}
    assert model.feature_names_in_.tolist() == ["age", "sex", "seen"]


def test_a_schema_with_several_problems_names_all_of_them_at_once(place, capsys):
    (place / "wrong.toml").write_text(
        SCHEMA.replace("[0, 100]", "[100, 0]").replace('["F", "M"]', '["F"]') + "\n[columns.no]\n"
        "bounds = [0, 1]\n"
    )
    code, _, err = run(capsys, "schema", "check", "table.csv", "--schema", "wrong.toml")
    assert code == 2
    for words in ("column 'age': bounds = [100, 0]: are reversed", "column 'sex'",
                  "the column 'no' of the schema is absent"):  # fmt: skip
        assert words in err


def test_one_bad_row_spoils_no_other_prediction_and_ids_are_kept(place, capsys):
    assert fit(capsys, "--task", "classification")[0] == 0
    (place / "new.csv").write_text("id,age,sex\na7,39,F\nb8,old,M\nc9,61,M\n")
    code, out, err = run(capsys, "predict", "run", "new.csv", "--id", "id", "--on-bad-rows", "keep")
    assert code == 0, err
    lines = [line.split(",") for line in out.splitlines()]
    assert [line[0] for line in lines] == ["id", "a7", "b8", "c9"]
    assert lines[2][1] == ""
    assert "is not a number" in out.splitlines()[2]
    assert lines[1][1] in ("0", "1")
