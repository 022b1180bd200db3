import contextlib
import errno
import json
import os
import random
import signal
import struct
import time
from functools import partial

import pytest
from forks import exit_code, started

import dpbnn
from dpbnn.privacy import ledger_file
from dpbnn.privacy.events import Event
from dpbnn.privacy.ledger import BudgetExceeded, Ledger, LedgerCorrupted

SAMPLER = dpbnn.Poisson(1000, 10)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_everything_spent_is_there_when_the_file_is_opened_again(path):
    book = Ledger(path, epsilon=3.0, delta=1e-5)
    book.spend(Event("full-batch", 20.0, 1, 1000, 1000), label="statistics", clip=1.0)
    for _ in range(3):
        book.spend(SAMPLER.event(1.5, 10), label="training", clip=0.5)
    again = Ledger(path)
    assert again.events == book.events
    assert again.releases == 31
    assert again.budget == (3.0, 1e-5)
    expected = dpbnn.ACCOUNTANTS["pld"].epsilon(book.events, 1e-5)
    assert again.epsilon() == pytest.approx(expected)
    text = str(again.statement())
    assert "training: 30 releases" in text
    assert "clip 0.5" in text


def test_a_ledger_in_memory_counts_the_same():
    book = Ledger(epsilon=1.0, delta=1e-5)
    book.spend(SAMPLER.event(2.0, 5))
    assert book.releases == 5
    with pytest.raises(BudgetExceeded):
        book.spend(SAMPLER.event(2.0, 10**6))
    assert book.releases == 5


def test_the_budget_raises_before_anything_is_spent(path):
    book = Ledger(path, epsilon=0.5, delta=1e-5)
    book.spend(SAMPLER.event(1.5, 50))
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded, match=r"over the budget of 0.5 .* is left"):
        book.spend(SAMPLER.event(1.5, 10_000))
    with pytest.raises(BudgetExceeded):
        book.spend(SAMPLER.event(0.0))
    assert path.read_bytes() == before
    book.spend(SAMPLER.event(1.5, 1))


@pytest.mark.parametrize("block", [1, 7])
def test_the_budget_is_used_to_the_last_release_and_never_passed(block):
    """Spending in small pieces stops exactly where one composition says it must."""
    book = Ledger(epsilon=0.4, delta=1e-5)
    with contextlib.suppress(BudgetExceeded):
        while True:
            book.spend(SAMPLER.event(1.5, block))
    cost = dpbnn.ACCOUNTANTS["pld"].epsilon
    assert cost([SAMPLER.event(1.5, book.releases)], 1e-5) <= 0.4
    assert cost([SAMPLER.event(1.5, book.releases + block)], 1e-5) > 0.4


def test_a_partition_is_charged_by_its_positions():
    draw = dpbnn.Partition(100, 10)
    book = Ledger(epsilon=2.0, delta=1e-5)
    for start in range(10):
        book.spend(draw.event(5.0, 1, start))
    one_pass = dpbnn.ACCOUNTANTS["exact"].epsilon([draw.event(5.0, 10)], 1e-5)
    assert book.epsilon() == pytest.approx(one_pass)
    book.spend(draw.event(5.0, 1, 3))
    assert book.epsilon() > one_pass


def test_relation_is_the_ledgers_and_a_mismatch_raises(path):
    book = Ledger(path, relation="replace-one")
    with pytest.raises(dpbnn.UnsupportedEvent):
        book.spend(SAMPLER.event(1.0))
    with pytest.raises(ValueError, match="relation='zero-out'"):
        Ledger(path, relation="zero-out")
    assert Ledger(path).relation is dpbnn.Relation.REPLACE_ONE


def test_another_budget_for_an_existing_file_is_refused(path):
    Ledger(path, epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match=r"epsilon=2\.0"):
        Ledger(path, epsilon=2.0, delta=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0.0, "delta": 1e-5}, "epsilon=0"),
        ({"epsilon": float("nan"), "delta": 1e-5}, "epsilon=nan"),
        ({"epsilon": 1.0}, "delta: missing"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta=1"),
        ({"accountant": "moments"}, "accountant='moments'"),
    ],
)
def test_bad_budgets_write_nothing(path, arguments, message):
    with pytest.raises(ValueError, match=message):
        Ledger(path, **arguments)
    assert not path.exists()


def test_without_a_budget_epsilon_needs_a_delta(path):
    book = Ledger(path)
    with pytest.raises(ValueError, match="delta: missing"):
        book.epsilon()
    assert book.epsilon(1e-5) == 0


