"""Bounds of a schema that are learned privately: one release, charged, and tied to its ledger."""

import copy
import math

import broken_versions as broken
import numpy as np
import pytest
from twins import fails_on, twins_of

import dpbnn
from dpbnn.data import Schema, TableError, as_table
from dpbnn.data.paid import LABEL, PaidBounds, learn_bounds
from dpbnn.estimators.pages import described

DRAFT = {
    "target": {"name": "y", "classes": ["no", "yes"]},
    "columns": {
        "age": {"bounds": ["TODO", "TODO"]},
        "dose": {"bounds": [0, 10]},
        "income": {"bounds": ["TODO", "TODO"], "log": True},
        "note": {"categories": ["TODO"]},
    },
}
N = 3000


def table(n=N, seed=0):
    generator = np.random.default_rng(seed)
    return as_table({
        "age": np.clip(generator.normal(45, 15, n), 18, 95),
        "dose": generator.random(n),
        "income": np.exp(generator.normal(10, 1, n)),
        "note": np.array(["a"] * n, dtype=object),
        "y": np.array(["no", "yes"], dtype=object)[generator.integers(0, 2, n)],
    })  # fmt: skip


def planned(epsilon=0.1, n=N):
    return dpbnn.plan(epsilon=epsilon, delta=1e-5, n=n, sampling="full-batch", steps=1)


def learned(rows=None, draft=DRAFT, ledger=None, **options):
    book = dpbnn.Ledger(epsilon=1.0, delta=1e-5) if ledger is None else ledger
    filled, hidden = learn_bounds(draft, rows or table(), plan=planned(), ledger=book, **options)
    return filled, hidden, book


def test_bounds_that_are_todo_are_filled_in_and_usable_at_three_thousand_rows():
    """At epsilon 0.1 and two columns the noise is 44 counts of 3000; its seed is fixed here."""
    before = copy.deepcopy(DRAFT)
    filled, hidden, book = learned(ledger=dpbnn.Ledger(), noise=dpbnn.NoiseSource.seeded(1))
    assert before == DRAFT
    assert hidden == ()
    values, columns = table(), filled["columns"]
    for name in ("age", "income"):
        low, high = columns[name]["bounds"]
        assert ((values[name] >= low) & (values[name] <= high)).mean() > 0.85
        assert high < 100 * np.quantile(values[name], 0.99)
    assert columns["income"]["bounds"][0] >= 0
    assert columns["dose"] == DRAFT["columns"]["dose"]
    assert columns["note"] == DRAFT["columns"]["note"]
    paid = filled["private_bounds"]
    assert paid == {"columns": ["age", "income"], "ledger": book.id, "head": book.head}


@fails_on(50, broken.bounds_are_charged_to_nobody)
def test_item_50_every_call_is_one_charged_release():
    book = dpbnn.Ledger(epsilon=0.12, delta=1e-5)
    learned(ledger=book)
    assert book.events == planned().own_events
    assert book.spent(LABEL) == book.events
    with pytest.raises(dpbnn.BudgetExceeded):
        learned(ledger=book)
    assert book.releases == 1


def test_the_ledger_is_charged_before_the_data_is_counted(monkeypatch):
    from dpbnn.data import statistics

    book = dpbnn.Ledger()

    class Unreadable(statistics._Cells):
        def chunks(self):
            raise RuntimeError(f"{book.releases} release recorded")

    monkeypatch.setattr(statistics, "_Cells", Unreadable)
    with pytest.raises(RuntimeError, match="1 release recorded"):
        learned(ledger=book)


@fails_on(50, broken.bounds_are_read_off_the_data)
def test_item_50_neighbours_are_within_the_sensitivity_and_nothing_else_moves():
    rows = table(600)
    x = np.stack([rows["age"], rows["income"]], 1)
    x[7] = -1e6
    plan = dpbnn.plan(epsilon=5.0, delta=1e-5, n=600, sampling="full-batch", steps=1)

    def release(values):
        own = as_table({"age": values[:, 0], "income": values[:, 1]})
        filled, hidden = learn_bounds(DRAFT, own, plan=plan, ledger=dpbnn.Ledger())
        return [filled["columns"]["age"]["bounds"], filled["columns"]["income"]["bounds"], hidden]

    missing = x.copy()
    missing[7] = math.nan
    for other in (7, missing):
        assert dpbnn.replay(release, x, other).check().worst == pytest.approx(1.0)


