import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbnn.privacy.accountants import (
    ACCOUNTANTS,
    accountant,
    default_accountant,
    gaussian_delta,
    gaussian_epsilon,
)
from dpbnn.privacy.events import Event, UnsupportedEvent, gaussian_mu
from dpbnn.privacy.relation import Relation

N = 10**6


def poisson(rate, sigma, count):
    return Event("poisson", sigma, count, N, rate * N)


class AccountantContract:
    """What every accountant promises, on events it supports."""

    name: str
    event: Event
    relation = Relation.ZERO_OUT

    def epsilon(self, event, delta=1e-5):
        return ACCOUNTANTS[self.name].epsilon([event], delta, self.relation)

    def test_nothing_released_costs_nothing(self):
        assert ACCOUNTANTS[self.name].epsilon([], 1e-5) == 0

    def test_without_noise_epsilon_is_infinite(self):
        import dataclasses

        assert self.epsilon(dataclasses.replace(self.event, noise_multiplier=0.0)) == math.inf

    def test_two_blocks_cost_what_one_block_of_both_costs(self):
        import dataclasses

        half = dataclasses.replace(self.event, count=self.event.count // 2)
        rest = dataclasses.replace(
            self.event, count=self.event.count - half.count, start=half.count
        )
        both = ACCOUNTANTS[self.name].epsilon([half, rest], 1e-5, self.relation)
        assert both == pytest.approx(self.epsilon(self.event), rel=1e-9)

    def test_an_unsupported_event_raises_and_says_why(self):
        wrong = Event("fixed-size", 1.0, 1, 100, 10)
        with pytest.raises(UnsupportedEvent, match="replace-one"):
            ACCOUNTANTS[self.name].epsilon([wrong], 1e-5, Relation.ZERO_OUT)

    @pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
    def test_delta_outside_the_unit_interval_raises(self, delta):
        with pytest.raises(ValueError, match="delta="):
            self.epsilon(self.event, delta)


class TestPLD(AccountantContract):
    name = "pld"
    event = poisson(0.01, 1.0, 100)


class TestRDP(AccountantContract):
    name = "rdp"
    event = poisson(0.01, 1.0, 100)


class TestRDPFixedSize(AccountantContract):
    name = "rdp"
    event = Event("fixed-size", 1.0, 100, 1000, 10)
    relation = Relation.REPLACE_ONE


class TestGDPCLT(AccountantContract):
    name = "gdp-clt"
    event = poisson(0.01, 1.0, 100)


class TestExact(AccountantContract):
    name = "exact"
    event = Event("full-batch", 10.0, 100)


class TestExactPartition(AccountantContract):
    name = "exact"
    event = Event("partition", 10.0, 105, 100, 10)


REFERENCE = [
    # rate, sigma, steps, rdp, pld, PRV bounds, gdp-clt
    (0.01, 1.0, 1000, 2.1014, 1.8282, (1.8181, 1.8384), 1.6177),
    (256 / 60000, 1.1, 14040, 2.5944, 2.3796, (2.3694, 2.3897), 2.3222),
    (0.1, 4.0, 500, 2.5488, 2.3407, (2.3306, 2.3509), 2.2983),
]


@pytest.mark.parametrize(("rate", "sigma", "steps", "rdp", "pld", "prv", "clt"), REFERENCE)
def test_reference_values(rate, sigma, steps, rdp, pld, prv, clt):
    events = [poisson(rate, sigma, steps)]
    values = {name: a.epsilon(events, 1e-5) for name, a in ACCOUNTANTS.items() if name != "exact"}
    assert values["rdp"] == pytest.approx(rdp, abs=1e-3)
    assert values["pld"] == pytest.approx(pld, abs=1e-3)
    assert values["gdp-clt"] == pytest.approx(clt, abs=1e-3)
    assert prv[0] <= values["pld"] <= prv[1]


def test_reference_values_without_sampling():
    events = [Event("full-batch", 10.0, 100)]
    values = {name: a.epsilon(events, 1e-5) for name, a in ACCOUNTANTS.items()}
    assert values["exact"] == pytest.approx(4.3772, abs=1e-3)
    assert values["pld"] == pytest.approx(4.3772, abs=1e-3)
    assert values["rdp"] == pytest.approx(4.7285, abs=1e-3)
    assert values["gdp-clt"] == pytest.approx(4.3899, abs=1e-3)


@pytest.mark.parametrize(("rate", "sigma", "steps"), [row[:3] for row in REFERENCE])
def test_opacus_agrees_with_rdp_and_its_prv_bounds_hold_pld(rate, sigma, steps):
    from opacus.accountants import PRVAccountant, RDPAccountant

    events = [poisson(rate, sigma, steps)]
    theirs = RDPAccountant()
    theirs.history = [(sigma, rate, steps)]
    ours = ACCOUNTANTS["rdp"].epsilon(events, 1e-5)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)

    prv = PRVAccountant()
    prv.history = [(sigma, rate, steps)]
    curve = prv._get_dprv(eps_error=0.01, delta_error=1e-8)
    low, _, high = curve.compute_epsilon(1e-5, 1e-8, 0.01)
    assert low <= ACCOUNTANTS["pld"].epsilon(events, 1e-5) <= high


