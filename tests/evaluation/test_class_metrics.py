"""Class metrics against scikit-learn, netcal, hand-computed examples and their invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn import metrics as sk

from dpbnn import evaluation as ev
from dpbnn.predictive import ClassPredictive
from dpbnn.reproduce.dp_bnn import mce_dropped_bins

METRICS = (
    ev.accuracy, ev.nll, ev.brier, ev.ece, ev.mce, ev.classwise_ece, ev.global_gap,
    mce_dropped_bins,
)  # fmt: skip


def drawn(n=3000, classes=4, seed=0, sharp=1.7):
    """Probabilities that are too sharp, and labels."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, classes))
    p = softmax(logits, 1)
    return softmax(sharp * logits, 1), (p.cumsum(1) > rng.random((n, 1))).argmax(1)


def netcal():
    try:
        from netcal import metrics
    except ImportError:
        pytest.skip("netcal is not installed: the calibration errors are not cross-checked")
    return metrics


def test_accuracy_log_loss_and_brier_are_those_of_scikit_learn():
    p, y = drawn()
    assert ev.accuracy(p, y) == pytest.approx(sk.accuracy_score(y, p.argmax(1)))
    assert ev.nll(p, y) == pytest.approx(sk.log_loss(y, p))
    brier = ((p - np.eye(4)[y]) ** 2).sum(1).mean()
    assert ev.brier(p, y) == pytest.approx(brier)
    two, label = drawn(classes=2)
    assert ev.brier(two, label) == pytest.approx(2 * sk.brier_score_loss(label, two[:, 1]))


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_errors_are_those_of_netcal(bins):
    p, y = drawn()
    other = netcal()
    assert ev.ece(p, y, bins) == pytest.approx(other.ECE(bins).measure(p, y), abs=1e-9)
    assert ev.mce(p, y, bins) == pytest.approx(other.MCE(bins).measure(p, y), abs=1e-9)
    each = [other.ECE(bins, detection=False).measure(p[:, k], (y == k).astype(int)) for k in (2,)]
    alone = np.stack([1 - p[:, 2], p[:, 2]], 1)
    assert ev.classwise_ece(alone, (y == 2).astype(int), bins) == pytest.approx(each[0], abs=1e-9)


def test_equal_mass_bins_hold_equally_many_records():
    p, y = drawn(n=3000)
    found = ev.reliability(p, y, 15, "mass")
    assert set(found.counts) == {200}
    by_hand = np.argsort(p.max(1)).reshape(15, 200)
    hit = p.argmax(1) == y
    expected = np.mean([abs(hit[b].mean() - p.max(1)[b].mean()) for b in by_hand])
    assert ev.ece(p, y, 15, "mass") == pytest.approx(expected)


def test_equal_confidences_share_a_bin_whatever_their_order():
    p = np.tile([[0.7, 0.3]], (10, 1))
    y = np.array([0] * 5 + [1] * 5)
    assert ev.ece(p, y, 5, "mass") == pytest.approx(0.2)
    assert ev.ece(p, y[::-1], 5, "mass") == pytest.approx(0.2)


def test_confidences_of_exactly_0_and_1_are_in_bins():
    p = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    y = np.array([0, 0, 1, 1])
    found = ev.reliability(p, y, 10)
    assert found.counts.tolist() == [0] * 9 + [4]
    assert found.accuracy[-1] == 0.75
    assert ev.ece(p, y) == ev.mce(p, y) == ev.classwise_ece(p, y) == pytest.approx(0.25)
    assert ev.classwise_ece(p, np.array([1, 1, 0, 0])) == pytest.approx(0.75)
    assert ev.nll(p, np.array([0, 0, 1, 0])) == 0
    assert ev.nll(p, y) == math.inf
    assert ev.brier(p, y) == pytest.approx(0.5)
    # A little above 1 by rounding is still 1.
    assert ev.ece(np.array([[1.0000001, 0.0]], dtype=np.float32), [0]) < 1e-6


def test_edges_belong_to_the_bin_above():
    p = np.array([[0.6, 0.4], [0.8, 0.2], [0.5, 0.5]])
    assert ev.reliability(p, [0, 0, 0], 10).counts.tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 1, 0]


