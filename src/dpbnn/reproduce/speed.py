"""Seconds an epoch of each private method, beside the DP-BNN paper's, plain torch and Opacus."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.methods import BBP, SGD, SGLD, MCDropout
from dpbnn.methods.method import Method
from dpbnn.priors import Gaussian
from dpbnn.privacy.plan import open_plan, plan
from dpbnn.reproduce.cells import Cells
from dpbnn.reproduce.dp_bnn_mnist import network
from dpbnn.reproduce.result import Result, Settings, Summary
from dpbnn.training import fit

__all__ = ["speed"]

BATCH, EPOCH, RATE, SIGMA, CLIP = 256, 60_000 / 256, 0.25, 1.3, 1.5
METHODS: dict[str, tuple[Method, float | None]] = {
    "SGLD": (SGLD.paper(keep=1), 10.0),
    "BBP, weight space": (BBP(learning_rate=0.15, clip=CLIP), 480.0),
    "BBP, Algorithm 3, one draw": (BBP.paper(), 480.0),
    "MC Dropout": (MCDropout(learning_rate=0.1, clip=CLIP), 9.0),
    "SGD": (SGD(learning_rate=RATE, clip=CLIP), 10.0),
}
"""Method and the paper's seconds an epoch on a P100."""
OPEN, PLAIN, OPACUS = "SGD, not private", "plain torch, SGD", "Opacus ghost clipping, SGD"
Train = Callable[[int], None]
"""Trains for a number of steps."""


