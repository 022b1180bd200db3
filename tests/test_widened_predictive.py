"""Draws around a prediction that stays as it is."""

import pickle

import pytest
import torch

from dpbnn.calibration import tempered
from dpbnn.evaluation import evaluate
from dpbnn.predictive import (
    ClassPredictive,
    CountPredictive,
    Deviations,
    OrdinalPredictive,
    PropagatedPredictive,
    RealPredictive,
    widened,
    widening,
)

N, S = 40, 100


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def deviations(*shape, scale=1.0, seed=1):
    half = scale * torch.randn(S // 2, N, *shape, generator=generator(seed), dtype=torch.float64)
    return Deviations(lambda: torch.cat([half, -half]))


def classes(scale=1.0, count=3, seed=0):
    logits = 2 * torch.randn(7, N, count, generator=generator(seed), dtype=torch.float64)
    return widened(ClassPredictive.from_logits(logits), deviations(count, scale=scale))


def numbers(scale=1.0, shape=()):
    means = torch.randn(1, N, *shape, generator=generator(), dtype=torch.float64).repeat(5, 1)
    means = means + 0.01 * torch.randn(5, N, *shape, generator=generator(3), dtype=torch.float64)
    plain = RealPredictive(means, 0.25, (-3.0, 3.0))
    return widened(plain, deviations(*shape, scale=scale))


class TestClasses:
    def test_all_that_is_said_of_the_label_is_as_without_deviations(self):
        wide = classes()
        plain, y = wide.plain, torch.arange(N) % 3
        for name in ("mean", "mode", "variance", "entropy"):
            assert torch.equal(getattr(wide, name), getattr(plain, name))
        assert torch.equal(wide.interval(0.8), plain.interval(0.8))
        assert torch.equal(wide.log_prob(y), plain.log_prob(y))

    @pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
    def test_on_average_draws_are_as_sure_of_the_top_class(self, scale):
        wide = classes(scale, count=2)
        drawn = wide.probabilities
        assert drawn.shape == (S, N, 2)
        assert torch.allclose(drawn.sum(-1), torch.ones(S, N, dtype=torch.float64))
        top = wide.mode[:, None]
        apart = (drawn.mean(0) - wide.mean).gather(1, top)[:, 0]
        assert apart.abs().max() < 0.01
        assert apart.min() > -0.0021  # by design
        unmoved = (wide.plain._log_mean + wide.deviations.values).softmax(-1).mean(0)
        if scale >= 1:  # what would be wrong without it
            assert (unmoved - wide.mean).gather(1, top).min() < -0.02

    def test_larger_deviations_mean_more_epistemic_uncertainty(self):
        parts = [classes(scale).epistemic.mean() for scale in (0.01, 0.3, 1.0, 3.0)]
        assert parts == sorted(parts)
        assert parts[0] < 1e-4
        wide = classes(3.0)
        assert torch.allclose(wide.epistemic + wide.aleatoric, wide.entropy)
        assert (wide.epistemic >= 0).all()
        assert (wide.aleatoric >= 0).all()
        low, high = wide.quantile(0.05), wide.quantile(0.95)
        assert ((low <= wide.mean) & (wide.mean <= high)).double().mean() > 0.95

    @pytest.mark.parametrize("shortened", [True, False])
    @pytest.mark.parametrize("count", [2, 6])
    def test_a_band_holds_a_prediction_that_is_sure(self, count, shortened, monkeypatch):
        """Broken twin: deviations that are as long to both sides."""
        if not shortened:
            monkeypatch.setattr(widening, "_shorter", lambda *_: 1.0)
        sure = torch.linspace(0.95, 0.999, N, dtype=torch.float64)[:, None]
        rest = ((1 - sure) / (count - 1)).expand(-1, count - 1)
        plain = ClassPredictive(torch.cat([sure, rest], 1).log()[None])
        wide = widened(plain, deviations(count, scale=8.0))
        low, high = (wide.quantile(q)[:, 0] for q in (0.05, 0.95))
        held = (low <= sure[:, 0]) & (sure[:, 0] <= high)
        assert held.all() if shortened else held.double().mean() < 0.75

    @pytest.mark.parametrize("count", [2, 30])
    def test_deviations_of_unsure_predictions_stay(self, count):
        top = torch.linspace(1.5 / count, 0.9, N, dtype=torch.float64)[:, None]
        logs = torch.cat([top, ((1 - top) / (count - 1)).expand(-1, count - 1)], 1).log()
        away = deviations(count, scale=8.0).values
        away = away - away.mean(-1, keepdim=True)
        factors = widening._shorter(logs, away, logs.argmax(-1, keepdim=True))
        assert torch.equal(factors, torch.ones(S, N, 1, dtype=torch.float64))

    def test_a_temperature_divides_logits_and_deviations(self):
        wide = classes()
        warmer = tempered(wide, 2.0)
        assert torch.equal(warmer.mean, wide.plain.tempered(2.0).mean)
        assert torch.allclose(warmer.deviations.values, wide.deviations.values / 2)
        assert warmer.epistemic.mean() < tempered(wide, 1.0).epistemic.mean()
        assert len(warmer.probabilities) == S

    def test_rows_and_classes_are_taken_together_with_their_deviations(self):
        wide = classes()
        rows, order = [4, 2, 9], [2, 0, 1]
        assert torch.allclose(wide.take(rows).probabilities, wide.probabilities[:, rows])
        assert torch.allclose(wide.reordered(order).probabilities, wide.probabilities[..., order])
        logits = torch.randn(3, N, 2, 4, generator=generator(), dtype=torch.float64)
        several = widened(ClassPredictive.from_logits(logits), deviations(2, 4))
        assert several.probabilities.shape == (S, N, 2, 4)
        one = several.target(1)
        assert torch.allclose(one.probabilities, several.probabilities[:, :, 1])
        assert torch.equal(one.mean, several.mean[:, 1])

    def test_extreme_predictions_stay_finite(self):
        logs = torch.tensor([[0.0, -torch.inf], [-60.0, 0.0]], dtype=torch.float64).expand(1, 2, 2)
        half = 5 * torch.randn(S // 2, 2, 2, generator=generator(), dtype=torch.float64)
        wide = widened(ClassPredictive(logs), Deviations(lambda: torch.cat([half, -half])))
        assert wide.probabilities.isfinite().all()
        assert wide.epistemic.isfinite().all()

    def test_nothing_is_computed_before_it_is_asked_for(self):
        def never():
            raise AssertionError

        wide = widened(classes().plain, Deviations(never))
        wide.mean, wide.entropy, wide.take([1]).mean, tempered(wide, 2.0).mode
        with pytest.raises(AssertionError):
            wide.probabilities  # noqa: B018

    def test_it_is_pickled_with_its_deviations(self):
        wide = classes()
        again = pickle.loads(pickle.dumps(wide))
        assert torch.equal(again.probabilities, wide.probabilities)

    def test_metrics_are_those_of_the_prediction(self):
        wide, y = classes(), (torch.arange(N) % 3).numpy()
        for name, metric in evaluate(wide.plain, y).metrics.items():
            assert evaluate(wide, y).metrics[name] == metric


class TestNumbers:
    def test_all_that_is_said_of_y_is_as_without_deviations(self):
        wide = numbers()
        plain, y = wide.plain, torch.linspace(-2, 2, N, dtype=torch.float64)
        for name in ("mean", "mode", "variance", "entropy", "std"):
            assert torch.equal(getattr(wide, name), getattr(plain, name))
        assert torch.equal(wide.quantile(0.1), plain.quantile(0.1))
        assert torch.equal(wide.interval(0.9)[0], plain.interval(0.9)[0])
        assert torch.equal(wide.log_prob(y), plain.log_prob(y))
        assert evaluate(wide, y.numpy()).metrics == evaluate(plain, y.numpy()).metrics

    @pytest.mark.parametrize("scale", [0.05, 0.3, 3.0])
    def test_the_variance_is_divided_anew_and_kept(self, scale):
        wide = numbers(scale)
        total = wide.plain.variance
        assert torch.allclose(wide.means.mean(0), wide.plain.means.mean(0))
        assert torch.allclose(wide.epistemic, wide.means.var(0, correction=0))
        assert torch.allclose(wide.epistemic + wide.aleatoric, total)
        assert torch.allclose(wide.variances.mean(0), wide.aleatoric)
        wanted = wide.deviations.values.var(0, correction=0)
        assert torch.allclose(wide.epistemic, wanted.minimum(0.7 * total))
        assert (wide.variances > 0).all()

    def test_scale_temperature_and_rows_move_all_alike(self):
        wide = numbers(0.3)
        moved = wide.moved(10.0, 2.0, (-28.0, 32.0))
        assert torch.allclose(moved.means, wide.means * 10 + 2)
        assert torch.allclose(moved.variances, wide.variances * 100)
        assert moved.bounds == (-28.0, 32.0)
        warmer = tempered(wide, 4.0)
        assert torch.allclose(warmer.variance, 4 * wide.variance)
        assert torch.allclose(warmer.epistemic, wide.epistemic)
        assert torch.allclose(wide.take([3, 1]).means, wide.means[:, [3, 1]])
        two = numbers_of_two()
        assert torch.allclose(two.target(1).means, two.means[..., 1])

    def test_draws_of_y_have_the_total_variance(self):
        wide = numbers(0.3)
        wide = widened(RealPredictive(wide.plain.means, wide.plain.variances), wide.deviations)
        drawn = wide.samples(20_000, generator())
        assert torch.allclose(drawn.var(0), wide.variance, rtol=0.08)


def numbers_of_two():
    means = torch.randn(5, N, 2, generator=generator(), dtype=torch.float64)
    return widened(RealPredictive(means, 1.0), deviations(2, scale=0.2))


def test_other_predictions_stay_as_they_are():
    logits = torch.randn(3, N, 3)
    for plain in (
        OrdinalPredictive.from_logits(logits),
        CountPredictive(torch.zeros(2, N)),
        PropagatedPredictive(torch.zeros(N), torch.ones(N), 1.0),
    ):
        assert widened(plain, deviations(3)) is plain
        assert plain.plain is plain
