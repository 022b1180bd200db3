"""A new sampler is one file and its registration: batches, gate, ledger, accountants, fit."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
import torch
from scipy.special import gammaln, logsumexp
from toy_sampler import CyclicPoisson

import dpbnn
from dpbnn.contributions import DenseContributions
from dpbnn.privacy.accountants import ACCOUNTANTS, default_accountant
from dpbnn.privacy.events import UnsupportedEvent
from dpbnn.privacy.sampling import SAMPLERS, Participation, Sampler, register

DELTA = 1e-5
DRAW = CyclicPoisson(90, 6, groups=3)


def renyi_epsilon(rate, sigma, count, delta):
    """The formula of the subsampled Gaussian at whole orders, with the improved conversion."""
    best = math.inf
    for a in range(2, 200):
        k = np.arange(a + 1)
        terms = gammaln(a + 1) - gammaln(k + 1) - gammaln(a - k + 1) + k * math.log(rate)
        terms += (a - k) * math.log1p(-rate) + (k * k - k) / (2 * sigma**2)
        renyi = count * logsumexp(terms) / (a - 1)
        best = min(best, renyi + math.log((a - 1) / a) - math.log(delta * a) / (a - 1))
    return best


def released(steps, sigma=2.0, **options):
    gate = dpbnn.Gate(1.0, sigma, DRAW, **options)
    for batch in DRAW.batches(steps):
        gate(DenseContributions(torch.ones(len(batch), 2)), records=batch)
    return gate


def test_batches_are_poisson_within_the_group_whose_turn_it_is():
    batches = list(DRAW.batches(3000, key=b"k" * 32))
    for step, batch in enumerate(batches):
        assert (batch % 3 == step % 3).all()
    joined = np.bincount(torch.cat(batches).numpy(), minlength=90)
    assert abs(joined - 200).max() < 5 * math.sqrt(1000 * 0.2 * 0.8)
    assert np.var([len(batch) for batch in batches]) == pytest.approx(30 * 0.2 * 0.8, rel=0.1)


@pytest.mark.parametrize("steps", [9, 10])
def test_epsilon_is_that_of_the_releases_of_one_group(steps):
    ledger = released(steps).ledger
    expected = renyi_epsilon(0.2, 2.0, math.ceil(steps / 3), DELTA)
    assert ledger.epsilon(DELTA, "rdp") == pytest.approx(expected, rel=1e-2)
    poisson = dpbnn.Poisson(30, 6).event(2.0, math.ceil(steps / 3))
    exact = ACCOUNTANTS["pld"].epsilon([poisson], DELTA)
    assert ledger.epsilon(DELTA) == pytest.approx(exact, rel=1e-3)
    everywhere = dpbnn.Poisson(90, 6).event(2.0, steps)
    assert ledger.epsilon(DELTA) > ACCOUNTANTS["pld"].epsilon([everywhere], DELTA)


def test_steps_that_fall_on_one_group_are_not_taken_for_a_cycle():
    """Three gates that each make step 0 release the same group three times."""
    ledger = dpbnn.Ledger()
    for _ in range(3):
        released(1, ledger=ledger)
    three = ACCOUNTANTS["pld"].epsilon([dpbnn.Poisson(30, 6).event(2.0, 3)], DELTA)
    assert ledger.epsilon(DELTA) == pytest.approx(three, rel=1e-3)


def test_accountants_without_an_analysis_refuse_it():
    event = DRAW.event(2.0, 6)
    assert default_accountant([event]) == "pld"
    for name in ("exact", "gdp-clt"):
        with pytest.raises(UnsupportedEvent, match="cyclic-poisson"):
            ACCOUNTANTS[name].epsilon([event], DELTA)


def test_relations_without_an_analysis_are_refused():
    for relation in ("add/remove", "replace-one"):
        with pytest.raises(UnsupportedEvent, match=r"cyclic-poisson sampling; use relation='zero"):
            released(1, ledger=dpbnn.Ledger(relation=relation))


def test_a_ledger_on_disk_gives_the_event_back(tmp_path, monkeypatch):
    ledger = dpbnn.Ledger(tmp_path / "ledger.jsonl", delta=DELTA)
    gate = released(4, ledger=ledger)
    again = dpbnn.Ledger(ledger.path)
    expected = dataclasses.replace(DRAW.event(2.0, 4), order=gate.attempt.key)
    assert again.events == ledger.events == (expected,)
    assert again.epsilon() == ledger.epsilon()
    assert gate.statement(delta=DELTA).mechanisms[0]["parameters"] == {"groups": 3}
    monkeypatch.delitem(SAMPLERS, "cyclic-poisson")
    with pytest.raises(UnsupportedEvent, match=r"sampling='cyclic-poisson'.*import the module"):
        dpbnn.Ledger(ledger.path)


def test_plans_and_fits_take_it_by_its_name():
    plan = dpbnn.plan(
        epsilon=2.0, delta=DELTA, n=90, batch_size=6, steps=12, sampling="cyclic-poisson"
    )
    assert plan.sampler == DRAW
    expected = renyi_epsilon(0.2, plan.noise_multiplier, 4, DELTA)
    assert plan.epsilons()["rdp"] == pytest.approx(expected, rel=2e-2)  # it has broken orders too
    five = CyclicPoisson(90, 6, groups=5)
    other = dataclasses.replace(plan, sampler=five, target_epsilon=None)
    assert dpbnn.Plan.from_json(other.to_json()).sampler == five
    data = torch.randn(90, 2), torch.arange(90) % 2
    posterior = dpbnn.fit(dpbnn.mlp(2, (4,), 2), data, method=dpbnn.SGD(), plan=plan)
    assert posterior.privacy.private
    assert posterior.privacy.epsilon == pytest.approx(plan.epsilon)
    assert "cyclic-poisson sampling" in " ".join(str(posterior.privacy).split())
    result = dpbnn.replay(dpbnn.SGD(), data, 7, model=dpbnn.mlp(2, (4,), 2), plan=plan).check()
    assert sum(distance > 0 for distance in result.distances) <= 4


def test_a_sampler_that_claims_a_closed_form_it_has_not_is_refused():
    class Wrong(dpbnn.Poisson):
        name = "wrong"
        relations = tuple(dpbnn.Relation)

    with pytest.raises(ValueError, match="no analysis under replace-one"):
        register(Wrong)
    for taken in ("poisson", "cyclic-poisson"):
        with pytest.raises(ValueError, match="registered already"):
            register(type("Again", (dpbnn.Poisson,), {"name": taken}))


def test_a_sampler_with_an_event_of_its_own_does_not_inherit_a_closed_form():
    """Its releases hold the record for sure, and its parent's are Poisson-sampled."""

    class Sure(dpbnn.Poisson):
        name = "sure"

        @classmethod
        def dp_event(cls, event, noise):
            return dp_accounting.SelfComposedDpEvent(noise, event.count)

    with pytest.raises(ValueError, match=r"closed form of INDEPENDENT from its parent"):
        register(Sure)
    assert "sure" not in SAMPLERS


