"""Weak scaling over ranks on one machine: a step of 32 sequences a rank, on 1, 2, ... ranks.

    python -m benchmarks.ranks [--ranks 1,2] [--rounds 3] [--steps 6] [--model encoder]
    python -m benchmarks.ranks --fit [--rounds 3] [--steps 6]

Every number of ranks runs once a round, in turn, each rank on one thread; so does one process that
does not divide its batches (0 ranks). Printed are medians over rounds: wall time and processor
time of a step, the time that rank 0 spends in the group (other ranks' delays are in it), the bytes
that a rank hands to the group in a step, and the throughput against 1 rank. On a busy machine
processor time is what can be compared.

With --fit, perceptrons of several widths are trained with several batches and numbers of shards, in
one rank, and on two, and the cost model of docs/scaling.md is fitted to the processor times.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy import optimize

import dpbnn
from benchmarks.clipping import MODELS, images, tokens
from dpbnn import ranks, resume
from dpbnn.privacy.noise import NoiseSource
from dpbnn.ranks import Ranks

BATCH = 32
WIDTHS, BATCHES, SHARDS = (200, 800, 1600), (16, 128), (1, 4, 8)
Seen = dict[str, float]
Work = tuple[Callable[[], torch.nn.Module], Callable[[int], Any], int, int]
"""What a group trains: the network, rows by number, records of a rank, shards."""
Point = tuple[int, int, int, int, float]
"""Parameters d, records of a rank b, shards m, ranks k, processor time of a step."""


def counted(method: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    """Return a method of a group that adds its time and the bytes it gets to `seen`."""

    def call(self: Ranks, values: torch.Tensor) -> Any:
        begin = time.perf_counter()
        result = method(self, values)
        seen["group"] += time.perf_counter() - begin
        seen["bytes"] += values.numel() * values.itemsize
        return result

    return call


def measured(job: Work, size: int, steps: int) -> Seen:
    """Fit in this process, one of a group; return what a step takes, without the first."""
    model, rows, records, ranks.SHARDS = job
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
    n = records * max(1, size)
    plan = dpbnn.plan(
        noise_multiplier=1.0, delta=1e-5, n=n, sampling="full-batch", steps=steps, accountant="rdp"
    )
    dpbnn.fit(
        model, rows(n), method=dpbnn.SGD(learning_rate=1e-6), plan=plan, progress=False,
        checkpoint_every=10**6,
    )  # fmt: skip
    spans = [(b - a) / (len(ends) - 1) for a, b in zip(ends[0], ends[-1], strict=True)]
    return dict(zip(("wall", "processor", "group", "bytes"), spans, strict=True))


def work(job: Work, rank: int, size: int, steps: int, folder: str, results: Any) -> None:
    """One rank of a group, or with size 0 a process without a group."""
    torch.set_num_threads(1)
    if size:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = measured(job, size, steps)
    if rank == 0:
        results.put(found)
    if size:
        dist.barrier()


def group(job: Work, size: int, steps: int) -> Seen:
    """Run a group; return what its rank 0 measured."""
    context = multiprocessing.get_context("fork")  # imports once
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=work, args=(job, r, size, steps, folder, results))
            for r in range(max(1, size))
        ]
        for rank in ranks:
            rank.start()
        found: Seen = results.get(timeout=3600)
        for rank in ranks:
            rank.join(60)
    return found


def width(h: int) -> tuple[Callable[[], torch.nn.Module], int]:
    """Return a perceptron of two hidden layers, and its number of parameters."""

    def model() -> torch.nn.Module:
        return dpbnn.mlp(784, (h, h), 10)

    return model, sum(p.numel() for p in model().parameters())


def noise_of(numbers: int) -> float:
    """Return the processor time of noise for so many numbers, the median of 9."""
    times, source, sums = [], NoiseSource(), {"all": torch.zeros(numbers)}
    for _ in range(9):
        begin = time.process_time()
        source.add(sums, 1.0)
        times.append(time.process_time() - begin)
    return statistics.median(times)


def fit_model(rounds: int, steps: int) -> None:
    """Fit seconds of a step to public numbers; print the terms and how far points are off."""
    points: list[Point] = []
    print("parameters, records a rank, shards, ranks, processor time of a step in s")
    for h in WIDTHS:
        model, d = width(h)
        for batch in BATCHES:
            for shards, size in (*((m, 1) for m in SHARDS), (4, 2)):
                job: Work = (model, images, batch, shards)
                runs = [group(job, size, steps)["processor"] for _ in range(rounds)]
                points.append((d, batch, shards, size, statistics.median(runs)))
                print(*points[-1], flush=True)
    report(points)
    print(f"noise: {noise_of(points[-1][0]) / points[-1][0]:.3g} s a parameter")


def report(points: list[Point]) -> None:
    """Print the fitted terms, and how far a model without a point is off for it."""
    terms = ["a step", "a shard", "a record and parameter", "a shard and parameter",
             "a parameter", "the exchange", "the exchange, a parameter"]  # fmt: skip
    a = np.array([
        [1, m / k, b * d, m / k * d, d, k > 1, (k > 1) * d] for d, b, m, k, _ in points
    ])  # fmt: skip
    t = np.array([point[-1] for point in points])

    def fitted(rows: Any) -> Any:
        return optimize.nnls((a / t[:, None])[rows], np.ones(len(t))[rows])[0]  # relative errors

    for name, value in zip(terms, fitted(slice(None)), strict=True):
        print(f"{name}: {value:.3g} s")
    every = np.arange(len(t))
    off = np.array([abs(a[i] @ fitted(every != i) / t[i] - 1) for i in every])
    for size in (1, 2):
        own = off[[point[3] == size for point in points]]
        print(f"{size} ranks: {len(own)} points, each predicted by the others: median "
              f"{np.median(own):.0%}, at most {own.max():.0%} off")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--model", default="encoder", choices=["encoder", "mlp", "cnn"])
    parser.add_argument("--fit", action="store_true", help="fit the cost model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.fit:
        fit_model(given.rounds, given.steps)
        return
    rows = tokens if given.model == "encoder" else images
    job: Work = (MODELS[given.model][1], rows, BATCH, ranks.SHARDS)
    sizes = [0, *map(int, given.ranks.split(","))]
    runs: dict[int, list[Seen]] = {size: [] for size in sizes}
    for _ in range(given.rounds):
        for size in sizes:
            runs[size].append(group(job, size, given.steps))
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
