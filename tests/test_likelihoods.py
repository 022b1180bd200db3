"""Likelihoods against torch's, their targets and weights, and what a record of theirs can do."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal
from torch.distributions import Poisson as TorchPoisson

import dpbnn
from dpbnn.audit import PrivacyBug
from dpbnn.contributions import UnsupportedModel
from dpbnn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LearnedNoiseGaussian,
    Ordinal,
    Poisson,
    Weighted,
    likelihood,
)
from dpbnn.predictive import ClassPredictive


def test_categorical_is_the_log_softmax_of_the_label():
    outputs, y = torch.randn(5, 3), torch.randint(0, 3, (5,))
    expected = TorchCategorical(logits=outputs).log_prob(y)
    torch.testing.assert_close(Categorical().log_prob(outputs, y), expected)


def test_categorical_sums_over_positions():
    outputs, y = torch.randn(5, 4, 3), torch.randint(0, 3, (5, 4))
    expected = TorchCategorical(logits=outputs).log_prob(y).sum(1)
    torch.testing.assert_close(Categorical().log_prob(outputs, y), expected)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2)])
def test_gaussian_is_the_normal_density(shape):
    outputs, y = torch.randn(5, *(shape[1:] or (1,))), torch.randn(shape)
    expected = Normal(outputs, 0.3).log_prob(y.view_as(outputs)).sum(1)
    torch.testing.assert_close(Gaussian(0.3).log_prob(outputs, y), expected)


def test_lookup_and_refusals():
    assert likelihood("categorical") == Categorical()
    assert likelihood("gaussian") == Gaussian(1.0)
    with pytest.raises(ValueError, match="'gaussian'"):
        likelihood("normal")
    with pytest.raises(ValueError, match="noise_std"):
        Gaussian(0.0)


def test_a_learned_noise_does_not_scale_the_gradient_of_the_mean():
    """The value is the log-probability; the mean's gradient is that of noise 1."""
    outputs = torch.tensor([[0.5, -3.0], [2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([1.5, -1.0], dtype=torch.float64)
    found = LearnedNoiseGaussian().log_prob(outputs, y)
    usual = HeteroscedasticGaussian().log_prob(outputs, y)
    torch.testing.assert_close(found, usual)
    (own,) = torch.autograd.grad(found.sum(), outputs, retain_graph=True)
    (other,) = torch.autograd.grad(usual.sum(), outputs)
    torch.testing.assert_close(own[:, 0], y - outputs[:, 0].detach())
    torch.testing.assert_close(own[:, 1], 0.1 * other[:, 1])


@pytest.mark.parametrize("weights", [None, (1.0, 7.0, 0.5)])
def test_class_weights_multiply_the_log_probability_of_their_class(weights):
    outputs, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0])
    found = Categorical(weights).log_prob(outputs, y)
    factor = torch.ones(6) if weights is None else torch.tensor(weights)[y]
    torch.testing.assert_close(found, factor * outputs.log_softmax(-1)[range(6), y])


def test_weights_are_taken_out_of_predictions_again():
    """The best weighted fit to p is q ~ w p; what is predicted of it is p."""
    p = torch.tensor([[0.9, 0.08, 0.02]], dtype=torch.float64)
    weights = (1.0, 5.0, 30.0)
    q = p * torch.tensor(weights)
    for likely, logits in (
        (Categorical(weights), q.log() + 3.0),
        (Bernoulli((1.0, 5.0)), (5 * p[:, :1] / (1 - p[:, :1])).log()),
    ):
        found = likely.predictive(logits[None])
        target = p if logits.shape[-1] == 3 else torch.cat([1 - p[:, :1], p[:, :1]], 1)
        torch.testing.assert_close(found.mean, target)
    ordinal = Ordinal(weights)
    outputs = torch.randn(1, 1, 2, dtype=torch.float64)
    plain = Ordinal().predictive(outputs).mean / torch.tensor(weights)
    torch.testing.assert_close(
        ordinal.predictive(outputs).mean, plain / plain.sum(-1, keepdim=True)
    )


@pytest.mark.parametrize("kind", [Categorical, Bernoulli, Ordinal])
@pytest.mark.parametrize("wrong", ["balanced", (1.0, 0.0), (1.0, -2.0), (1.0, math.inf), 3.0, ()])
def test_weights_that_are_no_public_numbers_are_refused(kind, wrong):
    with pytest.raises(ValueError, match="weights"):
        kind(weights=wrong)
    if wrong == "balanced":
        with pytest.raises(ValueError, match="depend on all others, which epsilon does not cover"):
            kind(weights=wrong)


def test_the_number_of_weights_is_that_of_the_classes():
    plan = dpbnn.open_plan(n=4, sampling="full-batch", steps=1)
    data = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    with pytest.raises(ValueError, match="2 for 3 classes"):
        dpbnn.fit(nn.Linear(2, 3), data, Categorical((1.0, 2.0)), None, dpbnn.SGD(), plan)
    with pytest.raises(ValueError, match="give two"):
        Bernoulli((1.0, 2.0, 3.0))


@pytest.mark.parametrize("columns", [1, 3])
def test_bernoulli_is_the_torch_one_and_sums_over_targets(columns):
    outputs = 3 * torch.randn(5, columns, dtype=torch.float64)
    y = torch.randint(0, 2, (5, columns)).double()
    expected = TorchBernoulli(logits=outputs).log_prob(y).sum(1)
    torch.testing.assert_close(Bernoulli().log_prob(outputs, y), expected)
    weighted = torch.where(y == 1, 4.0, 0.5) * TorchBernoulli(logits=outputs).log_prob(y)
    torch.testing.assert_close(Bernoulli((0.5, 4.0)).log_prob(outputs, y), weighted.sum(1))
    found = Bernoulli().predictive(outputs[None])
    assert found.mean.shape == ((5, 2) if columns == 1 else (5, 3, 2))
    labels = y[:, 0] if columns == 1 else y
    torch.testing.assert_close(found.log_prob(labels.long()), expected)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_ordinal_probabilities_are_those_of_a_latent_logistic_variable(classes):
    """P(y > k) falls with k, is sigmoid(f_0 - c_k), and all probabilities sum to 1."""
    outputs = 2 * torch.randn(50, classes - 1, dtype=torch.float64)
    logs = Ordinal().log_probabilities(outputs)
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(50, dtype=torch.float64))
    above = 1 - logs.exp().cumsum(-1)[:, :-1]
    assert (above.diff() < 0).all()
    assert (Ordinal().log_probabilities(outputs + torch.eye(classes - 1)[0]).exp().cumsum(-1)
            [:, :-1] < 1 - above).all()  # fmt: skip
    even = Ordinal().log_probabilities(torch.zeros(1, classes - 1)).exp()
    torch.testing.assert_close(even, torch.full((1, classes), 1 / classes))
    y = torch.randint(0, classes, (50,))
    torch.testing.assert_close(Ordinal().log_prob(outputs, y), logs[range(50), y])


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e9])
def test_gradients_stay_finite_at_outputs_of_any_size(size):
    """A gradient that overflows would make a record contribute nothing, silently."""
    outputs = torch.tensor([[-size], [size], [0.0], [size]], requires_grad=True)
    for likely, y, columns in (
        (Bernoulli((1.0, 9.0)), torch.tensor([0.0, 0.0, 1.0, 1.0]), 1),
        (Poisson(most=50.0), torch.tensor([3.0, 0.0, 50.0, 7.0]), 1),
        (Poisson(typical=2.0), torch.tensor([3.0, 0.0, 50.0, 7.0]), 1),
        (Ordinal(), torch.tensor([0, 1, 3, 2]), 3),
        (Ordinal((1.0, 2.0, 3.0, 4.0)), torch.tensor([3, 0, 1, 0]), 3),
    ):
        f = outputs.expand(4, columns) * torch.tensor([1.0, -1.0, 1.0])[:columns]
        found = likely.log_prob(f, y)
        (gradient,) = torch.autograd.grad(found.sum(), outputs)
        assert gradient.isfinite().all(), (likely, gradient)
        assert found.isfinite().all()
    f = torch.tensor([[size]], requires_grad=True)
    Poisson(most=50.0).log_prob(f, torch.zeros(1)).sum().backward()
    assert f.grad.item() == pytest.approx(-50.0, rel=1e-3)  # it still pulls the rate down


