"""Private conformal prediction: the theorem by simulation, its parts, costs and neighbours."""

import json
import math

import numpy as np
import pytest
import torch
from calibration_cases import classes, reals, trained
from scipy.stats import binom

import dpbnn
from dpbnn.calibration import ConformalPosterior, conformal, prefix
from dpbnn.calibration.release import release
from dpbnn.posteriors import PointPosterior
from dpbnn.privacy.gate import Gate


def test_the_root_of_cumulative_sums():
    for cells in (1, 2, 7, 256):
        r = prefix.root(cells)
        assert (r @ r).allclose(torch.ones(cells, cells, dtype=torch.double).tril())
        assert r.norm(dim=0).max() <= prefix.sensitivity(cells) * (1 + 1e-12)
    # Noise of a cumulative count, in units of sigma: 2.8 where plain counts would have 16.
    deviation = prefix.sensitivity(256) * prefix.root(256).norm(dim=1).max()
    assert 2.7 < deviation < 2.9


@pytest.mark.parametrize("beta", [0.1, 0.01])
def test_the_margin_is_exceeded_with_probability_beta(beta):
    """On 20000 fresh draws, at most as often as beta allows (false alarm 1e-6), and not idly."""
    z = np.random.default_rng(1).standard_normal((20_000, 64)) @ prefix.root(64).numpy().T
    most = binom.ppf(1 - 1e-6, 20_000, beta)
    assert (z.max(1) > prefix.margin(64, beta)).sum() <= most
    assert (z.max(1) > 0.85 * prefix.margin(64, beta)).sum() > most


def thresholds(n, alpha, sigma, beta, repetitions=400, seed=0):
    """Thresholds from scores that are uniform on [0, 1], so that a threshold is its coverage."""
    generator = torch.Generator().manual_seed(seed)
    grid = conformal._grid("classification")
    clip = prefix.sensitivity(len(grid)) * 1.0004
    raised = 0.0 if beta is None else prefix.margin(len(grid), beta) * sigma * clip
    found = []
    for _ in range(repetitions):
        scores = torch.rand(n, generator=generator, dtype=torch.double)
        gate = Gate(clip if sigma else math.inf, sigma)
        counts = conformal._cumulative(release(gate, conformal._columns(scores, grid)))
        found.append(min(1.0, conformal._threshold(counts - raised, grid, n, alpha)))
    return np.array(found)


def covers(found, promised):
    """Whether the mean coverage is not below the promise by 5 standard errors (alarm 3e-7)."""
    return found.mean() + 5 * found.std() / math.sqrt(len(found)) >= promised


@pytest.mark.parametrize(("n", "beta"), [(50, 0.1), (100, 0.3), (1000, 0.01)])
def test_coverage_is_at_least_what_is_promised(n, beta):
    """sigma = 3.73 is epsilon 1 at delta 1e-5."""
    assert covers(thresholds(n, 0.1, 3.73, beta, 150), 1 - 0.1 - beta)


@pytest.mark.parametrize("n", [50, 100])
def test_without_the_margin_few_records_do_not_cover(n):
    """The first noisy count to reach the goal is too early: coverage 0.68 and 0.81 for 0.9."""
    assert not covers(thresholds(n, 0.1, 3.73, None, 150), 1 - 0.1 - 0.01)


def test_coverage_is_not_much_more_on_many_records():
    """The price on 20000 records is below 1 %: 10.6 sigma of 20000, and one cell of the grid."""
    found = thresholds(20_000, 0.1, 3.73, 0.01, repetitions=10)
    assert 0.89 <= found.mean() <= 0.91


def test_few_records_need_one_more():
    """Without noise, coverage is ceil((n + 1)(1 - alpha))/(n + 1), up to a cell of the grid."""
    found = thresholds(20, 0.1, 0.0, None, repetitions=600)
    assert covers(found, 19 / 21)
    assert not covers(found - 1 / 21, 0.9)  # the 18th smallest of 20, as ceil(n (1 - alpha)) says
    assert thresholds(8, 0.1, 0.0, None, repetitions=5).min() == 1.0


@pytest.mark.parametrize("temperature", [2.5, 0.5])
def test_sets_of_classes_cover(temperature):
    """5000 test records; 5 standard errors are 0.022. The posterior's own sets cover less."""
    posterior, data = classes(temperature=temperature)
    found = dpbnn.conformalize(posterior, data, 1.0, 1e-5, alpha=0.1)
    _, (x, y) = classes(5000, temperature=temperature, seed=1)
    sets = found.predict_set(x)
    share = sets[torch.arange(5000), y].double().mean().item()
    assert found.coverage - 0.022 <= share <= 0.96
    assert found.coverage == pytest.approx(0.89)
    if temperature > 1:
        own = posterior.predict(x).interval(0.9)
        assert own[torch.arange(5000), y].double().mean() < 0.89
    with pytest.raises(TypeError, match="use predict_set"):
        found.predict_interval(x)


def test_intervals_cover_though_the_model_thinks_its_noise_is_half_as_large():
    posterior, data = reals()
    found = dpbnn.conformalize(posterior, data, 1.0, 1e-5, alpha=0.2)
    _, (x, y) = reals(5000, seed=1)
    low, high = found.predict_interval(x)
    share = ((low <= y) & (y <= high)).double().mean().item()
    assert 0.79 - 0.03 <= share <= 0.87
    with pytest.raises(TypeError, match="use predict_interval"):
        found.predict_set(x)


def test_several_outputs_are_covered_together():
    torch.manual_seed(0)
    x = torch.randn(4000, 3)
    posterior = dpbnn.posteriors.PointPosterior(torch.nn.Linear(3, 2), "gaussian")
    y = posterior.predict(x).mean + torch.randn(4000, 2)
    found = dpbnn.conformalize(posterior, (x[:2000], y[:2000]), 1.0, 1e-5)
    low, high = found.predict_interval(x[2000:])
    inside = ((low <= y[2000:]) & (y[2000:] <= high)).all(1).double().mean()
    assert 0.86 < inside < 0.95


