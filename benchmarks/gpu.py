"""Seconds per epoch of private training on a GPU, through `dpbnn.fit`, beside plain training.

    python -m benchmarks.gpu [--rounds 3] [--epochs 15] [--models mlp,cnn,encoder]

An epoch is 235 steps of 256 of 60 000 images (the encoder: 32 of 7520 sequences). Plain training is
forward, backward and torch.optim.SGD on batches of exactly that size, gathered on the device:
operation by operation ("eager"), and as one CUDA graph that is replayed ("captured"). The time is
that of the loop, (T(epochs) - T(1)) / (epochs - 1), the median over rounds that run everything in
turn; T(1) has the capture in it. Private runs have Poisson batches, sigma 1.3.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpbnn
from dpbnn import training

STEPS = 235
Timed = Callable[[int], float]


def data(name: str) -> tuple[int, Tensor, Tensor]:
    """Return the batch size, inputs and targets."""
    batch = 32 if name == "encoder" else 256
    n = STEPS * batch - 160 * (name != "encoder")
    x = torch.randint(0, 1000, (n, 128)) if name == "encoder" else torch.rand(n, 1, 28, 28)
    return batch, x.cuda(), torch.randint(0, 10, (n,)).cuda()


def plain(make: Callable[[], nn.Module], name: str, captured: bool) -> Timed:
    torch.manual_seed(0)
    model = make().cuda()
    size, x, y = data(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    records = torch.zeros(size, dtype=torch.long, device="cuda")

    def step() -> None:
        F.cross_entropy(model(x[records]), y[records]).backward()
        optimizer.step()
        optimizer.zero_grad()

    run: Callable[[], object] = step
    if captured:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay

    def timed(epochs: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(epochs):
            order = torch.randperm(len(y), device="cuda")
            for first in range(STEPS):
                records.copy_(order[min(first * size, len(y) - size) :][:size])
                run()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    return timed


def private(make: Callable[[], nn.Module], name: str, method: dpbnn.Method) -> Timed:
    size, x, y = data(name)

    def timed(epochs: int) -> float:
        seconds, train = [], training._Run.train

        def clocked(run: training._Run, progress: bool) -> None:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            train(run, progress)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)

        plan = dpbnn.plan(
            noise_multiplier=1.3, delta=1e-5, n=len(y), batch_size=size, steps=STEPS * epochs
        )
        training._Run.train = clocked  # type: ignore[method-assign]
        try:
            dpbnn.fit(make, (x, y), method=method, plan=plan, device="cuda", progress=False)
        finally:
            training._Run.train = train  # type: ignore[method-assign]
        return seconds[0]

    return timed


def encoder() -> nn.Module:
    """Return a transformer of 4 layers, width 256, over sequences of 128 tokens."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(1000, 256),
        nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        nn.AdaptiveAvgPool2d((1, None)),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def contenders(name: str) -> dict[str, Timed]:
    make: Callable[[], nn.Module] = {"mlp": dpbnn.mlp, "cnn": dpbnn.cnn, "encoder": encoder}[name]
    runs = {
        "plain eager": plain(make, name, captured=False),
        "plain captured": plain(make, name, captured=True),
        "DP-SGD": private(make, name, dpbnn.SGD(learning_rate=0.1)),
    }
    if name == "mlp":
        dropout = lambda: dpbnn.mlp(dropout=0.5)  # noqa: E731
        runs["DP-SGLD"] = private(make, name, dpbnn.SGLD(learning_rate=1e-6, keep=10))
        runs["DP-BBP"] = private(make, name, dpbnn.BBP(learning_rate=0.1))
        runs["DP-MC Dropout"] = private(dropout, name, dpbnn.MCDropout(learning_rate=0.1))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--models", default="mlp,cnn,encoder")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print("| model | | s per epoch | first epoch | x plain captured |\n|---|---|---|---|---|")
    for name in arguments.models.split(","):
        runs = contenders(name)
        for run in runs.values():
            run(1)
        times: dict[str, list[tuple[float, float]]] = {label: [] for label in runs}
        for _ in range(arguments.rounds):
            for label, run in runs.items():
                one, many = run(1), run(arguments.epochs)
                times[label].append(((many - one) / (arguments.epochs - 1), one))
        per = {label: statistics.median(t for t, _ in own) for label, own in times.items()}
        for label, own in times.items():
            first = statistics.median(t for _, t in own)
            ratio = per[label] / per["plain captured"]
            print(
                f"| {name} | {label} | {per[label]:.4f} | {first:.3f} | {ratio:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
