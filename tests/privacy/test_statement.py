import dataclasses
import json
import math

import pytest

import dpbnn
from dpbnn.privacy.events import Event
from dpbnn.privacy.statement import LabelledEvent, PrivacyStatement, joined

SAMPLER = dpbnn.Poisson(60_000, 256)


def statement(**details):
    return PrivacyStatement.of([SAMPLER.event(1.3, 3516)], delta=1e-5, **details)


def test_everything_a_reader_needs_is_there():
    text = str(statement(clip=1.5, labels=["training"], unit="one patient", tuning_runs=3))
    for word in (
        "epsilon = 0.8646",
        "delta = 1e-05",
        "one patient",
        "zero-out",
        "pld",
        "dp-accounting",
        "training: 3516 releases",
        "sigma = 1.3 x clip 1.5",
        "poisson sampling, rate 0.00426667",
        "n = 60000",
        "operating-system entropy",
        "3 tuning runs declared",
        "not part of epsilon",
    ):
        assert word in " ".join(text.split()), word


def test_json_round_trip_with_a_schema_version():
    first = statement(clip=1.5)
    assert json.loads(first.to_json())["schema"] == 1
    assert PrivacyStatement.from_json(first.to_json()) == first
    with pytest.raises(ValueError, match="schema=2"):
        PrivacyStatement.from_json(first.to_json().replace('"schema": 1', '"schema": 2'))


@pytest.mark.parametrize(
    ("made", "banner"),
    [
        (PrivacyStatement.not_private(), "*** NOT PRIVATE ***"),
        (PrivacyStatement.debug("seeded with 7"), "*** DEBUG: NOT PRIVATE ***"),
        (statement(debug=True), "*** DEBUG: NOT PRIVATE ***"),
        (
            PrivacyStatement.of([Event("full-batch", 0.0)], delta=1e-5),
            "*** NOT PRIVATE ***",
        ),
    ],
)
def test_no_guarantee_is_unmistakable(made, banner):
    assert str(made).startswith(banner)
    assert "epsilon =" not in str(made)
    assert not made.private
    assert made.epsilon == math.inf
    values = json.loads(made.to_json())
    assert values["epsilon"] is None
    assert values["private"] is False
    assert PrivacyStatement.from_json(made.to_json()) == made


def test_the_approximation_is_called_one():
    text = str(statement(accountant="gdp-clt"))
    assert "epsilon about" in text
    assert "can lie below the true epsilon" in " ".join(text.split())


def test_a_weak_delta_is_remarked_on():
    weak = PrivacyStatement.of([SAMPLER.event(1.3, 10)], delta=1e-3)
    assert any("not below 1/n" in caveat for caveat in weak.caveats)


def test_undeclared_tuning_is_said_to_be_undeclared():
    assert "not declared" in str(statement())


def test_a_plans_statement_carries_its_numbers():
    plan = dpbnn.plan(noise_multiplier=1.3, delta=1e-5, n=60_000, batch_size=256, epochs=15)
    made = plan.statement(clip=1.5)
    assert made.epsilon == plan.epsilon
    assert made.mechanisms[0]["clip"] == 1.5
    assert made.mechanisms[0]["releases"] == 3516


def test_mechanisms_and_events_say_the_same():
    partition = dpbnn.Partition(100, 10)
    events = [
        LabelledEvent(SAMPLER.event(1.3, 10), "training", 1.5, "book"),
        LabelledEvent(SAMPLER.event(1.3, 5), "training", 1.5, "book"),
        LabelledEvent(partition.event(4.0, 3), "passes"),
        LabelledEvent(partition.event(4.0, 3, 3), "passes"),
        LabelledEvent(Event("full-batch", 9.0, 2)),
    ]
    made = PrivacyStatement.of(events, delta=1e-5)
    assert [m["releases"] for m in made.mechanisms] == [15, 3, 3, 2]
    assert [m["ledger"] for m in made.mechanisms] == ["book", "", "", ""]
    assert [m["start"] for m in made.mechanisms if "start" in m] == [0, 3]
    again = PrivacyStatement.from_json(made.to_json())
    assert again.released == made.released
    assert made.epsilon == PrivacyStatement.of(again.released, delta=1e-5).epsilon
    earlier = json.loads(made.to_json())
    for mechanism in earlier["mechanisms"]:
        del mechanism["ledger"]  # as statements were before ledgers had names
    assert [part.ledger for part in PrivacyStatement.from_dict(earlier).released] == [""] * 4


def book(*, label, sigma, releases, like=None):
    ledger = like or dpbnn.Ledger(delta=1e-5)
    ledger.spend(Event("full-batch", sigma, releases), label=label)
    return ledger


def test_joined_statements_count_every_release_once():
    ledger = book(label="training", sigma=9.0, releases=4)
    training = ledger.statement(unit="one patient", covers=["a map"])
    book(label="calibration", sigma=8.0, releases=2, like=ledger)
    same = joined(training, ledger.statement(), 2)
    assert [m["releases"] for m in same.mechanisms] == [4, 2]
    assert same.epsilon == ledger.epsilon()
    assert same.unit == "one patient"
    assert "a map" in same.covers
    other = book(label="calibration", sigma=8.0, releases=2)
    apart = joined(training, other.statement(), 2)
    assert apart.mechanisms[0]["ledger"] == ledger.id
    assert apart.epsilon == same.epsilon > other.epsilon()


def test_joined_statements_are_not_private_where_something_is_missing():
    ledger = book(label="training", sigma=9.0, releases=4)
    training, empty = ledger.statement(), PrivacyStatement.not_private()
    for before, later, made, reason in (
        (None, training, 0, "nothing is known"),
        (empty, training, 0, "without privacy"),
        (training, PrivacyStatement.debug(), 1, "debug"),
        (training, training, 1, "lacks releases"),
        (dataclasses.replace(training, complete=False), training, 0, "lacks releases"),
        (
            training,
            dataclasses.replace(
                book(label="other", sigma=9.0, releases=1).statement(), complete=False
            ),
            1,
            "lacks releases",
        ),
    ):
        found = joined(before, later, made)
        assert not found.private
        assert reason in found.reason