class Window(Sampler):
    """Any batch may hold any record; where it begins is public."""

    name = "window"
    relations = (dpbnn.Relation.ZERO_OUT,)
    participation = Participation.EVERY
    by_position = True

    def _draw(self, step, generator, records):
        return np.arange(int(self.batch_size))


@pytest.mark.parametrize("name", ["exact", "pld", "rdp", "gdp-clt"])
def test_where_every_release_may_hold_the_record_nothing_is_divided_by_passes_or_rate(
    monkeypatch, name
):
    monkeypatch.setitem(SAMPLERS, "window", Window)
    costs = ACCOUNTANTS[name]
    full = costs.epsilon([dpbnn.FullBatch(100).event(2.0, 10)], DELTA)
    assert costs.epsilon([Window(100, 10).event(2.0, 10)], DELTA) == full


def test_an_observer_takes_no_rate_for_a_chance_either(monkeypatch):
    monkeypatch.setitem(SAMPLERS, "window", Window)
    found = []
    for draw in (dpbnn.FullBatch(100), Window(100, 10)):
        event = draw.event(2.0, 2)
        plan = dpbnn.Plan(draw, ((2.0, 4),), DELTA, 1.0, dpbnn.Relation.ZERO_OUT, "exact")
        observer = dpbnn.BayesianAccountant()
        observer.begin(plan, [event])
        for _ in range(2):
            observer.watch(draw.event(2.0), 1.0, torch.ones(10))
        found.append(observer.raw_estimate().epsilon_mu)
    assert found[0] == found[1]


def test_a_subclass_is_not_accounted_for_under_its_parents_name(monkeypatch):
    class Biased(dpbnn.Poisson):
        def _draw(self, step, generator, records):
            return np.arange(int(self.batch_size))

    with pytest.raises(UnsupportedEvent, match=r"Biased: .*'poisson'.* @register"):
        Biased(100, 10).event(1.0)
    with pytest.raises(UnsupportedEvent, match="Biased"):
        dpbnn.Gate(1.0, 1.0, sampler=Biased(100, 10))(dpbnn.DenseContributions(torch.ones(10, 2)))
    Biased.name = "biased"
    monkeypatch.setitem(SAMPLERS, "biased", Biased)
    assert Biased(100, 10).event(1.0).sampling == "biased"


class Repeated(Sampler):
    """Draws with replacement: a record may be there as often as the batch is long."""

    name = "repeated"
    relations = (dpbnn.Relation.ZERO_OUT, dpbnn.Relation.REPLACE_ONE)

    @classmethod
    def dp_event(cls, event, noise):
        worst = dp_accounting.GaussianDpEvent(noise.noise_multiplier / event.batch_size)
        return dp_accounting.SelfComposedDpEvent(worst, event.count)

    def _draw(self, step, generator, records):
        return generator.integers(0, self.n, int(self.batch_size))


@pytest.mark.parametrize("batch_size", [5, 10])
def test_what_a_sampler_says_holds_at_every_rate(monkeypatch, batch_size):
    monkeypatch.setitem(SAMPLERS, "repeated", Repeated)
    event = Repeated(10, batch_size).event(20.0, 3)
    full = dpbnn.FullBatch(10).event(20.0 / batch_size, 3)
    assert default_accountant([event]) == "pld"
    for name in ("pld", "rdp"):
        true = ACCOUNTANTS[name].epsilon([full], DELTA)
        assert ACCOUNTANTS[name].epsilon([event], DELTA) == pytest.approx(true, rel=1e-3)
    for name, relation in (("exact", "zero-out"), ("pld", "replace-one")):
        with pytest.raises(UnsupportedEvent, match="repeated"):
            ACCOUNTANTS[name].epsilon([event], DELTA, dpbnn.Relation.parse(relation))
