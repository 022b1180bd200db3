"""The grid of the pld accountant, and where a plan looks first."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

import dpbnn
from dpbnn.privacy import accountants
from dpbnn.privacy.accountants import ACCOUNTANTS, _hockey_stick, _poisson_pld
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
    ours = _poisson_pld(rate, sigma, interval, tail)
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
        accountants, "_hockey_stick", lambda release, e, remove: _hockey_stick(release, e, True)
    )
    _poisson_pld.cache_clear()
    with pytest.raises((AssertionError, ValueError)):
        test_the_distribution_is_dp_accountings(*CASES[1])
    _poisson_pld.cache_clear()


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_an_estimate_is_near_and_decides_nothing(epsilon, monkeypatch):
    given = {"epsilon": epsilon, "delta": 1e-5, "n": 20_000, "batch_size": 256, "steps": 500}
    plan = dpbnn.plan(**given)
    near = ACCOUNTANTS["pld"].estimate(plan.events, plan.delta, Relation.ZERO_OUT)
    assert plan.epsilon * (1 - 1e-9) <= near <= 1.003 * plan.epsilon
    for wrong in (0.5, 2.0, float("inf")):
        monkeypatch.setattr(accountants.PLD, "estimate", lambda *_, wrong=wrong: near * wrong)
        again = dpbnn.plan(**given)
        assert 0.995 * epsilon <= again.epsilon <= epsilon
        assert again.epsilon == ACCOUNTANTS["pld"].epsilon(again.events, again.delta)
