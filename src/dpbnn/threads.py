"""How many threads small work runs on: one, since threads that wait for each other cost more.

On busy cores two threads of a small step wait for each other at every operation: a step of 2 ms
then takes 300. Large steps keep all threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["threads", "threads_for"]

SMALL = 3e8  # operations of a step, up to which one thread is at least as fast on busy cores


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run a block on so many threads; 0 leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    large = len(record) != 1 or 6 * rows * parameters > SMALL
    with threads(0 if large else 1):
        yield
