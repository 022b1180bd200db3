"""Tests and twins that say the same on every CPU, however it orders and rounds its sums."""

import itertools

import broken_versions as broken
import numpy as np
import pytest
from twins import fails_on, twins_of


def cancelling():
    """Inputs and back-signals of two positions that cancel up to 2^-13."""
    return np.ones(2), np.array([1.0, -(1 + 2.0**-13)])


def fused(total, a, b):
    """Return a b + total, rounded once to float32."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(total))


def rounded_twice(total, a, b):
    return np.float32(np.float32(a * b) + total)


def gram_norms(a, g):
    """|sum_t g_t a_t|^2 = sum_st (a_s a_t)(g_s g_t) in float32, in every order, fused or not."""
    a, g = a.astype(np.float32), g.astype(np.float32)
    for multiply_add in (fused, rounded_twice):
        pairs = [(a[s] * a[t], g[s] * g[t]) for s, t in itertools.product(range(len(a)), repeat=2)]
        for order in itertools.permutations(pairs):
            total = np.float32(0)
            for one, other in order:
                total = multiply_add(total, one, other)
            yield float(total)


@fails_on(51, broken.the_cancelling_numbers_are_any)
@pytest.mark.parametrize("numbers", [cancelling])
def test_item_51_a_naive_gram_norm_is_zero_in_every_order_of_summation(numbers):
    """So the twins of item 3 are broken by construction, not by the kernels of one CPU."""
    a, g = numbers()
    assert (a @ g) ** 2 > 1e-8
    assert set(gram_norms(a, g)) == {0.0}


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
