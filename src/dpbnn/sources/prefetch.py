"""Batches that are read ahead: by a thread, or by worker processes that are started afresh.

A thread reads arrays alone, where no code of a user's runs: that could draw from the generators of
the run. Datasets are read by the process itself, or by workers. These are started by "spawn": they
get the dataset and the numbers of records, and hold no key, no ledger and no reservation.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dpbnn.messages import unquoted
from dpbnn.sources.source import Block, Records, Source

__all__ = ["ahead", "seed_of"]

_DEPTH = 2  # batches that are read ahead
_START = "spawn"  # a fork would take the keys of the run along
_DIED = (
    "a worker process ended, or raised an error, while it loaded records",
    "load records yourself to see more; a script that uses workers needs `if __name__ == "
    "'__main__':` around what it runs",
)
_UNSENT = (
    "the dataset cannot be sent to worker processes",
    "define its class in a module and open files in __getitem__, or use workers=0",
)
T = TypeVar("T")


def seed_of(base: int, step: int) -> int:
    """Return the seed of what the records of one batch draw."""
    drawn = hashlib.blake2b(f"{base} {step}".encode(), digest_size=7).digest()
    return int.from_bytes(drawn, "big")


def ahead(
    source: Source, batches: Iterable[Tensor], base: int, made: Callable[[Tensor, Block], T]
) -> Iterator[tuple[Tensor, T]]:
    """Yield batches with what is made of their records, some of them read ahead.

    Args:
        source: of the records.
        batches: numbers of records.
        base: seed of what records draw.
        made: makes something of a batch and its records; has no code of the user's that draws.
    """
    asked = ((seed_of(base, step), batch) for step, batch in enumerate(batches))
    if source.workers:
        for batch, block in _by_workers(source, asked):
            yield batch, made(batch, block)
    elif isinstance(source, Records):
        for seed, batch in asked:
            yield batch, made(batch, source.read(batch.numpy(), seed))
    else:
        yield from _by_thread(asked, lambda s, batch: made(batch, source.read(batch.numpy(), s)))


def _by_thread(
    asked: Iterable[tuple[int, Tensor]], read: Callable[[int, Tensor], T]
) -> Iterator[tuple[Tensor, T]]:
    waiting: deque[tuple[Tensor, Future[T]]] = deque()
    with ThreadPoolExecutor(1, "dpbnn-reading") as pool:
        for seed, batch in asked:
            waiting.append((batch, pool.submit(read, seed, batch)))
            if len(waiting) > _DEPTH:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()


def _by_workers(
    source: Source, asked: Iterable[tuple[int, Tensor]]
) -> Iterator[tuple[Tensor, Block]]:
    order = _Order(asked)
    loader: DataLoader[Block] = DataLoader(
        _View(source),  # type: ignore[arg-type]
        batch_size=None,
        sampler=order,
        num_workers=source.workers,
        multiprocessing_context=_START,
        prefetch_factor=_DEPTH,
        collate_fn=_as_it_is,
        generator=torch.Generator().manual_seed(0),  # so that nothing is drawn from the run's own
    )
    with unquoted(*_UNSENT, ValueError), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Got pickle error")  # it advises to fork
        blocks = iter(loader)
    while True:
        with unquoted(*_DIED):
            block = next(blocks, None)
        if block is None:
            return
        yield order.given.popleft(), block


class _Order:
    """Numbers of records, in the order in which they are asked for."""

    def __init__(self, asked: Iterable[tuple[int, Tensor]]) -> None:
        self.asked, self.given = asked, deque[Tensor]()

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        for seed, batch in self.asked:
            self.given.append(batch)
            yield seed, batch.numpy()


class _View:
    """What a worker has: the dataset, and nothing of the run."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, asked: tuple[int, np.ndarray]) -> Block:
        return self.source.read(asked[1], asked[0])


def _as_it_is(value: Any) -> Any:
    return value