@pytest.mark.parametrize("columns", [1, 2])
def test_poisson_is_the_torch_one_up_to_the_bound(columns):
    outputs = 1.5 * torch.randn(6, columns, dtype=torch.float64)
    y = torch.poisson(torch.full((6, columns), 3.0)).double()
    for typical in (1.0, 4.0):
        expected = TorchPoisson(typical * outputs.exp()).log_prob(y).sum(1)
        likely = Poisson(most=1e4, typical=typical)
        torch.testing.assert_close(likely.log_prob(outputs, y), expected)
        found = likely.predictive(outputs[None])
        torch.testing.assert_close(found.log_prob(y), expected)
    top = torch.tensor([[math.log(100.0)]], dtype=torch.float64)
    rates = Poisson(most=100.0).log_rate(top + torch.tensor([[-1e-6], [0.0], [1e-6], [2.0]])).exp()
    assert rates.diff(dim=0).min() > 0
    torch.testing.assert_close(rates[-1].item(), 300.0)


CASES = {
    "bernoulli": (Bernoulli((1.0, 3.0)), 1, torch.tensor([0.0, 1.0]), [2.0, -1.0, 0.5, math.nan]),
    "poisson": (Poisson(most=30.0), 1, torch.tensor([0.0, 5.0]), [31.0, -1.0, 2.5, math.nan]),
    "ordinal": (Ordinal(), 3, torch.tensor([0, 3]), [4, -1]),
    "categorical": (Categorical((1.0, 5.0, 2.0)), 3, torch.tensor([0, 2]), [3, -1]),
    "weighted": (
        Weighted(Categorical(), most=4.0),
        3,
        torch.tensor([[0.0, 1.5], [2.0, 3.5]]),
        [[3.0, 1.0], [1.0, -1.0], [1.0, 5.0], [1.0, math.nan], [0.5, 1.0]],
    ),
}


