"""Regression metrics against quadrature, closed forms and the predictive's own intervals."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import kstest, norm

from dpbnn import evaluation as ev
from dpbnn.predictive import RealPredictive


def mixture(samples=5, n=40, outputs=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, n, *outputs)
    means = torch.randn(shape, generator=generator, dtype=torch.double)
    variances = torch.rand(shape, generator=generator, dtype=torch.double) + 0.1
    predictive = RealPredictive(means, variances)
    return predictive, predictive.samples(1, generator)[0]


def cdf(predictive, i, y):
    return norm.cdf((y - predictive.means[:, i]) / predictive.variances[:, i].sqrt()).mean()


def test_crps_is_the_integral_of_the_squared_distance_of_distribution_functions():
    predictive, y = mixture(n=6)

    def squared(t, i):
        return (cdf(predictive, i, t) - (t >= y[i].item())) ** 2

    expected = [
        quad(squared, -12, y[i].item(), args=(i,))[0] + quad(squared, y[i].item(), 12, args=(i,))[0]
        for i in range(6)
    ]
    assert ev.crps(predictive, y) == pytest.approx(np.mean(expected), abs=1e-7)


def test_crps_of_one_gaussian():
    """Gneiting and Raftery 2007: s (z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi))."""
    predictive, y = RealPredictive(torch.tensor([[1.0]]), 4.0), torch.tensor([2.5])
    z = 0.75
    expected = 2 * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert ev.crps(predictive, y) == pytest.approx(expected)


def test_blocks_do_not_matter(monkeypatch):
    predictive, y = mixture(n=100)
    whole = ev.crps(predictive, y), ev.pit(predictive, y)
    monkeypatch.setattr("dpbnn.evaluation.regression._BLOCK", 35)
    assert ev.crps(predictive, y) == pytest.approx(whole[0])
    assert ev.pit(predictive, y) == pytest.approx(whole[1])


def test_pit_is_the_distribution_function_and_uniform_where_calibrated():
    """The Kolmogorov-Smirnov test at 1e-4 accepts targets of the prediction, not wider ones."""
    predictive, y = mixture(n=3000)
    ranks = ev.pit(predictive, y)
    assert ranks[:5] == pytest.approx([cdf(predictive, i, y[i].item()) for i in range(5)])
    assert kstest(ranks, "uniform").pvalue > 1e-4
    wider = predictive.mean + 1.2 * (y - predictive.mean)
    assert kstest(ev.pit(predictive, wider), "uniform").pvalue < 1e-4


def test_coverage_is_that_of_the_intervals():
    predictive, y = mixture(n=500)
    found = ev.interval_coverage(predictive, y, (0.5, 0.9))
    for row in found:
        low, high = predictive.interval(row.nominal)
        assert row.observed == pytest.approx(((low <= y) & (y <= high)).double().mean().item())
        assert row.width == pytest.approx((high - low).mean().item())
    assert found[0].width < found[1].width
    with pytest.raises(ValueError, match="levels: 1"):
        ev.interval_coverage(predictive, y, (1.5,))


def test_error_and_likelihood():
    predictive, y = mixture()
    assert ev.rmse(predictive, y) == pytest.approx((predictive.mean - y).square().mean().sqrt())
    assert ev.rmse(predictive.mean, y) == pytest.approx(ev.rmse(predictive, y))
    assert ev.log_likelihood(predictive, y) == pytest.approx(predictive.log_prob(y).mean().item())


def test_several_outputs():
    predictive, y = mixture(outputs=(3,))
    alone = [
        RealPredictive(predictive.means[..., d], predictive.variances[..., d]) for d in (0, 1, 2)
    ]
    each = [ev.crps(p, y[:, d]) for d, p in enumerate(alone)]
    assert ev.crps(predictive, y) == pytest.approx(np.mean(each))
    assert ev.pit(predictive, y).shape == (40, 3)
    found = ev.evaluate(predictive, y, resamples=50)
    assert found.n == 40
    assert found.pit.counts.sum() == 120


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.full(40, np.nan), "40 values that are not finite"),
        (np.r_[np.zeros(39), np.inf], "1 values that are not finite"),
        (np.zeros(39), "one target per prediction"),
        (np.zeros(0), "empty"),
    ],
)
def test_bad_targets_are_refused_in_one_line(y, message):
    predictive, _ = mixture()
    for metric in (ev.rmse, ev.log_likelihood, ev.pit, ev.crps, ev.interval_coverage, ev.evaluate):
        with pytest.raises(ValueError, match=message) as found:
            metric(predictive, y)
        assert "\n" not in str(found.value)


def test_the_wrong_kind_of_prediction_is_refused():
    predictive, y = mixture()
    with pytest.raises(ValueError, match="needs class labels"):
        ev.accuracy(predictive, y)
    with pytest.raises(ValueError, match="needs a regression prediction"):
        ev.crps(np.zeros(40), y)
