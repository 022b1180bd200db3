"""Seconds per epoch of private training on a GPU, through `dpbnn.fit`, beside plain training.

    python -m benchmarks.gpu [--rounds 3] [--epochs 9] [--models mlp,cnn,vit,predict,encoder]

An epoch is 235 steps of 256 of 60 000 images (the encoder: 60 steps of 32 of 1920 sequences; vit:
16 steps of 256 of 4096 images of 224 px, given as 196 patches, in bfloat16 autocast). Plain
training is forward, backward and torch.optim.SGD on batches of exactly that size, gathered on the
device: operation by operation ("eager"), and as one CUDA graph that is replayed ("captured"). The
time is that of the loop after its first epoch, which has the capture in it; the median over rounds
that run everything in turn. The encoder runs half as many epochs, vit a third. Private runs have
Poisson batches, sigma 1.3. Memory is the peak of the first run beside the data. "predict" has 100
iterates of the MLP at 10 000 images.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpbnn
from dpbnn import training
from dpbnn.likelihoods import Categorical
from dpbnn.posteriors import IteratePosterior

Timed = Callable[[int], tuple[float, float]]
"""Runs some epochs; returns the seconds of the first, and of each of the others."""


class Clock:
    """Times epochs: `tick` ends one."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.tick()

    def tick(self) -> None:
        torch.cuda.synchronize()
        self.ticks.append(time.perf_counter())

    def read(self, epochs: int) -> tuple[float, float]:
        begin, first, end = self.ticks[0], self.ticks[1], self.ticks[-1]
        return first - begin, (end - first) / max(1, epochs - 1)


