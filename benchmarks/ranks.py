"""Weak scaling over ranks on one machine: a step of 32 sequences a rank, on 1, 2, ... ranks.

    python -m benchmarks.ranks [--ranks 1,2] [--rounds 3] [--steps 6] [--model encoder]

Every number of ranks runs once a round, in turn, each rank on one thread; so does one process that
does not divide its batches (0 ranks). Printed are medians over rounds: wall time and processor
time of a step, the time that rank 0 spends in the group (other ranks' delays are in it), the bytes
that a rank hands to the group in a step, and the throughput against 1 rank. On a busy machine
processor time is what can be compared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import dpbnn
from benchmarks.clipping import MODELS, images, tokens
from dpbnn import resume
from dpbnn.ranks import Ranks

BATCH = 32
Seen = dict[str, float]


def counted(method: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    """Return a method of a group that adds its time and the bytes it gets to `seen`."""

    def call(self: Ranks, values: torch.Tensor) -> Any:
        begin = time.perf_counter()
        result = method(self, values)
        seen["group"] += time.perf_counter() - begin
        seen["bytes"] += values.numel() * values.itemsize
        return result

    return call


def measured(name: str, size: int, steps: int) -> Seen:
    """Fit in this process, one of a group; return what a step takes, without the first."""
    seen: Seen = {"group": 0.0, "bytes": 0.0}
    for kind in ("sum", "spread", "gather"):
        setattr(Ranks, kind, counted(getattr(Ranks, kind), seen))
    ends: list[tuple[float, float, float, float]] = []
    in_step = resume.in_step

    def noted(*given: Any) -> Any:
        found = in_step(*given)
        ends.append((time.perf_counter(), time.process_time(), seen["group"], seen["bytes"]))
        return found

    resume.in_step = noted  # type: ignore[assignment]
    torch.manual_seed(0)
    n = BATCH * max(1, size)
    rows = tokens(n) if name == "encoder" else images(n)
    plan = dpbnn.plan(
        noise_multiplier=1.0, delta=1e-5, n=n, sampling="full-batch", steps=steps, accountant="rdp"
    )
    dpbnn.fit(
        MODELS[name][1], rows, method=dpbnn.SGD(learning_rate=1e-6), plan=plan, progress=False,
        checkpoint_every=10**6,
    )  # fmt: skip
    spans = [(b - a) / (len(ends) - 1) for a, b in zip(ends[0], ends[-1], strict=True)]
    return dict(zip(("wall", "processor", "group", "bytes"), spans, strict=True))


def work(name: str, rank: int, size: int, steps: int, folder: str, results: Any) -> None:
    """One rank of a group, or with size 0 a process without a group."""
    torch.set_num_threads(1)
    if size:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = measured(name, size, steps)
    if rank == 0:
        results.put(found)
    if size:
        dist.barrier()


def group(name: str, size: int, steps: int) -> Seen:
    """Run a group; return what its rank 0 measured."""
    context = multiprocessing.get_context("fork")  # imports once
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=work, args=(name, r, size, steps, folder, results))
            for r in range(max(1, size))
        ]
        for rank in ranks:
            rank.start()
        found: Seen = results.get(timeout=3600)
        for rank in ranks:
            rank.join(60)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--model", default="encoder", choices=["encoder", "mlp", "cnn"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [0, *map(int, given.ranks.split(","))]
    runs: dict[int, list[Seen]] = {size: [] for size in sizes}
    for _ in range(given.rounds):
        for size in sizes:
            runs[size].append(group(given.model, size, given.steps))
    print(f"{MODELS[given.model][0].split(',')[0]}, {BATCH} records a rank")
    print("| Ranks | Step, s | Processor time, s | In the group, s | MB a rank | Throughput |")
    print("|---|---|---|---|---|---|")
    for size, found in runs.items():
        middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
        pairs = zip(runs[1], found, strict=True)
        gain = statistics.median(max(1, size) * a["wall"] / b["wall"] for a, b in pairs)
        print(
            f"| {size or 'one process, no shards'} | {middle['wall']:.3f} "
            f"| {middle['processor']:.3f} | {middle['group']:.3f} "
            f"| {middle['bytes'] / 1e6:.2f} | {gain:.2f} x |"
        )


if __name__ == "__main__":
    main()
