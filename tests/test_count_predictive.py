"""Predictions of counts and of ordered classes, against scipy and sampling."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpbnn.predictive import ClassPredictive, CountPredictive, OrdinalPredictive


def counts(samples=7, shape=(5,), seed=0, bounds=None):
    g = torch.Generator().manual_seed(seed)
    return CountPredictive(1.5 * torch.randn(samples, *shape, generator=g) + 1, bounds)


def pmf(pred, i, upto=400):
    rates = pred.means[:, i].numpy()
    return stats.poisson.pmf(np.arange(upto)[:, None], rates).mean(1)


class TestCounts:
    def test_moments_mode_and_entropy_are_those_of_the_mixture(self):
        pred, k = counts(), np.arange(400)
        for i in range(len(pred)):
            p = pmf(pred, i)
            assert pred.mean[i].item() == pytest.approx((p * k).sum())
            assert pred.variance[i].item() == pytest.approx((p * k**2).sum() - (p * k).sum() ** 2)
            assert pred.mode[i].item() == p.argmax()
            assert pred.entropy[i].item() == pytest.approx(stats.entropy(p), rel=1e-8)
        assert torch.allclose(pred.variance, pred.epistemic + pred.aleatoric)

    @pytest.mark.parametrize("q", [1e-9, 0.025, 0.3, 0.5, 0.95, 1 - 1e-9])
    def test_quantiles_are_the_smallest_counts_of_that_probability(self, q):
        pred = counts()
        for i, found in enumerate(pred.quantile(q).tolist()):
            assert found == np.searchsorted(pmf(pred, i).cumsum(), q)

    @given(st.lists(st.floats(-20.0, 14.0), min_size=1, max_size=5), st.floats(1e-6, 1 - 1e-6))
    def test_any_quantile_gives_its_probability_back(self, logs, q):
        pred = CountPredictive(torch.tensor(logs, dtype=torch.float64)[:, None])
        y = pred.quantile(q)
        rates = np.exp(logs)
        assert stats.poisson.cdf(y.item(), rates).mean() >= q * (1 - 1e-9)
        assert stats.poisson.cdf(y.item() - 1, rates).mean() < q * (1 + 1e-9)

    @pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
    def test_intervals_hold_at_least_their_probability(self, level):
        pred = counts(shape=(40,), seed=1)
        low, high = pred.interval(level)
        inside = pred.cdf(high) - pred.cdf(low - 1)
        assert (inside >= level - 1e-9).all()
        assert (pred.cdf(high - 1) < (1 + level) / 2).all()  # and they are no wider than needed

    @pytest.mark.parametrize("wrong", [1.0, 1.05])
    def test_samples_have_mean_and_variance_of_the_mixture(self, wrong):
        """6 standard errors: false alarms below 1e-8; rates 5 % off must be seen."""
        pred = counts(shape=(3,))
        draws = CountPredictive(pred.log_rates + math.log(wrong)).samples(
            200_000, torch.Generator().manual_seed(0)
        )
        error = (draws.mean(0) - pred.mean).abs() / (pred.variance / 200_000).sqrt()
        assert bool((error > 6).any()) == (wrong != 1)

    def test_log_prob_is_joint_over_targets_and_refuses_what_is_no_count(self):
        pred = counts(shape=(4, 2))
        y = torch.tensor([[0, 3], [1, 2], [7, 0], [0, 0]])
        parts = stats.poisson.logpmf(y.numpy(), pred.means.numpy()).sum(-1)
        expected = np.log(np.exp(parts).mean(0))
        np.testing.assert_allclose(pred.log_prob(y), expected)
        np.testing.assert_allclose(
            pred.target(1).log_prob(y[:, 1]),
            np.log(stats.poisson.pmf(y[:, 1].numpy(), pred.means[..., 1].numpy()).mean(0)),
        )
        for wrong in (-1.0, 0.5, math.inf, math.nan):
            with pytest.raises(ValueError, match="1 targets are no counts"):
                counts(shape=(2,)).log_prob(torch.tensor([1.0, wrong]))
        with pytest.raises(ValueError, match="shape"):
            pred.log_prob(torch.zeros(3))

    def test_nothing_leaves_the_public_bounds(self):
        pred = counts(shape=(50,), bounds=(0.0, 4.0), seed=3)
        assert pred.means.max() > 10
        low, high = pred.interval(0.99)
        for values in (pred.mean, high, pred.samples(50)):
            assert values.max() == 4
        assert max(low.max(), pred.mode.max()) <= 4
        assert pred.quantile(1.0).max() == 4
        assert counts().quantile(1.0).isinf().all()
        assert (counts().quantile(0.0) == 0).all()

    def test_rates_that_round_to_zero_keep_their_logarithm(self):
        pred = CountPredictive(torch.tensor([[-1e4, -math.inf]]))
        found = pred.log_prob(torch.tensor([2, 0]))
        assert found[0].item() == pytest.approx(-2e4 - math.log(2))
        assert found[1].item() == 0.0
        assert pred.mode.tolist() == [0.0, 0.0]
        with pytest.raises(ValueError, match="at most 700"):
            CountPredictive(torch.tensor([[1e3]]))

    def test_large_counts(self):
        pred = CountPredictive(torch.tensor([[12.0], [12.1]], dtype=torch.float64))
        rates = np.exp([12.0, 12.1])
        for q in (0.05, 0.5, 0.95):
            y = pred.quantile(q).item()
            assert stats.poisson.cdf(y, rates).mean() == pytest.approx(q, abs=2e-3)


class TestOrdered:
    def ordinal(self):
        g = torch.Generator().manual_seed(0)
        return OrdinalPredictive.from_logits(2 * torch.randn(6, 30, 5, generator=g).double())

    def test_what_the_order_gives(self):
        pred = self.ordinal()
        p = pred.mean.numpy()
        np.testing.assert_allclose(pred.expected, (p * np.arange(5)).sum(1))
        np.testing.assert_allclose(pred.cumulative, p.cumsum(1))
        medians = [np.searchsorted(row.cumsum(), 0.5) for row in p]
        assert pred.median.tolist() == medians
        assert (pred.class_quantile(1.0) == 4).all()

    @pytest.mark.parametrize("level", [0.5, 0.9])
    def test_intervals_have_no_gaps_and_hold_their_probability(self, level):
        pred = self.ordinal()
        mask = pred.interval(level)
        assert ((pred.mean * mask).sum(1) >= level - 1e-9).all()
        jumps = mask.long().diff(dim=1).abs().sum(1) + mask[:, 0] + mask[:, -1]
        assert (jumps == 2).all()

    def test_a_part_of_it_is_of_its_kind(self):
        pred = self.ordinal()
        part = pred.take([3, 1])
        assert isinstance(part, OrdinalPredictive)
        torch.testing.assert_close(part.mean, pred.mean[[3, 1]])
        several = ClassPredictive.from_logits(torch.randn(4, 6, 3, 2))
        torch.testing.assert_close(several.target(2).mean, several.mean[:, 2])
