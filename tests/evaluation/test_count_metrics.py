"""Metrics of counts, of ordered classes and of several targets."""

import numpy as np
import pytest
import torch
from scipy import stats

from dpbnn import evaluation, report
from dpbnn.evaluation import evaluate, evaluate_each
from dpbnn.predictive import ClassPredictive, CountPredictive, OrdinalPredictive, RealPredictive

N = 4000


def case(n=N, seed=0, wrong=0.0):
    """Counts drawn from the prediction itself, and the prediction moved by `wrong`."""
    g = torch.Generator().manual_seed(seed)
    logs = 1 + torch.randn(n, generator=g).double() + 0.3 * torch.randn(6, n, generator=g).double()
    pred = CountPredictive(logs)
    y = pred.samples(1, g)[0]
    picked = torch.poisson(pred.means[torch.randint(6, (n,), generator=g), torch.arange(n)],
                           generator=g)  # fmt: skip
    return CountPredictive(logs + wrong), (picked if n > 1 else y).numpy()


def test_scores_are_sums_over_all_counts():
    pred, y = case(50)
    k = np.arange(3000)
    cdf = stats.poisson.cdf(k[:, None, None], pred.means.numpy()).mean(1)
    expected = ((cdf - (y <= k[:, None])) ** 2).sum(0)
    assert evaluation.crps(pred, y) == pytest.approx(expected.mean(), rel=1e-8)
    far = y + 500
    expected = ((cdf - (far <= k[:, None])) ** 2).sum(0)
    assert evaluation.crps(pred, far) == pytest.approx(expected.mean(), rel=1e-8)
    one = CountPredictive(torch.full((1, 1), 9.0, dtype=torch.float64))
    assert evaluation.crps(one, [0]) == pytest.approx(np.exp(9.0), rel=0.01)


def test_evaluate_gives_all_metrics_a_baseline_and_groups():
    pred, y = case()
    groups = np.where(np.arange(N) % 2, "a", "b")
    found = evaluate(pred, y, resamples=50, groups=groups, group="side")
    assert found.task == "regression"
    assert list(found.metrics) == ["rmse", "mae", "r2", "log_likelihood", "crps"]
    assert found.metrics["log_likelihood"].value == pytest.approx(pred.log_prob(y).mean().item())
    assert found.metrics["mae"].value == pytest.approx(np.abs(pred.mean.numpy() - y).mean())
    rate = y.mean()
    expected = stats.poisson.logpmf(y, rate).mean()
    assert found.baseline["log_likelihood"] == pytest.approx(expected)
    assert found.baseline["r2"] == pytest.approx(0.0, abs=1e-9)
    assert found.metrics["r2"].value > 0.3
    assert [group.n for group in found.groups] == [N // 2, N // 2]
    again = evaluation.Evaluation.from_json(found.to_json())
    assert again.to_json() == found.to_json()
    assert "CRPS" in str(found)
    examples = report.select_examples(pred, y, count=2)
    assert len(examples.certain) == len(examples.uncertain) == 2


@pytest.mark.parametrize("wrong", [0.0, 0.15])
def test_coverage_and_pit_see_a_wrong_rate(wrong):
    """Counts from the prediction itself: chi-squared of the spread PIT; 15 % off must be seen."""
    pred, y = case(wrong=wrong)
    found = evaluate(pred, y, resamples=0)
    assert found.pit.counts.sum() == pytest.approx(N, abs=1)
    excess = np.abs(found.pit.counts - N / 20).max() / np.sqrt(N / 20)
    assert (excess > 6) == bool(wrong)
    for row in found.coverage:
        inside = (pred.cdf(pred.interval(row.nominal)[1]) - pred.cdf(
            pred.interval(row.nominal)[0] - 1)).mean().item()  # fmt: skip
        assert inside >= row.nominal
        if not wrong:
            assert row.observed == pytest.approx(inside, abs=6 * 0.5 / N**0.5)
    low, high = pred.interval(0.9)
    share = ((y >= low.numpy()) & (y <= high.numpy())).mean()
    assert found.coverage[2].observed == pytest.approx(share)


def test_counts_that_are_all_zero():
    pred = CountPredictive(torch.full((3, 20), -1.0))
    found = evaluate(pred, np.zeros(20), resamples=10)
    assert found.metrics["log_likelihood"].value == pytest.approx(-np.exp(-1))
    assert found.baseline["log_likelihood"] == pytest.approx(0.0, abs=1e-9)
    assert np.isnan(found.metrics["r2"].value)


def test_ordered_classes_have_a_score_that_knows_the_order():
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7], [0.2, 0.6, 0.2]])
    y = np.array([0, 0, 1])
    cumulative = p.cumsum(1)[:, :2]
    truth = (y[:, None] <= np.arange(2)).astype(float)
    expected = ((cumulative - truth) ** 2).sum(1).mean()
    pred = OrdinalPredictive.from_probabilities(torch.as_tensor(p)[None])
    assert evaluation.rps(pred, y) == pytest.approx(expected)
    found = evaluate(pred, y, resamples=0, groups=["a", "b", "a"])
    assert found.metrics["rps"].value == pytest.approx(expected)
    assert found.metrics["mae"].value == pytest.approx(2 / 3)
    assert {"accuracy", "auroc", "average_precision", "recall", "ece"} <= set(found.metrics)
    assert found.confusion.sum() == 3
    assert "rps" in found.baseline
    assert "rps" in found.groups[0].metrics
    plain = evaluate(ClassPredictive.from_probabilities(torch.as_tensor(p)[None]), y, resamples=0)
    assert "rps" not in plain.metrics


def test_several_targets_are_evaluated_one_by_one():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 80, 3, generator=g)
    binary = ClassPredictive.from_logits(torch.stack([torch.zeros_like(logits), logits], -1))
    labels = torch.randint(0, 2, (80, 3), generator=g)
    found = evaluate_each(binary, labels, ["cough", "fever", "pain"], resamples=0)
    assert list(found) == ["cough", "fever", "pain"]
    alone = evaluate(binary.target(1), labels[:, 1], resamples=0)
    assert found["fever"].to_json() == alone.to_json()
    real = RealPredictive(torch.randn(5, 80, 2, generator=g), 1.0)
    y = torch.randn(80, 2, generator=g)
    assert evaluate_each(real, y, resamples=0)["1"].metrics["rmse"].value == pytest.approx(
        evaluation.rmse(real.target(1), y[:, 1])
    )
    with pytest.raises(ValueError, match="use evaluate_each"):
        evaluate(binary, labels)
    with pytest.raises(ValueError, match="several targets for each record"):
        evaluate_each(binary, labels[:, 0])
    with pytest.raises(ValueError, match="3 different names"):
        evaluate_each(binary, labels, ["a", "a", "b"])
