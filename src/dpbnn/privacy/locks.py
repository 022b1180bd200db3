"""Locks on files and durable folders, on POSIX systems and on Windows."""

from __future__ import annotations

import errno
import importlib
import os
import time
from typing import Any

# On Windows a lock keeps others from reading the bytes it covers, so it covers one byte that no
# file reaches. The C library seeks there with 31 bits.
_BYTE = 2**31 - 2
_PAUSE = 0.01  # seconds between two tries
_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

fcntl: Any
msvcrt: Any
try:
    fcntl, msvcrt = importlib.import_module("fcntl"), None
except ImportError:
    fcntl, msvcrt = None, importlib.import_module("msvcrt")


def lock(fd: int, *, exclusive: bool = True, wait: bool = True) -> bool:
    """Lock an open file; return whether this file descriptor has the lock now.

    **Guarantee.** While it is held, no other `open` of the file has an exclusive lock, in this
    process or in another one. A process that ends gives its locks back. The position in the file
    stays. The lock binds only those who ask for it.

    Args:
        fd: the descriptor, which has no lock yet.
        exclusive: keep everybody else out; else those alone who ask for an exclusive lock. Windows
            knows only exclusive locks, so there this says nothing.
        wait: wait until the lock is free; else return False where it is not.
    """
    if msvcrt is not None:
        return _lock_byte(fd, wait)
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(fd, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give the lock of an open file back, before it is closed."""
    if msvcrt is not None:
        _at_byte(fd, msvcrt.LK_UNLCK)
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable: files that were made, renamed or deleted there.

    **Guarantee.** On POSIX systems they are on disk when this returns. Windows cannot open a
    folder as a file and keeps a journal of names itself, so there this does nothing.
    """
    if msvcrt is not None:
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock_byte(fd: int, wait: bool) -> bool:
    while True:
        try:
            _at_byte(fd, msvcrt.LK_NBLCK)
        except OSError as error:
            if error.errno not in _BUSY:
                raise
        else:
            return True
        if not wait:
            return False
        time.sleep(_PAUSE)


def _at_byte(fd: int, mode: int) -> None:
    """Call `msvcrt.locking`, which acts on the bytes at the position of the file."""
    before = os.lseek(fd, 0, os.SEEK_CUR)
    os.lseek(fd, _BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(fd, mode, 1)
    finally:
        os.lseek(fd, before, os.SEEK_SET)