def test_gdp_clt_lies_below_a_rigorous_lower_bound_so_it_is_never_a_default():
    """The DP-BNN setting: an optimistic discretisation bounds the true epsilon from below."""
    from dp_accounting.pld import privacy_loss_distribution

    optimistic = privacy_loss_distribution.from_gaussian_mechanism(
        1.3,
        sampling_prob=256 / 60000,
        pessimistic_estimate=False,
        use_connect_dots=False,
        value_discretization_interval=1e-5,
    ).self_compose(3516)
    below = optimistic.get_epsilon_for_delta(1e-5)
    events = [poisson(256 / 60000, 1.3, 3516)]
    assert ACCOUNTANTS["gdp-clt"].epsilon(events, 1e-5) < below
    assert ACCOUNTANTS["pld"].epsilon(events, 1e-5) > below
    assert not ACCOUNTANTS["gdp-clt"].rigorous
    assert default_accountant(events) == "pld"


@pytest.mark.parametrize(
    ("events", "name"),
    [
        ([poisson(0.1, 1, 1)], "pld"),
        ([Event("full-batch", 1.0)], "exact"),
        ([Event("partition", 1.0, 1, 10, 5)], "exact"),
        ([Event("full-batch", 1.0), poisson(0.1, 1, 1)], "pld"),
        ([Event("fixed-size", 1.0, 1, 10, 5)], "rdp"),
    ],
)
def test_default_is_the_tightest_rigorous_accountant(events, name):
    assert default_accountant(events) == name


SUPPORTED = {
    "poisson": {Relation.ZERO_OUT: {"pld", "rdp", "gdp-clt"},
                Relation.ADD_REMOVE: {"pld", "rdp", "gdp-clt"}},
    "full-batch": {r: {"exact", "pld", "rdp", "gdp-clt"} for r in Relation},
    "partition": {Relation.ZERO_OUT: {"exact", "pld", "rdp"},
                  Relation.REPLACE_ONE: {"exact", "pld", "rdp"}},
    "fixed-size": {Relation.REPLACE_ONE: {"rdp"}},
}  # fmt: skip


@pytest.mark.parametrize("sampling", SUPPORTED)
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_only_the_supported_table_is_supported(sampling, relation, name):
    event = Event(sampling, 2.0, 10, 1000, 1000 if sampling == "full-batch" else 100)
    allowed = name in SUPPORTED[sampling].get(relation, set())
    assert (ACCOUNTANTS[name].supports(event, relation) is None) == allowed
    if allowed:
        assert ACCOUNTANTS[name].epsilon([event], 1e-5, relation) > 0
    else:
        with pytest.raises(UnsupportedEvent):
            ACCOUNTANTS[name].epsilon([event], 1e-5, relation)


def test_replace_one_doubles_the_shift_once():
    for name in ("exact", "pld", "rdp"):
        zero = ACCOUNTANTS[name].epsilon([Event("full-batch", 5.0, 100)], 1e-5, Relation.ZERO_OUT)
        one = ACCOUNTANTS[name].epsilon(
            [Event("full-batch", 10.0, 100)], 1e-5, Relation.REPLACE_ONE
        )
        assert one == pytest.approx(zero, rel=1e-9)
    whole = Event("fixed-size", 10.0, 100, 100, 100)
    full = Event("full-batch", 10.0, 100)
    rdp = ACCOUNTANTS["rdp"]
    assert rdp.epsilon([whole], 1e-5, Relation.REPLACE_ONE) == pytest.approx(
        rdp.epsilon([full], 1e-5, Relation.REPLACE_ONE), rel=1e-9
    )


def test_regression_setting_under_replace_one():
    events = [Event("full-batch", 10.0, 200)]
    assert ACCOUNTANTS["exact"].epsilon(events, 1 / 250, Relation.REPLACE_ONE) == pytest.approx(
        10.8, abs=0.01
    )


def brute_force_mu_squared(events, batches, shift):
    load = np.zeros(batches)
    for event in events:
        for release in range(event.start, event.start + event.count):
            load[release % batches] += (shift / event.noise_multiplier) ** 2
    return load.max()


@given(
    st.integers(1, 9),
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 40), st.sampled_from([0.5, 1.0, 3.0])),
        max_size=5,
    ),
    st.sampled_from([Relation.ZERO_OUT, Relation.REPLACE_ONE]),
)
def test_a_partition_costs_what_its_most_used_batch_collects(batches, spends, relation):
    events = [Event("partition", s, count, batches, 1, start) for start, count, s in spends]
    expected = brute_force_mu_squared(events, batches, relation.shift)
    assert gaussian_mu(events, relation) ** 2 == pytest.approx(expected, abs=1e-9)


