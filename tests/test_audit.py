import ast
import contextlib
import contextvars
import gc
import math
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import dpbnn
from dpbnn.audit import PrivacyBug, replay
from dpbnn.contributions import DenseContributions
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

    from dpbnn import audit

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


# No gate outside a replay can skip its ledger.


def released(gate):
    return gate(DenseContributions(torch.ones(4, 2)))["value"]


def charged(gate):
    """Whether a release of this gate is charged, and its ledger still private."""
    before = gate.ledger.releases
    released(gate)
    return gate.ledger.releases == before + 1 and gate.statement(delta=1e-5).private


def test_nothing_in_privacy_reads_a_context_variable_or_a_global_switch():
    for path in Path(dpbnn.__file__).parent.glob("privacy/*.py"):
        tree = ast.parse(path.read_text())
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), path
        assert "contextvars" not in path.read_text(), path


def test_a_gate_charges_in_a_context_that_was_copied_in_a_replay():
    kept = []

    def attack(values):
        kept.append(contextvars.copy_context())
        return released(Gate(1.0, 2.0))

    replay(attack, DATA, DATA)
    for context in kept:
        assert context.run(charged, Gate(1.0, 2.0))


@pytest.mark.parametrize("fails", [False, True])
def test_gates_are_themselves_again_after_a_replay(fails):
    methods = Gate.__call__, Gate.reserve, dpbnn.Poisson.batches
    made = []

    def function(values):
        made.append(Gate(1.0, 2.0))
        released(made[-1])
        if fails:
            raise KeyError("in the middle")

    with contextlib.suppress(KeyError):
        replay(function, DATA, DATA)
    assert methods == (Gate.__call__, Gate.reserve, dpbnn.Poisson.batches)
    assert charged(Gate(1.0, 2.0))
    for gate in made:
        released(gate)
        assert gate.ledger.releases == 1
        assert not gate.statement(delta=1e-5).private


def test_the_gates_of_other_threads_charge_while_one_replays():
    """Of threads from before and from inside the replay; one of them has the replay's own gate."""
    shared, found = Gate(1.0, 2.0), []

    def function(values):
        release = released(shared)
        for work in (lambda: charged(Gate(1.0, 2.0)), lambda: released(shared)):
            thread = threading.Thread(target=lambda work=work: found.append(work()))
            thread.start()
            thread.join()
        return release

    replay(function, DATA, DATA, trace=False)
    assert [answer for answer in found if answer is True] == [True, True]
    assert shared.ledger.releases == 2  # of the other threads, one in each run
    assert not shared.statement(delta=1e-5).private


def test_two_threads_can_replay_at_once():
    together = threading.Barrier(2, timeout=60)
    results = []

    def function(values):
        together.wait()
        return train(values)

    def work(record):
        results.append(replay(function, DATA, record, trace=False).check())

    threads = [threading.Thread(target=work, args=(record,)) for record in (3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert charged(Gate(1.0, 2.0))


class Silent:
    """An auditor of one's own, that lets sums pass without noise."""

    sampling_key = b"k" * 32

    def keep(self, records, count):
        return None

    def release(self, gate, event, sums):
        return sums


@pytest.mark.parametrize("reserved", [0, 3])
def test_a_gate_with_an_auditor_of_ones_own_is_not_private(tmp_path, reserved):
    ledger = dpbnn.Ledger(tmp_path / "ledger.jsonl", delta=1e-5)
    gate = Gate(1.0, 2.0, ledger=ledger, auditor=Silent())
    gate.reserve(reserved)
    released(gate)
    for book in (ledger, dpbnn.Ledger(ledger.path)):
        assert "observed or replayed" in book.statement().reason
        assert book.epsilon() == math.inf


def test_what_was_reserved_before_an_auditor_came_is_not_private_either():
    gate = Gate(1.0, 2.0)
    gate.reserve(1)
    assert gate.statement(delta=1e-5).private
    gate._auditor = Silent()
    released(gate)
    assert not gate.statement(delta=1e-5).private
