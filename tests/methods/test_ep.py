"""ADF, EP and the SEP of Li et al.: references that are not private."""

import warnings

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import dpbnn
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.moments.sequential import Gamma, PriorSites

METHODS = {
    "adf": dpbnn.ADF(),
    "ep": dpbnn.EP(),
    "sep": dpbnn.SEP.original(),
}
N = 300


def regression(noise=0.2):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=generator)
    return x, x.sum(1).abs() + noise * torch.randn(N, generator=generator)


def fitted(method, noise=None, passes=12, data=None, **options):
    plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=passes)
    data = regression() if data is None else data
    return dpbnn.fit(
        lambda: dpbnn.mlp(2, (15,), 1), data, GaussianNoise(noise), None, method, plan, **options
    )


@pytest.mark.parametrize("name", list(METHODS))
def test_they_learn_a_function_its_noise_and_say_that_they_are_not_private(name):
    x, y = regression()
    posterior = fitted(METHODS[name])
    predictive = posterior.predict(x)
    assert float((predictive.mean - y).square().mean().sqrt()) < 0.35
    assert 0.12 < posterior.likelihood.noise_std < 0.45
    assert float(predictive.log_prob(y).mean()) > -0.5
    assert "NOT PRIVATE" in str(posterior.privacy)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_private_plan_is_refused(name):
    plan = dpbnn.plan(noise_multiplier=5.0, delta=1e-3, n=N, sampling="full-batch", steps=2)
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match=r"not private.*dpbnn\.SEP"):
        dpbnn.fit(
            dpbnn.mlp(2, (5,), 1), regression(), "gaussian", None, METHODS[name], plan,
            ledger=ledger,
        )  # fmt: skip
    assert ledger.releases == 0


def test_a_method_that_visits_records_gets_no_private_plan_even_if_it_asks_for_one():
    class Sneaky(dpbnn.EP):
        def settled(self, plan):
            return plan, 1.0

    plan = dpbnn.plan(noise_multiplier=5.0, delta=1e-3, n=N, sampling="full-batch", steps=2)
    ledger = dpbnn.Ledger()
    options = {"method": Sneaky(), "plan": plan, "ledger": ledger}
    with pytest.raises(ValueError, match=r"Sneaky is not private.*open_plan"):
        dpbnn.fit(dpbnn.mlp(2, (5,), 1), regression(), "gaussian", **options)
    assert ledger.releases == 0


@pytest.mark.parametrize("name", list(METHODS))
def test_the_order_follows_the_seed_and_a_state_goes_on(name):
    from dpbnn.methods.method import Problem
    from dpbnn.methods.state import flat

    torch.manual_seed(0)
    model = dpbnn.mlp(2, (4,), 1)
    x, y = regression()
    problem = Problem(model, GaussianNoise(None), dpbnn.Gaussian(1.0), N, N, 4, False)
    records = torch.arange(40)

    def visit(process, state, passes, seed):
        torch.manual_seed(seed)
        for _ in range(passes):
            state = process.visit(state, x[:40], y[:40], records)
        return state

    whole, other = (METHODS[name].start(problem) for _ in range(2))
    state = visit(whole, whole.begin(), 1, 1)
    resumed = other.resumed(other.begin(), flat(state))
    found, again = flat(visit(whole, state, 2, 2)), flat(visit(other, resumed, 2, 2))
    assert found.keys() == again.keys()
    for key, value in found.items():
        assert torch.equal(again[key], value), key


def test_the_noises_gamma_matches_the_moments_of_the_tilted_distribution():
    """E[t] and E[t^2] of Gamma(t; a, b) N(r; 0, v + 1/t) by quadrature.

    The update is that of PBP: the Gaussian in the tilted density has variance v + b/(a - 1)
    within each normaliser, so the moments agree with quadrature for v = 0 up to the difference
    between a Student density and that Gaussian; b and a move in the direction of the exact ones.
    """
    prior = Gamma(30.0, 20.0)
    for residual in (0.1, 1.0, 2.0):
        new = prior.tilted(residual**2, 0.05)

        def tilted(t, r=residual):
            return stats.gamma.pdf(t, prior.a, scale=1 / prior.b) * stats.norm.pdf(
                r, 0, np.sqrt(0.05 + 1 / t)
            )

        z, first = (integrate.quad(lambda t, k=k: t**k * tilted(t), 0, 10)[0] for k in (0, 1))
        assert new.a / new.b == pytest.approx(first / z, rel=0.01)