def test_runs_that_repeat_the_first_batches_do_not_count_as_one_pass():
    """Two interrupted passes over the same half cost two releases a record, not one."""
    half = Event("partition", 1.0, 5, 100, 10)
    assert gaussian_mu([half, half], Relation.ZERO_OUT) == pytest.approx(math.sqrt(2))


@given(st.floats(0.01, 20), st.floats(1e-9, 0.3))
def test_gaussian_epsilon_inverts_delta_and_never_falls_below(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    assert gaussian_delta(mu, epsilon) <= delta * (1 + 1e-9)
    if epsilon > 0:
        assert gaussian_delta(mu, epsilon * (1 - 1e-6)) > delta


@pytest.mark.parametrize("power", [3, 5, 6, 7, 9, 12, 17, 100])
def test_gaussian_epsilon_of_a_huge_mu_is_above_the_truth(power):
    """The truth lies within mu of mu^2/2 + 4.265 mu, in whole numbers."""
    mu = 10**power
    epsilon = int(gaussian_epsilon(float(mu), 1e-5))
    assert 2 * epsilon >= mu * mu + 8 * mu
    assert epsilon <= (mu * mu + 10 * mu) // 2 * 100_001 // 100_000
    assert gaussian_epsilon(1e200, 1e-5) == gaussian_epsilon(math.inf, 1e-5) == math.inf


def test_gaussian_delta_against_numerical_integration():
    from scipy.integrate import quad
    from scipy.stats import norm

    for mu, epsilon in [(0.5, 0.3), (2.0, 5.0), (1.0, 0.0)]:
        integral, _ = quad(
            lambda x, mu=mu, eps=epsilon: max(0, norm.pdf(x - mu) - math.exp(eps) * norm.pdf(x)),
            -20,
            20,
            points=[epsilon / mu + mu / 2],
            limit=200,
        )
        assert gaussian_delta(mu, epsilon) == pytest.approx(integral, abs=1e-9)


settings_of_a_run = st.tuples(
    st.floats(math.log(1e-4), math.log(0.5)).map(math.exp),
    st.floats(0.5, 20),
    st.integers(1, 20_000),
    st.floats(math.log(1e-8), math.log(1e-3)).map(math.exp),
)
SLACK = 1e-3  # relative; the grid of the privacy loss changes with the setting


@settings(max_examples=12)
@given(settings_of_a_run, st.floats(1.02, 3))
@pytest.mark.parametrize("name", ["pld", "rdp"])
def test_monotone_in_sigma_rate_steps_and_delta(name, setting, factor):
    rate, sigma, steps, delta = setting
    cost = ACCOUNTANTS[name].epsilon
    base = cost([poisson(rate, sigma, steps)], delta)
    slack = SLACK * base + 1e-6
    assert base >= 0
    assert cost([poisson(rate, sigma * factor, steps)], delta) <= base + slack
    assert cost([poisson(min(1.0, rate * factor), sigma, steps)], delta) >= base - slack
    assert cost([poisson(rate, sigma, math.ceil(steps * factor))], delta) >= base - slack
    assert cost([poisson(rate, sigma, steps)], delta * factor) <= base + slack


@settings(max_examples=25)
@given(settings_of_a_run)
def test_pld_is_at_most_rdp(setting):
    rate, sigma, steps, delta = setting
    events = [poisson(rate, sigma, steps)]
    pld, rdp = (ACCOUNTANTS[name].epsilon(events, delta) for name in ("pld", "rdp"))
    assert pld <= rdp * (1 + SLACK) + 1e-6


def test_pld_is_above_the_exact_curve_where_there_is_one():
    for sigma, steps in [(1.0, 1), (10.0, 500), (50.0, 3)]:
        event = Event("full-batch", sigma, steps)
        exact, pld = (ACCOUNTANTS[a].epsilon([event], 1e-5) for a in ("exact", "pld"))
        assert exact <= pld <= exact * (1 + 1e-3)


def test_a_schedule_of_many_sigmas_is_lowered_to_a_grid_never_raised():
    sigmas = np.linspace(1.0, 2.0, 200)
    events = [poisson(0.01, float(sigma), 2) for sigma in sigmas]
    grouped = ACCOUNTANTS["rdp"].epsilon(events, 1e-5)
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    exact = RdpAccountant()
    for sigma in sigmas:
        exact.compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(sigma)), 2)
    assert exact.get_epsilon(1e-5) <= grouped <= exact.get_epsilon(1e-5) * 1.02


def test_delta_below_the_arithmetic_is_refused():
    with pytest.raises(UnsupportedEvent, match="too small"):
        ACCOUNTANTS["pld"].epsilon([poisson(0.01, 1.0, 10**6)], 1e-12)


def test_unknown_accountant_names_the_choices():
    with pytest.raises(ValueError, match="'pld'"):
        accountant("moments")