def table(name, n=40):
    likely, outputs, values, bad = CASES[name]
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return likely, outputs, (x, values[(x[:, 0] > 0).long()]), bad


@pytest.mark.parametrize("name", list(CASES))
def test_they_train_save_load_and_refuse_bad_rows(name, tmp_path):
    likely, outputs, (x, y), bad = table(name)
    plan = dpbnn.plan(noise_multiplier=3.0, delta=1e-3, n=40, sampling="full-batch", steps=40)

    def fit(y, **options):
        method = dpbnn.SGD(learning_rate=0.5)
        return dpbnn.fit(nn.Linear(2, outputs), (x, y), likely, None, method, plan, **options)

    posterior = fit(y)
    assert posterior.privacy.private
    posterior.save(tmp_path / "saved")
    loaded = dpbnn.load(tmp_path / "saved")
    assert loaded.likelihood == likely
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    for value in bad:
        wrong = y.clone()
        wrong[3] = torch.tensor(value)
        ledger = dpbnn.Ledger()
        with pytest.raises(ValueError, match="1 row cannot be used"):
            fit(wrong, ledger=ledger)
        assert ledger.releases == 0
        assert fit(wrong, on_bad_rows="zero").privacy.private


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(
    "method", [dpbnn.SGD(clip=0.5), dpbnn.SGLD(learning_rate=1e-3, keep=3), dpbnn.VI()]
)
def test_replay_of_a_record_stays_within_the_clip(name, method):
    """A record with a large input and any target or weight moves the sum by the clip at most."""
    likely, outputs, (x, y), _ = table(name)
    x[7] = torch.tensor([30.0, -3.0])
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-3, n=40, batch_size=30, steps=5)
    result = dpbnn.replay(
        method, (x, y), 7, model=lambda: dpbnn.mlp(2, (4,), outputs), likelihood=likely, plan=plan
    ).check()
    assert 0 < result.worst <= 1 + 1e-5


