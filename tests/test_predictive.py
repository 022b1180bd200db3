"""Predictive distributions against closed forms, scipy and sampling."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from dpbnn.predictive import ClassPredictive, RealPredictive


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def real(samples=7, shape=(5,), seed=0, dtype=torch.float64):
    g = generator(seed)
    means = 2 * torch.randn(samples, *shape, generator=g, dtype=dtype)
    return RealPredictive(means, 0.05 + torch.rand(samples, *shape, generator=g, dtype=dtype))


def mixture_cdf(pred, i):
    m, s = pred.means[:, i].numpy(), pred.variances[:, i].sqrt().numpy()
    return lambda y: stats.norm.cdf(y, m, s).mean()


class TestReal:
    def test_variance_is_epistemic_plus_aleatoric(self):
        pred = real()
        assert torch.allclose(pred.epistemic, pred.means.var(0, correction=0))
        assert torch.allclose(pred.aleatoric, pred.variances.mean(0))
        assert torch.allclose(pred.variance, pred.epistemic + pred.aleatoric)
        assert torch.allclose(pred.std.square(), pred.variance)

    @pytest.mark.parametrize("wrong", [1.0, 1.05])
    def test_samples_have_the_total_variance(self, wrong):
        """6 standard errors: false alarms below 1e-8; a scale 5 % off must be seen."""
        pred = real(shape=(3,))
        draws = pred.samples(200_000, generator()) * wrong
        error = (draws.var(0) - pred.variance) / pred.variance
        kurtosis = (draws - draws.mean(0)).pow(4).mean(0) / draws.var(0).square()
        alarm = (error.abs() > 6 * ((kurtosis - 1) / 200_000).sqrt()).any()
        assert bool(alarm) == (wrong != 1)

    def test_samples_follow_the_mixture(self):
        """Kolmogorov-Smirnov at 1e-6."""
        pred = real(shape=(1,))
        draws = pred.samples(20_000, generator())[:, 0].numpy()
        m, s = pred.means[:, 0].numpy(), pred.variances[:, 0].sqrt().numpy()

        def cdf(y):
            return stats.norm.cdf(y[:, None], m, s).mean(1)

        assert stats.kstest(draws, cdf).pvalue > 1e-6
        assert stats.kstest(draws + 0.2, cdf).pvalue < 1e-6

    @pytest.mark.parametrize("q", [1e-12, 0.025, 0.3, 0.5, 0.95, 1 - 1e-9])
    def test_quantiles_are_roots_of_the_mixture_cdf(self, q):
        pred = real()
        found = pred.quantile(q)
        for i, y in enumerate(found.tolist()):
            cdf = mixture_cdf(pred, i)
            root = optimize.brentq(lambda t, cdf=cdf: cdf(t) - q, -60, 60, xtol=1e-14)
            assert y == pytest.approx(root, abs=1e-6 if q > 0.9999 else 1e-9)

    @given(
        st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(1e-4, 1e3)), min_size=1, max_size=5),
        st.floats(1e-6, 1 - 1e-6),
    )
    def test_any_quantile_gives_its_probability_back(self, parts, q):
        means, stds = torch.tensor(parts, dtype=torch.float64).T
        y = RealPredictive(means[:, None], stds.square()[:, None]).quantile(q)
        around = torch.stack([torch.nextafter(y, y + d) for d in (-1e9, 0, 1e9)])
        below, above = [
            torch.special.ndtr((t - means) / stds).mean().item()
            for t in (around[0] - 1e-9 * stds.min(), around[2] + 1e-9 * stds.min())
        ]
        assert below - 1e-12 <= q <= above + 1e-12

    def test_one_sample_is_a_gaussian(self):
        pred = RealPredictive(torch.tensor([[1.0]]), torch.tensor([[4.0]]))
        low, high = pred.interval(0.95)
        assert low.item() == pytest.approx(1 - 2 * 1.959964, rel=1e-6)
        assert high.item() == pytest.approx(1 + 2 * 1.959964, rel=1e-6)
        assert pred.epistemic.item() == 0
        assert pred.mode.item() == 1
        assert pred.entropy.item() == pytest.approx(stats.norm(1, 2).entropy(), rel=1e-6)
        assert pred.log_prob(torch.tensor([0.0])).item() == pytest.approx(
            stats.norm.logpdf(0, 1, 2), rel=1e-6
        )

    def test_extreme_quantiles_are_infinite(self):
        assert (real().quantile(0) == -math.inf).all()
        assert (real().quantile(1) == math.inf).all()

    def test_log_prob_is_the_mixture_density(self):
        pred, y = real(), torch.linspace(-3, 3, 5, dtype=torch.float64)
        expected = np.log(stats.norm.pdf(y, pred.means, pred.variances.sqrt()).mean(0))
        assert np.allclose(pred.log_prob(y), expected)

    def test_log_prob_is_joint_over_outputs_and_stable_far_away(self):
        pred, y = real(shape=(4, 2)), torch.full((4, 2), 300.0)
        parts = stats.norm.logpdf(y, pred.means, pred.variances.sqrt()).sum(-1)
        expected = np.logaddexp.reduce(parts, 0) - math.log(7)
        assert np.allclose(pred.log_prob(y), expected)
        assert pred.log_prob(y).isfinite().all()

    def test_mode_is_the_highest_point(self):
        pred = real(samples=4)
        grid = torch.linspace(-8, 8, 40_001, dtype=torch.float64)
        for i in range(5):
            z = (grid[:, None] - pred.means[:, i]) / pred.variances[:, i].sqrt()
            density = (torch.exp(-z.square() / 2) / pred.variances[:, i].sqrt()).mean(1)
            assert pred.mode[i].item() == pytest.approx(grid[density.argmax()].item(), abs=1e-3)

    def test_entropy_is_the_integral(self):
        pred = real(samples=4, shape=(3,))
        for i in range(3):
            m, s = pred.means[:, i].numpy(), pred.variances[:, i].sqrt().numpy()

            def integrand(y, m=m, s=s):
                p = stats.norm.pdf(y, m, s).mean()
                return -p * math.log(p) if p > 0 else 0.0

            value = integrate.quad(integrand, -12, 12, limit=400, points=sorted(m))[0]
            assert pred.entropy[i].item() == pytest.approx(value, abs=5e-3)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype_and_shape_are_kept(self, dtype):
        pred = real(shape=(4, 2), dtype=dtype)
        for value in (pred.mean, pred.variance, pred.mode, pred.entropy, *pred.interval(0.9)):
            assert value.dtype == dtype
            assert value.shape == (4, 2)
        assert len(pred) == 4

    def test_blocks_do_not_change_quantiles(self, monkeypatch):
        whole = real(shape=(50,)).quantile(0.2)
        monkeypatch.setattr("dpbnn.predictive.reals._BLOCK", 20)
        assert torch.allclose(real(shape=(50,)).quantile(0.2), whole, rtol=0, atol=1e-12)

    def test_bad_values_are_refused(self):
        means = torch.zeros(2, 3)
        with pytest.raises(ValueError, match="2 NaN; check"):
            RealPredictive(torch.tensor([[0.0, 1], [math.nan, math.nan]]), 1.0)
        with pytest.raises(ValueError, match="finite"):
            RealPredictive(means + math.inf, 1.0)
        with pytest.raises(ValueError, match=r"clamp\(min"):
            RealPredictive(means, 0.0)
        with pytest.raises(ValueError, match="at least one"):
            RealPredictive(torch.zeros(0, 3), 1.0)
        with pytest.raises(ValueError, match="level="):
            RealPredictive(means, 1.0).interval(1.5)
        with pytest.raises(ValueError, match="q=2"):
            RealPredictive(means, 1.0).quantile(2)
        with pytest.raises(ValueError, match="shape"):
            RealPredictive(means, 1.0).log_prob(torch.zeros(4))


P = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.9, 0.1], [0.0, 1.0]]], dtype=torch.float64)


class TestClasses:
    def test_entropies_by_hand(self):
        pred = ClassPredictive.from_probabilities(P)
        first = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3))
        inside = (math.log(2) - 0.9 * math.log(0.9) - 0.1 * math.log(0.1)) / 2
        assert pred.mean.tolist() == [pytest.approx([0.7, 0.3]), pytest.approx([0.5, 0.5])]
        assert pred.entropy.tolist() == pytest.approx([first, math.log(2)])
        assert pred.aleatoric.tolist() == pytest.approx([inside, 0])
        assert pred.epistemic.tolist() == pytest.approx([first - inside, math.log(2)])

    def test_variance_is_that_of_the_one_hot_label(self):
        pred = ClassPredictive.from_probabilities(P)
        parts = P.var(0, correction=0) + (P * (1 - P)).mean(0)
        assert torch.allclose(pred.variance, parts)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_certainty_is_exact(self, dtype):
        pred = ClassPredictive.from_probabilities(torch.tensor([[[1.0, 0.0]]], dtype=dtype))
        assert pred.mean.tolist() == [[1, 0]]
        assert pred.entropy.item() == pred.epistemic.item() == pred.aleatoric.item() == 0
        assert pred.variance.tolist() == [[0, 0]]
        assert pred.interval(0.99).tolist() == [[True, False]]
        assert pred.log_prob(torch.tensor([0])).item() == 0
        assert pred.log_prob(torch.tensor([1])).item() == -math.inf
        assert pred.mean.dtype == dtype

    def test_log_prob_is_stable_where_probabilities_underflow(self):
        logits = torch.tensor([[[0.0, -300.0]], [[0.0, -301.0]]])
        expected = np.logaddexp(-300, -301) - math.log(2)
        found = ClassPredictive.from_logits(logits).log_prob(torch.tensor([1]))
        assert found.item() == pytest.approx(expected)

    def test_labels_of_one_example_are_joint(self):
        p = torch.rand(3, 2, 4, 5, generator=generator(), dtype=torch.float64).softmax(-1)
        y = torch.randint(5, (2, 4), generator=generator())
        rows = [[p[s, i, range(4), y[i]].prod() for i in range(2)] for s in range(3)]
        expected = torch.tensor(rows).mean(0).log()
        assert torch.allclose(ClassPredictive.from_probabilities(p).log_prob(y), expected)

    def test_interval_is_the_smallest_set(self):
        p = torch.tensor([[[0.5, 0.2, 0.3], [0.05, 0.9, 0.05]]])
        pred = ClassPredictive.from_probabilities(p)
        assert pred.interval(0.7).tolist() == [[True, False, True], [False, True, False]]
        assert pred.interval(0.95).tolist() == [[True, True, True], [True, True, False]]
        assert pred.mode.tolist() == [0, 1]

    def test_quantiles_are_those_of_the_class_probabilities(self):
        p = torch.rand(9, 3, 4, generator=generator()).softmax(-1)
        for q in (0.0, 0.1, 0.5, 0.77, 1.0):
            found = ClassPredictive.from_probabilities(p).quantile(q)
            assert np.allclose(found, np.quantile(p.numpy(), q, axis=0), atol=1e-6)

    def test_samples_have_the_mean_probabilities(self):
        """Chi-square at 1e-6; the wrong probabilities must be rejected."""
        pred = ClassPredictive.from_logits(torch.randn(6, 2, 4, generator=generator()))
        draws = pred.samples(20_000, generator(1))
        assert draws.shape == (20_000, 2)
        counts = draws[:, 0].bincount(minlength=4).double()
        expected = pred.mean[0].double() / pred.mean[0].double().sum() * 20_000
        assert stats.chisquare(counts, expected).pvalue > 1e-6
        assert stats.chisquare(counts, expected.flip(0)).pvalue < 1e-6

    def test_bad_values_are_refused(self):
        with pytest.raises(ValueError, match="NaN"):
            ClassPredictive.from_logits(torch.full((1, 2, 3), math.nan))
        with pytest.raises(ValueError, match="NaN"):
            ClassPredictive.from_logits(torch.full((1, 2, 3), math.inf))
        with pytest.raises(ValueError, match="sum to 1"):
            ClassPredictive.from_probabilities(torch.ones(1, 2, 3))
        with pytest.raises(ValueError, match="from_logits"):
            ClassPredictive(torch.ones(1, 2, 3))
        pred = ClassPredictive.from_probabilities(P)
        with pytest.raises(ValueError, match=r"0\.\.1"):
            pred.log_prob(torch.tensor([0, 2]))
        with pytest.raises(ValueError, match="integers"):
            pred.log_prob(torch.tensor([0.0, 1.0]))


class TestBounds:
    """Predictions stay inside public bounds; the density is that of the mixture."""

    BOUNDS = (0.0, 2.0)

    def pair(self):
        means = 3 * torch.randn(5, 400, generator=generator(), dtype=torch.double)
        return RealPredictive(means, 1.0), RealPredictive(means, 1.0, self.BOUNDS)

    def test_predictions_never_leave_the_bounds(self):
        _, bounded = self.pair()
        found = [bounded.mean, bounded.mode, *bounded.interval(0.99), bounded.samples(50)]
        found += [bounded.quantile(q) for q in (0.0, 1e-6, 0.5, 1.0)]
        for values in found:
            assert values.min() >= 0
            assert values.max() <= 2
        assert bounded.take([3, 4]).interval(0.9)[1].max() <= 2

    def test_quantiles_are_those_of_the_clipped_target(self):
        free, bounded = self.pair()
        draws = free.samples(4001, generator(1)).clamp(*self.BOUNDS)
        for q in (0.1, 0.5, 0.9):
            assert torch.equal(bounded.quantile(q), free.quantile(q).clamp(*self.BOUNDS))
            below = (draws <= bounded.quantile(q)).double().mean(0)
            assert (below >= q - 6 * math.sqrt(q * (1 - q) / 4001) - 1 / 4001).all()

    def test_density_and_uncertainty_are_those_of_the_mixture(self):
        free, bounded = self.pair()
        y = torch.linspace(0, 2, 400, dtype=torch.double)
        for name in ("variance", "epistemic", "aleatoric", "entropy"):
            assert torch.equal(getattr(free, name), getattr(bounded, name))
        assert torch.equal(free.log_prob(y), bounded.log_prob(y))
