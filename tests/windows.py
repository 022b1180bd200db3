"""What Windows has in place of POSIX calls, as far as the tests need it."""

import errno
import os
import sys
import threading
import types

POSIX_ONLY = ("pwrite", "pread", "posix_fallocate", "O_DIRECT", "sched_getaffinity")


class FakeMsvcrt(types.ModuleType):
    """`msvcrt.locking`: locks bytes at the position of a file, against every other `open` of it.

    Attributes:
        held: (file, byte) -> the descriptor that holds the byte.
    """

    LK_UNLCK, LK_LOCK, LK_NBLCK = 0, 1, 2

    def __init__(self):
        super().__init__("msvcrt")
        self.held = {}
        self._guard = threading.Lock()

    def locking(self, fd, mode, count):
        assert count == 1
        at = os.lseek(fd, 0, os.SEEK_CUR)
        assert at < 2**31, "the C library seeks with 31 bits"
        key = (os.fstat(fd).st_dev, os.fstat(fd).st_ino, at)
        with self._guard:
            if mode == self.LK_UNLCK:
                if self.held.pop(key, None) != fd:
                    raise PermissionError(errno.EACCES, "not locked by this descriptor")
            elif key in self.held:
                raise PermissionError(errno.EACCES, "locked")
            else:
                self.held[key] = fd


def without_posix(patch):
    """Take away what Windows lacks; return the `msvcrt` that stands there instead.

    Modules that chose at import must be loaded again afterwards.
    """
    for name in POSIX_ONLY:
        patch.delattr(os, name, raising=False)
    patch.setitem(sys.modules, "fcntl", None)
    fake = FakeMsvcrt()
    patch.setitem(sys.modules, "msvcrt", fake)
    return fake
