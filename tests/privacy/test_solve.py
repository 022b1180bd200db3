import math

import pytest

from dpbnn.privacy.solve import noise_scale, step_count

COSTS = {
    "a power": lambda s: 3 / s**1.7,
    "infinite below 2": lambda s: math.inf if s < 2 else 5 / (s - 1.9),
    "0 from 7 on": lambda s: 3 / s if s < 7 else 0.0,
    "steps": lambda s: 1 / math.floor(1e6 * s) * 1e6,
}
MODELS = {
    "none": None,
    "right": COSTS["a power"],
    "half": lambda s: COSTS["a power"](s) / 2,
    "0": lambda s: 0.0,
    "infinite": lambda s: math.inf,
    "the wrong way": lambda s: s,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cost", COSTS)
def test_what_is_returned_was_computed_and_is_at_most_the_target(cost, model):
    computed = {}

    def counted(scale):
        computed[scale] = COSTS[cost](scale)
        return computed[scale]

    for target in (0.6, 1.0, 2.5):
        found = noise_scale(counted, target, MODELS[model])
        assert 0.998 * target <= computed[found] <= target


def test_a_jump_over_the_target_is_solved_from_below():
    found = noise_scale(lambda s: 2.0 if s < 3 else 0.5, 1.0)
    assert found == pytest.approx(3, rel=1e-8)
    assert found >= 3


def test_a_good_model_saves_evaluations():
    seen = []
    noise_scale(lambda s: seen.append(s) or COSTS["a power"](s), 1.0, MODELS["half"])
    assert len(seen) <= 2


def test_no_scale_is_enough():
    with pytest.raises(ValueError, match="no noise multiplier up to 1e9"):
        noise_scale(lambda s: 2.0, 1.0)


@pytest.mark.parametrize("most", [1, 2, 3, 100, 12_345])
def test_the_last_number_of_steps_that_fits(most):
    assert step_count(lambda steps: steps / most, 1.0) == most


def test_steps_without_end_are_refused():
    with pytest.raises(ValueError, match="more than 100000000 steps"):
        step_count(lambda steps: 0.0, 1.0)
    with pytest.raises(ValueError, match="a single release"):
        step_count(lambda steps: 2.0 * steps, 1.0)
