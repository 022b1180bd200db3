"""Attacks on replayed steps: what a graph keeps of one batch must not reach the next.

Graphs are those of `fake_graphs.py`, which replay Python.
"""

import broken_versions as broken
import pytest
import torch
from fake_graphs import install
from twins import fails_on, twins_of

import dpbnn
from dpbnn.captured import CapturedStep
from dpbnn.likelihoods import Categorical
from dpbnn.methods.method import Problem
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.sampling import Poisson

N, CAPACITY = 300, 24
generator = torch.Generator().manual_seed(0)
X = torch.rand(N, 6, generator=generator)
Y = torch.randint(0, 3, (N,), generator=generator)


def summing(clip):
    """Return a gate that adds no noise, though it counts on it."""
    gate = Gate(clip, 1.0, Poisson(N, 20), noise=NoiseSource.seeded(0))
    gate._noised = lambda sums, sigma: {name: value.clone() for name, value in sums.items()}
    return gate


def compare(sizes, clips=(0.7,), masked=()):
    """Compare replayed sums of batches of these sizes with those of the batches alone.

    Args:
        sizes: of the batches.
        clips: of the gates, which take turns.
        masked: numbers of the batches of which every second record is left out.
    """
    torch.manual_seed(0)
    problem = Problem(dpbnn.mlp(6, (9,), 3), Categorical(), dpbnn.Gaussian(1.0), N, 20, 50, True)
    process = dpbnn.SGD().start(problem)
    state = process.begin()
    like = process.contribute(state, X[:0], Y[:0])
    step = CapturedStep(process, state, like, (X, Y, None), Poisson(N, 20))
    assert step.capacity == CAPACITY
    gates = [summing(clip) for clip in clips]
    drawn = torch.Generator().manual_seed(1)
    batches = [torch.randperm(N, generator=drawn)[:size] for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        for index, batch in enumerate(step.ahead(iter(batches))):
            gate = gates[index % len(gates)]
            keep = torch.arange(len(batch)) % 2 == 0 if index in masked else None
            alone = gate(process.contribute(state, X[batch], Y[batch]), keep=keep)
            found = gate(step.load(batch, state), keep=keep)
            for name, wanted in alone.items():
                torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6)
    assert step.replays.count >= 1
    return step


@fails_on(1, broken.padding_keeps_earlier_records)
def test_item_1_no_record_of_an_earlier_batch_is_in_the_padding():
    compare([24, 3, 0, 20, 1] * 30)


@fails_on(1, broken.sums_of_parts_go_on_with_the_next_batch)
def test_item_1_sums_of_large_batches_begin_anew():
    step = compare([25, 60, 5, 70, 49, 3, 100, 0, 26] * 2)
    assert step.replays.count == 2


@fails_on(6, broken.a_mask_stays_for_later_batches)
def test_item_6_a_record_that_was_left_out_once_is_back_in_later_batches():
    compare([24] * 9 + [60] * 9, masked=(4, 7, 12))


@fails_on(11, broken.graphs_are_replayed_for_any_clip)
def test_item_11_a_graph_is_replayed_for_its_own_clip_alone():
    step = compare([20, 60] * 8, clips=(0.7, 0.7, 0.01, 0.01))
    assert step.replays.count == 4


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
