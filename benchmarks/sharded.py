"""Memory of a rank: a network that `fully_shard` has spread over 1, 2, 4 ranks, and a whole one.

    python -m benchmarks.sharded [--ranks 1,2,4] [--layers 8] [--width 2048] [--steps 3]

Every rank is a process of its own, on one thread. Printed is the largest resident memory of any
rank over the whole run, from `import dpbnn` to the end of `fit`, less what it was before the
network was made; and the same for ranks that each hold the whole network. Layers are made and
spread one by one, so that no rank ever has the whole network. glibc keeps what was freed, unless
MALLOC_MMAP_THRESHOLD_=1048576 is set.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dpbnn

N, BATCH = 512, 32


def network(layers: int, width: int, spread: bool) -> nn.Module:
    """Return a perceptron, spread over all ranks or whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts: list[nn.Module] = []
    for _ in range(layers):
        layer = nn.Linear(width, width)
        parts += [fully_shard(layer, mesh=mesh) if spread else layer, nn.Tanh()]
    head = nn.Linear(width, 10)
    made = nn.Sequential(*parts, fully_shard(head, mesh=mesh) if spread else head)
    return fully_shard(made, mesh=mesh) if spread else made


def megabytes() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(
    rank: int, size: int, spread: bool, options: argparse.Namespace, folder: str, results: Any
) -> None:
    """Train as one rank of a group; report memory and time."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    x, y = torch.randn(N, options.width), torch.randint(0, 10, (N,))
    plan = dpbnn.plan(
        noise_multiplier=1.0, delta=1e-5, n=N, batch_size=BATCH, steps=options.steps,
        accountant="rdp",
    )  # fmt: skip
    before, begin = megabytes(), time.process_time()
    made = network(options.layers, options.width, spread)
    numbers = sum(p.numel() for p in made.parameters())
    method = dpbnn.SGD(learning_rate=1e-3, momentum=0.9)
    dpbnn.fit(lambda: made, (x, y), method=method, plan=plan, progress=False)
    results.put((numbers, megabytes() - before, time.process_time() - begin))
    dist.barrier()
    dist.destroy_process_group()


def measured(size: int, spread: bool, options: argparse.Namespace) -> tuple[int, float, float]:
    """Return the number of parameters, and the largest memory and time of any rank."""
    start = multiprocessing.get_context("spawn")
    results = start.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (size, spread, options, folder, results)
        children = [start.Process(target=work, args=(rank, *given)) for rank in range(size)]
        for child in children:
            child.start()
        found = [results.get(timeout=1200) for _ in children]
        for child in children:
            child.join()
    numbers, memory, seconds = zip(*found, strict=True)
    return numbers[0], max(memory), max(seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    sizes = [int(size) for size in options.ranks.split(",")]
    for size, spread in [(sizes[0], False), *((size, True) for size in sizes)]:
        numbers, memory, seconds = measured(size, spread, options)
        kind = "sharded" if spread else "whole"
        print(
            f"{kind:8} {size} ranks  d={numbers}  {memory:7.0f} MB a rank  "
            f"{memory / numbers * 1e6:5.1f} bytes a parameter  {seconds:5.1f} s processor",
            flush=True,
        )


if __name__ == "__main__":
    main()
