"""Gaussian weights that predict by propagating moments."""

import math

import pytest
import torch
from torch import nn

import dpbnn
from dpbnn import posteriors
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.posteriors import NaturalPosterior


def make(outputs=1, noise=0.3, hidden=(6,), scale=0.1, **record):
    torch.manual_seed(0)
    model = dpbnn.mlp(4, hidden, outputs)
    std = {n: scale * torch.rand_like(p) for n, p in model.named_parameters()}
    likelihood = GaussianNoise(noise)
    return NaturalPosterior(model, likelihood, std, **record)


X = torch.randn(11, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("outputs", [1, 3])
def test_propagation_agrees_with_weight_draws(outputs):
    """Mean within 5 standard errors of 20000 draws (false alarm 1e-5), variance within 6 %."""
    posterior = make(outputs)
    exact = posterior.predict(X)
    drawn = posterior.predict(X, 20_000, propagate=False, seed=0)
    error = (exact.epistemic / 20_000).sqrt()
    assert ((exact.mean - drawn.mean).abs() < 5 * error + 1e-5).all()
    torch.testing.assert_close(exact.epistemic, drawn.epistemic, rtol=0.06, atol=1e-6)
    assert exact.mean.shape == ((11,) if outputs == 1 else (11, 3))


def test_the_variance_splits_and_the_density_is_gaussian():
    predictive = make(noise=0.5).predict(X)
    torch.testing.assert_close(predictive.aleatoric, torch.full((11,), 0.25))
    torch.testing.assert_close(predictive.variance, predictive.epistemic + 0.25)
    y = torch.randn(11)
    exact = torch.distributions.Normal(predictive.mean, predictive.variance.sqrt()).log_prob(y)
    torch.testing.assert_close(predictive.log_prob(y), exact)
    low, high = predictive.interval(0.9)
    torch.testing.assert_close(high - low, 2 * 1.6448536 * predictive.std)


def test_weights_without_spread_predict_the_network():
    posterior = make(scale=0.0)
    with torch.no_grad():
        torch.testing.assert_close(
            posterior.predict(X).mean, posterior.model(X)[:, 0], rtol=1e-4, atol=1e-5
        )
    assert (posterior.predict(X).epistemic < 1e-6).all()


def test_it_is_saved_and_loaded(tmp_path):
    posterior = make(privacy={"epsilon": 1.0}, settings={"clip": 0.2})
    posterior.save(tmp_path / "run")
    again = posteriors.load(tmp_path / "run")
    assert type(again) is NaturalPosterior
    assert torch.equal(again.predict(X).mean, posterior.predict(X).mean)
    assert torch.equal(again.predict(X).variance, posterior.predict(X).variance)
    assert torch.equal(again.outputs(X, 5, seed=1), posterior.outputs(X, 5, seed=1))
    assert (again.privacy, again.settings) == ({"epsilon": 1.0}, {"clip": 0.2})


def test_large_inputs_are_propagated_in_parts(monkeypatch):
    posterior = make()
    whole = posterior.predict(X)
    monkeypatch.setattr(posteriors.natural, "_BLOCK", 12)
    torch.testing.assert_close(posterior.predict(X).mean, whole.mean)


def test_other_networks_are_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    std = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="1 is Tanh"):
        NaturalPosterior(model, "gaussian", std)


def test_bad_arguments_are_refused():
    posterior = make()
    with pytest.raises(ValueError, match="at least one example"):
        posterior.predict(X[:0])
    with pytest.raises(ValueError, match="NaN"):
        posterior.predict(X * math.nan)
    with pytest.raises(ValueError, match="samples=0"):
        posterior.predict(X, 0, propagate=False)
