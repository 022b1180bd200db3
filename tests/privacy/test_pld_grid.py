"""The grid of the pld accountant, and how often a plan computes epsilon."""

import functools

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

import dpbnn
from dpbnn.privacy import accountants, losses
from dpbnn.privacy.accountants import ACCOUNTANTS
from dpbnn.privacy.events import Event
from dpbnn.privacy.losses import _hockey_stick, poisson_losses
from dpbnn.privacy.relation import Relation

CASES = [
    (0.0314, 2.7, 1e-4, -32.0),
    (0.5, 0.5, 1e-3, -40.0),
    (1e-4, 0.6, 1e-3, -40.0),
    (0.99, 20.0, 1e-4, -28.0),
    (0.999999, 1.0, 1e-3, -28.0),
    (0.01, 0.04, 1e-1, -30.0),  # losses beyond 709, where exp overflows
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("rate", "sigma", "interval", "tail"), CASES)
def test_the_distribution_is_dp_accountings(rate, sigma, interval, tail):
    ours = poisson_losses(rate, sigma, interval, tail)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=rate,
        value_discretization_interval=interval,
        log_mass_truncation_bound=tail,
    )
    epsilons = np.linspace(-1, 5, 40)
    deltas = theirs.get_delta_for_epsilon(epsilons)
    np.testing.assert_allclose(ours.get_delta_for_epsilon(epsilons), deltas, rtol=0, atol=1e-14)
    for count in (1, 300):
        expected = theirs.self_compose(count).get_epsilon_for_delta(1e-6)
        assert ours.self_compose(count).get_epsilon_for_delta(1e-6) == pytest.approx(
            expected, rel=1e-6
        )


def test_a_wrong_curve_is_told_apart(monkeypatch):
    monkeypatch.setattr(
        losses, "_hockey_stick", lambda release, e, remove: _hockey_stick(release, e, True)
    )
    poisson_losses.cache_clear()
    with pytest.raises((AssertionError, ValueError)):
        test_the_distribution_is_dp_accountings(*CASES[1])
    poisson_losses.cache_clear()


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_model_of_epsilon_decides_nothing(epsilon, monkeypatch):
    given = {"epsilon": epsilon, "delta": 1e-5, "n": 20_000, "batch_size": 256, "steps": 500}
    model = accountants.GDPCLT._epsilon
    for wrong in (0.0, 0.5, 2.0, float("inf")):
        monkeypatch.setattr(
            accountants.GDPCLT, "_epsilon", lambda *a, wrong=wrong: model(*a) * wrong
        )
        again = dpbnn.plan(**given)
        assert 0.998 * epsilon <= again.epsilon <= epsilon
        assert again.epsilon == ACCOUNTANTS["pld"].epsilon(again.events, again.delta)


# Epsilon of a plan with a given sigma, on a grid of steps of 1e-4.
PINNED = [
    (32_561, 1024, 2.7, 400, 3e-6, 0.9975686688492037),
    (20_000, 256, 0.6, 500, 1e-5, 7.048015250594227),
    (1000, 900, 20.0, 50, 1e-5, 1.2093146134501713),
    (500, 100, 1.6, 1, 1e-5, 1.0350120259597677),
]


@pytest.mark.parametrize(("n", "batch_size", "sigma", "steps", "delta", "epsilon"), PINNED)
def test_a_coarser_grid_raises_epsilon_and_hardly(n, batch_size, sigma, steps, delta, epsilon):
    given = {"n": n, "batch_size": batch_size, "steps": steps, "delta": delta}
    plan = dpbnn.plan(noise_multiplier=sigma, **given)
    assert epsilon <= plan.epsilon <= (1 + 2e-4) * epsilon


@pytest.mark.parametrize("seed", range(3))
def test_a_grid_four_times_finer_changes_little(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    for _ in range(8):
        rate, sigma = 10 ** rng.uniform(-1, -0.01), 10 ** rng.uniform(-0.3, 0.6)
        steps, delta = int(10 ** rng.uniform(0, 3)), 10 ** rng.uniform(-8, -4)
        events = (Event("poisson", sigma, steps, 10_000, rate * 10_000),)
        amplified, mu = accountants._split(events, Relation.ZERO_OUT)
        tails, step = accountants.loss_grid(amplified, mu, delta)
        assert rate / sigma / 50 < step <= rate / sigma / 25
        usual = accountants._pld_epsilon.__wrapped__(events, delta, Relation.ZERO_OUT)
        with monkeypatch.context() as patch:
            patch.setattr(accountants, "loss_grid", lambda *_, found=(tails, step / 4): found)
            finer = accountants._pld_epsilon.__wrapped__(events, delta, Relation.ZERO_OUT)
        assert finer * (1 - 1e-9) <= usual <= finer * (1 + 2e-4)


def counted(monkeypatch):
    """Return a list that grows by every epsilon that is computed."""
    calls = []
    full = accountants._pld_epsilon.__wrapped__
    monkeypatch.setattr(
        accountants, "_pld_epsilon", functools.cache(lambda *a: (calls.append(a), full(*a))[1])
    )
    return calls


@pytest.mark.parametrize(
    ("epsilon", "n", "batch_size", "steps", "times"),
    [
        (1.0, 60_000, 256, 3516, 3),
        (1.0, 32_561, 1024, 400, 3),
        (0.05, 1000, 900, 10, 1),
        (20.0, 1000, 50, 10, 5),
        (0.01, 100_000, 10, 20, 6),  # a few large losses, far from a Gaussian
        (1.0, 500, 100, 1, 4),
    ],
)
def test_a_solver_computes_epsilon_a_few_times(epsilon, n, batch_size, steps, times, monkeypatch):
    calls = counted(monkeypatch)
    plan = dpbnn.plan(epsilon=epsilon, delta=1e-6, n=n, batch_size=batch_size, steps=steps)
    assert len(calls) <= times
    assert 0.998 * epsilon <= plan.epsilon <= epsilon
    assert plan.epsilon == ACCOUNTANTS["pld"].epsilon(plan.events, plan.delta)
