"""evaluate() as a whole: intervals, records, tables, sizes."""

import json
import math
import tracemalloc

import numpy as np
import pytest
import torch
from scipy.special import softmax

import dpbnn
from dpbnn import evaluation as ev
from dpbnn.evaluation import resampling
from dpbnn.predictive import ClassPredictive, RealPredictive


def classes(n=2000, k=3, seed=0):
    rng = np.random.default_rng(seed)
    p = softmax(1.5 * rng.normal(size=(n, k)), 1)
    return p, (p.cumsum(1) > rng.random((n, 1))).argmax(1)


def reals(n=500, samples=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    predictive = RealPredictive(torch.randn(samples, n, generator=generator), 0.5)
    return predictive, predictive.samples(1, generator)[0]


def test_every_number_is_that_of_the_plain_function():
    p, y = classes()
    found = dpbnn.evaluate(p, y, resamples=20)
    assert found.task == "classification"
    expected = {
        "accuracy": ev.accuracy, "nll": ev.nll, "brier": ev.brier, "ece": ev.ece, "mce": ev.mce,
        "ece_mass": lambda p, y: ev.ece(p, y, kind="mass"), "classwise_ece": ev.classwise_ece,
        "global_gap": ev.global_gap, "aurc": lambda p, y: ev.risk_coverage(p, y).aurc,
        "auroc": ev.auroc, "average_precision": ev.average_precision, "recall": ev.recall,
    }  # fmt: skip
    assert list(found.metrics) == [
        "accuracy", "auroc", "average_precision", "recall", "nll", "brier", "ece", "ece_mass",
        "mce", "classwise_ece", "global_gap", "aurc",
    ]  # fmt: skip
    for name, metric in found.metrics.items():
        assert metric.value == pytest.approx(expected[name](p, y))
        assert metric.low <= metric.value <= metric.high
    assert found.reliability.counts.sum() == found.confidence_histogram.counts.sum() == 2000
    assert len(found.risk_coverage.risk) == 200
    assert found.risk_coverage.coverage[-1] == 1

    predictive, target = reals()
    found = dpbnn.evaluate(predictive, target, resamples=20)
    assert found.task == "regression"
    for name in ("rmse", "mae", "r2", "log_likelihood", "crps"):
        value = getattr(ev, name)(predictive, target)
        assert found.metrics[name].value == pytest.approx(value, rel=1e-5)
    plain = ev.interval_coverage(predictive, target)
    assert [c.observed for c in found.coverage] == pytest.approx([c.observed for c in plain])
    assert [c.nominal for c in found.coverage] == [0.5, 0.8, 0.9, 0.95]


def test_fast_intervals_are_those_of_the_plain_bootstrap():
    """Ends agree within 15 % of the width: both are quantiles of 2000 resamples."""
    p, y = classes(400)
    found = ev.evaluate(p, y, resamples=2000).metrics
    for name, metric in (("nll", ev.nll), ("ece", ev.ece), ("brier", ev.brier), ("mce", ev.mce)):
        slow = ev.bootstrap(metric, p, y, resamples=2000, seed=1)
        width = slow.high - slow.low
        assert found[name].low == pytest.approx(slow.low, abs=0.15 * width)
        assert found[name].high == pytest.approx(slow.high, abs=0.15 * width)
    aurc = ev.bootstrap(lambda p, y: ev.risk_coverage(p, y).aurc, p, y, resamples=2000, seed=1)
    width = aurc.high - aurc.low
    assert found["aurc"].low == pytest.approx(aurc.low, abs=0.15 * width)
    assert found["aurc"].high == pytest.approx(aurc.high, abs=0.15 * width)


def test_intervals_cover(monkeypatch):
    """Of 300 intervals of 90 %, 249 to 288 hold the true mean (false alarm about 1e-4).

    With records in groups that are drawn whole as well; intervals of half the width do not pass.
    """
    rng = np.random.default_rng(0)
    monkeypatch.setattr(resampling, "_UNITS", 150)

    def hits(shrink):
        inside = 0
        for seed in range(300):
            values = rng.exponential(size=400)
            found = resampling.resampled(
                {"mean": lambda sums, v=values: sums.mean(v)}, 400,
                resamples=200, level=0.9, seed=seed, ranges={},
            )["mean"]  # fmt: skip
            inside += abs(1 - found.value) * shrink <= (
                found.high - found.value if found.value < 1 else found.value - found.low
            )
        return inside

    assert 249 <= hits(1) <= 288
    assert not 249 <= hits(2) <= 288


def test_an_evaluation_survives_json():
    for found in (ev.evaluate(*classes(50)), ev.evaluate(*reals(50))):
        text = found.to_json()
        json.loads(text, parse_constant=pytest.fail)
        again = ev.Evaluation.from_json(text)
        assert again.to_dict() == found.to_dict()
        assert str(again) == str(found)
    with pytest.raises(ValueError, match="schema 1"):
        ev.Evaluation.from_dict({"schema": 2})


def test_infinite_and_missing_numbers_survive_json():
    found = ev.evaluate(np.array([[1.0, 0.0], [0.0, 1.0]]), [1, 0])
    assert found.metrics["nll"].value == math.inf
    again = ev.Evaluation.from_json(found.to_json())
    assert again.metrics["nll"].value == math.inf
    assert math.isnan(again.reliability.accuracy[0])


def test_an_evaluation_with_a_metric_that_has_gone_is_still_read():
    values = ev.evaluate(np.array([[1.0, 0.0], [0.0, 1.0]]), [1, 0]).to_dict()
    values["metrics"]["mce_dropped_bins"] = {"value": None, "low": None, "high": None}
    again = ev.Evaluation.from_json(json.dumps(values))
    assert math.isnan(again.metrics["mce_dropped_bins"].value)
    assert "mce_dropped_bins" in str(again)


def test_an_evaluation_from_before_the_baseline_is_still_read():
    values = ev.evaluate(*classes(50)).to_dict()
    for name in (
        "baseline", "groups", "group", "classes", "threshold", "positive", "confusion",
    ):  # fmt: skip
        del values[name]
    again = ev.Evaluation.from_dict(values)
    assert again.baseline == {}
    assert again.groups == ()
    assert again.metrics["accuracy"].value == values["metrics"]["accuracy"]["value"]


def test_the_table_is_readable():
    text = str(ev.evaluate(*classes(200), resamples=50))
    lines = text.splitlines()
    assert lines[0] == "Classification on 200 records, 95% bootstrap intervals"
    assert len(lines) == 13
    assert all(len(line) < 100 for line in lines)
    assert "90% interval, coverage" in str(ev.evaluate(*reals(50), resamples=50))


def test_one_record_has_no_interval():
    found = ev.evaluate(np.array([[0.8, 0.2]]), [0])
    assert found.metrics["accuracy"].value == 1
    assert math.isnan(found.metrics["accuracy"].low)
    assert ev.evaluate(*reals(1)).n == 1


def test_seeds_and_settings():
    p, y = classes(100)
    assert ev.evaluate(p, y, seed=1).to_dict() == ev.evaluate(p, y, seed=1).to_dict()
    assert ev.evaluate(p, y, seed=1).to_dict() != ev.evaluate(p, y, seed=2).to_dict()
    wide, narrow = (ev.evaluate(p, y, level=level).metrics["nll"] for level in (0.99, 0.5))
    assert wide.low < narrow.low < narrow.high < wide.high
    for options, message in (({"level": 1.5}, "level=1.5"), ({"resamples": -1}, "resamples=-1")):
        with pytest.raises(ValueError, match=message):
            ev.evaluate(p, y, **options)


def test_a_predictive_is_evaluated_like_its_probabilities():
    p, y = classes(100)
    predictive = ClassPredictive.from_probabilities(torch.from_numpy(p)[None])
    found = ev.evaluate(predictive, torch.from_numpy(y)).metrics
    for name, metric in ev.evaluate(p, y).metrics.items():
        assert found[name].value == pytest.approx(metric.value)


def test_memory_does_not_grow_with_the_resamples():
    """Half a million records, 8 MB of probabilities: temporaries stay below 200 MB."""
    p, y = classes(500_000, 2)
    tracemalloc.start()
    ev.evaluate(p, y, resamples=20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6


def test_bootstrap_takes_any_metric():
    rng = np.random.default_rng(0)
    values = rng.normal(size=2000)
    found = ev.bootstrap(lambda v: v.mean(), values, resamples=400)
    assert found.high - found.low == pytest.approx(2 * 1.96 / math.sqrt(2000), rel=0.15)
    with pytest.raises(ValueError, match="same length"):
        ev.bootstrap(lambda a, b: 0.0, values, values[:5])


def test_docstring_examples_hold():
    import doctest

    result = doctest.testmod(resampling)
    assert result.attempted
    assert not result.failed
