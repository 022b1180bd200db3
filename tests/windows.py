"""What Windows has in place of POSIX calls, as far as the tests need it."""

import errno
import importlib.util
import os
import shutil
import sys
import threading
import types
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows itself
    fcntl = None

POSIX_ONLY = ("pwrite", "pread", "posix_fallocate", "fstatvfs", "O_DIRECT", "sched_getaffinity")


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


def again(module):
    """Load a module a second time, as it would be under what `os` and `sys.modules` hold now."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_again", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    try:
        spec.loader.exec_module(copy)
    finally:
        del sys.modules[copy.__name__]
    return copy


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


def strict_files(patch):
    """Let files be as touchy as those of Windows.

    No folder is opened, no file synced that is open for reading alone, nothing renamed onto what is
    there, and nothing replaced that is mapped into memory.
    """
    real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "replace")}
    patch.setattr(shutil, "_use_fd_functions", False, raising=False)

    def opened(path, flags, *args, **options):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real["open"](path, flags, *args, **options)

    def fsync(file):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real["fsync"](file)

    def rename(source, target, **options):
        if os.path.exists(target):
            raise FileExistsError(errno.EEXIST, "File exists", str(target))
        real["rename"](source, target, **options)

    def replace(source, target, **options):
        maps = Path("/proc/self/maps")
        if maps.exists() and any(
            line.endswith(f" {Path(target).absolute()}") for line in maps.read_text().splitlines()
        ):
            raise PermissionError(errno.EACCES, "Access is denied", str(target))
        real["replace"](source, target, **options)

    for function in (opened, fsync, rename, replace):
        patch.setattr(os, "open" if function is opened else function.__name__, function)
