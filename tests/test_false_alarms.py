"""The suite as a whole: how often it fails by chance, and that it repeats otherwise."""

import random
import secrets

import numpy as np
import pytest
import torch
from false_alarms import LIMIT

import dpbnn


def test_a_run_of_all_tests_fails_by_chance_less_than_once_in_a_hundred_thousand(request):
    marks = [mark for item in request.session.items for mark in item.iter_markers("os_entropy")]
    assert sum(mark.args[0] for mark in marks) < LIMIT


def draws():
    """One number of every generator that tests use."""
    noise = dpbnn.NoiseSource().normal({"x": torch.empty(1)}, 1.0)["x"]
    return (
        secrets.token_bytes(),
        float(noise),
        float(torch.rand(())),
        float(np.random.rand()),  # noqa: NPY002
        random.random(),
    )


@pytest.fixture(scope="module")
def seen():
    return []


@pytest.mark.parametrize("_", range(2))
def test_every_test_has_random_numbers_of_its_own(_, seen):
    seen.append(draws())
    assert len({number for test in seen for number in test}) == 5 * len(seen)


def test_the_numbers_of_a_test_are_the_same_in_every_run():
    assert secrets.token_bytes(4).hex() == "8890a71a"
    assert torch.randint(10**6, ()).item() == 901_629


@pytest.mark.os_entropy(2**-256)
def test_a_marked_test_draws_from_the_operating_system():
    assert secrets.token_bytes.__module__ == "secrets"
    assert secrets.token_bytes() != secrets.token_bytes()
