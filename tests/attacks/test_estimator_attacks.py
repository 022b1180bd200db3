"""Attacks on estimators: frames that teach the encoding, and fits that go on wrongly."""

import json
import warnings

import broken_versions as broken
import numpy as np
import pytest
from interruption import stopped_after
from twins import fails_on, twins_of

import dpbnn
from dpbnn.data import Column, Schema
from dpbnn.estimators import fitting, workspace

pytestmark = pytest.mark.filterwarnings("ignore:epsilon = ")
SCHEMA = Schema(
    (
        Column("age", bounds=(0, 100), missing="indicator"),
        Column("city", categories=("Ulm", "Bonn"), other=True),
    ),
    Column("ill", categories=("yes", "no")),
)


def people(n=60):
    rng = np.random.default_rng(0)
    age = rng.uniform(10, 60, n).round()
    ill = np.where(age + rng.normal(0, 5, n) > 35, "yes", "no")
    city = rng.choice(["Ulm", "Bonn"], n)
    return {"age": age.astype(object), "city": city.astype(object), "ill": ill.astype(object)}


def with_record(row, **values):
    table = people()
    for name, value in values.items():
        table[name][row] = value
    return table


def estimator(**more):
    settings = {"schema": SCHEMA, "epsilon": 5.0, "epochs": 12, "random_state": 0, **more}
    return dpbnn.PrivateBayesClassifier(**settings)


# 17: what is learned from the data outside the gate


@fails_on(17, broken.schemas_widen_to_the_data, broken.unknown_categories_are_learned)
def test_item_17_an_outlier_or_a_new_category_teaches_the_encoding_nothing():
    """Everything but the releases is the same with and without the record."""
    odd = with_record(7, age=99.0, city="Atlantis")
    blank = with_record(7, age=None, city=None, ill=None)

    def fit(data):
        model = estimator(epsilon=50.0, epochs=3, on_bad_rows="zero").fit(data)
        public = {name: values[:5] for name, values in people().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = model.inputs(public)
        return inputs.shape, model.classes_, model.standardisation_, model.predictive(public).mean

    dpbnn.replay(fit, odd, blank, trace=False).check()


# 35, 39, 40: fits that go on


def stopped(out, **more):
    """A fit that was interrupted after 5 of its steps."""
    model = estimator(**more)
    with stopped_after(5):
        model.fit(people(), out=out)
    return model


def crashed(out):
    """A fit that crashed after its standardisation, before any step."""
    model = estimator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting._Fit, "_trained", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.fit(people(), out=out)
    return model


@fails_on(35, broken.resumed_fits_take_any_ledger)
def test_item_35_released_statistics_are_used_with_their_ledger_alone(tmp_path):
    """Otherwise a standardisation that is in no ledger would be used for free."""
    model = crashed(tmp_path / "run")
    for name in ("ledger.jsonl", "ledger.jsonl.head"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(ValueError, match="has released is not in the ledger"):
        model.fit(people(), out=tmp_path / "run", resume=True)


@fails_on(35, broken.resumed_fits_take_any_ledger)
def test_item_35_a_fit_that_released_nothing_yet_keeps_to_its_ledger_too(tmp_path):
    """Otherwise what a crashed attempt has spent would be in another ledger than the statement."""
    book = tmp_path / "book.jsonl"
    model = estimator(ledger=book)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting._Fit, "_keep", lambda *_, **__: 1 / 0)
        patch.setattr(workspace.shutil, "rmtree", lambda *_, **__: None)  # nothing is cleaned up
        with pytest.raises(ZeroDivisionError):
            model.fit(people(), out=tmp_path / "run")
    assert dpbnn.Ledger(book).releases == 2
    with pytest.raises(ValueError, match="has released is not in the ledger"):
        model.set_params(ledger=None).fit(people(), out=tmp_path / "run", resume=True)


@fails_on(39, broken.resumed_fits_take_any_table)
def test_item_39_a_resumed_fit_takes_no_other_table(tmp_path):
    """Without keys the training would go on with new noise on another table."""
    model = stopped(tmp_path / "run")
    (tmp_path / "run" / "progress" / "training" / "keys.json").unlink()
    with pytest.raises(ValueError, match="the table is not that of the fit"):
        model.fit(with_record(7, age=99.0), out=tmp_path / "run", resume=True)


@fails_on(40, broken.resumed_fits_charge_nothing_again)
def test_item_40_statistics_that_are_released_again_are_paid_for_again(tmp_path):
    """A crash between the release and its record: the next attempt releases another one."""
    out = tmp_path / "run"
    model = crashed(out)
    path = out / "progress" / "released.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "values": {}}))
    once = dpbnn.Ledger(out / "ledger.jsonl").releases
    model.fit(people(), out=out, resume=True)
    held = dpbnn.Ledger(out / "ledger.jsonl")
    assert once == 2
    assert sum(event.count for event in held.spent("private standardisation")) == 4
    assert model.privacy_.epsilon == pytest.approx(held.statement(delta=1e-5).epsilon)


def test_item_37_a_folder_in_progress_is_locked_and_keeps_its_secrets(tmp_path):
    stopped(tmp_path / "run")
    progress = tmp_path / "run" / "progress"
    for secret in (progress / "private.json", progress / "training" / "keys.json"):
        assert secret.stat().st_mode & 0o077 == 0, secret
    with pytest.raises(ValueError, match="was interrupted"):
        estimator().fit(people(), out=tmp_path / "run")
    assert (progress / "training" / "keys.json").exists()


def test_item_13_a_fit_goes_on_once_from_one_interruption(tmp_path):
    """The end of a fit takes its keys and all that another attempt could go on from."""
    model = stopped(tmp_path / "run")
    model.fit(people(), out=tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "progress").exists()
    assert not list((tmp_path / "run").rglob("keys.json"))
    with pytest.raises(ValueError, match="holds no interrupted fit"):
        model.fit(people(), out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
