"""Bounds on the best attack: exact where a closed form is known, never below a real attack."""

import math

import numpy as np
import pytest
from scipy.stats import norm

import dpbnn
from dpbnn.privacy.accountants import ACCOUNTANTS
from dpbnn.privacy.attack import FALSE_POSITIVES, attack_on
from dpbnn.privacy.relation import Relation

DELTA = 1e-5


def full_batch(epsilon, **options):
    options = {"delta": DELTA, "n": 455, "sampling": "full-batch", "steps": 400, **options}
    return dpbnn.plan(epsilon=epsilon, **options)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0])
def test_full_batches_are_attacked_as_one_gaussian(epsilon):
    plan = full_batch(epsilon)
    mu = math.sqrt(plan.steps) / plan.noise_multiplier
    attack = attack_on(plan.events, DELTA)
    assert attack.mu == pytest.approx(mu)
    assert attack.right == pytest.approx(norm.cdf(mu / 2))
    for share in FALSE_POSITIVES:
        truth = norm.cdf(norm.ppf(share) + mu)
        assert truth <= attack.power[share] <= truth * 1.01 + 1e-6


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_the_grid_finds_the_closed_form(epsilon):
    """At rate 1 the pld accountant must find what the exact one knows, and never less."""
    plan = full_batch(epsilon)
    exact = attack_on(plan.events, DELTA)
    grid = attack_on(plan.events, DELTA, accountant="pld")
    assert exact.mu <= grid.mu <= 1.02 * exact.mu
    assert exact.right - 1e-9 <= grid.right <= exact.right + 2e-3
    for share in FALSE_POSITIVES:
        assert exact.power[share] - 1e-9 <= grid.power[share] <= exact.power[share] + 5e-3


def test_no_attack_on_a_poisson_release_does_better():
    """The likelihood-ratio test of one subsampled release, whose power is known by integration."""
    rate, sigma = 0.2, 0.7
    plan = dpbnn.plan(noise_multiplier=sigma, delta=DELTA, n=100, batch_size=20, steps=1)
    attack = attack_on(plan.events, DELTA)
    x = np.linspace(-12, 14, 400_001)
    without = norm.pdf(x, 0, sigma)
    with_it = (1 - rate) * without + rate * norm.pdf(x, 1, sigma)
    right = 0.5 + np.abs(with_it - without).sum() * (x[1] - x[0]) / 4
    assert right <= attack.right + 1e-6
    assert attack.right <= right + 2e-3
    for share in FALSE_POSITIVES:
        cut = sigma * norm.isf(share)  # the ratio rises in x
        power = (1 - rate) * share + rate * norm.sf(cut, 1, sigma)
        assert power <= attack.power[share] + 1e-6 <= power + 5e-3


@pytest.mark.parametrize("sampling", ["full-batch", "poisson"])
def test_mu_lies_above_the_whole_curve(sampling):
    size = {} if sampling == "full-batch" else {"batch_size": 50}
    plan = full_batch(1.0, sampling=sampling, steps=60, **size)
    mu = attack_on(plan.events, DELTA).mu
    epsilons = np.linspace(0, plan.epsilon, 313)
    curve = ACCOUNTANTS[plan.accountant].curve(plan.events, DELTA, Relation.ZERO_OUT)(epsilons)
    for epsilon, delta in zip(epsilons, curve, strict=True):
        by_mu = norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(
            -epsilon / mu - mu / 2
        )
        assert by_mu >= delta - 1e-12


def test_one_point_of_the_curve_says_what_epsilon_and_delta_say():
    """Without a curve (rdp) the bet is right in (e^eps + delta)/(1 + e^eps) at most."""
    plan = full_batch(1.0)
    epsilon = ACCOUNTANTS["rdp"].epsilon(plan.events, DELTA)
    attack = attack_on(plan.events, DELTA, accountant="rdp")
    assert attack.right == pytest.approx((math.exp(epsilon) + DELTA) / (1 + math.exp(epsilon)))
    assert attack.power[0.01] == pytest.approx(math.exp(epsilon) * 0.01 + DELTA, rel=1e-3)
    assert attack.right > attack_on(plan.events, DELTA).right


def test_mu_says_how_far_it_holds():
    """With subsampling the far end of the curve lies above that of any small mu."""
    plan = dpbnn.plan(noise_multiplier=0.6, delta=1e-4, n=100_000, batch_size=100, steps=10)
    attack = attack_on(plan.events, 1e-4)
    assert attack.up_to == pytest.approx(plan.epsilon)
    assert f"for epsilon up to {attack.up_to:.4g}" in str(attack)
    assert attack_on(full_batch(1.0).events, DELTA).up_to is None


def test_statements_carry_the_attack_and_lose_it_without_events():
    import dataclasses

    statement = full_batch(3.0).statement()
    assert statement.attack.right == pytest.approx(0.640, abs=5e-4)
    assert "right in at most 64.1 %" in " ".join(str(statement).split())
    values = statement.to_dict()
    assert values["attack"]["power"]["0.01"] == pytest.approx(statement.attack.power[0.01])
    assert dpbnn.PrivacyStatement.from_dict(values).attack == statement.attack
    forged = {**values, "attack": {"mu": 0.0, "right": 0.5, "power": {}}}
    assert dpbnn.PrivacyStatement.from_dict(forged).attack == statement.attack
    assert dataclasses.replace(statement, complete=False).attack is None
    assert dpbnn.PrivacyStatement.not_private().attack is None


def test_without_noise_every_guess_is_right():
    from dpbnn.privacy.events import Event

    event = Event(sampling="full-batch", noise_multiplier=0.0, n=10, batch_size=10)
    attack = attack_on([event], DELTA)
    assert (attack.mu, attack.right) == (None, 1.0)
