import gc
import random

import numpy as np
import pytest
import torch

import dpbnn
from dpbnn.contributions import DenseContributions
from dpbnn.privacy.audit import PrivacyBug, replay
from dpbnn.privacy.gate import Gate

DATA = torch.arange(40.0).reshape(20, 2) / 10


def train(values, gate=None, steps=5):
    """A private average by gradient steps."""
    gate = gate or Gate(clip=1.0, noise_multiplier=2.0, sampler=dpbnn.Poisson(20, 8))
    state = torch.zeros(2)
    for batch in gate.sampler.batches(steps):
        contributions = DenseContributions(state - values[batch])
        state = state - 0.1 * gate(contributions, mean=True, records=batch)["value"]
    return {"state": state, "steps": steps}


@pytest.mark.parametrize("record", [0, 7, 19])
def test_a_sound_method_passes(record):
    result = replay(train, DATA, record, seed=record).check()
    assert result.passed
    assert 0 < result.worst <= 1 + 1e-5
    assert len(result.distances) == 5


def test_a_neighbour_can_be_a_dataset():
    other = DATA.clone()
    other[3] = torch.tensor([100.0, -100.0])

    def fixed(values):
        ledger = dpbnn.Ledger(relation="replace-one")
        return train(values, Gate(1.0, 2.0, dpbnn.Partition(20, 5), ledger), steps=8)

    result = replay(fixed, DATA, other).check()
    assert 1.0 < max(result.distances) <= 2.0 + 1e-4
    assert sum(d > 0 for d in result.distances) == 2


def test_nothing_is_charged_and_the_random_state_is_given_back():
    ledger = dpbnn.Ledger()
    gate = Gate(clip=1.0, noise_multiplier=2.0, sampler=dpbnn.FullBatch(20), ledger=ledger)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    replay(lambda values: train(values, gate), DATA, 1, trace=False)
    assert ledger.releases == 0
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert states[2] == random.getstate()


def unclipped(values):
    class Broken(Gate):
        def _weights(self, chunk):
            return torch.ones(chunk.batch_size)

    return train(values, Broken(clip=1.0, noise_multiplier=2.0, sampler=dpbnn.Poisson(20, 8)))


def averaged_by_the_data(values):
    gate = Gate(clip=1.0, noise_multiplier=2.0)
    size = int((~values.isnan()).all(1).sum())
    return gate(DenseContributions(values))["value"] / size


def standardised(values):
    return train(values / values.std())


def leaking_loss(values):
    result = train(values)
    result["loss"] = float((values - result["state"]).square().sum())
    return result


def stops_early(values):
    gate = Gate(clip=1.0, noise_multiplier=2.0, sampler=dpbnn.FullBatch(20))
    state = torch.zeros(2)
    for batch in gate.sampler.batches(5):
        if values.nan_to_num().max() < 3.85:
            break
        state = state - gate(DenseContributions(state - values[batch]))["value"]
    return state


def looks(values):
    if values[3].isnan().any():
        _peek()
    return train(values)


def _peek():
    pass


def changes_the_noise(values):
    gate = Gate(clip=1.0, noise_multiplier=2.0, sampler=dpbnn.FullBatch(20))
    sigma = float(values.nan_to_num().abs().max())
    return gate(DenseContributions(values), noise_multiplier=sigma)["value"]


def without(record):
    other = DATA.clone()
    other[record] = float("nan")
    return other


@pytest.mark.parametrize(
    ("function", "neighbour", "message"),
    [
        (unclipped, 19, "times its sensitivity"),
        (averaged_by_the_data, without(3), "result differs"),
        (standardised, DATA + torch.eye(20)[:, :1] * 50, "times its sensitivity"),
        (leaking_loss, without(3), r"result\['loss'\] differs"),
        (stops_early, without(19), "releases on the data"),
        (looks, without(3), "sequence of function calls"),
        (changes_the_noise, without(19), "another kind"),
    ],
)
def test_every_way_around_the_gate_is_seen(function, neighbour, message):
    with pytest.raises(PrivacyBug, match=message):
        replay(function, DATA, neighbour).check()


def test_a_record_that_no_release_held_is_reported_not_passed():
    def blind(values):
        gate = Gate(clip=1.0, noise_multiplier=2.0)
        return gate(DenseContributions(values))["value"]

    with pytest.raises(PrivacyBug, match="record 3 was in no release"):
        replay(blind, DATA, 3).check()


def test_results_are_compared_in_depth():
    def nested(values):
        return [{"a": (np.ones(2), 1.0, "x", values.isnan().any())}]

    assert replay(nested, DATA, without(0)).differences == ("result[0]['a'][3] differs",)


def test_docstring_examples_hold():
    import doctest

    from dpbnn.privacy import audit

    result = doctest.testmod(audit)
    assert result.attempted
    assert not result.failed


def test_garbage_that_others_left_does_not_show_in_the_trace():
    """A generator in a cycle ends by a call, whenever the garbage is collected."""
    runs, threshold = [], gc.get_threshold()

    def run(values):
        runs.append(None)
        if len(runs) == 2:  # the first one that is traced
            gc.set_threshold(5)
        return train(values)

    gc.disable()
    for _ in range(20):
        cycle = [dpbnn.Poisson(10, 2).batches(5)]
        next(cycle[0])
        cycle.append(cycle)
    gc.enable()
    try:
        assert replay(run, DATA, DATA).passed
        assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
