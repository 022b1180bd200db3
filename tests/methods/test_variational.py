"""Bayes by Backprop and VI on targets whose optimum is known."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpbnn
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.methods.bbp import kl_gradient

N, NOISE = 50, 0.5
PRIOR = dpbnn.Gaussian(1.5)


def regression():
    """Data and the exact mean-field optimum of Bayesian linear regression."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator) @ torch.tensor(
        [[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]]
    )
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + NOISE * torch.randn(N, generator=generator)
    precision = x.T @ x / NOISE**2 + torch.eye(3) / 1.5**2
    mean = torch.linalg.solve(precision, x.T @ y / NOISE**2)
    return x, y, mean, precision.diagonal().rsqrt()


def fitted(method, steps):
    x, y, mean, std = regression()
    plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=steps)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1, bias=False))
    posterior = dpbnn.fit(model, (x, y), GaussianNoise(NOISE), PRIOR, method, plan)
    weights = posterior.model.state_dict()["0.weight"].flatten()
    return weights, posterior.std["0.weight"].flatten(), mean, std


def test_vi_reaches_the_exact_mean_field_optimum():
    """One layer, integrated in closed form: no sampling noise at all."""
    weights, stds, mean, std = fitted(
        dpbnn.VI(learning_rate=0.05, optimizer="adam", schedule="cosine"), 800
    )
    torch.testing.assert_close(weights, mean, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(stds, std, rtol=5e-3, atol=0)


@pytest.mark.parametrize(
    "method",
    [
        dpbnn.BBP(learning_rate=0.05, optimizer="adam", schedule="linear", average="polyak"),
        dpbnn.BBP(
            learning_rate=0.05, optimizer="adam", schedule="linear", average="polyak", kl="sampled"
        ),
        dpbnn.BBP.paper(
            draws=4, kl_weight=None, learning_rate=0.05, optimizer="adam", schedule="linear",
            average="polyak",
        ),
        dpbnn.VI(
            learning_rate=0.05, optimizer="adam", schedule="linear", average="polyak", draws=4,
            integrate=False,
        ),
    ],
    ids=["weights", "weights, sampled KL", "algorithm 3", "vi by sampling"],
)  # fmt: skip
def test_sampled_estimators_reach_the_same_optimum(method):
    weights, stds, mean, std = fitted(method, 1200)
    torch.testing.assert_close(weights, mean, rtol=0.03, atol=0.03)
    torch.testing.assert_close(stds, std, rtol=0.12, atol=0)


def test_a_kl_that_is_weighted_wrongly_misses_the_optimum():
    """The whole KL in every example's loss, as Algorithm 3 prints it: far too narrow a fit."""
    method = dpbnn.BBP.paper(draws=4, learning_rate=0.05, optimizer="adam", schedule="linear")
    _, stds, _, std = fitted(method, 600)
    assert not torch.allclose(stds, std, rtol=0.12)


@pytest.mark.parametrize("prior", [dpbnn.Gaussian(0.4, 0.1), dpbnn.Laplace(0.3)])
def test_the_sampled_kl_gradient_is_unbiased(prior):
    torch.manual_seed(0)
    model = dpbnn.to_gaussian(nn.Linear(2, 2), rho=-0.5)
    exact = kl_gradient(model, prior)
    draws = [{"weight": torch.randn(2, 2), "bias": torch.randn(2)} for _ in range(20_000)]
    sampled = kl_gradient(model, prior, draws)
    for name, value in exact.items():
        torch.testing.assert_close(sampled[name], value, rtol=0.05, atol=0.1)


def test_the_exact_kl_gradient_is_that_of_the_kl():
    torch.manual_seed(0)
    model = dpbnn.to_gaussian(nn.Linear(3, 2), rho=-1.0)
    parameters = dict(model.named_parameters())
    total = torch.zeros(())
    for which in ("weight", "bias"):
        q = torch.distributions.Normal(
            parameters[f"{which}_mu"], F.softplus(parameters[f"{which}_rho"])
        )
        p = torch.distributions.Normal(0.1, 0.4)
        total = total + torch.distributions.kl_divergence(q, p).sum()
    expected = torch.autograd.grad(total, list(parameters.values()))
    ours = kl_gradient(model, dpbnn.Gaussian(0.4, 0.1))
    for name, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours[name], value)


def test_settings_that_make_no_sense_say_so():
    with pytest.raises(ValueError, match="draws=3"):
        dpbnn.BBP(draws=3)
    with pytest.raises(ValueError, match="kl_weight=1"):
        dpbnn.BBP(kl_weight=1.0)
    with pytest.raises(ValueError, match="space='rho'"):
        dpbnn.BBP(space="rho")
    with pytest.raises(ValueError, match="closed-form KL"):
        dpbnn.fit(
            nn.Linear(2, 2), (torch.randn(9, 2), torch.zeros(9).long()), "categorical",
            dpbnn.ScaleMixture(), dpbnn.VI(), dpbnn.open_plan(n=9, sampling="full", steps=1),
        )  # fmt: skip


def test_a_scale_mixture_prior_is_sampled():
    x, y, _, _ = regression()
    plan = dpbnn.open_plan(n=N, sampling="full", steps=5)
    posterior = dpbnn.fit(
        nn.Linear(3, 1), (x, y), "gaussian", dpbnn.ScaleMixture(), dpbnn.BBP(), plan
    )
    assert posterior.predict(x, samples=3).mean.isfinite().all()
