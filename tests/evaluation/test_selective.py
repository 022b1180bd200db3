"""Risk-coverage and out-of-distribution detection."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from dpbnn import evaluation as ev
from dpbnn.predictive import ClassPredictive


def two(confidence):
    c = np.asarray(confidence)
    return np.stack([c, 1 - c], 1)


def test_a_curve_by_hand():
    found = ev.risk_coverage(two([0.9, 0.8, 0.7, 0.6]), [0, 1, 0, 1])
    assert found.coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert found.risk == pytest.approx([0, 1 / 2, 1 / 3, 2 / 4])
    assert found.aurc == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4)


def test_ties_are_the_mean_over_their_orders():
    errors = [1, 0, 0]
    orders = [np.cumsum(o) / np.arange(1, 4) for o in itertools.permutations(errors)]
    found = ev.risk_coverage(two([0.8, 0.8, 0.8]), errors)
    assert found.risk == pytest.approx(np.mean(orders, 0))
    assert found.aurc == pytest.approx(np.mean(orders))


def test_epistemic_uncertainty_orders_records():
    """Draws agree on the first record; on the second, a little more certain, they do not."""
    draws = torch.tensor([[[0.6, 0.4], [0.99, 0.01]], [[0.6, 0.4], [0.25, 0.75]]])
    predictive = ClassPredictive.from_probabilities(draws)
    curves = {s: ev.risk_coverage(predictive, [0, 1], s) for s in ("confidence", "epistemic")}
    assert curves["confidence"].aurc == pytest.approx(0.75)
    assert curves["epistemic"].aurc == pytest.approx(0.25)
    with pytest.raises(ValueError, match="needs a predictive"):
        ev.risk_coverage(predictive.mean, [0, 1], "epistemic")
    with pytest.raises(ValueError, match="'confidence', 'entropy'"):
        ev.risk_coverage(predictive, [0, 1], "variance")


def test_a_score_can_be_given_or_be_the_entropy():
    p, y = two([0.9, 0.8, 0.7, 0.6]), [0, 1, 0, 1]
    assert ev.risk_coverage(p, y, "entropy").aurc == ev.risk_coverage(p, y).aurc
    assert ev.risk_coverage(p, y, [0.1, 0.2, 0.3, 0.4]).aurc == ev.risk_coverage(p, y).aurc
    with pytest.raises(ValueError, match="one per record"):
        ev.risk_coverage(p, y, [0.1])


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=30),
    st.lists(st.integers(0, 8), min_size=1, max_size=30),
)
def test_ood_auroc_is_that_of_scikit_learn(inside, outside):
    labels = [0] * len(inside) + [1] * len(outside)
    expected = roc_auc_score(labels, inside + outside)
    assert ev.ood_auroc(inside, outside) == pytest.approx(expected)


def test_ood_auroc_takes_predictives():
    agree = ClassPredictive.from_probabilities(torch.full((4, 5, 2), 0.5))
    apart = ClassPredictive.from_probabilities(torch.eye(2)[[0, 1, 0, 1]][:, None].expand(4, 6, 2))
    assert ev.ood_auroc(agree, apart) == 1
    with pytest.raises(ValueError, match="not finite"):
        ev.ood_auroc([0.1, np.nan], [1.0])
    with pytest.raises(ValueError, match="empty"):
        ev.ood_auroc([], [1.0])
