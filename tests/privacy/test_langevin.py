import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dpbnn

sizes = {
    "learning_rate": st.floats(1e-7, 1e-2),
    "clip": st.floats(0.01, 10),
    "n": st.integers(100, 10**6),
    "batch_size": st.integers(1, 100),
    "convention": st.sampled_from(["half-step", "paper"]),
}


def test_the_papers_setting():
    sigma = dpbnn.sgld_noise_multiplier(5e-6, 1.5, 60_000, 256, convention="paper")
    assert sigma == pytest.approx(1.27207, abs=1e-5)
    assert sigma == pytest.approx(256 / (60_000 * math.sqrt(5e-6) * 1.5))
    ours = dpbnn.sgld_noise_multiplier(5e-6, 1.5, 60_000, 256)
    assert ours == pytest.approx(2 * 256 / (60_000 * math.sqrt(5e-6) * 1.5))


@given(**sizes, tau=st.floats(0.01, 10))
def test_the_solvers_invert_each_other(learning_rate, clip, n, batch_size, convention, tau):
    common = {"n": n, "batch_size": batch_size, "temperature": tau, "convention": convention}
    sigma = dpbnn.sgld_noise_multiplier(learning_rate, clip, **common)
    assert dpbnn.sgld_clip(sigma, learning_rate, **common) == pytest.approx(clip)
    assert dpbnn.sgld_learning_rate(sigma, clip, **common) == pytest.approx(learning_rate)


@given(**sizes, tau=st.floats(0.01, 10))
def test_theorem_1_both_ways(learning_rate, clip, n, batch_size, convention, tau):
    sgd = dpbnn.sgd_equivalent(learning_rate, clip, n, batch_size, tau, convention)
    back = dpbnn.sgld_equivalent(
        sgd.learning_rate, sgd.noise_multiplier, n, batch_size, sgd.clip, convention=convention
    )
    assert (back.learning_rate, back.clip, back.temperature) == pytest.approx(
        (learning_rate, clip, tau)
    )
    clipless = dpbnn.sgld_equivalent(
        sgd.learning_rate,
        sgd.noise_multiplier,
        n,
        batch_size,
        temperature=tau,
        convention=convention,
    )
    assert clipless.clip == pytest.approx(clip)


def test_theorem_1_as_printed():
    sgd = dpbnn.sgd_equivalent(5e-6, 1.5, 60_000, 256, convention="paper")
    assert sgd.learning_rate == pytest.approx(0.30)
    sgld = dpbnn.sgld_equivalent(0.25, 1.3, 60_000, 256, convention="paper")
    assert sgld.learning_rate == pytest.approx(0.25 / 60_000)
    assert sgld.clip == pytest.approx(256 / (math.sqrt(60_000 * 0.25) * 1.3))


@pytest.mark.parametrize("convention", ["half-step", "paper"])
@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_one_step_of_both_is_the_same_in_distribution(convention, tau):
    """Drift and noise of the two updates, written out, agree."""
    eta, clip, n, b = 1e-4, 0.7, 5000, 50
    total = torch.randn(5, dtype=torch.float64)
    sgd = dpbnn.sgd_equivalent(eta, clip, n, b, tau, convention)
    factor = {"half-step": eta / 2, "paper": eta}[convention]
    variance = {"half-step": eta * tau, "paper": 2 * eta * tau}[convention]
    torch.testing.assert_close(factor * n / b * total, sgd.learning_rate * total / b)
    noise = sgd.learning_rate * sgd.noise_multiplier * sgd.clip / b
    assert noise == pytest.approx(math.sqrt(variance))


def test_theorem_3_as_printed_and_back():
    eta, clip, n, b, steps = 5e-6, 1.5, 60_000, 256, 3516
    mu = dpbnn.sgld_mu(eta, clip, n, b, steps, convention="paper")
    assert mu == pytest.approx(math.sqrt(steps * math.expm1(n**2 * eta * clip**2 / b**2)) * b / n)
    sigma = dpbnn.gdp_noise_multiplier(mu, b / n, steps)
    assert dpbnn.sgld_clip(sigma, eta, n, b, convention="paper") == pytest.approx(clip)
    assert dpbnn.gdp_mu(sigma, b / n, steps) == pytest.approx(mu)


BUDGET = {"epsilon": 1.0, "delta": 1e-5, "n": 10_000, "batch_size": 100, "epochs": 3}


def test_a_budget_solves_for_the_clip_or_for_the_step_size():
    by_clip = dpbnn.sgld_plan(learning_rate=1e-5, **BUDGET)
    assert dpbnn.sgld_noise_multiplier(1e-5, by_clip.clip, 10_000, 100) == pytest.approx(
        by_clip.plan.noise_multiplier
    )
    by_rate = dpbnn.sgld_plan(clip=by_clip.clip, **BUDGET)
    assert by_rate.learning_rate == pytest.approx(1e-5)
    assert 0.995 <= by_rate.plan.epsilon <= 1.0


def test_three_that_disagree_are_an_error():
    fixed = {key: value for key, value in BUDGET.items() if key != "epsilon"}
    with pytest.raises(ValueError, match="leave one of the three out"):
        dpbnn.sgld_plan(learning_rate=1e-5, clip=1.0, noise_multiplier=0.5, **fixed)
    with pytest.raises(ValueError, match="epsilon=1"):
        dpbnn.sgld_plan(learning_rate=1.0, clip=1.0, **BUDGET)
    with pytest.raises(ValueError, match="both missing"):
        dpbnn.sgld_plan(**BUDGET)
    with pytest.raises(ValueError, match="n and batch_size"):
        dpbnn.sgld_plan(clip=1.0, epsilon=1.0, delta=1e-5, steps=5)
    with pytest.raises(ValueError, match="one of the two"):
        dpbnn.sgld_equivalent(0.1, 1.0, 100, 10, clip=1.0, temperature=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0"),
        ({"clip": math.nan}, "clip=nan"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"convention": "full"}, "convention='full'"),
        ({"n": 0}, "n=0"),
    ],
)
def test_bad_input(change, message):
    arguments = {"learning_rate": 1e-5, "clip": 1.0, "n": 100, "batch_size": 10, **change}
    with pytest.raises(ValueError, match=message):
        dpbnn.sgld_noise_multiplier(**arguments)