def _loop(cell: dict[str, Any], model: nn.Module, x: Tensor, y: Tensor) -> Train:
    """Return plain training on batches of exactly the expected size, or that of Opacus."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
    criterion: Any = nn.CrossEntropyLoss()
    if cell["method"] == OPACUS:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        model = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP, use_ghost_clipping=True
        )
        optimizer = DPOptimizerFastGradientClipping(
            optimizer, noise_multiplier=SIGMA, max_grad_norm=CLIP, expected_batch_size=BATCH
        )
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)

    def train(steps: int) -> None:
        for _ in range(steps):
            rows = torch.randint(0, len(x), (BATCH,), device=x.device)
            criterion(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def _fit(cell: dict[str, Any], make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> Train:
    """Return training by the library, all of `fit`."""
    way, _ = METHODS.get(cell["method"], METHODS["SGD"])
    sigma = way.noise_multipliers(len(x), BATCH, 1)[0] if isinstance(way, SGLD) else SIGMA

    def train(steps: int) -> None:
        budget = open_plan(n=len(x), batch_size=BATCH, steps=steps)
        if cell["method"] != OPEN:
            budget = plan(
                noise_multiplier=sigma, delta=1e-5, n=len(x), batch_size=BATCH, steps=steps
            )
        fit(make, (x, y), "categorical", Gaussian(0.1), way, budget, device=str(x.device),
            progress=False)  # fmt: skip

    return train


def _measured(cell: dict[str, Any], device: str) -> dict[str, Any]:
    """Return seconds an epoch: a long run less a short one, after one that warms up.

    With one thread on a CPU they are CPU seconds, which do not count the work of others on the
    machine; the time that passed is kept beside them.
    """
    n = 2000 if cell.get("fast") else 60_000
    x = torch.randn(n, 1, 28, 28, device=device)
    y = torch.randint(0, 10, (n,), device=device)
    kind = "mcdropout" if cell["method"] == "MC Dropout" else "sgd"

    def make() -> nn.Module:
        return network({**cell, "method": kind})

    loop = cell["method"] in (PLAIN, OPACUS)
    train = _loop(cell, make().to(device), x, y) if loop else _fit(cell, make, x, y)
    alone = device == "cpu" and torch.get_num_threads() == 1
    clocks = (time.process_time if alone else time.perf_counter, time.perf_counter)
    times = []
    for steps in (cell["steps"], cell["steps"], 3 * cell["steps"]):
        begin = [clock() for clock in clocks]
        train(steps)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append([clock() - start for clock, start in zip(clocks, begin, strict=True)])
    seconds, passed = (
        (long - short) / (2 * cell["steps"]) * EPOCH
        for short, long in zip(times[1], times[2], strict=True)
    )
    value = {"seconds": seconds, "passed": passed, "cores": os.cpu_count(),
             "threads": torch.get_num_threads()}  # fmt: skip
    if cell["method"] == OPACUS:
        value["opacus"] = importlib.metadata.version("opacus")
    return value


def _where(line: dict[str, Any]) -> str:
    threads = line["value"].get("threads")
    if line["cell"]["device"] != "cpu":
        return str(line["device"])
    return f"CPU, {threads} thread{'' if threads == 1 else 's'}"


def _rows(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return medians over rounds by device, network and method; ratios are taken in a round."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for line in lines:
        cell = line["cell"]
        key = _where(line), cell["network"], cell["method"]
        found.setdefault(key, {})[cell.get("round", 0)] = line["value"]["seconds"]
    rows = []
    for (where, net, name), seconds in found.items():
        plain = found.get((where, net, PLAIN), {})
        ratios = [value / plain[i] for i, value in seconds.items() if i in plain and plain[i] > 0]
        paper = METHODS[name][1] if name in METHODS and net == "mlp" else None
        rows.append((name, net.upper(), paper, statistics.median(seconds.values()),
                     statistics.median(ratios) if ratios else None, where))  # fmt: skip
    return rows


def speed(settings: Settings) -> Result:
    """Seconds an epoch of every private method, MLP and CNN, beside plain torch and Opacus."""
    cuda = settings.device.startswith("cuda")
    steps = 1 if settings.fast else 1000 if cuda else 10
    rounds = settings.count(1 if cuda else 3)
    here = importlib.util.find_spec("opacus") is not None
    cells = [
        {"method": name, "network": net, "steps": steps, "device": settings.device,
         **({"round": i} if i else {})}
        for i in range(rounds)
        for net in ("mlp", "cnn")
        for name in (PLAIN, *((OPACUS,) if here else ()), OPEN, *METHODS)
    ]  # fmt: skip
    kept = Cells("speed", settings)
    elsewhere = [
        line for line in kept.lines.values()
        if line["cell"]["device"] != settings.device
        and line["cell"].get("fast", False) == settings.fast
    ]  # fmt: skip
    kept.all(cells, lambda cell: _measured(cell, settings.device))
    settings.used.extend(elsewhere)
    lines = [line for line in settings.used if "value" in line]
    rows = _rows(lines)
    return Result(
        title="Speed: seconds an epoch of MNIST's size, batch 256",
        columns=(
            "method",
            "network",
            "paper: s an epoch (P100)",
            "s an epoch",
            "x plain torch",
            "device",
        ),
        rows=tuple(rows),
        notes=(
            "random images; the time of a long run less that of a short one, so that setting up is "
            "not in it, scaled to an epoch of 234 steps: a difference of "
            + ", ".join(f"{2 * s} steps on {d}" for d, s in _lengths(lines).items())
            + ". A run measures one device (--device) and keeps the rows of others. On the CPU "
            "medians over rounds in which every method runs in turn; with one thread CPU seconds, "
            f"which do not count the work of others on the machine{_busy(lines)}",
            "all rows but plain torch and Opacus are whole calls of dpbnn.fit: Poisson batches, "
            "noise from a cryptographic generator, gate and ledger. Plain torch and Opacus run a "
            "loop over batches of exactly 256 records, without sampling and accounting, and "
            "Opacus adds torch's own noise",
            *_remarks(lines, here),
        ),
        summary=_summary(rows),
    )


def _busy(lines: list[dict[str, Any]]) -> str:
    """Say how much longer it took on the clock, where CPU seconds were measured."""
    values = [line["value"] for line in lines if line["cell"]["device"] == "cpu"]
    ratios = [v["passed"] / v["seconds"] for v in values if v["threads"] == 1 and v["seconds"] > 0]
    if not ratios:
        return ""
    return (
        f", though they do count what others do to the caches; on the clock it took "
        f"{statistics.median(ratios):.1f} times as long (median)"
    )


def _lengths(lines: list[dict[str, Any]]) -> dict[str, int]:
    return {line["device"]: line["cell"]["steps"] for line in lines}


def _remarks(lines: list[dict[str, Any]], here: bool) -> tuple[str, ...]:
    """Say which Opacus it is, where it is missing and why, and which rows are of older code."""
    versions = {line["value"]["opacus"] for line in lines if "opacus" in line["value"]}
    found = [f"Opacus {', '.join(sorted(versions))}"] if versions else []
    if not here:
        found.append("Opacus is not installed here, so it was not run: pip install opacus")
    older = {line["device"] for line in lines if "threads" not in line["value"]}
    if older:
        found.append(
            f"the rows of {', '.join(sorted(older))} are of earlier code, without plain torch and "
            "Opacus. The likely reason why SGLD is slow in them: it measured the temperature of "
            "its noise by operations outside the CUDA graph, at every step (it stores one iterate, "
            "so that writing is not the reason). That is now inside the graph, and the clip has "
            "fewer kernels: later times are in "
            "[benchmarks/README.md](../benchmarks/README.md#on-a-gpu)"
        )
    return tuple(found)


def _summary(rows: list[tuple[Any, ...]]) -> Summary:
    by = {(row[5], row[1], row[0]): row for row in rows}
    times, costs, beside = [], [], []
    for where in dict.fromkeys(row[5] for row in rows):
        names = ("SGD", "BBP, weight space", "BBP, Algorithm 3, one draw")
        own = [by[where, "MLP", name][3] for name in names if (where, "MLP", name) in by]
        if len(own) == len(names) and min(own) > 0:
            sgd, weights, printed = own
            times.append(
                f"SGD {sgd:.2g} s, BBP {weights:.2g} s, as Algorithm 3 {printed:.2g} s ({where})"
            )
            costs.append(f"{weights / sgd:.1f} and {printed / sgd:.1f} ({where})")
        for net in ("MLP", "CNN"):
            both = [by.get((where, net, name), (None,) * 6)[4] for name in ("SGD", OPACUS)]
            if None not in both:
                beside.append(f"{both[0]:.2f} and {both[1]:.2f} ({net}, {where})")
    ours = f"; private SGD and Opacus beside plain torch: {'; '.join(beside)}" if beside else ""
    return Summary(
        paper="10 s (SGLD, SGD), 9 s (MC Dropout), 480 s (BBP), on a P100",
        protocol="-",
        corrected="; ".join(times) or "-",
        epsilon="-",
        verdict="times of SGD that BBP takes, in weight space and as Algorithm 3 with one draw: "
        f"{'; '.join(costs)}, not 48{ours}"
        if costs
        else "not complete, or too few steps to measure",
    )


ITEMS = {"speed": speed}