def test_weights_from_all_labels_break_the_bound_that_public_ones_keep():
    """Balanced weights change with one record, and with them what all other records contribute."""
    n, rare = 30, 10
    x, y = torch.zeros(n, 1), torch.zeros(n, dtype=torch.long)
    x[:rare], y[:rare], x[0] = 1.0, 1, -1.0
    without = x.clone(), y.clone()
    without[0][0], without[1][0] = 0.0, 0

    def train(balanced):
        def run(data):
            x, y = data
            count = int(y.sum()) if balanced else rare
            model = nn.Linear(1, 2, bias=False)
            nn.init.zeros_(model.weight)
            found = dpbnn.contributions(model, Categorical((1.0, n / (2 * count))), x, y)
            gate = dpbnn.Gate(1.2, 1.0, dpbnn.FullBatch(n), dpbnn.Ledger())
            return gate(found, records=torch.arange(n))

        return run

    public = dpbnn.replay(train(False), (x, y), without).check()
    assert 0.8 < public.worst <= 1 + 1e-5
    with pytest.raises(PrivacyBug, match=r"moved by 1\.\d+ times its sensitivity"):
        dpbnn.replay(train(True), (x, y), without).check()


def test_a_likelihood_that_normalises_by_the_batch_is_refused():
    class ByCounts(Categorical):
        def log_prob(self, outputs, y):
            share = torch.bincount(y, minlength=outputs.shape[-1]).float() / len(y)
            return super().log_prob(outputs, y) / share[y].clamp(min=1e-3)

    plan = dpbnn.plan(noise_multiplier=3.0, delta=1e-3, n=30, sampling="full-batch", steps=2)
    data, ledger = (torch.randn(30, 2), torch.arange(30) % 3), dpbnn.Ledger()
    with pytest.raises(UnsupportedModel, match="mixes examples"):
        dpbnn.fit(nn.Linear(2, 3), data, ByCounts(), None, dpbnn.SGD(), plan, ledger=ledger)
    assert ledger.releases == 0


@pytest.mark.parametrize("method", [dpbnn.Moments(), dpbnn.NoiseAware(points=20)])
def test_methods_that_model_the_noise_refuse_weights(method):
    data, ledger = (torch.randn(30, 2), torch.arange(30) % 2), dpbnn.Ledger()
    plan = dpbnn.plan(noise_multiplier=3.0, delta=1e-3, n=30, sampling="full-batch", steps=3)
    likely = Categorical((1.0, 2.0))
    with pytest.raises(ValueError, match="no class weights"):
        dpbnn.fit(nn.Linear(2, 2), data, likely, dpbnn.Gaussian(1.0), method, plan, ledger=ledger)
    assert ledger.releases == 0


def test_a_weight_in_the_record_is_the_weight_of_its_log_probability():
    outputs = torch.randn(4, 3, dtype=torch.float64)
    y = torch.tensor([[0.0, 2.0], [1.0, 0.0], [2.0, 0.5], [1.0, 1.0]], dtype=torch.float64)
    found = Weighted(Categorical()).log_prob(outputs, y)
    torch.testing.assert_close(found, y[:, 1] * Categorical().log_prob(outputs, y[:, 0].long()))
    for wrong in ("categorical", Weighted()):
        with pytest.raises(TypeError, match="must be a likelihood"):
            Weighted(wrong)
    with pytest.raises(ValueError, match="most"):
        Weighted(most=0.0)


