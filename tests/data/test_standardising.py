"""Private standardisation: two releases, and centres and spreads that follow from them."""

import numpy as np
import pytest
import torch

import dpbnn
from dpbnn.data import standardising
from dpbnn.data.standardising import Standardisation, noise_of_means, private_standardisation


def planned(n, sigma=1.0, **options):
    return dpbnn.plan(
        noise_multiplier=sigma, delta=1e-5, n=n, sampling="full-batch", steps=2, **options
    )


def columns(n=4000):
    rng = np.random.default_rng(0)
    narrow = rng.normal(0.3, 0.05, n)
    skewed = np.minimum(0.02 * np.exp(rng.normal(size=n)), 1) - 0.9
    return np.stack([narrow, skewed, np.full(n, 0.5), np.where(rng.random(n) < 0.3, 1.0, -1.0)], 1)


def test_centres_and_spreads_are_those_of_the_columns():
    x = columns()
    found = private_standardisation(x, plan=planned(len(x), 0.1))
    mean, deviation = x.mean(0), np.abs(x - x.mean(0)).mean(0) * np.sqrt(np.pi / 2)
    np.testing.assert_allclose(found.centre, mean, atol=0.002)
    np.testing.assert_allclose(found.spread, np.clip(deviation, 0.02, 0.5), atol=0.002)
    without = Standardisation.learned(x)
    np.testing.assert_allclose(found.centre, without.centre, atol=0.002)
    np.testing.assert_allclose(found.spread, without.spread, atol=0.002)


@pytest.mark.parametrize("row", [[1.0, 1.0, 1.0], [-1.0, 1.0, -1.0], [1e9, -1e9, 1e9], [0.0] * 3])
def test_neighbours_are_within_the_sensitivity_and_nothing_else_moves(row):
    """The worst record adds its whole clip to the sums; one far outside [-1, 1] adds no more."""
    x = np.random.default_rng(3).uniform(-0.1, 0.1, size=(300, 3))
    x[7] = row
    neighbour = x.copy()
    neighbour[7] = np.nan
    plan = planned(300, 0.5)

    def release(values):
        found = private_standardisation(values, [1.0, 2.0, 0.5], plan=plan)
        return np.stack([found.centre, found.spread])

    result = dpbnn.replay(release, x, neighbour).check()
    assert len(result.distances) == 2
    assert (result.distances[0] > 0.99 * result.sensitivities[0]) == (row != [0.0] * 3)


def test_a_centre_that_did_not_pass_the_gate_is_found_out(monkeypatch):
    """The replay sees a second release that is centred by the data itself."""
    x = np.random.default_rng(3).uniform(-1, 1, size=(50, 2))

    def leaky(values):
        own = np.nanmean(values, axis=0)
        return private_standardisation(np.clip(values - own, -1, 1), plan=planned(50)), own

    assert not dpbnn.replay(leaky, x, np.vstack([x[:-1], [[np.nan, np.nan]]])).passed


def test_the_noise_has_the_stated_size_and_the_test_sees_five_percent(monkeypatch):
    """Variance of 20 000 centres of empty columns: 1 +- 0.05, five standard errors."""
    monkeypatch.setattr(standardising, "_PRIOR", 1e6)
    x = np.zeros((100, 20_000))
    found = private_standardisation(x, plan=planned(100, 0.1))
    tau = noise_of_means(100, 0.1, np.ones(20_000))[0]
    assert tau == pytest.approx(0.1 * np.sqrt(20_000) / 100)
    ratio = found.centre.var() / tau**2
    assert abs(ratio - 1) < 0.05
    assert abs(ratio / 1.05**2 - 1) > 0.05


def test_noise_that_hides_a_column_leaves_the_public_spread():
    x = columns(50)
    found = private_standardisation(x, plan=planned(50, 1e4))
    assert np.abs(found.centre).max() < 0.01
    np.testing.assert_array_equal(found.spread, np.full(4, 0.5))


def test_spreads_are_never_tiny_whatever_the_noise():
    """A released deviation can be negative; the spread is at least the noise, or 0.02."""
    x = np.zeros((400, 3))
    for _ in range(20):
        spread = private_standardisation(x, plan=planned(400, 5.0)).spread
        assert (spread >= 2 * noise_of_means(400, 5.0, np.ones(3))).all()
        assert (private_standardisation(x, plan=planned(400, 1e-3)).spread >= 0.02).all()


def test_weights_share_the_noise_out():
    w = np.array([1.0, 1.0, 3.0])
    tau = noise_of_means(100, 2.0, w)
    np.testing.assert_allclose(tau, 2.0 * np.sqrt(11) / (100 * w))
    with pytest.raises(ValueError, match="weights"):
        private_standardisation(np.zeros((5, 3)), [1.0, 0.0, 1.0], plan=planned(5))


def test_records_that_are_bad_or_left_out_add_nothing():
    x = columns(500)
    spoiled = np.vstack([x, np.full((500, 4), 0.9)])
    spoiled[500:, 1] = np.nan
    kept = torch.arange(1000) < 500
    left_out = np.vstack([x, np.full((500, 4), 0.9)])
    plan = planned(1000, 1e-3)
    one = private_standardisation(spoiled, plan=plan)
    two = private_standardisation(left_out, plan=plan, keep=kept)
    np.testing.assert_allclose(one.centre, x.mean(0) / 2, atol=1e-4)
    np.testing.assert_allclose(two.centre, x.mean(0) / 2, atol=1e-4)


def test_it_is_charged_first_and_stops_at_the_budget(monkeypatch):
    x = columns(500)
    book = dpbnn.Ledger(epsilon=1.0, delta=1e-5)
    with pytest.raises(dpbnn.BudgetExceeded):
        private_standardisation(x, plan=planned(500, 1.0), ledger=book)
    assert book.releases == 0
    private_standardisation(x, plan=planned(500, 30.0), ledger=book)
    assert book.releases == 2
    assert book.statement().mechanisms[0]["label"] == "private standardisation"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (planned(50), "n=50 and there are 500"),
        (planned(500, relation="replace-one"), "relation"),
        (dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=500, sampling="full-batch", steps=1),
         "steps=2"),
    ],
)  # fmt: skip
def test_other_plans_are_refused_and_spend_nothing(plan, message):
    book = dpbnn.Ledger()
    with pytest.raises(ValueError, match=message):
        private_standardisation(columns(500), plan=plan, ledger=book)
    assert book.releases == 0


def test_under_add_remove_the_number_of_records_stays_hidden():
    plan = planned(400, relation="add/remove")
    x = columns(400)

    def release(values):
        return private_standardisation(values, plan=plan).spread

    dpbnn.replay(release, x, x[:-1]).check()
