"""Inputs that a user calls public: the statement says that the guarantee does not cover them."""

import broken_versions as broken
import numpy as np
import pytest
import torch
from runs_under_attack import dataset, fit, plan
from torch import nn
from twins import fails_on, twins_of

import dpbnn
from dpbnn.silos import Site

PATH = {"learning_rate": 0.5, "keep": 3}
NAMED = "the inputs that the method's function `inputs` returns"


def inputs(number):
    return torch.zeros(number, 3)


def taken(x):
    """Rows of the data, which no check can tell from public ones that are equal to them."""
    return lambda number: x[torch.arange(number) % len(x)]


@fails_on(69, broken.inputs_are_not_named)
def test_item_69_inputs_of_a_user_are_in_the_statement_as_public(tmp_path):
    given = dpbnn.SGD(**PATH, inputs=taken(dataset()[0]))
    fit(method=given).save(tmp_path / "saved")
    privacy = dpbnn.load(tmp_path / "saved").privacy
    assert NAMED in privacy.public
    assert NAMED in " ".join(str(privacy).split())
    assert not any(NAMED in item for item in fit(method=dpbnn.SGD(**PATH)).privacy.public)
    known = dpbnn.NoiseAware(rounds=1, inputs=taken(dataset()[0]))
    assert known.public() == (NAMED,)
    assert dpbnn.NoiseAware().public() == ()


@fails_on(69, broken.inputs_are_not_named)
def test_item_69_a_site_says_so_too():
    parts = [(x, y) for x, y in zip(*(p.split(20) for p in dataset()), strict=True)]
    site = Site(
        lambda: nn.Linear(3, 2), parts[0], site=0, records=(20, 20), plan=plan(),
        method=dpbnn.SGD(**PATH, inputs=inputs),
    )  # fmt: skip
    site.message()
    for knowing in (None, 1):
        assert NAMED in site.statement(knowing).public


@fails_on(69, broken.inputs_are_not_named, broken.a_selection_forgets_what_is_public)
def test_item_69_what_follows_the_training_keeps_it():
    ledger = dpbnn.Ledger()
    first = fit(method=dpbnn.SGD(**PATH, inputs=inputs), ledger=ledger)
    second = fit(ledger=ledger)
    chosen = dpbnn.select({"a": first, "b": second}, dataset(), 1.0, 1e-5, ledger=ledger)
    assert chosen.privacy.public.count(NAMED) == 1
    assert len(set(chosen.privacy.public)) == len(chosen.privacy.public)
    tempered = dpbnn.recalibrate(first, dataset(), 1.0, 1e-5, ledger=ledger)
    assert NAMED in tempered.privacy.public


def test_inputs_that_are_drawn_from_releases_are_covered():
    """The estimators' default pays for the moments that it draws inputs from."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (300, 2))
    model = dpbnn.PrivateBayesClassifier(epsilon=1.0, bounds=(-1, 1), classes=[0, 1])
    model.fit(x, (x[:, 0] > 0).astype(int))
    assert model.posterior_.settings["inputs"] == "independent columns of the released moments"
    assert not any(NAMED in item for item in model.privacy_.public)


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
