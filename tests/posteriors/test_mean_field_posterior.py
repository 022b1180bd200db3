"""Independent Gaussian weights."""

import pytest
import torch
import torch.nn.functional as F
from posterior_contract import PosteriorContract, X, generator, network
from torch import nn

from dpbnn.networks import GaussianLinear, cnn, to_gaussian
from dpbnn.posteriors import MeanFieldPosterior


class TestMeanField(PosteriorContract):
    def make(self, tmp_path, model=None, likelihood="categorical", **record):
        model = model or network()
        std = {name: torch.full_like(p, 0.3) for name, p in model.named_parameters()}
        return MeanFieldPosterior(model, likelihood, std, **record)


def test_draws_have_the_mean_and_standard_deviation():
    """5 standard errors: false alarms below 1e-6 per value; twice the spread must be seen."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -2.0]]))
    count, x = 40_000, torch.eye(2)
    for factor in (1, 2):
        std = {"0.weight": factor * torch.tensor([[0.5, 0.1]])}
        posterior = MeanFieldPosterior(model, "gaussian", std)
        drawn = posterior.outputs(x, count, seed=0)[..., 0]
        error = (drawn.std(0) - torch.tensor([0.5, 0.1])).abs()
        assert bool((error < 5 * torch.tensor([0.5, 0.1]) / (2 * count) ** 0.5).all()) == (
            factor == 1
        )
        assert torch.allclose(drawn.mean(0), torch.tensor([1.0, -2.0]), atol=0.03)
        assert abs(torch.corrcoef(drawn.T)[0, 1]) < 0.025


@pytest.mark.parametrize("bias", [True, False])
def test_gaussian_layers_become_means_and_deviations(bias):
    model = nn.Sequential(GaussianLinear(4, 3, bias=bias, rho=-1.0), nn.Tanh(), nn.Linear(3, 2))
    posterior = MeanFieldPosterior.of(model, "categorical")
    assert posterior.std.keys() == {"0.weight", *(["0.bias"] if bias else [])}
    assert torch.equal(posterior.model[0].weight, model[0].weight_mu)
    assert torch.allclose(posterior.std["0.weight"], F.softplus(torch.tensor(-1.0)))
    assert type(posterior.model[0]) is nn.Linear


def test_a_gaussian_layer_alone_and_convolutions():
    alone = MeanFieldPosterior.of(GaussianLinear(4, 3), "categorical")
    assert alone.std.keys() == {"weight", "bias"}
    images = torch.randn(2, 1, 28, 28, generator=generator())
    wide = MeanFieldPosterior.of(to_gaussian(cnn()), "categorical")
    sure = MeanFieldPosterior.of(to_gaussian(wide.model.requires_grad_(), rho=-50.0), "categorical")
    assert torch.allclose(sure.outputs(images, 3)[1], wide.model(images), atol=1e-4)
    assert wide.predict(images, 5).mean.shape == (2, 10)


def test_bad_deviations_are_refused():
    with pytest.raises(ValueError, match="no such parameter"):
        MeanFieldPosterior(network(), "categorical", {"else": torch.ones(1)})
    with pytest.raises(ValueError, match="at least 0"):
        MeanFieldPosterior(network(), "categorical", {"1.bias": -torch.ones(6)})
    with pytest.raises(ValueError, match="to_gaussian"):
        MeanFieldPosterior.of(network(), "categorical")


def test_parameters_without_deviation_are_points():
    posterior = MeanFieldPosterior(network(), "categorical", {"5.bias": torch.ones(3)})
    spread = posterior.outputs(X, 200, seed=0)
    assert torch.allclose(spread - spread[:, :1], spread[:1] - spread[:1, :1], atol=1e-5)
