"""Attacks on ledgers: damage, races, costs that nobody charges."""

import contextlib
import math
import os
import signal
import threading
import time

import broken_versions as broken
import pytest
import torch
from forks import exit_code, started
from runs_under_attack import STEPS, N, dataset, fit, plan
from sklearn.datasets import load_iris
from torch import nn
from twins import fails_on, twins_of

import dpbnn
from dpbnn.contributions import DenseContributions
from dpbnn.estimators.workspace import new_run
from dpbnn.posteriors import PointPosterior
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger_file import Locked

EVENT = dpbnn.FullBatch(100).event(2.0, 40)


# 36: a tail that is torn, changed or missing


def last(path):
    return path.read_bytes().splitlines(keepends=True)[-1]


def without_newline(path):
    path.write_bytes(path.read_bytes()[:-1])


def with_a_flipped_byte(path):
    content = path.read_bytes()
    path.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])


def without_its_last_line(path):
    path.write_bytes(path.read_bytes()[: -len(last(path))])


def with_a_smaller_count(path):
    """As if somebody had mended the line by hand, checksum and all."""
    line = last(path).replace(b'"count": 40', b'"count": 1')
    path.write_bytes(path.read_bytes()[: -len(last(path))] + line)


def with_its_header_alone(path):
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


def without_a_byte(path):
    path.write_bytes(b"")


def without_itself(path):
    path.unlink()


def without_its_head(path):
    path.with_name(path.name + ".head").unlink()


def with_a_torn_head(path):
    head = path.with_name(path.name + ".head")
    head.write_bytes(head.read_bytes()[:-9])


def with_more_behind_it(path):
    path.write_bytes(path.read_bytes() + b'{"spend": {"count"')


DAMAGE = [
    without_newline, with_a_flipped_byte, without_its_last_line, with_a_smaller_count,
    with_its_header_alone, without_a_byte, without_itself, without_its_head, with_a_torn_head,
    with_more_behind_it,
]  # fmt: skip


def spent(path, **budget):
    book = dpbnn.Ledger(path, **budget)
    for _ in range(10):
        book.spend(EVENT)
    return book


@fails_on(36, broken.the_head_is_not_looked_at, damage=without_its_last_line)
@fails_on(36, broken.the_head_is_not_looked_at, damage=with_its_header_alone)
@pytest.mark.parametrize("damage", DAMAGE)
def test_item_36_a_ledger_that_lost_anything_is_refused_and_never_counts_less(damage, tmp_path):
    path = tmp_path / "ledger.jsonl"
    book = spent(path)
    truth = book.epsilon(1e-5)
    damage(path)
    for use in (lambda: dpbnn.Ledger(path), lambda: book.releases, lambda: book.spend(EVENT)):
        with pytest.raises(dpbnn.LedgerCorrupted, match=r"account --repair .* most that can have"):
            use()
    try:
        mended = dpbnn.Ledger.repair(path)
    except dpbnn.LedgerCorrupted as error:
        assert "Restore it" in str(error)  # noqa: PT017
    else:
        assert mended.epsilon(1e-5) >= truth
        assert mended.releases >= 400 or not mended.statement(delta=1e-5).private
        assert dpbnn.Ledger(path).epsilon(1e-5) == mended.epsilon(1e-5)
        assert list(tmp_path.glob("ledger.jsonl*.damaged-*"))


@pytest.mark.parametrize("damage", [without_newline, with_a_flipped_byte, without_its_last_line])
def test_item_36_damage_to_the_last_entry_can_be_undone(damage, tmp_path):
    path = tmp_path / "ledger.jsonl"
    before = spent(path).statement(delta=1e-5)
    damage(path)
    assert dpbnn.Ledger.repair(path).statement(delta=1e-5) == before


def test_item_36_where_entries_are_lost_the_whole_budget_counts_as_spent(tmp_path):
    path = tmp_path / "ledger.jsonl"
    spent(path, epsilon=100.0, delta=1e-5)
    without_its_head(path)
    mended = dpbnn.Ledger.repair(path)
    assert mended.epsilon() == mended.statement().epsilon == 100.0
    assert "its whole budget counts as spent" in str(mended.statement()).replace(
        "\n" + 14 * " ", " "
    )
    assert math.isinf(mended.epsilon(1e-6))
    assert not mended.statement(delta=1e-6).private
    with pytest.raises(dpbnn.BudgetExceeded, match="entries of this ledger were lost"):
        mended.spend(EVENT)


def test_item_36_a_whole_ledger_is_left_alone_by_a_repair(tmp_path):
    path = tmp_path / "ledger.jsonl"
    spent(path)
    content = path.read_bytes()
    assert dpbnn.Ledger.repair(path).releases == 400
    assert path.read_bytes() == content


class Stopped(BaseException):
    """An interrupt, or the end of the process."""


def stops(function):
    """Call a function and be interrupted right after it."""

    def call(*arguments, **options):
        function(*arguments, **options)
        raise Stopped

    return call


