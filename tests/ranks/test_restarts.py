"""Runs over ranks that stop, are killed, and go on, also on another number of ranks."""

import os
import signal
import time

import broken_versions as broken
import pytest
import torch
from killed_runs import STEPS as MANY
from killed_runs import WRONG, killed, trouble, worker
from small_runs import STEPS, fit, numbers, plan, stopped
from together import DEADLINE, begun, ended, together
from twins import fails_on, twins_of

from dpbnn import checkpoint, resume
from dpbnn.methods.sgd import SGDProcess
from dpbnn.methods.sgld import LangevinProcess
from dpbnn.privacy.ledger import Ledger


@fails_on(58, broken.noise_depends_on_the_ranks, size=1)
@pytest.mark.parametrize("size", [0, 1, 4])
def test_item_58_a_run_goes_on_on_another_number_of_ranks(tmp_path, size):
    """With the same keys it ends as if it had not been interrupted, and nothing is paid twice."""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        fixed = checkpoint.Keys("name", *(bytes([i]) * 32 for i in range(3)))
        patch.setattr(checkpoint.Keys, "new", classmethod(lambda cls: fixed))
        whole = together(2, lambda rank: numbers(fit(out=tmp_path / "whole")))
        assert together(2, lambda rank: stopped(rank, out=out)) == ["stopped", "stopped"]
    if size:
        rest = together(size, lambda rank: numbers(fit(out=out, resume=True)))
    else:  # this very process, without a group
        rest = [numbers(fit(out=out, resume=True))]
    assert all(torch.equal(own, whole[0]) for own in rest), rest
    assert Ledger(out / "ledger.jsonl").releases == STEPS


def test_a_run_of_one_process_does_not_go_on_over_ranks_with_its_noise(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        update = SGDProcess.update

        def interrupting(self, state, release):
            state = update(self, state, release)
            if state.steps == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return state

        patch.setattr(SGDProcess, "update", interrupting)
        with pytest.raises(KeyboardInterrupt):
            fit(out=tmp_path)
    for error in together(2, lambda rank: fit(out=tmp_path, resume=True)):
        assert "cannot go on with the same noise on 2;" in str(error)
    (tmp_path / "keys.json").unlink()
    first, second = together(2, lambda rank: numbers(fit(out=tmp_path, resume=True)))
    assert torch.equal(first, second)
    assert Ledger(tmp_path / "ledger.jsonl").releases == STEPS + STEPS - 2


@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_steps_that_a_device_does_not_repeat_bit_for_bit_get_new_noise(
    tmp_path, monkeypatch, kind, repeated
):
    """After a crash two steps are made again; after an interrupt none is."""
    monkeypatch.setattr(resume, "repeats", lambda device: repeated)
    with pytest.MonkeyPatch.context() as patch:
        update = SGDProcess.update

        def ending(self, state, release):
            state = update(self, state, release)
            if state.steps == 4 and kind is MemoryError:
                raise MemoryError
            if state.steps == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return state

        patch.setattr(SGDProcess, "update", ending)
        with pytest.raises(kind):
            fit(out=tmp_path, checkpoint_every=2)
    fit(out=tmp_path, resume=True)
    again = kind is MemoryError and not repeated
    assert Ledger(tmp_path / "ledger.jsonl").releases == STEPS + (STEPS - 2) * again


def test_refusals_of_rank_0_reach_all_ranks(tmp_path):
    together(2, lambda rank: stopped(rank, out=tmp_path))
    for error in together(2, lambda rank: fit(out=tmp_path)):
        assert "holds an earlier run" in str(error)
    other = plan(noise_multiplier=3.0)
    for error in together(2, lambda rank: fit(out=tmp_path, resume=True, plan=other)):
        assert "of a run with other settings" in str(error)


@pytest.mark.once
@pytest.mark.parametrize("owned", [False, True])
def test_a_few_kills(owned, tmp_path):
    """The record of 200 kills is in docs/scaling.md."""
    found = killed(3, 1, tmp_path, owned)
    assert found["kills"] >= 3
    assert not any(found[name] for name in WRONG), found


def standing_still(folder, which, at=7):
    """Return what one rank does, of which one stands still after some step, until it is woken."""
    work = worker(folder, b"12345678")

    def stopping(rank):
        update = LangevinProcess.update

        def stopped_once(self, state, release):
            state = update(self, state, release)
            if rank == which and state.steps == at:
                os.kill(os.getpid(), signal.SIGSTOP)
            return state

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LangevinProcess, "update", stopped_once)
            return work(rank)

    return stopping


@pytest.mark.once
@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_others_do_not_reach_ends_the_run_on_both_sides(tmp_path, which):
    """As if the network were cut in two: one side stands still, and wakes up when all is over."""
    group, other = tmp_path / "group", f"{1 - which}.pickle"
    children = begun(2, standing_still(tmp_path, which), group, patience=5.0)
    deadline = time.monotonic() + DEADLINE
    while not (group / other).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    again = begun(2, worker(tmp_path, b"12345678"), tmp_path / "again")
    late = ended(again, tmp_path / "again")
    os.kill(children[which], signal.SIGCONT)
    assert all(isinstance(left, Exception) for left in ended(children, group))
    if which == 0:  # it has the folder as long as it lives
        assert all("another process is at work in this folder" in str(left) for left in late), late
        late = ended(begun(2, worker(tmp_path, b"12345678"), tmp_path / "last"), tmp_path / "last")
    assert torch.equal(late[0][0], late[1][0])
    assert not trouble(tmp_path).total()
    assert late[0][1]["mechanisms"][0]["releases"] == MANY  # the same sums, with the same noise


def test_what_the_kills_look_for_would_be_found(tmp_path):
    (tmp_path / "releases.log").write_text("a one\na one\n")
    assert trouble(tmp_path)["under-counts"] == 1
    assert not trouble(tmp_path)["noise used twice"]
    (tmp_path / "releases.log").write_text("a one\na two\n")
    assert trouble(tmp_path)["noise used twice"] == 1


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
