"""How many threads small work runs on: one, since threads that wait for each other cost more.

On busy cores two threads of a small step wait for each other at every operation: a step of 2 ms
then takes 300. Large steps keep all threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SMALL = 3e8  # operations of a step, up to which one thread is at least as fast on busy cores


@contextlib.contextmanager
def threads_for(rows: float, parameters: int, record: torch.Size) -> Iterator[None]:
    """Run a block on one thread where its steps are small, and on all threads otherwise.

    A forward and a backward pass take about 6 operations per row and weight where a record is a
    vector. Layers that use a weight at many positions take more, so other records keep all threads.

    Args:
        rows: number of rows of a step.
        parameters: number of weights.
        record: shape of a record.
    """
    before = torch.get_num_threads()
    if before == 1 or len(record) != 1 or 6 * rows * parameters > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