def test_an_unwritable_ledger_says_so(tmp_path):
    with pytest.raises(OSError, match="cannot be written"):
        Ledger(tmp_path / "missing" / "ledger.jsonl")
    with pytest.raises(OSError, match="cannot be written"):
        Ledger(tmp_path)


def test_a_full_disk_spends_nothing_and_leaves_nothing_half_written(path, monkeypatch):
    book = Ledger(path)
    book.spend(SAMPLER.event(1.0))
    before = path.read_bytes()
    write = os.write

    def full(fd, data):
        write(fd, bytes(data)[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        book.spend(SAMPLER.event(1.0))
    monkeypatch.undo()
    assert path.read_bytes() == before
    book.spend(SAMPLER.event(1.0))
    assert Ledger(path).releases == 2


class Unflushed(Ledger):
    """Flushes before it writes, and not afterwards."""

    def spend(self, event, **details):
        with pytest.MonkeyPatch.context() as patch:
            with self.path.open() as file:
                os.fsync(file)
            patch.setattr(os, "fsync", lambda fd: None)
            super().spend(event, **details)


class Late(Ledger):
    """Keeps entries to itself until there are 50."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.waiting = []

    def spend(self, event, **details):
        self.waiting.append(event)
        if len(self.waiting) == 50:
            for late in self.waiting:
                super().spend(late, **details)
            self.waiting.clear()


def check_on_disk(kind, path):
    """fsync sees the whole entry, and nothing is written after the last fsync."""
    book = kind(path)
    synced = []
    fsync = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (fsync(fd), synced.append(path.read_bytes())))
        book.spend(SAMPLER.event(1.0, 3))
    assert synced
    assert synced[-1] == path.read_bytes()
    assert json.loads(synced[-1].splitlines()[-1])["spend"]["count"] == 3


def test_the_entry_is_on_disk_before_spend_returns(path):
    check_on_disk(Ledger, path)


@pytest.mark.parametrize("kind", [Unflushed, Late])
def test_the_same_check_rejects_a_ledger_that_writes_or_flushes_late(kind, path):
    with pytest.raises(AssertionError):
        check_on_disk(kind, path)


@pytest.mark.parametrize("cut", [1, 10, 30, 60])
def test_a_torn_last_line_is_refused_and_counts_once_repaired(path, cut):
    book = Ledger(path, epsilon=1.0, delta=1e-5)
    for _ in range(3):
        book.spend(SAMPLER.event(1.5, 4))
    path.write_bytes(path.read_bytes()[:-cut])
    for use in (Ledger, lambda _: book.releases, lambda _: book.spend(SAMPLER.event(1.5, 4))):
        with pytest.raises(LedgerCorrupted, match="account --repair"):
            use(path)
    mended = Ledger.repair(path)
    assert mended.releases == 12
    mended.spend(SAMPLER.event(1.5, 4))
    assert Ledger(path).releases == 16


def test_a_torn_first_spend_counts_as_well(path):
    Ledger(path).spend(SAMPLER.event(1.5))
    path.write_bytes(path.read_bytes()[:-40])
    assert Ledger.repair(path).releases == 1


@pytest.mark.parametrize("tail", [b'{"mechanism": 0, "eve', b"\0" * 20, b"\n"])
def test_a_torn_line_that_announced_nothing_is_refused_and_then_cut_off(path, tail):
    """Only what the head knows was ever used."""
    Ledger(path).spend(SAMPLER.event(1.5, 2))
    with path.open("ab") as file:
        file.write(tail)
    with pytest.raises(LedgerCorrupted, match="torn"):
        Ledger(path)
    book = Ledger.repair(path)
    assert book.releases == 2
    book.spend(SAMPLER.event(1.5))
    assert Ledger(path).releases == 3


@pytest.mark.parametrize("change", ["edit", "drop", "swap"])
def test_damage_in_the_middle_refuses_to_open_and_says_what_to_do(path, change):
    book = Ledger(path)
    for count in (1, 2, 3):
        book.spend(SAMPLER.event(1.5, count))
    lines = path.read_bytes().splitlines(keepends=True)
    second = next(i for i, line in enumerate(lines) if b'"count": 2' in line)
    if change == "edit":
        lines[second] = lines[second].replace(b'"count": 2', b'"count": 0')
    elif change == "drop":
        del lines[second]
    else:
        lines[second - 1], lines[second] = lines[second], lines[second - 1]
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerCorrupted, match="Restore it from a backup"):
        Ledger(path)


def test_entries_that_vanish_under_an_open_ledger_are_noticed(path):
    book = Ledger(path)
    book.spend(SAMPLER.event(1.5))
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(LedgerCorrupted, match="became shorter"):
        book.spend(SAMPLER.event(1.5))


def test_a_file_that_is_no_ledger_is_left_alone(path):
    path.write_text("a,b\n1,2\n")
    with pytest.raises(LedgerCorrupted, match="is no ledger"):
        Ledger(path)
    assert path.read_text() == "a,b\n1,2\n"


def test_an_empty_file_left_by_a_crash_becomes_a_ledger(path):
    path.touch()
    Ledger(path).spend(SAMPLER.event(1.5))
    assert Ledger(path).releases == 1


def test_the_file_is_for_its_owner_alone(path):
    Ledger(path)
    assert path.stat().st_mode & 0o077 == 0


def spend_many(path, times):
    book = Ledger(path)
    for _ in range(times):
        book.spend(SAMPLER.event(1.5))


def test_several_processes_on_one_ledger_are_serialised(path):
    Ledger(path)
    workers = [started(partial(spend_many, path, 40)) for _ in range(4)]
    for worker in workers:
        assert exit_code(worker) == 0
    assert Ledger(path).releases == 160


def test_two_processes_cannot_both_take_the_last_of_a_budget(path):
    event = Event("full-batch", 10.0, 1)
    cost = dpbnn.ACCOUNTANTS["exact"].epsilon
    budget = (cost([event] * 5, 1e-5) + cost([event] * 6, 1e-5)) / 2
    first = Ledger(path, epsilon=budget, delta=1e-5)
    second = Ledger(path)
    for book in (first, second, first, second, first):
        book.spend(event)
    with pytest.raises(BudgetExceeded):
        second.spend(event)
    assert first.releases == 5


def use_releases(kind, path, used):
    """Spend and then use one release after the other, noting each use, until killed."""
    book = kind(path)
    counter = os.open(used, os.O_WRONLY | os.O_CREAT)
    for number in range(1, 10**6):
        book.spend(SAMPLER.event(1.5))
        os.pwrite(counter, struct.pack("q", number), 0)


def check_killed(kind, path, tmp_path, attempts):
    """SIGKILL at random moments: what was used before is on record. Return how often it was."""
    chance = random.Random(0)
    Ledger(path)
    before = 0
    progressed = 0
    for attempt in range(attempts):
        used = tmp_path / f"used{attempt}"
        child = started(partial(use_releases, kind, path, used))
        while attempt % 2 and not (used.exists() and used.stat().st_size):
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        exit_code(child)
        count = (
            struct.unpack("q", used.read_bytes())[0] if used.exists() and used.stat().st_size else 0
        )
        recorded = Ledger(path).releases
        assert recorded >= before + count, f"recorded {recorded}, used {before + count}"
        assert recorded <= before + count + 1
        progressed += count > 0
        before = recorded
    return progressed


def test_a_killed_process_has_never_used_more_than_the_ledger_says(path, tmp_path):
    assert check_killed(Ledger, path, tmp_path, 100) > 40


class Killed(BaseException):
    """Ends a write where a kill signal would."""


@pytest.mark.parametrize("filled", [True, False])
def test_a_process_that_is_killed_at_the_end_of_a_page_leaves_no_part_of_a_line(
    path, monkeypatch, filled
):
    """Linux looks for a kill signal between pages of one write. Broken twin: pages not filled."""
    write, page, killed, refused = ledger_file._write, 4096, 0, ""

    def first_page(fd, data):
        room = page - os.fstat(fd).st_size % page
        write(fd, data[:room])
        if len(data) > room:
            raise Killed

    monkeypatch.setattr(ledger_file, "_write", first_page)
    monkeypatch.setattr(ledger_file.Locked, "_undo", lambda self: None)  # nobody is left to do it
    if not filled:
        monkeypatch.setattr(ledger_file, "_filled", lambda line, start: line)
    for number in range(100):
        try:
            Ledger(path).spend(SAMPLER.event(1.5 + number))  # two lines
        except Killed:
            killed += 1
        except LedgerCorrupted as error:
            refused = str(error)
            break
    assert killed
    assert ("damaged or torn" in refused) != filled
    assert not filled or path.stat().st_size > 5 * page


def test_the_same_check_catches_a_ledger_that_writes_too_late(path, tmp_path):
    """Used first and recorded afterwards, releases go missing."""
    with pytest.raises(AssertionError, match="recorded"):
        check_killed(Late, path, tmp_path, 10)
