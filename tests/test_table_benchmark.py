"""The benchmark of many tables: its tables, learners, scores, and its resumable results."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import learners, peers, table_data, tables
from benchmarks.learners import Predicted
from benchmarks.results import recorded
from benchmarks.table_report import Results, report

GENERATED = [*table_data._GENERATORS, *table_data._BUNDLED]


def test_there_are_enough_tables_of_both_tasks():
    assert len(table_data.CLASSES) >= 12
    assert len(table_data.NUMBERS) >= 10
    known = {*GENERATED, *table_data._SCHEMAS, *table_data._UCI}
    assert known == set(table_data.TABLES)


@pytest.mark.parametrize("name", GENERATED)
def test_a_table_is_complete_and_its_splits_are_apart(name):
    table = table_data.table(name)
    assert table.low.shape == table.high.shape == (table.x.shape[1],)
    assert (table.low < table.high).all()
    outside = ((table.x < table.low) | (table.x > table.high)).mean()
    assert outside < 0.01
    if table.classes:
        assert set(np.unique(table.y)) == set(range(table.classes))
    else:
        assert table.target[0] < table.y.mean() < table.target[1]
    for group in table.groups:
        assert (table.x[:, group].sum(1) == 1).all()
    first, second = table.split(0), table.split(1)
    assert not np.array_equal(first.x, second.x)
    whole = np.concatenate([first.x, first.x_test])
    assert len(np.unique(whole, axis=0)) == len(np.unique(table.x, axis=0))


def test_a_generator_is_fixed():
    again = table_data._GENERATORS["small"]
    seed = table_data.zlib.crc32(b"small")
    assert np.array_equal(again(np.random.default_rng(seed)).x, table_data.table("small").x)


@pytest.mark.usefixtures("generated_folder")
@pytest.mark.parametrize("name", [*table_data._SCHEMAS, *table_data._UCI])
def test_a_table_of_files_is_written_and_read_back(name, tmp_path, monkeypatch):
    table_data.table.cache_clear()
    table = table_data.table(name)
    table_data.write(name, tmp_path)
    monkeypatch.setenv("DPBNN_TABLES", str(tmp_path))
    table_data.table.cache_clear()
    again = table_data.table(name)
    table_data.table.cache_clear()
    assert again.groups == table.groups
    one, other = table.split(3), again.split(3)
    for part in ("x", "y", "x_test", "y_test"):
        assert np.array_equal(getattr(one, part), getattr(other, part))


def test_a_table_that_is_not_here_is_left_out_loudly(monkeypatch, capsys):
    table_data.table.cache_clear()
    monkeypatch.delenv("DPBNN_TABLES", raising=False)
    monkeypatch.delenv("DPBNN_DATA", raising=False)
    assert table_data.present(["power", "small"]) == ["small"]
    assert "LEFT OUT: table power" in capsys.readouterr().err


def test_ridge_without_noise_is_least_squares_and_covers():
    table = table_data.table("small-numbers")
    split = table.split(0)
    found = learners._ridge(table, split, None, np.random.default_rng(0))
    inside = np.column_stack([np.ones(len(split.x)), split.x])
    beta = np.linalg.lstsq(inside, split.y, rcond=None)[0]
    expected = beta[0] + split.x_test @ beta[1:]
    assert np.abs(found.mean - expected).max() < 0.1
    assert 0.85 < learners.scores(table, found, split.y_test)["coverage"] < 0.97


def test_ridge_adds_noise_that_falls_with_epsilon():
    table = table_data.table("heavy-noise")
    split = table.split(0)
    open_ = learners._ridge(table, split, None, np.random.default_rng(0)).mean
    away = [
        np.abs(learners._ridge(table, split, e, np.random.default_rng(0)).mean - open_).mean()
        for e in (0.1, 1.0, 10.0)
    ]
    assert away[0] > 2 * away[1] > 4 * away[2] > 0


def test_scores_of_classes_are_those_of_probabilities_above_the_floor():
    table = table_data.table("small")
    y = np.array([0, 0, 1, 1])
    sure = Predicted(np.array([[1.0, 0], [0, 1], [0, 1], [0, 1]]))
    found = learners.scores(table, sure, y)
    right, wrong = 1 / (1 + learners.FLOOR), learners.FLOOR / (1 + learners.FLOOR)
    assert found["accuracy"] == 0.75
    assert found["auroc"] == 0.75
    assert found["nll"] == pytest.approx(-(3 * np.log(right) + np.log(wrong)) / 4)
    assert found["ece"] == pytest.approx(right - 0.75)


def test_chance_alone_has_the_mean_deviation_of_a_share():
    """One bin of 1000 rows: sqrt(2/pi) sqrt(p (1 - p)/1000); the mean of 20, with a fixed seed."""
    p, y = np.tile([0.75, 0.25], (1000, 1)), np.arange(1000) % 2
    found = learners.scores(table_data.table("small"), Predicted(p), y)
    assert found["ece_by_chance"] == pytest.approx(0.0109, abs=0.006)
    assert found["ece"] == pytest.approx(0.25)


def job(name, learner, epsilon=1.0, seed=0):
    return {"table": name, "learner": learner, "epsilon": epsilon, "seed": seed}


@pytest.mark.parametrize("name", ["small", "small-numbers"])
@pytest.mark.parametrize("learner", ["dpbnn", "dpbnn-vi", "base-rate"])
def test_a_job_gives_a_record_with_all_metrics(name, learner):
    record = recorded(tables.one, job(name, learner))
    assert "error" not in record
    classes = table_data.table(name).classes
    wanted = ("accuracy", "auroc", "nll", "ece")
    for metric in wanted if classes else ("rmse", "log_likelihood", "coverage", "width"):
        assert np.isfinite(record[metric])
    assert json.loads(json.dumps(record)) == record
    if learner == "dpbnn":
        assert record["spent"] <= 1.0


def test_a_failure_is_recorded_and_run_again(tmp_path):
    record = recorded(tables.one, job("small", "dpbnn-nothing"))
    assert "nothing" in record["error"]
    results = tmp_path / "results.jsonl"
    good = recorded(tables.one, job("small", "base-rate"))
    results.write_text(json.dumps(record) + "\n" + json.dumps(good) + '\n{"table": "sm')
    asked = Namespace(learners=["dpbnn-nothing", "base-rate"], epsilons=["1"], seeds=1,
                      tables=["small"], results=results)  # fmt: skip
    assert [one["learner"] for one in tables.jobs(asked)] == ["dpbnn-nothing"]


def test_absent_peers_are_left_out_loudly(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PEERS_PYTHON", str(tmp_path / "python"))
    asked = Namespace(learners=["dp-ebm", "base-rate"], epsilons=["1", "none"], seeds=1,
                      tables=["small"], results=tmp_path / "none.jsonl")  # fmt: skip
    assert {one["learner"] for one in tables.jobs(asked)} == {"base-rate"}
    assert "LEFT OUT: the peers" in capsys.readouterr().err


FAKE = """
import numpy as np