def test_too_few_records_give_everything():
    posterior, data = classes(15)
    found = dpbnn.conformalize(posterior, data, 1.0, 1e-5)
    assert found.threshold == math.inf
    assert found.predict_set(data[0]).all()
    posterior, data = reals(15)
    low, high = dpbnn.conformalize(posterior, data, 1.0, 1e-5).predict_interval(data[0])
    assert (low == -math.inf).all()
    assert (high == math.inf).all()


def test_an_infinite_threshold_holds_everything_also_where_the_model_has_no_doubt():
    """The rate of a count can be so small that its standard deviation is 0."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.bias, -1e4)
    sure = PointPosterior(model, dpbnn.likelihoods.Poisson())
    found = ConformalPosterior(sure, math.inf, "regression", 0.1, 0.01, trained(), 10, 0)
    low, high = found.predict_interval(torch.zeros(3, 1))
    assert (low == -math.inf).all()
    assert (high == math.inf).all()


def test_scores_beyond_the_grid_count_as_never_covered():
    grid = conformal._grid("regression")
    scores = torch.tensor([1e9, math.inf, 0.0, 1.0], dtype=torch.double)
    gate = Gate(math.inf, 0.0)
    counts = conformal._cumulative(release(gate, conformal._columns(scores, grid)))
    assert counts[0].item() == pytest.approx(1)
    assert counts[-1].item() == pytest.approx(2)


def test_the_ledger_is_charged_and_the_statement_covers_everything():
    posterior, data = classes(500, privacy=trained())
    ledger = dpbnn.Ledger(epsilon=1.0, delta=1e-5)
    tempered = dpbnn.recalibrate(posterior, data, 0.4, ledger=ledger)
    found = dpbnn.conformalize(tempered, data, 0.4, ledger=ledger)
    labels = [m["label"] for m in found.privacy.mechanisms]
    assert labels == ["sgld", "recalibration", "conformal calibration"]
    assert ledger.releases == 6
    assert tempered.privacy.epsilon < found.privacy.epsilon < tempered.privacy.epsilon + 0.4
    with pytest.raises(dpbnn.BudgetExceeded):
        dpbnn.conformalize(posterior, data, 0.9, ledger=ledger)
    assert ledger.releases == 6


def test_bad_settings_and_data_are_refused_before_anything_is_spent():
    posterior, (x, y) = classes(100)
    ledger = dpbnn.Ledger(epsilon=1.0, delta=1e-5)
    plan = dpbnn.plan(epsilon=0.5, delta=1e-5, n=100, steps=3, sampling="full-batch")
    for data, options, message in (
        ((x, y), {"alpha": 0.0}, "alpha=0"),
        ((x, y), {"beta": 0.0}, "beta=0"),
        ((x, y + 3), {}, "labels"),
        ((x, y.double() / 2), {}, "integers"),
        ((x, y), {"epsilon": None, "plan": plan}, "3 steps"),
    ):
        with pytest.raises(ValueError, match=message):
            dpbnn.conformalize(posterior, data, **{"epsilon": 0.5, **options}, ledger=ledger)
    assert ledger.releases == 0


def threshold_of(data, relation="zero-out"):
    posterior, _ = classes(1)
    ledger = dpbnn.Ledger(relation=relation)
    return dpbnn.conformalize(posterior, data, 1.0, 1e-5, ledger=ledger).threshold


def test_neighbours_move_the_release_by_at_most_its_sensitivity():
    """The surest and rightest record has the lowest score, hence the longest column."""
    _, (x, y) = classes(50)
    x[7], y[7] = 1e4 * x[7], 0
    y[7] = classes(1)[0].predict(x[7:8]).mode[0]
    assert dpbnn.replay(threshold_of, (x, y), 7).check().worst == pytest.approx(1, rel=1e-3)
    for record in (0, 20):
        dpbnn.replay(threshold_of, (x, y), record).check()
    other = y.clone()
    other[7] = (y[7] + 1) % 3
    dpbnn.replay(lambda d: threshold_of(d, "replace-one"), (x, y), (x, other)).check()


def test_replay_sees_cumulative_counts_that_claim_the_sensitivity_of_plain_ones(monkeypatch):
    """A record that adds 1 to every cumulative count moves the sum by 16, not by 1.68."""

    class Unclipped(Gate):
        def _weights(self, chunk):
            return torch.ones(chunk.batch_size, dtype=torch.double)

    monkeypatch.setattr("dpbnn.calibration.release.Gate", Unclipped)
    monkeypatch.setattr(prefix, "root", lambda n: torch.ones(n, n, dtype=torch.double).tril())
    monkeypatch.setattr(prefix, "sensitivity", lambda n: 1.0)
    _, (x, y) = classes(50)
    with pytest.raises(dpbnn.PrivacyBug, match="times its sensitivity"):
        dpbnn.replay(threshold_of, (x, y), 0).check()


def test_it_can_be_saved():
    posterior, data = classes(400, privacy=trained())
    found = dpbnn.conformalize(posterior, data, 1.0)
    again = ConformalPosterior.from_dict(json.loads(found.to_json()), posterior)
    assert again.to_dict() == found.to_dict()
    assert again.predict_set(data[0]).equal(found.predict_set(data[0]))
    values = {**found.to_dict(), "threshold": None}
    assert ConformalPosterior.from_dict(values, posterior).threshold == math.inf
    with pytest.raises(ValueError, match="schema 1"):
        ConformalPosterior.from_dict({"schema": 3}, posterior)
