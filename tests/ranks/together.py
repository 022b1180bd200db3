"""Processes that train together, forked from the test; none of them can hang it.

Broken versions of the library that a test has put in place are in the forked processes too.
"""

import importlib
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forks import fork

for _name in ("torch._dynamo", "torch.distributed.checkpoint.hf_storage"):
    importlib.import_module(_name)  # for optimizers and checkpoints: once, not in each process
DEADLINE = 120.0  # seconds; a group takes about one


def begun(
    size: int,
    work: Callable[[int], Any],
    folder: Path,
    backend: str = "gloo",
    patience: float = DEADLINE / 2,
) -> list[int]:
    """Fork processes of one group; each leaves what its work returned, or raised, in the folder.

    They wait for each other as many seconds as their patience lasts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(size):
        pid = fork()
        if pid == 0:
            status = 1
            try:
                store = dist.FileStore(str(folder / "store"), size)
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=size,
                    timeout=timedelta(seconds=patience),
                )  # fmt: skip
                try:
                    left: Any = work(rank)
                except Exception as error:
                    left = error
                (folder / f"{rank}.new").write_bytes(pickle.dumps(left))
                (folder / f"{rank}.new").rename(folder / f"{rank}.pickle")
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    return children


def ended(children: list[int], folder: Path, grace: float = DEADLINE) -> list[Any]:
    """Wait for the processes; return what each has left, None where it was killed.

    Where one was killed the others get some time to end by themselves, as `torchrun` gives them.
    """
    deadline, running = time.monotonic() + DEADLINE, set(children)
    dead = late = False
    while running:
        for pid in list(running):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                running.remove(pid)
                if os.waitstatus_to_exitcode(status) < 0 and not dead:
                    dead = True
                    deadline = min(deadline, time.monotonic() + grace)
        if running and time.monotonic() > deadline:
            late = late or not dead
            dead = True
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    assert not late, f"ranks were still running after {DEADLINE:g} s"
    files = [folder / f"{rank}.pickle" for rank in range(len(children))]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def together(size: int, work: Callable[[int], Any], backend: str = "gloo") -> list[Any]:
    """Return what `work(rank)` returns, or raises, on each of so many ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return ended(begun(size, work, folder, backend), folder)