class LinearRegression:
    def __init__(self, epsilon, bounds_X, bounds_y, random_state):
        low, high = bounds_X
        assert (low.tolist(), high.tolist()) == ([-4.0] * 6, [4.0] * 6)
        assert bounds_y == (-10.0, 10.0) and epsilon == 1.0
    def fit(self, x, y):
        self.beta = np.linalg.lstsq(x, y, rcond=None)[0]
    def predict(self, x):
        return x @ self.beta

class LogisticRegression:
    def __init__(self, **settings):
        raise ValueError(f"norm {settings['data_norm']:.3f}")
"""


def test_peers_run_in_a_process_of_their_own_with_the_public_bounds(tmp_path, monkeypatch):
    for package, module, text in (
        ("diffprivlib", "models", FAKE), ("interpret", "privacy", ""),
    ):  # fmt: skip
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / f"{module}.py").write_text(text)
    monkeypatch.setenv("PEERS_PATH", str(tmp_path))
    monkeypatch.setenv("PEERS_PYTHON", sys.executable)
    learners._server.cache_clear()
    assert learners.peers_missing(sys.executable) is None
    try:
        good = recorded(tables.one, job("small-numbers", "diffprivlib"))
        bad = recorded(tables.one, job("small", "diffprivlib"))
    finally:
        learners._server().kill()
        learners._server.cache_clear()
    assert good["rmse"] < 1.2
    assert 0.8 < good["coverage"] < 0.97
    assert bad["error"].startswith("RuntimeError: ValueError: norm 2.828")


def test_peers_can_be_told_apart_by_name():
    assert set(peers.PEERS) == set(learners.PEERS)


def record(table, learner, epsilon, seed, **scores):
    numbers = table in table_data.NUMBERS
    return job(table, learner, epsilon, seed) | {
        "rows": 6000, "columns": 4, "classes": 0 if numbers else 2, "seconds": 1.0, **scores,
    }  # fmt: skip


def test_the_report_counts_what_passes_and_what_does_not():
    scored = {"accuracy": 0.9, "auroc": 0.9, "ece": 0.02}
    records = [
        *(record("large", "dpbnn", e, s, nll=n + 0.001 * s, **scored)
          for e, n in ((0.1, 0.5), (1.0, 0.6), (3.0, 0.4)) for s in range(3)),
        *(record("large", "dp-ebm", e, s, nll=0.55, **scored | {"auroc": 0.904})
          for e in (0.1, 1.0, 3.0) for s in range(3)),
        record("power", "dpbnn", 1.0, 0, rmse=4.3, log_likelihood=-3, coverage=0.95, width=1),
        record("power", "moment-ridge", 1.0, 0, rmse=4.1, log_likelihood=-4, coverage=0.9, width=1),
    ]  # fmt: skip
    text = report(records, "dpbnn")
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert lines["first in NLL"].count("1 of 1") == 2
    assert "0 of 1 (not large)" in lines["first in NLL"]
    assert lines["AUROC first or within 0.005"].count("1 of 1") == 3
    assert "0 of 1 (not power)" in lines["RMSE first or within 2 %"]
    assert "1 of 1" in lines["first in log-likelihood"]
    assert "0 of 1 (not power)" in lines["coverage in [0.87, 0.94]"]
    assert "0 of 1 (not power 4.3)" in lines["RMSE of power <= 4.25 (epsilon 1)"]
    assert "does not get worse in 1 of 2 steps" in text
    assert "- large, 0.1 to 1: NLL worse by 0.1" in text


def test_a_judged_learner_that_fails_does_not_pass():
    scored = {"accuracy": 0.9, "auroc": 0.9, "ece": 0.02, "nll": 0.5}
    failed = job("large", "dpbnn") | {"error": "ValueError: no"}
    text = report([record("large", "dp-ebm", 1.0, 0, **scored), failed], "dpbnn")
    assert "| first in NLL | 0 of 1 (not large) |" in text
    assert "- dpbnn on large: ValueError: no" in text


def test_a_rise_within_its_standard_error_is_none():
    one = [record("large", "dpbnn", 0.1, s, nll=0.5) for s in range(4)]
    two = [
        record("large", "dpbnn", 1.0, s, nll=0.5 + d) for s, d in enumerate((0.3, -0.2, 0.2, -0.2))
    ]
    results = Results([r | {"accuracy": 0, "auroc": 0, "ece": 0} for r in one + two])
    assert "1 of 1 steps" in report(results.records, "dpbnn")
