"""Locks behave alike on POSIX systems and on an imitation of Windows."""

import os
import threading
import time

import pytest
import windows

from dpbnn.privacy import locks


@pytest.fixture(params=["posix", "windows"])
def system(request, monkeypatch):
    if request.param == "posix":
        if locks.fcntl is None:
            pytest.skip("no POSIX locks here")
        return locks
    windows.without_posix(monkeypatch)
    return windows.again(locks)


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    opened = [os.open(path, os.O_RDWR | os.O_APPEND) for _ in range(3)]
    yield opened
    for fd in opened:
        os.close(fd)


def test_the_imitation_is_what_the_module_uses(monkeypatch, files):
    fake = windows.without_posix(monkeypatch)
    module = windows.again(locks)
    assert module.fcntl is None
    assert module.msvcrt is fake
    assert module.lock(files[0])
    assert set(fake.held.values()) == {files[0]}


def test_one_holds_an_exclusive_lock(system, files):
    first, second, _ = files
    assert system.lock(first)
    assert not system.lock(second, wait=False)
    system.unlock(first)
    assert system.lock(second, wait=False)
    assert not system.lock(first, wait=False)


def test_a_shared_lock_keeps_an_exclusive_one_out(system, files):
    first, second, third = files
    assert system.lock(first, exclusive=False)
    assert not system.lock(second, wait=False)
    if system is locks and locks.msvcrt is None:
        assert system.lock(third, exclusive=False, wait=False)


def test_waiting_ends_when_the_lock_is_given_back(system, files):
    first, second, _ = files
    assert system.lock(first)
    order = []

    def other():
        assert system.lock(second)
        order.append("second")

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.1)
    order.append("first")
    system.unlock(first)
    thread.join(30)
    assert order == ["first", "second"]


def test_the_position_and_the_content_stay(system, files, tmp_path):
    fd = files[0]
    os.lseek(fd, 3, os.SEEK_SET)
    system.lock(fd)
    assert os.read(fd, 2) == b"34"
    system.unlock(fd)
    assert os.read(fd, 2) == b"56"
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_other_errors_are_raised(system, files):
    closed = os.dup(files[0])
    os.close(closed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        system.lock(closed)


def test_a_folder_is_synced_or_left_alone(system, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    system.sync_folder(tmp_path)
    assert synced == ([tmp_path.stat().st_ino] if system.msvcrt is None else [])