class Own(nn.Module):
    """The MLP as a module of a user, with code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(m for m in dpbnn.mlp() if isinstance(m, nn.Linear))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.flatten(1)
        for layer in self.layers[:-1]:
            hidden = F.relu(layer(hidden))
        return self.layers[-1](hidden)


def transformer(layers: int, width: int, heads: int, **options: bool | str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, batch_first=True, **options
    )  # type: ignore[arg-type]
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def encoder() -> nn.Module:
    """Return a transformer of 4 layers, width 256, over sequences of tokens."""
    pooled = nn.AvgPool2d((128, 1)), nn.Flatten()
    return nn.Sequential(
        nn.Embedding(1000, 256), transformer(4, 256, 4), *pooled, nn.Linear(256, 10)
    )


def vit() -> nn.Module:
    """Return a transformer of the size of ViT-S/16, over patches of 16 x 16 pixels."""
    blocks = transformer(12, 384, 6, activation="gelu", norm_first=True)
    pooled = nn.AvgPool2d((196, 1)), nn.Flatten()
    return nn.Sequential(
        nn.Linear(768, 384), blocks, nn.LayerNorm(384), *pooled, nn.Linear(384, 10)
    )


def images(n: int) -> Tensor:
    return torch.rand(n, 1, 28, 28, device="cuda")


@dataclass(frozen=True)
class Case:
    """A network, its data, whether it runs in bfloat16 autocast, and its share of epochs."""

    make: Callable[[], nn.Module]
    batch: int
    steps: int
    n: int
    inputs: Callable[[int], Tensor]
    low: bool = False
    share: int = 1

    def data(self) -> tuple[Tensor, Tensor]:
        return self.inputs(self.n), torch.randint(0, 10, (self.n,), device="cuda")

    def precision(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.low)


CASES = {
    "mlp": Case(dpbnn.mlp, 256, 235, 60_000, images),
    "cnn": Case(dpbnn.cnn, 256, 235, 60_000, images),
    "encoder": Case(
        encoder, 32, 60, 1920, lambda n: torch.randint(0, 1000, (n, 128), device="cuda"), share=2
    ),
    "vit": Case(vit, 256, 16, 4096, lambda n: torch.rand(n, 196, 768, device="cuda"), True, 3),
}


def plain(case: Case, captured: bool) -> Timed:
    torch.manual_seed(0)
    model = case.make().cuda()
    (x, y), size = case.data(), case.batch
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    records = torch.zeros(size, dtype=torch.long, device="cuda")
    replay: list[Callable[[], object]] = []

    def step() -> None:
        with case.precision():
            loss = F.cross_entropy(model(x[records]), y[records])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def capture() -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay.append(graph.replay)

    def timed(epochs: int) -> tuple[float, float]:
        if captured and not replay:
            capture()
        run, clock = replay[0] if captured else step, Clock()
        for epoch in range(epochs):
            order = torch.randperm(case.n, device="cuda")
            for first in range(case.steps):
                records.copy_(order[min(first * size, case.n - size) :][:size])
                run()
            if epoch in (0, epochs - 1):
                clock.tick()
        return clock.read(epochs)

    return timed


def private(case: Case, method: dpbnn.Method, sampling: str = "poisson") -> Timed:
    data = case.data()

    def timed(epochs: int) -> tuple[float, float]:
        clocks, train, replayed = [], training._Run.train, training._Run._replayed

        def clocked(run: training._Run, progress: bool) -> None:
            clocks.append(Clock())
            train(run, progress)
            clocks[0].tick()

        def noted(run: training._Run, *batch: Any) -> None:
            replayed(run, *batch)
            if run.step == case.steps:
                clocks[0].tick()

        plan = dpbnn.plan(
            noise_multiplier=1.3, delta=1e-5, n=case.n, batch_size=case.batch,
            steps=case.steps * epochs, sampling=sampling,
            relation="replace-one" if sampling == "fixed-size" else "zero-out",
        )  # fmt: skip
        training._Run.train, training._Run._replayed = clocked, noted  # type: ignore[method-assign]
        try:
            with case.precision():
                dpbnn.fit(case.make, data, method=method, plan=plan, device="cuda", progress=False)
        finally:
            training._Run.train, training._Run._replayed = train, replayed  # type: ignore[method-assign]
        return clocks[0].read(epochs)

    return timed


def by_vmap(case: Case) -> Timed:
    """Clip by torch.func: per-example gradients, 32 at a time; one step stands for an epoch."""
    model = case.make().cuda()
    x, y = case.data()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(model, weights, (x.unsqueeze(0),))
        return F.cross_entropy(out, y.unsqueeze(0))

    def step(records: Tensor) -> None:
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for part in records.split(32):
            with case.precision():
                found = torch.func.vmap(
                    torch.func.grad(loss), (None, 0, 0), randomness="different"
                )(parameters, x[part], y[part])
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
            w = norms.reciprocal().clamp(max=1.0)
            for name, g in found.items():
                total[name] += torch.tensordot(w, g, 1)
        for name, p in parameters.items():
            p -= 1e-3 * (total[name] + 1.3 * torch.randn_like(p)) / case.batch

    def timed(epochs: int) -> tuple[float, float]:
        clock = Clock()
        for _ in range(epochs):
            step(torch.randperm(case.n, device="cuda")[: case.batch])
            clock.tick()
        first, others = clock.read(epochs)
        return first * case.steps, others * case.steps

    return timed


def contenders(name: str) -> dict[str, Timed]:
    case = CASES[name]
    runs = {
        "plain eager": plain(case, captured=False),
        "plain captured": plain(case, captured=True),
        "DP-SGD": private(case, dpbnn.SGD(learning_rate=0.1)),
    }
    if name == "mlp":
        dropout = replace(case, make=lambda: dpbnn.mlp(dropout=0.5))
        runs["DP-SGD, module of a user"] = private(
            replace(case, make=Own), dpbnn.SGD(learning_rate=0.1)
        )
        runs["DP-SGLD"] = private(case, dpbnn.SGLD(learning_rate=1e-6, keep=10))
        runs["DP-BBP"] = private(case, dpbnn.BBP(learning_rate=0.1))
        runs["DP-MC Dropout"] = private(dropout, dpbnn.MCDropout(learning_rate=0.1))
    if name in ("encoder", "vit"):
        fixed = private(case, dpbnn.SGD(learning_rate=0.1), "fixed-size")
        runs["DP-SGD, batches of fixed size"] = fixed
    if name == "vit":
        runs["torch.func"] = by_vmap(case)
    return runs


def compare(name: str, rounds: int, epochs: int) -> None:
    runs, memory = contenders(name), {}
    for label, run in runs.items():
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(1)
        memory[label] = (torch.cuda.max_memory_allocated() - before) / 2**20
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            times[label].append(run(max(2, epochs // CASES[name].share)))
    per = {label: statistics.median(t for _, t in own) for label, own in times.items()}
    for label, own in times.items():
        first = statistics.median(t for t, _ in own)
        ratio, more = (known[label] / known["plain captured"] for known in (per, memory))
        print(
            f"| {name} | {label} | {per[label]:.4f} | {first:.3f} | {ratio:.2f} | "
            f"{memory[label]:.0f} MB, {more:.2f} |",
            flush=True,
        )


def predict(rounds: int) -> None:
    """Time predictions: read from the file, of weights that stay on the device, and in pieces."""
    model, x = dpbnn.mlp().cuda(), images(10_000)
    draws = {n: torch.randn(100, *p.shape) * 0.02 for n, p in model.named_parameters()}
    posterior = IteratePosterior.of_draws(model, Categorical(), draws)
    products = 2 * 100 * len(x) * sum(v[0].numel() for v in draws.values() if v.dim() > 2)

    def seconds(**options: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        posterior.predict(x, 100, **options)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    seconds()
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        posterior._resident = None
        found.setdefault("read from the file", []).append(seconds())
        found.setdefault("on the device", []).append(seconds())
        keep, posterior._keep = posterior._keep, lambda positions: False  # type: ignore[method-assign]
        posterior._resident = None
        found.setdefault("streamed, 512 MiB", []).append(seconds(memory_limit=2**29))
        posterior._keep = keep  # type: ignore[method-assign]
    for label, own in found.items():
        best = statistics.median(own)
        print(
            f"| predict | {label} | {best:.4f} | {products / best / 1e12:.0f} TFLOP/s |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--models", default="mlp,cnn,vit,predict,encoder")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print("| model | | s per epoch | first epoch | x plain captured | memory, x plain captured |")
    print("|---|---|---|---|---|---|")
    for name in arguments.models.split(","):
        if name == "predict":
            predict(arguments.rounds)
        else:
            compare(name, arguments.rounds, arguments.epochs)


if __name__ == "__main__":
    main()
