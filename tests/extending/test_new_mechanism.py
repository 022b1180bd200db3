"""A new mechanism is one file and its registration: gate, ledger, accountants and statement."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest
import torch
from scipy import stats
from toy_mechanism import LaplaceNoise
from toy_sampler import CyclicPoisson

import dpbnn
from dpbnn.contributions import DenseContributions
from dpbnn.privacy.accountants import ACCOUNTANTS, Accountant, default_accountant
from dpbnn.privacy.events import Event, UnsupportedEvent
from dpbnn.privacy.mechanisms import MECHANISMS, register
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.relation import Relation
from dpbnn.privacy.statement import LabelledEvent, PrivacyStatement

DELTA = 1e-3


def laplace_gate(scale=2.0, **options):
    return dpbnn.Gate(clip=1.0, mechanism=LaplaceNoise(scale), **options)


def one_number(records=5):
    return DenseContributions(torch.full((records, 1), 0.5))


def laplace_epsilon(scale, delta):
    """From delta(epsilon) = 1 - exp((epsilon - 1/b) / 2) of one Laplace release."""
    return max(0.0, 1 / scale + 2 * math.log1p(-delta))


def two_releases_epsilon(scale, delta):
    """Integrate the hockey-stick divergence of two releases over the plane."""
    x = np.linspace(-30 * scale, 30 * scale + 1, 3001)
    p, q = (np.exp(-np.abs(x - shift) / scale) / (2 * scale) for shift in (0, 1))
    one, two, cell = np.outer(p, p), np.outer(q, q), (x[1] - x[0]) ** 2
    low, high = 0.0, 2 / scale
    for _ in range(40):
        middle = (low + high) / 2
        above = np.maximum(one - math.exp(middle) * two, 0).sum() * cell > delta
        low, high = (middle, high) if above else (low, middle)
    return high


@pytest.mark.parametrize(("relation", "shift"), [("zero-out", 1), ("replace-one", 2)])
def test_epsilon_is_that_of_the_laplace_mechanism(relation, shift):
    gate = laplace_gate(ledger=dpbnn.Ledger(relation=relation))
    gate(one_number())
    exact = laplace_epsilon(2.0 / shift, DELTA)
    assert exact <= gate.ledger.epsilon(DELTA) <= exact + 2e-4
    assert gate.statement(delta=DELTA).accountant == "pld"


def test_two_releases_compose():
    gate = laplace_gate()
    for _ in range(2):
        gate(one_number())
    exact = two_releases_epsilon(2.0, DELTA)
    assert gate.ledger.epsilon(DELTA) == pytest.approx(exact, rel=2e-3)
    assert gate.ledger.epsilon(DELTA) < 2 * laplace_epsilon(2.0, DELTA / 2)


def test_poisson_batches_amplify_it():
    rate = 0.2
    gate = laplace_gate(sampler=dpbnn.Poisson(100, 100 * rate))
    gate(one_number())
    inside = math.expm1(laplace_epsilon(2.0, DELTA / rate))
    assert gate.ledger.epsilon(DELTA) == pytest.approx(math.log1p(rate * inside), abs=2e-4)


def test_a_partition_counts_its_passes():
    gate = laplace_gate(sampler=dpbnn.Partition(30, 10))
    for _ in range(6):
        gate(one_number(10))
    assert gate.ledger.epsilon(DELTA) == pytest.approx(two_releases_epsilon(2.0, DELTA), rel=2e-3)


def test_it_composes_with_gaussian_releases_in_one_ledger():
    ledger = dpbnn.Ledger()
    laplace_gate(ledger=ledger)(one_number())
    alone = ledger.epsilon(DELTA)
    dpbnn.Gate(1.0, mechanism=dpbnn.GaussianNoise(5.0), ledger=ledger)(one_number())
    gaussian = ACCOUNTANTS["exact"].epsilon([Event("full-batch", 5.0)], DELTA)
    assert max(alone, gaussian) < ledger.epsilon(DELTA) < alone + gaussian
    tiny = dpbnn.Ledger()
    laplace_gate(ledger=tiny)(one_number())
    dpbnn.Gate(1.0, 1e4, ledger=tiny)(one_number())
    assert tiny.epsilon(DELTA) == pytest.approx(alone, rel=1e-2)


def test_rdp_covers_it_and_the_gaussian_formulas_refuse_it():
    event = LaplaceNoise(2.0).on(Event("full-batch", 2.0))
    assert default_accountant([event]) == "pld"
    assert ACCOUNTANTS["rdp"].epsilon([event], DELTA) >= laplace_epsilon(2.0, DELTA)
    for name in ("exact", "gdp-clt"):
        with pytest.raises(UnsupportedEvent, match="laplace noise"):
            ACCOUNTANTS[name].epsilon([event], DELTA)
    fixed = LaplaceNoise(2.0).on(Event("fixed-size", 2.0, 1, 10, 5))
    for name in ("pld", "rdp"):
        with pytest.raises(UnsupportedEvent, match="laplace noise with fixed-size sampling"):
            ACCOUNTANTS[name].epsilon([fixed], DELTA, Relation.REPLACE_ONE)


def test_a_ledger_on_disk_gives_the_event_back(tmp_path):
    ledger = dpbnn.Ledger(tmp_path / "ledger.jsonl", delta=DELTA)
    laplace_gate(ledger=ledger, label="a sum")(one_number())
    again = dpbnn.Ledger(ledger.path)
    assert again.events == ledger.events == (LaplaceNoise(2.0).on(Event("full-batch", 2.0)),)
    assert again.epsilon() == ledger.epsilon()
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert [line["event"]["mechanism"] for line in lines if "event" in line] == ["laplace"]


def test_a_ledger_of_a_mechanism_that_is_not_registered_is_refused(tmp_path, monkeypatch):
    ledger = dpbnn.Ledger(tmp_path / "ledger.jsonl", delta=DELTA)
    laplace_gate(ledger=ledger)(one_number())
    before = ledger.path.read_bytes()
    monkeypatch.delitem(MECHANISMS, "laplace")
    for opened in (dpbnn.Ledger, dpbnn.Ledger.repair):
        with pytest.raises(UnsupportedEvent, match=r"mechanism='laplace'.*import the module"):
            opened(ledger.path)
    assert ledger.path.read_bytes() == before


def test_the_statement_names_it_and_gaussian_ones_are_as_before(monkeypatch):
    gate = laplace_gate(label="a sum")
    gate(one_number())
    statement = gate.statement(delta=DELTA)
    assert "Laplace noise, scale = 2 x clip 1" in " ".join(str(statement).split())
    again = PrivacyStatement.from_json(statement.to_json())
    assert again == statement
    assert LabelledEvent.from_dict(again.mechanisms[0]).event == gate.ledger.events[0]
    monkeypatch.delitem(MECHANISMS, "laplace")
    assert "laplace noise, scale = 2" in " ".join(str(again).split())
    gaussian = dpbnn.Gate(1.0, mechanism=dpbnn.GaussianNoise(2.0))
    gaussian(one_number())
    same = dpbnn.Gate(1.0, 2.0)
    same(one_number())
    assert gaussian.ledger.events == same.ledger.events
    assert "mechanism" not in gaussian.statement(delta=DELTA).mechanisms[0]
    assert "mechanism" not in gaussian.ledger.events[0].to_dict()


def test_the_noise_is_laplace_noise_on_the_gates_grid():
    """A KS test at level 1e-4 with a seed, which also sees a quarter more noise."""
    gate = laplace_gate(2.0, noise=NoiseSource.seeded(3))
    gate.reserve(4000)
    nothing = DenseContributions(torch.zeros(1, 1))
    drawn = np.array([gate(nothing)["value"].item() for _ in range(4000)])
    assert stats.kstest(drawn, "laplace", (0, 2.0)).pvalue > 1e-4
    assert stats.kstest(drawn, "laplace", (0, 2.5)).pvalue < 1e-4
    steps = drawn / 2.0**-18
    assert (steps == np.floor(steps)).all()


def test_what_it_has_no_analysis_of_is_refused_before_anything_is_spent():
    gate = laplace_gate()
    with pytest.raises(ValueError, match="releases of one number"):
        gate(DenseContributions(torch.ones(3, 2)))
    assert gate.ledger.releases == 0
    for given in ({}, {"noise_multiplier": 1.0, "mechanism": LaplaceNoise(1.0)}):
        with pytest.raises(ValueError, match="give one of the two"):
            dpbnn.Gate(1.0, **given)


def test_charges_of_another_mechanism_do_not_serve_it():
    ledger, attempt = dpbnn.Ledger(), dpbnn.privacy.ledger.Attempt.new()
    source = NoiseSource()
    dpbnn.Gate(1.0, 2.0, ledger=ledger, noise=source, attempt=attempt).reserve(3)
    assert dpbnn.Gate(1.0, 2.0, ledger=ledger, noise=source, attempt=attempt).reserved == 3
    assert laplace_gate(ledger=ledger, noise=source, attempt=attempt).reserved == 0
    laplace_gate(ledger=ledger, noise=source, attempt=attempt)(one_number())
    assert ledger.releases == 4


def test_replay_measures_it():
    def run(values):
        gate = laplace_gate()
        return gate(DenseContributions(values), records=torch.arange(len(values)))["value"]

    assert dpbnn.replay(run, torch.full((5, 1), 3.0), 2).check().worst == pytest.approx(1, rel=1e-3)


class Pure(Accountant):
    """Pure epsilon of Laplace releases adds up."""

    name = "pure"

    def _refusal(self, event, relation):
        return None if event.mechanism == "laplace" else "pure is for Laplace noise"

    def _epsilon(self, events, delta, relation):
        return sum(event.count * relation.shift / event.noise_multiplier for event in events)


def test_a_mechanism_can_bring_its_own_accountant(monkeypatch):
    monkeypatch.setitem(ACCOUNTANTS, "pure", Pure())
    ledger = dpbnn.Ledger(epsilon=1.6, delta=DELTA, accountant="pure")
    gate = laplace_gate(ledger=ledger)
    for _ in range(3):
        gate(one_number())
    assert gate.statement().epsilon == 1.5
    with pytest.raises(dpbnn.BudgetExceeded):
        gate(one_number())
    with pytest.raises(UnsupportedEvent, match="pure is for Laplace noise"):
        dpbnn.Gate(1.0, 1.0, ledger=ledger)(one_number())
    assert ledger.releases == 3


@dataclasses.dataclass(frozen=True)
class Widened(LaplaceNoise):
    """Laplace noise of the scale b times `wider`."""

    wider: float = 1.0

    name = "widened"

    def dp_event(self, shift):
        return dp_accounting.LaplaceDpEvent(self.wider * self.noise_multiplier / shift)


def test_charges_at_other_parameters_or_of_another_sampler_do_not_serve_it(monkeypatch):
    """A release at wider=1 must not be made on the charge of one at wider=100."""
    monkeypatch.setitem(MECHANISMS, "widened", Widened)
    ledger, attempt = dpbnn.Ledger(), dpbnn.privacy.ledger.Attempt.new()
    same = {"ledger": ledger, "noise": NoiseSource(), "attempt": attempt}
    dpbnn.Gate(1.0, mechanism=Widened(2.0, 100.0), **same).reserve(3)
    assert dpbnn.Gate(1.0, mechanism=Widened(2.0, 100.0), **same).reserved == 3
    assert dpbnn.Gate(1.0, mechanism=Widened(2.0), **same).reserved == 0
    sampler = dpbnn.Poisson(100, 5)
    assert dpbnn.Gate(1.0, mechanism=Widened(2.0, 100.0), sampler=sampler, **same).reserved == 0


def test_a_mechanism_that_was_not_registered_is_not_taken_for_its_parent():
    class Silent(dpbnn.GaussianNoise):
        def add(self, sums, clip, dtype, source):
            """Add nothing."""

    with pytest.raises(ValueError, match=r"Silent.*accounted for as that.*@register"):
        dpbnn.Gate(1.0, mechanism=Silent(2.0))


def test_a_mechanism_with_an_event_of_its_own_does_not_inherit_closed_forms():
    class Spiky(dpbnn.GaussianNoise):
        name = "spiky"

        def dp_event(self, shift):
            return dp_accounting.LaplaceDpEvent(self.noise_multiplier / shift)

    with pytest.raises(ValueError, match="say gaussian = False"):
        register(Spiky)
    assert "spiky" not in MECHANISMS


def test_sampler_and_mechanism_cannot_share_a_parameter(monkeypatch):
    """The sampler would read the mechanism's value, or lose its own on disk."""
    kind = dataclasses.make_dataclass(
        "Grouped", [("groups", int, 1)], bases=(LaplaceNoise,), frozen=True
    )
    kind.name = "grouped"
    monkeypatch.setitem(MECHANISMS, "grouped", kind)
    with pytest.raises(ValueError, match=r"groups: the cyclic-poisson sampler and grouped noise"):
        dpbnn.Gate(1.0, mechanism=kind(2.0, 2), sampler=CyclicPoisson(90, 6, groups=3))