@fails_on(36, broken.what_was_interrupted_is_kept, place="append")
@pytest.mark.parametrize("place", ["append", "read"])
def test_item_36_an_interrupt_between_file_and_memory_loses_nothing(place, tmp_path):
    path = tmp_path / "ledger.jsonl"
    book = dpbnn.Ledger(path)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Locked, place, stops(getattr(Locked, place)))
            with pytest.raises(Stopped):
                book.spend(dpbnn.FullBatch(10).event(50.0))
    for _ in range(20):
        book.spend(dpbnn.FullBatch(10).event(1.0))
    again = dpbnn.Ledger(path)
    assert again.events == book.events
    assert again.epsilon(1e-5) >= dpbnn.ACCOUNTANTS["exact"].epsilon(
        [dpbnn.FullBatch(10).event(1.0, 20)], 1e-5
    )


@fails_on(36, broken.repairs_move_the_files_first)
def test_item_36_a_repair_that_is_interrupted_makes_no_new_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    spent(path)
    without_its_head(path)
    for calls in range(12):
        left = calls

        def replace(*arguments, real=os.replace):
            nonlocal left
            if left == 0:
                raise Stopped
            left -= 1
            real(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", replace)
            with contextlib.suppress(Stopped, dpbnn.LedgerCorrupted):
                dpbnn.Ledger.repair(path)
        try:
            book = dpbnn.Ledger(path)
        except dpbnn.LedgerCorrupted:
            continue
        assert not book.statement(delta=1e-5).private
    assert not dpbnn.Ledger.repair(path).statement(delta=1e-5).private


def test_item_36_a_run_that_fails_leaves_a_repaired_ledger_alone(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    spent(out / "ledger.jsonl")
    with_its_header_alone(out / "ledger.jsonl")
    without_its_head(out / "ledger.jsonl")
    assert not dpbnn.Ledger.repair(out / "ledger.jsonl").statement(delta=1e-5).private
    with pytest.raises(ValueError, match="holds a run already"), new_run(out, overwrite=False):
        pass
    again = new_run(out, overwrite=True)
    again.__enter__()
    fail(again)
    assert not dpbnn.Ledger(out / "ledger.jsonl").statement(delta=1e-5).private


def test_item_36_a_statement_takes_no_epsilon_from_its_caller():
    book = dpbnn.Ledger(delta=1e-5)
    book.spend(EVENT)
    gate = Gate(1.0, 1.0, ledger=book)
    for state in (book.statement, gate.statement):
        with pytest.raises(ValueError, match="epsilon: the entries say that"):
            state(epsilon=0.01)


def test_item_36_what_was_lost_is_not_forgotten_by_a_calibration(tmp_path):
    x, y = dataset()
    book = dpbnn.Ledger(tmp_path / "ledger.jsonl", epsilon=20.0, delta=1e-5)
    posterior = fit(ledger=book)
    without_its_head(book.path)
    posterior.privacy = dpbnn.Ledger.repair(book.path).statement()
    assert posterior.privacy.private
    assert not dpbnn.recalibrate(posterior, (x, y), 1.0, 1e-5).privacy.private


# 37: overlapping and killed runs


def fail(run):
    """End the block of a run with an error."""
    assert not run.__exit__(KeyError, KeyError(), None)


@fails_on(37, broken.a_run_keeps_its_ledger_to_itself_until_it_ends)
def test_item_37_a_killed_run_leaves_what_it_spent(tmp_path):
    out = tmp_path / "run"

    def killed():
        with new_run(out, overwrite=False) as workspace:
            gate = Gate(1.0, 1.0, ledger=workspace.book(1e-5))
            for _ in range(7):
                gate(DenseContributions(torch.zeros(1, 1)))
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(started(killed)) == -signal.SIGKILL
    assert (out / "ledger.jsonl").is_file()
    assert dpbnn.Ledger(out / "ledger.jsonl").releases == 7
    with (
        pytest.raises(ValueError, match="holds a run already"),
        new_run(out, overwrite=False),
    ):
        pass
    again = new_run(out, overwrite=True)
    assert again.__enter__().book(1e-5).releases == 7
    fail(again)
    assert dpbnn.Ledger(out / "ledger.jsonl").releases == 7
    assert not list(out.glob(".partial*"))


@fails_on(37, broken.folders_are_not_locked)
def test_item_37_two_runs_in_one_directory_do_not_overlap(tmp_path):
    with new_run(tmp_path / "run", overwrite=False):
        overlapping = new_run(tmp_path / "run", overwrite=True)
        with pytest.raises(ValueError, match="another process is at work"):
            overlapping.__enter__()
        (tmp_path / "run" / "ledger.jsonl").touch()
        for name in ("manifest.json", "schema.toml"):
            (next((tmp_path / "run").glob(".partial*")) / name).touch()
        (next((tmp_path / "run").glob(".partial*")) / "model").mkdir()


def test_item_37_a_run_that_spends_nothing_leaves_nothing(tmp_path):
    run = new_run(tmp_path / "run", overwrite=False)
    run.__enter__().book(1e-5)
    fail(run)
    assert not (tmp_path / "run").exists()


# 47: costs that nobody charges


def statistics():
    return dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=N, sampling="full", steps=1)


@fails_on(47, broken.beside_is_left_to_others)
def test_item_47_what_the_plan_has_beside_it_is_charged_to_any_ledger(tmp_path):
    joint = plan(beside=[statistics()])
    book = dpbnn.Ledger(tmp_path / "ledger.jsonl", delta=1e-5)
    fit(out=tmp_path, plan=joint)
    (tmp_path / "checkpoint.safetensors").unlink()
    assert fit(out=tmp_path, plan=joint).privacy.epsilon >= joint.epsilon
    assert book.releases == 2 * (STEPS + 1)
    other = dpbnn.Ledger()
    posterior = fit(plan=joint, ledger=other)
    assert posterior.privacy.epsilon == pytest.approx(joint.epsilon)
    assert other.releases == STEPS + 1
    # Equal events of another run, and what was charged for it, pay for nothing.
    assert fit(plan=joint, ledger=other).privacy.epsilon > joint.epsilon
    assert other.releases == 2 * (STEPS + 1)
    twice = dpbnn.Ledger()
    fit(ledger=twice)
    fit(plan=plan(beside=[plan()]), ledger=twice)
    assert twice.releases == 3 * STEPS
    # What single gates have spent there is theirs, and the caller may say that he has paid.
    for options in ({}, {"beside_paid": True}):
        paid = dpbnn.Ledger()
        paid.spend(statistics().own_events[0])
        posterior = fit(plan=joint, ledger=paid, **options)
        assert posterior.privacy.epsilon == pytest.approx(joint.epsilon)
        assert paid.releases == STEPS + 1


@fails_on(47, broken.what_is_unknown_is_called_private)
def test_item_47_a_choice_among_models_of_unknown_origin_is_not_private():
    x, y = dataset()
    unknown = [PointPosterior(nn.Linear(3, 2), "categorical") for _ in range(2)]
    ledger = dpbnn.Ledger()
    chosen = dpbnn.select(unknown, (x, y), 1.0, 1e-5, ledger=ledger)
    assert not chosen.privacy.private
    assert "nothing is known of the training" in chosen.privacy.reason
    one = fit(ledger=ledger)
    mixed = dpbnn.select([one, unknown[0]], (x, y), 1.0, 1e-5, ledger=ledger)
    assert not mixed.privacy.private
    with pytest.raises(ValueError, match="not trained on this ledger"):
        dpbnn.select([one, fit()], (x, y), 1.0, 1e-5, ledger=ledger)


@fails_on(47, broken.open_fits_are_recorded_nowhere)
def test_item_47_an_open_fit_on_a_ledger_voids_it(tmp_path):
    x, y = load_iris(return_X_y=True)
    path = tmp_path / "ledger.jsonl"
    dpbnn.PrivateBayesClassifier(epsilon=None, epochs=1, ledger=str(path)).fit(x, y)
    assert dpbnn.Ledger(path).releases > 0
    assert not dpbnn.Ledger(path).statement(delta=1e-5).private
    budgeted = dpbnn.Ledger(tmp_path / "budget.jsonl", epsilon=1.0, delta=1e-5)
    with pytest.raises(dpbnn.BudgetExceeded, match="without noise would use up any budget"):
        dpbnn.PrivateBayesClassifier(epsilon=None, epochs=1, ledger=budgeted).fit(x, y)
    assert budgeted.releases == 0


# 48: threads


@fails_on(48, broken.ledgers_have_no_lock)
def test_item_48_threads_cannot_spend_one_budget_twice():
    """Every thread waits between the check of the budget and the entry."""
    event = dpbnn.FullBatch(10).event(5.0)
    cost = dpbnn.ACCOUNTANTS["exact"].epsilon
    book = dpbnn.Ledger(epsilon=cost([event] * 4, 1e-5) * 1.01, delta=1e-5)
    afford, refused = dpbnn.Ledger._afford, []

    def slowly(self, event):
        afford(self, event)
        time.sleep(0.05)

    def spend():
        try:
            book.spend(event)
        except dpbnn.BudgetExceeded:
            refused.append(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpbnn.Ledger, "_afford", slowly)
        threads = [threading.Thread(target=spend) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert book.releases == 4
    assert len(refused) == 4
    assert book.epsilon() <= book.budget[0]


def test_item_48_threads_and_processes_share_a_ledger_file(tmp_path):
    """Some use one object, some open the file themselves, some are forked."""
    book = dpbnn.Ledger(tmp_path / "ledger.jsonl")

    def spend(mine):
        for _ in range(10):
            mine.spend(dpbnn.FullBatch(10).event(5.0))

    threads = [threading.Thread(target=spend, args=(book,), daemon=True) for _ in range(4)]
    threads += [
        threading.Thread(target=lambda: spend(dpbnn.Ledger(book.path)), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    children = [started(lambda: spend(book)) for _ in range(2)]
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    for child in children:
        assert exit_code(child) == 0
    assert book.releases == 80
    assert dpbnn.Ledger(book.path).releases == 80


# The twins


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