@fails_on(
    50,
    broken.any_ledger_goes_with_private_bounds,
    broken.ledgers_from_before_the_payment_will_do,
)
def test_item_50_a_schema_belongs_to_the_ledger_that_paid(tmp_path):
    """A second ledger, a copy from before the payment, and none at all are refused."""
    book = dpbnn.Ledger(tmp_path / "a.jsonl", epsilon=1.0, delta=1e-5)
    for name in ("a.jsonl", "a.jsonl.head"):
        (tmp_path / name.replace("a", "old", 1)).write_bytes((tmp_path / name).read_bytes())
    filled, _, _ = learned(ledger=book)
    filled["columns"].pop("note")
    schema = Schema.from_dict(filled)
    assert Schema.from_toml(schema.to_toml()) == schema
    schema.private_bounds.check(book)
    schema.private_bounds.check(dpbnn.Ledger(tmp_path / "a.jsonl"))
    other = dpbnn.Ledger(tmp_path / "b.jsonl", epsilon=1.0, delta=1e-5)
    learned(ledger=other)
    for wrong in (other, dpbnn.Ledger(tmp_path / "old.jsonl"), dpbnn.Ledger(), None):
        with pytest.raises(ValueError, match="learned privately and paid for by another ledger"):
            schema.private_bounds.check(wrong)


def test_more_bounds_are_bought_from_the_same_ledger_only():
    draft = copy.deepcopy(DRAFT)
    draft["columns"]["dose"] = {"bounds": [0, 10]}
    filled, _, book = learned(draft=draft)
    filled["columns"]["dose"] = {"bounds": ["TODO", "TODO"]}
    with pytest.raises(ValueError, match="another ledger"):
        learned(draft=filled)
    again, _, _ = learned(draft=filled, ledger=book)
    assert again["private_bounds"]["columns"] == ["age", "income", "dose"]
    assert again["columns"]["age"] == filled["columns"]["age"]
    assert book.releases == 2


def test_columns_without_numbers_stay_todo_and_raise_nothing():
    rows = as_table({
        "age": np.array(["old"] * N, dtype=object), "income": np.full(N, 5000.0),
        "dose": np.zeros(N), "y": np.array(["no", "yes"] * (N // 2), dtype=object),
    })  # fmt: skip
    filled, hidden, _ = learned(rows, ledger=dpbnn.Ledger(), noise=dpbnn.NoiseSource.seeded(1))
    assert hidden == ("age",)
    assert filled["columns"]["age"]["bounds"] == ["TODO", "TODO"]
    assert filled["private_bounds"]["columns"] == ["income"]


def test_nothing_to_learn_and_too_few_rows_are_refused_before_spending():
    book = dpbnn.Ledger()
    with pytest.raises(TableError, match="nothing to learn"):
        learned(draft={"target": {"name": "y"}, "columns": {"a": {"bounds": [0, 1]}}}, ledger=book)
    with pytest.raises(TableError, match="would protect one row only"):
        learned(draft={**DRAFT, "unit": "patient_id"}, ledger=book)  # a fit would refuse them
    with pytest.raises(ValueError, match="too few records"):
        learn_bounds(DRAFT, table(100), plan=planned(n=100), ledger=book)
    with pytest.raises(TableError, match="columns, ledger and head"):
        PaidBounds.from_dict({"columns": []})
    assert book.untouched


def test_a_page_says_which_bounds_were_paid_for():
    paid = {"columns": ["age", "y"], "ledger": "1", "head": "2"}
    schema = Schema.from_dict(
        {"target": {"name": "y", "bounds": [0, 1]}, "private_bounds": paid,
         "columns": {"age": {"bounds": [0, 9]}, "dose": {"bounds": [0, 9]}}})  # fmt: skip
    assert described(schema) == {
        "age": "number, 0 to 9, released privately",
        "dose": "number, 0 to 9",
        "y (target)": "number, 0 to 1, released privately",
    }


def test_the_bounds_of_a_regression_target_are_learned_too():
    draft = {"target": {"name": "income", "bounds": ["TODO", "TODO"]},
             "columns": {"dose": {"bounds": [0, 1]}}}  # fmt: skip
    filled, _, _ = learned(draft=draft)
    assert Schema.from_dict(filled).target.bounds[1] > 1e4


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
