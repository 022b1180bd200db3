"""Gaussian means of a mixture's components."""

import math

import pytest
import torch
from posterior_contract import PosteriorContract, X, generator, network
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import dpbnn
from dpbnn import posteriors
from dpbnn.likelihoods import Mixture
from dpbnn.posteriors import MixturePosterior


def mixture(components=3, kind=dpbnn.GaussianMixture, **options):
    centres = torch.randn(components, 4, generator=generator(7), dtype=torch.float64)
    weights = torch.arange(1, components + 1) / (components * (components + 1) / 2)
    made = kind(components, 4, 0.8, weights=weights.tolist(), centres=centres, **options)
    with torch.no_grad():
        made.offsets.copy_(torch.randn(components, 4, generator=generator(8)))
    return made


def covariance(components=3):
    root = torch.randn(components, 4, 4, generator=generator(9), dtype=torch.float64)
    return 0.1 * root @ root.mT


class TestMixture(PosteriorContract):
    def make(self, tmp_path, model=None, likelihood="mixture", **record):
        model = mixture() if model is None else model
        return MixturePosterior(
            model, "mixture", {"covariance": covariance(model.components)}, **record
        )

    # What the contract says of networks, said of mixtures.

    def test_a_network_that_vmap_cannot_take_is_looped_over(self, tmp_path):
        class Reading(dpbnn.GaussianMixture):
            def forward(self, x):
                y = super().forward(x)
                return y if y.sum().item() < 1e9 else -y

        plain = self.make(tmp_path).outputs(X, 5, seed=1)
        reading = self.make(tmp_path, model=mixture(kind=Reading)).outputs(X, 5, seed=1)
        assert torch.allclose(reading, plain)

    def test_the_model_given_is_left_alone(self, tmp_path):
        model = mixture().train()
        before = model.offsets.detach().clone()
        posterior = self.make(tmp_path, model=model)
        posterior.predict(X, 3)
        assert model.training
        assert torch.equal(model.offsets, before)
        with torch.no_grad():
            model.offsets += 1
        assert not torch.equal(posterior.means, model.means)

    def test_the_predictive_fits_the_likelihood(self, posterior):
        predictive = posterior.predict(X)
        assert torch.allclose(predictive.mean.sum(-1), torch.ones(11).double())
        assert (predictive.epistemic > 0).any()

    def test_a_network_of_other_modules_needs_the_instance(self, tmp_path):
        class Other(dpbnn.GaussianMixture):
            pass

        posterior = self.make(tmp_path, model=mixture(kind=Other))
        posterior.save(tmp_path / "saved")
        with pytest.raises(ValueError, match=r"Other.*model=instance"):
            posteriors.load(tmp_path / "saved")
        loaded = posteriors.load(tmp_path / "saved", model=Other(3, 4, 0.8))
        assert torch.equal(loaded.outputs(X, seed=1), posterior.outputs(X, seed=1))

    def test_another_network_is_refused(self, saved):
        with pytest.raises(ValueError, match=r"offsets: saved \(3, 4\), model \(2, 4\)"):
            posteriors.load(saved, model=mixture(2))


def posterior():
    return MixturePosterior(mixture(), Mixture(), {"covariance": covariance()})


def reference(made):
    parts = MultivariateNormal(made.means, made.model.covariances + made.covariance)
    return MixtureSameFamily(Categorical(made.weights), parts)


def test_densities_and_responsibilities_are_torchs():
    made, x = posterior(), X.double()
    torch.testing.assert_close(made.log_prob(x), reference(made).log_prob(x))
    parts = reference(made).component_distribution.log_prob(x[:, None]) + made.weights.log()
    torch.testing.assert_close(made.responsibilities(x), parts.softmax(-1))


def test_the_density_is_the_mean_density_of_draws():
    """40000 draws, 5 standard errors: false alarms below 1e-4; a density without the uncertainty
    of the means is told apart."""
    made, draws = posterior(), 40_000
    densities = made.outputs(X, draws, seed=0).logsumexp(-1).exp()
    error = 5 * densities.std(0) / math.sqrt(draws)
    assert ((densities.mean(0) - made.log_prob(X).exp()).abs() < error).all()
    plain = made.model(X.double()).logsumexp(-1).exp()
    assert not ((densities.mean(0) - plain).abs() < error).all()


def test_draws_have_the_mean_and_covariance():
    made, draws = posterior(), 40_000
    _, source = made._draws(draws, generator(2), (X,))
    means = source.take(draws)["offsets"] + made.model.centres
    for j in range(3):
        torch.testing.assert_close(means[:, j].mean(0), made.means[j], rtol=0, atol=0.02)
        torch.testing.assert_close(means[:, j].T.cov(), made.covariance[j], rtol=0, atol=0.03)


def test_new_points_come_from_the_density():
    """Mean, covariance and weights of 100000 points, within 5 standard errors or so."""
    made = posterior()
    points, labels = made.sample(100_000, seed=3)
    assert torch.equal(points, made.sample(100_000, seed=3)[0])
    share = labels.bincount(minlength=3) / 1e5
    torch.testing.assert_close(share.double(), made.weights, rtol=0, atol=0.01)
    expected = reference(made)
    torch.testing.assert_close(points.mean(0), expected.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(points.var(0), expected.variance, rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("spread", "message"),
    [
        ({}, "pass covariance"),
        ({"covariance": torch.eye(4).repeat(2, 1, 1)}, r"\[3, 4, 4\]"),
        ({"covariance": -torch.eye(4).repeat(3, 1, 1)}, "not negative"),
        ({"covariance": torch.ones(4, 4).triu().repeat(3, 1, 1)}, "symmetric"),
        ({"covariance": math.nan * torch.eye(4).repeat(3, 1, 1)}, "finite"),
    ],
)
def test_bad_covariances_are_refused(spread, message):
    with pytest.raises(ValueError, match=message):
        MixturePosterior(mixture(), "mixture", spread)


def test_another_model_is_refused():
    with pytest.raises(TypeError, match="GaussianMixture"):
        MixturePosterior(network(), "mixture", {"covariance": covariance()})
