"""The benchmark of coverage: coefficients in the data's units, and honest counts."""

import sys
from pathlib import Path

import numpy as np
import pytest

import dpbnn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import coverage
from benchmarks.results import read, recorded, waiting

TRUTH = np.array([1.5, -0.5, 0.0])


@pytest.mark.parametrize("method", ["vi", "sep"])
def test_coefficients_are_in_the_units_of_the_data(method):
    """Bounds that differ by column, and a target far from 0, are undone."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (500, 3))
    y = 30 + x @ TRUTH + 0.2 * rng.standard_normal(500)
    model = dpbnn.PrivateBayesRegressor(
        method, epsilon=None, hidden=(), bounds=([-2, -4, -8], [4, 2, 8]), target_bounds=(20, 50),
        random_state=0, samples=50,
    )  # fmt: skip
    drawn = coverage.coefficients(model.fit(x, y))
    assert drawn.shape == (50, 3)
    assert np.abs(drawn.mean(0) - TRUTH).max() < 0.15
    assert (drawn.std(0) > 0).all()


def test_coefficients_of_classes_are_log_odds():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (2000, 3))
    y = (rng.random(2000) < 1 / (1 + np.exp(-x @ TRUTH))).astype(int)
    model = dpbnn.PrivateBayesClassifier(
        "vi", epsilon=None, hidden=(), bounds=(-3, 3), classes=(0, 1), random_state=0
    )
    drawn = coverage.coefficients(model.fit(x, y))
    assert np.abs(drawn.mean(0) - TRUTH).max() < 0.4


def test_a_point_estimate_has_no_intervals():
    found = recorded(coverage.one, job("linear", "sgd"))["found"]
    assert found["coefficients"] == {"skipped": "one point estimate, no draws"}
    assert 0 <= found["predictive"]["coverage"] <= 1


def test_intervals_that_are_right_and_wrong_are_told_apart():
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(2000)
    seen = truth + rng.standard_normal(2000)
    drawn = seen / 2 + np.sqrt(0.5) * rng.standard_normal((4000, 2000))
    assert 0.87 < coverage._checked(drawn, truth)["coverage"] < 0.93
    narrow = seen / 2 + 0.5 * np.sqrt(0.5) * rng.standard_normal((4000, 2000))
    assert coverage._checked(narrow, truth)["coverage"] < 0.65


def job(task, method, epsilon=1.0, number=0):
    return {"task": task, "method": method, "epsilon": epsilon, "rows": 150, "set": number}


@pytest.mark.parametrize(
    ("task", "quantity"),
    [
        ("linear", "coefficients"),
        ("logistic", "coefficients"),
        ("network", "bands"),
        ("curve", "bands"),
        ("smooth", "bands"),
    ],
)
def test_every_task_gives_a_record(task, quantity):
    found = recorded(coverage.one, job(task, "default"))
    assert 0 <= found["found"][quantity]["coverage"] <= 1
    assert found["found"][quantity]["width"] > 0


def test_a_method_that_does_not_apply_is_left_out_with_the_reason():
    found = recorded(coverage.one, job("logistic", "sep"))
    assert "regression" in found["skipped"]
    assert f"- logistic, sep: {found['skipped']}" in coverage.report([found])


def test_the_report_has_the_monte_carlo_error_and_what_failed(tmp_path):
    scored = {"width": 1.0, "mse": 4.0, "slope": 0.5}
    records = [
        {**job("network", "vi", None, k), "found": {"bands": {"coverage": c, **scored}}}
        for k, c in enumerate((0.8, 0.9, 1.0))
    ]
    failed = {**job("network", "bbp"), "error": "ValueError: no"}
    text = coverage.report([*records, failed])
    assert "**0.900 ± 0.058** (3); 1; 2; 0.50" in text
    assert "1 jobs failed" in text
    path = tmp_path / "found.jsonl"
    path.write_text("\n".join(map(coverage.json.dumps, [*records, failed])))
    assert len(read(path, coverage.NAMES)) == 4
    asked = [job("network", "vi", None), job("network", "bbp"), job("network", "vi", 1.0)]
    assert waiting(asked, path) == asked[1:]