def test_the_papers_variants_by_hand():
    """Six records in bins 11 (0.55-0.6), 15 (0.75-0.8), 19 (0.95-1) of 20."""
    confidence = np.array([0.58, 0.58, 0.78, 0.78, 0.97, 0.97])
    p = np.stack([confidence, 1 - confidence], 1)
    y = np.array([0, 1, 1, 1, 0, 0])
    # accuracy 3/6, mean confidence (0.58 + 0.78 + 0.97)/3
    assert ev.global_gap(p, y) == pytest.approx((0.58 + 0.78 + 0.97) / 3 - 0.5)
    # The bin at 0.775 has accuracy 0 and is dropped: left are |0.575 - 0.5| and |0.975 - 1|.
    assert mce_dropped_bins(p, y) == pytest.approx(0.075)
    assert ev.mce(p, y, 20) == pytest.approx(0.78)
    # Under-confidence alone: centre 0.575 with accuracy 1.
    sure = p[:2]
    assert mce_dropped_bins(sure, [0, 0]) == pytest.approx(0.425)
    assert mce_dropped_bins(sure, [0, 0], signed=True) == pytest.approx(-0.425)
    assert math.isnan(mce_dropped_bins(sure, [1, 1]))


def test_a_predictive_and_its_mean_give_the_same():
    p, y = drawn(200)
    rng = np.random.default_rng(1)
    parts = softmax(np.log(p) + 0.5 * rng.normal(size=(7, 200, 4)), -1)
    predictive = ClassPredictive.from_probabilities(torch.from_numpy(parts))
    for metric in METRICS:
        assert metric(predictive, torch.from_numpy(y)) == pytest.approx(metric(parts.mean(0), y))


def test_log_loss_of_a_predictive_does_not_underflow():
    logs = torch.tensor([[[0.0, -200.0]]])
    assert ev.nll(ClassPredictive(logs), [1]) == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("p", "y", "message"),
    [
        ([[0.5, np.nan]], [0], "some records are NaN"),
        ([[0.5, 0.4]], [0], "do not sum to 1"),
        ([[1.5, -0.5]], [0], "negative"),
        ([[0.5, 0.5]], [2], "1 labels that are none"),
        ([[0.5, 0.5]], [-1], "1 labels that are none"),
        ([[0.5, 0.5]], [0.5], "whole numbers from 0 to 1"),
        ([[0.5, 0.5]], [np.nan], "NaN"),
        ([[0.5, 0.5]], [0, 1], "one label for each"),
        (np.empty((0, 2)), [], "at least one record"),
        ([0.5, 0.5], [0, 1], r"\[records, classes\]"),
        ([["a", "b"]], [0], "give numbers"),
    ],
)
def test_bad_input_is_refused_in_one_line(p, y, message):
    for metric in (*METRICS, ev.evaluate, ev.reliability, ev.risk_coverage):
        with pytest.raises(ValueError, match=message) as found:
            metric(p, np.array(y))
        assert "\n" not in str(found.value)


def test_bad_settings_are_refused():
    p, y = drawn(10)
    for bins in (0, 1.5, -3):
        with pytest.raises(ValueError, match="bins="):
            ev.ece(p, y, bins)
    with pytest.raises(ValueError, match="'width' or 'mass'"):
        ev.ece(p, y, kind="other")


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(2, 6))
def test_invariances(seed, n, classes):
    """Order of records and names of classes do not matter; every metric is in its range."""
    p, y = drawn(n, classes, seed)
    rng = np.random.default_rng(seed)
    records, names = rng.permutation(n), rng.permutation(classes)
    renamed, labels = p[records][:, names], np.argsort(names)[y[records]]
    for metric in METRICS:
        assert metric(p, y) == pytest.approx(metric(renamed, labels), nan_ok=True)
        assert metric(p, y) == pytest.approx(metric(np.tile(p, (2, 1)), np.tile(y, 2)), nan_ok=True)
    assert ev.global_gap(p, y) <= ev.ece(p, y) + 1e-12 <= ev.mce(p, y) + 2e-12
    assert ev.ece(p, y, 1) == pytest.approx(ev.global_gap(p, y))
    assert 0 <= ev.brier(p, y) <= 2


def test_sharper_predictions_of_calibrated_ones_are_less_calibrated():
    values = [ev.ece(*drawn(20_000, sharp=s)) for s in (1.0, 1.3, 2.0)]
    assert values[0] < 0.02 < values[1] < values[2]
