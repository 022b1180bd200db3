"""DP-SEP's columns without privacy: clipped SEP and variational inference."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

import dpbnn
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.methods.method import Problem
from dpbnn.reproduce import uci
from dpbnn.reproduce.dp_sep_references import ClippedSEP, PlainVI

N = 200


def regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=generator)
    return x, x.sum(1).abs() + 0.2 * torch.randn(N, generator=generator)


def fitted(method, passes):
    plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=passes)
    return dpbnn.fit(
        lambda: dpbnn.mlp(2, (15,), 1), regression(), GaussianNoise(None), dpbnn.Gaussian(1.0),
        method, plan,
    )  # fmt: skip


def process(method, noise=None):
    torch.manual_seed(0)
    model = dpbnn.mlp(2, (5,), 1)
    return method.start(Problem(model, GaussianNoise(noise), dpbnn.Gaussian(0.7), N, 1, 4, False))


@pytest.mark.parametrize("method", [ClippedSEP(), PlainVI(batch_size=20)], ids=["sep", "vi"])
def test_they_learn_a_function_and_its_noise_and_refuse_a_private_plan(method):
    x, y = regression()
    posterior = fitted(method, 25)
    assert float((posterior.predict(x).mean - y).square().mean().sqrt()) < 0.4
    assert 0.1 < posterior.likelihood.noise_std < 0.5
    assert "NOT PRIVATE" in str(posterior.privacy)
    plan = dpbnn.plan(noise_multiplier=5.0, delta=1e-3, n=N, sampling="full-batch", steps=2)
    with pytest.raises(ValueError, match="not private"):
        dpbnn.fit(dpbnn.mlp(2, (5,), 1), (x, y), GaussianNoise(None), None, method, plan)


def test_a_clip_that_is_never_reached_leaves_sep_as_it_is():
    wide, plain = (
        fitted(method, 2) for method in (ClippedSEP(clip=1e9), dpbnn.SEP.original(refine=False))
    )
    x, _ = regression()
    torch.testing.assert_close(wide.predict(x).mean, plain.predict(x).mean)


def test_every_factor_and_the_prior_are_clipped_and_the_start_is_that_of_sep():
    clip = 0.3
    own, sep = process(ClippedSEP(clip=clip)), process(dpbnn.SEP.original())
    state, start = own.begin(), sep.begin()
    np.testing.assert_allclose(state.first, start.first)
    np.testing.assert_allclose(state.second, start.second)
    prior = state.second - N * state.sites[1][0]
    assert np.linalg.norm(prior) == pytest.approx(clip)
    assert np.linalg.norm(start.second) > clip
    x, y = regression()
    for i in range(20):
        before = [part.copy() for part in (state.first, state.second, *state.sites[:2])]
        own.record(state, state.noise, i, x[i].double().numpy(), 30.0 * float(y[i]))
        factor = [
            now - q + f[0] for now, q, f in zip((state.first, state.second), before[:2], before[2:],
                                                strict=True)
        ]  # fmt: skip
        assert np.linalg.norm(np.concatenate(factor)) <= clip * (1 + 1e-9)
        assert np.linalg.norm(np.concatenate([s[0] for s in state.sites[:2]])) <= clip


def test_the_prior_alone_can_be_clipped():
    x, y = regression()
    states = []
    for factors in (True, False):
        own = process(ClippedSEP(clip=0.05, factors=factors))
        states.append(own.begin())
        own.record(states[-1], states[-1].noise, 0, x[0].double().numpy(), 30.0 * float(y[0]))
    clipped, free = ([part.copy() for part in (s.first, s.second)] for s in states)
    start = own.begin()
    assert np.linalg.norm(start.second - N * start.sites[1][0]) == pytest.approx(0.05)
    assert np.linalg.norm(free[0] - start.first) > 2 * np.linalg.norm(clipped[0] - start.first)


@pytest.mark.parametrize("gamma", [1.0, float(N)])
def test_a_record_moves_q_as_algorithm_3_of_the_library_does_without_noise(gamma):
    x, y = regression()
    clip = 0.05
    own = process(ClippedSEP(damping=gamma / N, clip=clip), noise=0.5)
    library = process(dpbnn.SEP.paper(gamma=gamma, clip=clip, always_clip=True), noise=0.5)
    state, other = own.begin(), library.begin()
    gate = dpbnn.Gate(clip, 0.0)
    for i in range(5):
        own.record(state, state.noise, i, x[i].double().numpy(), float(y[i]))
        release = gate(library.contribute(other, x[i : i + 1], y[i : i + 1]))
        other = library.update(other, release)
    found = own.natural(state)
    for name, value in other.q.second.items():
        torch.testing.assert_close(found.second[name], value.double(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(
            found.first[name], other.q.first[name].double(), rtol=1e-4, atol=1e-5
        )


def test_the_printed_damping_moves_q_n_times_less():
    x, y = regression()
    moved = []
    for damping in (1.0, 1 / N):
        own = process(ClippedSEP(damping=damping))
        state = own.begin()
        start = state.first.copy()
        own.record(state, state.noise, 0, x[0].double().numpy(), float(y[0]))
        moved.append(state.first - start)
    np.testing.assert_allclose(moved[0], N * moved[1], rtol=1e-6, atol=1e-12)


def test_the_kl_and_the_expected_likelihood_of_vi():
    own = process(PlainVI(draws=40_000, rho=-1.0), noise=0.5)
    state = own.begin()
    std = {name: F.softplus(rho) for name, rho in state.rho.items()}
    exact = sum(
        kl_divergence(Normal(mean, std[name]), Normal(0.0, 0.7)).sum()
        for name, mean in state.mean.items()
    )
    torch.testing.assert_close(own.kl(state), exact)
    x, y = (part[:6] for part in regression())
    with torch.no_grad():
        w1, b1, w2, b2 = (
            mean + std[name] * torch.randn(40_000, *mean.shape) for name, mean in state.mean.items()
        )
        hidden = F.relu(x @ w1.mT + b1.unsqueeze(1))
        outputs = (hidden @ w2.mT).squeeze(-1) + b2
        sampled = -Normal(outputs, 0.5).log_prob(y).mean()
        found = own.expected_nll(state, x, y) + 0.5 * math.log(2 * math.pi)
    assert float(found) == pytest.approx(float(sampled), rel=0.03)


def test_what_vi_cannot_do_is_refused():
    for model, prior in ((dpbnn.mlp(2, (5, 5), 1), dpbnn.Gaussian(1.0)),
                         (dpbnn.mlp(2, (5,), 1), dpbnn.Laplace(1.0))):  # fmt: skip
        with pytest.raises(ValueError, match="one hidden layer"):
            PlainVI().start(Problem(model, GaussianNoise(1.0), prior, N, N, 4, False))
    with pytest.raises(ValueError, match="must be 'adam' or 'sgd'"):
        PlainVI(optimizer="lbfgs")


def test_year_has_its_own_row_of_table_6_and_else_what_protein_has():
    assert uci.settings_of("vi-paper", "year")["batch_size"] == 2000
    assert uci.settings_of("dp-sep", "year") == uci.settings_of("dp-sep", "protein")
