"""Forks that cannot hang a test."""

import os
import signal
import time
from collections.abc import Callable

import torch


def fork() -> int:
    """As `os.fork`. The child uses one thread: OpenMP would wait for threads that it lost."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
    return pid


def exit_code(pid: int, seconds: float = 120.0) -> int:
    """Wait for a child and return its exit code; kill it where it takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"a child was still running after {seconds:g} s")
        time.sleep(0.002)


def started(work: Callable[[], object]) -> int:
    """A child that does this work and exits with 0, or with 1 after an exception."""
    pid = fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid
