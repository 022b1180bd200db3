"""What a private step of a transformer holds per example: as much as a plain one."""

import pytest

from benchmarks import held

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def grown(step):
    """Return by how many bytes the peak of one example grows with one more layer."""
    return max(held.per_example(step, 2)) - max(held.per_example(step, 1))


def test_a_private_step_holds_no_more_per_layer_than_a_plain_one():
    """Unless norm layers keep their inputs and gradients: then it holds a third more."""
    plain = grown(held.plain)
    assert plain > 2**21
    assert grown(held.recorded) <= 1.02 * plain
    assert grown(held.late) > 1.25 * plain