def test_the_prior_sweep_learns_the_scale_of_the_weights():
    """500 weights known to be N(0, 0.3^2): the Gamma's 1/precision goes from 1 to about 0.09."""
    generator = np.random.default_rng(0)
    weights = 0.3 * generator.standard_normal(500)
    sites = PriorSites.start(500, Gamma(6.0, 5.0))
    assert sites.gamma.variance == 1.0
    precision = np.full(500, 1e6)
    first, second = weights * precision, precision + 1.0
    for _ in range(3):
        sites = sites.swept(first, second)
    assert sites.gamma.variance == pytest.approx(0.09, rel=0.3)
    assert np.isfinite(first).all()
    assert (second > 0).all()


def check_finite(posterior, *inputs):
    """The posterior and its predictions are numbers, near the data and far from it."""
    for value in (*posterior.model.parameters(), *posterior.std.values()):
        assert value.isfinite().all()
    assert 0 < posterior.likelihood.noise_std < float("inf")
    for x in (*inputs, torch.zeros_like(inputs[0])):
        predictive = posterior.predict(x)
        for value in (predictive.mean, predictive.variance, predictive.epistemic):
            assert value.isfinite().all()
        assert (predictive.variance > 0).all()
        assert not predictive.log_prob(torch.zeros(len(x))).isnan().any()


@pytest.mark.parametrize("name", list(METHODS))
def test_constant_data_leaves_a_finite_posterior(name):
    x, y = (torch.ones_like(part) for part in regression())
    check_finite(fitted(METHODS[name], data=(x, y), passes=2), x)


@pytest.mark.parametrize("noise", [None, 0.3])
@pytest.mark.parametrize("which", ["x", "y", "x and y"])
@pytest.mark.parametrize("name", [*METHODS, "open SEP", "DP-SEP"])
def test_bad_data_leaves_a_finite_posterior(name, which, noise):
    n = 40
    x, y = (part[:n] for part in regression())
    for scale in (1e2, 1e3, 1e5, 1e8, 1e14, 1e20, 1e30):
        data = x * scale if "x" in which else x, y * scale if "y" in which else y
        if name in METHODS:
            method, plan = METHODS[name], dpbnn.open_plan(n=n, batch_size=10, epochs=2)
        else:
            method, plan = dpbnn.SEP(), dpbnn.open_plan(n=n, batch_size=10, steps=4)
        if name == "DP-SEP":
            plan = dpbnn.plan(noise_multiplier=2.0, delta=1e-3, n=n, batch_size=10, steps=4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            posterior = dpbnn.fit(
                lambda: dpbnn.mlp(2, (5,), 1), data, GaussianNoise(noise), None, method, plan
            )
        check_finite(posterior, data[0], x)


@pytest.mark.parametrize("name", list(METHODS))
def test_targets_in_large_units_give_a_noise_in_those_units(name):
    x, y = regression()
    posterior = fitted(METHODS[name], data=(x, 1e3 * y), passes=4)
    assert 100 < posterior.likelihood.noise_std < 3000


def test_inputs_beyond_double_precision_and_not_numbers_are_refused_in_a_line():
    posterior = fitted(dpbnn.ADF(), passes=1)
    x = torch.zeros(2, 2, dtype=torch.float64)
    for value, message in ((1e200, "standardise"), (float("nan"), "1 inputs hold NaN")):
        x[1] = value
        with pytest.raises(ValueError, match=message) as caught:
            posterior.moments(x)
        assert "\n" not in str(caught.value)


def test_far_residuals_give_the_gamma_of_their_expected_square():
    """Where the normalisers vanish: v = 0 is conjugate, so Gamma(a + 1/2, b + r^2/2) exactly."""
    for residual in (1e2, 1e8, 1e20):
        new = Gamma(6.0, 6.0).tilted(residual**2, 0.0)
        assert new == Gamma(6.5, 6.0 + residual**2 / 2)
    for squared in (float("inf"), float("nan"), 1e300):
        assert Gamma(6.0, 6.0).tilted(squared, 1.0).valid


def test_networks_with_several_outputs_are_refused():
    plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=1)
    x, y = regression()
    with pytest.raises(ValueError, match="2 outputs"):
        dpbnn.fit(
            dpbnn.mlp(2, (4,), 2), (x, torch.stack([y, y], 1)), "gaussian", None, dpbnn.ADF(), plan
        )
