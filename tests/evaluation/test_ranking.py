"""AUROC, average precision, recall, confusion matrix, R2 and MAE against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn import metrics as sk
from sklearn.preprocessing import label_binarize

from dpbnn import evaluation as ev
from dpbnn.evaluation.groups import wilson
from dpbnn.predictive import PropagatedPredictive, RealPredictive


def classes(n=300, k=3, seed=0, digits=None):
    """Probabilities with labels; few digits give many ties."""
    rng = np.random.default_rng(seed)
    p = softmax(1.5 * rng.normal(size=(n, k)), 1)
    y = (p.cumsum(1) > rng.random((n, 1))).argmax(1)
    if digits is not None:
        p = p.round(digits)
        p[:, -1] = 1 - p[:, :-1].sum(1)
        p = p.clip(0) / p.clip(0).sum(1, keepdims=True)
    return p, y


@pytest.mark.parametrize("digits", [None, 1])
def test_two_classes_agree_with_scikit_learn(digits):
    p, y = classes(k=2, digits=digits)
    assert ev.auroc(p, y) == pytest.approx(sk.roc_auc_score(y, p[:, 1]), abs=1e-12)
    for positive in (0, 1):
        truth, score = y == positive, p[:, positive]
        expected = sk.average_precision_score(truth, score)
        assert ev.average_precision(p, y, positive) == pytest.approx(expected, abs=1e-12)
        for threshold in (0.3, 0.5, 0.9):
            expected = sk.recall_score(truth, score >= threshold)
            assert ev.recall(p, y, threshold, positive) == pytest.approx(expected, abs=1e-12)
    matrix = sk.confusion_matrix(y, p.argmax(1))
    assert ev.confusion_matrix(p, y).tolist() == matrix.tolist()


@pytest.mark.parametrize("digits", [None, 1])
def test_several_classes_are_means_of_one_versus_rest(digits):
    p, y = classes(k=4, digits=digits)
    truth = label_binarize(y, classes=range(4))
    expected = sk.roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert ev.auroc(p, y) == pytest.approx(expected, abs=1e-12)
    expected = sk.average_precision_score(truth, p, average="macro")
    assert ev.average_precision(p, y) == pytest.approx(expected, abs=1e-12)
    expected = sk.recall_score(truth, p >= 0.4, average="macro")
    assert ev.recall(p, y, 0.4) == pytest.approx(expected, abs=1e-12)


def test_a_class_without_records_is_left_out_and_one_class_is_undefined():
    p, y = classes(k=3)
    fewer = np.where(y == 2, 0, y)
    truth = label_binarize(fewer, classes=range(3))
    expected = np.mean([sk.roc_auc_score(truth[:, k], p[:, k]) for k in (0, 1)])
    assert ev.auroc(p, fewer) == pytest.approx(expected)
    assert ev.confusion_matrix(p, fewer)[2].tolist() == [0, 0, 0]
    found = ev.evaluate(p[:, :2] / p[:, :2].sum(1, keepdims=True), 0 * y, resamples=20)
    assert math.isnan(found.metrics["auroc"].value)
    assert math.isnan(found.metrics["auroc"].low)
    assert ev.Evaluation.from_json(found.to_json()).to_dict() == found.to_dict()


@pytest.mark.parametrize("outputs", [(), (3,)])
def test_r2_and_mae_agree_with_scikit_learn(outputs):
    rng = np.random.default_rng(0)
    y = 100 + rng.normal(size=(200, *outputs))
    mean = y + 0.5 * rng.normal(size=y.shape)
    predictive = RealPredictive(torch.as_tensor(mean)[None], 1.0)
    for given in (mean, predictive):
        assert ev.r2(given, y) == pytest.approx(sk.r2_score(y, mean), abs=1e-9)
        assert ev.mae(given, y) == pytest.approx(sk.mean_absolute_error(y, mean))
    found = ev.evaluate(predictive, y, resamples=50).metrics
    assert found["r2"].value == pytest.approx(sk.r2_score(y, mean), abs=1e-9)
    assert found["r2"].low < found["r2"].value < found["r2"].high <= 1
    assert math.isnan(ev.r2(mean, np.full_like(y, 7.0)))


def test_fast_intervals_are_those_of_the_plain_bootstrap():
    """Ends agree within 15 % of the width: both are quantiles of 1000 resamples or more."""
    p, y = classes(400, 2)
    found = ev.evaluate(p, y, resamples=2000).metrics
    for name in ("auroc", "average_precision", "recall"):
        slow = ev.bootstrap(getattr(ev, name), p, y, resamples=1000, seed=1)
        width = slow.high - slow.low
        assert found[name].low == pytest.approx(slow.low, abs=0.15 * width)
        assert found[name].high == pytest.approx(slow.high, abs=0.15 * width)


def test_the_baseline_is_the_best_constant_of_the_test_truth():
    p, y = classes(k=3)
    shares = np.bincount(y) / len(y)
    found = ev.evaluate(p, y, resamples=0).baseline
    assert found["accuracy"] == pytest.approx(shares.max())
    assert found["nll"] == pytest.approx(-(shares * np.log(shares)).sum())
    assert found["auroc"] == pytest.approx(0.5)
    assert found["average_precision"] == pytest.approx(1 / 3)
    rng = np.random.default_rng(0)
    y = rng.normal(5, 2, size=200)
    predictive = RealPredictive(torch.as_tensor(y)[None] + 1, 1.0)
    found = ev.evaluate(predictive, y, resamples=0)
    assert found.baseline["rmse"] == pytest.approx(y.std())
    assert found.baseline["r2"] == pytest.approx(0, abs=1e-9)
    assert found.baseline["mae"] == pytest.approx(np.abs(y - y.mean()).mean())
    constant = 0.5 * np.log(2 * np.pi * y.var()) + 0.5
    assert found.baseline["log_likelihood"] == pytest.approx(-constant)
    assert "baseline" in str(found)
    assert math.isfinite(ev.evaluate(predictive, 0 * y, resamples=0).baseline["crps"])


def test_groups_have_their_own_rows_and_small_ones_wide_intervals():
    p, y = classes(300, 2)
    sure = np.eye(2)[y] * 0.98 + 0.01
    groups = ["a"] * 200 + ["b"] * 96 + [None] * 2 + [float("nan"), ""]
    found = ev.evaluate(np.where(np.arange(300)[:, None] < 296, p, sure), y, groups=groups)
    assert [(g.name, g.n) for g in found.groups] == [("(missing)", 4), ("a", 200), ("b", 96)]
    tiny, large = found.groups[:2]
    assert tiny.metrics["accuracy"].value == 1
    assert tiny.metrics["accuracy"].low < 0.6
    assert large.metrics["accuracy"].value == pytest.approx(ev.accuracy(p[:200], y[:200]))
    assert large.metrics["auroc"].value == pytest.approx(ev.auroc(p[:200], y[:200]))
    assert ev.Evaluation.from_json(found.to_json()).to_dict() == found.to_dict()
    assert "b: 96 records" in str(found)


def test_groups_of_a_regression():
    rng = np.random.default_rng(1)
    y = rng.normal(size=60)
    predictive = PropagatedPredictive(torch.zeros(60).double(), torch.full((60,), 0.5).double(), 1)
    found = ev.evaluate(predictive, y, groups=["x"] * 56 + ["y"] * 3 + ["z"], resamples=200)
    large, small, one = found.groups
    assert large.metrics["rmse"].value == pytest.approx(np.sqrt((y[:56] ** 2).mean()))
    assert small.metrics["mae"].value == pytest.approx(np.abs(y[56:59]).mean())
    assert one.n == 1
    assert math.isnan(one.metrics["rmse"].low)
    width = {g.name: g.metrics["coverage_90"].high - g.metrics["coverage_90"].low
             for g in found.groups}  # fmt: skip
    assert width["x"] < width["y"] < width["z"]


def test_wilson_intervals_are_those_of_a_printed_table():
    """Newcombe (1998), table I: 81 of 263 and 0 of 20, 95 %."""
    found = wilson(81 / 263, 263, 0.95)
    assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)
    assert round(wilson(0.0, 20, 0.95).high, 4) == 0.1611


def test_group_intervals_cover():
    """Of 400 intervals of 90 % for the mean error of 6 records, at least 330 hold the truth.

    Plain bootstrap intervals hold it in about 300.
    """
    rng = np.random.default_rng(0)
    inside = plain = 0
    for seed in range(400):
        y = rng.normal(size=6)
        predictive = RealPredictive(torch.zeros(1, 6).double(), 1.0)
        found = ev.evaluate(predictive, y, groups=["g"] * 6, resamples=200, level=0.9, seed=seed)
        truth = math.sqrt(2 / math.pi)
        wide, narrow = found.groups[0].metrics["mae"], found.metrics["mae"]
        inside += wide.low <= truth <= wide.high
        plain += narrow.low <= truth <= narrow.high
    assert plain < 330 <= inside


def test_bad_settings_are_named():
    p, y = classes(20, 2)
    for options, message in (
        ({"threshold": 0}, "threshold=0"),
        ({"positive": 2}, "positive=2"),
        ({"classes": ["a"]}, "1 names for 2 classes"),
        ({"groups": ["a"]}, "one value for each of the 20"),
    ):
        with pytest.raises(ValueError, match=message):
            ev.evaluate(p, y, resamples=0, **options)
    p, y = classes(300, 2)
    with pytest.raises(ValueError, match="300 different values, at most 100"):
        ev.evaluate(p, y, resamples=0, groups=list(range(300)))
