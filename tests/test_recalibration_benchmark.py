"""The ways to choose a temperature that `benchmarks/recalibration.py` compares."""

import math

import numpy as np
import pytest

from benchmarks import recalibration


@pytest.mark.parametrize("name", ["noise-aware", "bisection", "losses", "Brier"])
@pytest.mark.parametrize("scale", [2.5, 0.5])
def test_every_way_finds_by_how_much_logits_are_too_large(name, scale):
    predictive, y = recalibration.records(2000, 2.0, scale, seed=0)
    found = recalibration.chosen(name, predictive, y, 10.0, np.random.default_rng(0))
    assert abs(math.log(found / scale)) < 0.25