def test_several_targets_learn_what_each_alone_would():
    """A matrix of targets: each column follows its own input."""
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    plan = dpbnn.open_plan(n=400, sampling="full-batch", steps=300)
    for likely, y, rate in (
        (Bernoulli(), (x > 0).float(), 1.0),
        (Gaussian(0.1), 2 * x, 0.005),
        (Poisson(most=100.0), x.exp().round(), 0.03),
    ):
        torch.manual_seed(0)
        found = dpbnn.fit(
            nn.Linear(2, 2), (x, y), likely, None, dpbnn.SGD(learning_rate=rate), plan
        ).predict(torch.tensor([[1.5, -1.5], [-1.5, 1.5]]))
        mean = found.mean[..., 1] if isinstance(likely, Bernoulli) else found.mean
        assert mean.shape == (2, 2)
        assert mean.abs().max() < 10
        assert mean[0, 0] > 2 * mean[1, 0]
        assert mean[1, 1] > 2 * mean[0, 1]
        if isinstance(likely, Gaussian):
            torch.testing.assert_close(mean[0], torch.tensor([3.0, -3.0]), rtol=0.05, atol=0.1)


def test_a_weighted_likelihood_learns_its_noise_too(tmp_path):
    """By plain training: weights of 0 leave out records with a noise ten times as large."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator)
    size = torch.where(torch.arange(400) < 200, 0.1, 1.0)
    y = x[:, 0] + size * torch.randn(400, generator=generator)
    weight = (size < 1).float()
    posterior = dpbnn.fit(
        torch.nn.Linear(2, 1), (x, torch.stack([y, weight], 1)), Weighted(Gaussian(None)),
        method=dpbnn.SGD(learning_rate=0.05, optimizer="adam"), seed=0,
        plan=dpbnn.open_plan(n=400, sampling="full-batch", steps=400),
    )  # fmt: skip
    assert posterior.predict(x).aleatoric.sqrt().mean().item() == pytest.approx(0.1, abs=0.05)
    posterior.save(tmp_path / "saved")
    assert dpbnn.load(tmp_path / "saved").likelihood == posterior.likelihood


OUTCOMES = {
    "categorical": (Categorical(), 3),
    "weighted classes": (Categorical((1.0, 4.0, 0.5)), 3),
    "bernoulli": (Bernoulli(), 1),
    "weighted bernoulli": (Bernoulli((1.0, 3.0)), 1),
    "gaussian": (Gaussian(0.4), 1),
    "heteroscedastic": (HeteroscedasticGaussian(), 2),
    "learned": (LearnedNoiseGaussian(), 2),
}


@pytest.mark.parametrize("name", list(OUTCOMES))
def test_outcomes_are_what_targets_may_be_with_the_slopes_of_log_prob(name):
    kind, columns = OUTCOMES[name]
    torch.manual_seed(0)
    outputs = torch.randn(5, columns, dtype=torch.float64, requires_grad=True)
    found = kind.outcomes(outputs.detach())
    count = len(found.chances)
    assert torch.allclose(found.chances.sum(0), torch.ones(5, dtype=torch.float64))
    assert found.scores.shape == found.slopes.shape == (count, 5, columns)
    chances = found.chances[..., None]
    assert (chances * found.scores).sum(0).abs().max() < 1e-9  # a score has mean 0
    predicted = kind.predictive(outputs.detach()[None])
    for draw in range(count):
        (slope,) = torch.autograd.grad(-kind.log_prob(outputs, found.targets[draw]).sum(), outputs)
        located = (found.scores != 0).flatten(0, 1).any(0)
        torch.testing.assert_close(found.slopes[draw][:, located], slope[:, located])
        assert (found.slopes[draw][:, ~located] == 0).all()
    if isinstance(predicted, ClassPredictive):
        torch.testing.assert_close(found.chances.T, predicted.mean)
    else:
        torch.testing.assert_close((chances * found.targets).sum(0)[:, 0], predicted.mean)
        squares = (chances * (found.targets - predicted.mean[:, None]).square()).sum(0)[:, 0]
        torch.testing.assert_close(squares, predicted.aleatoric)


def test_likelihoods_without_known_outcomes_say_none():
    assert Poisson().outcomes(torch.zeros(2, 1)) is None
    assert Gaussian(None).outcomes(torch.zeros(2, 1)) is None
    assert Gaussian(1.0).outcomes(torch.zeros(2, 3)) is None
    assert Categorical().outcomes(torch.zeros(2, 4, 3)) is None
    assert Bernoulli().outcomes(torch.zeros(2, 2)) is None
