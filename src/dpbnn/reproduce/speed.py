"""Seconds an epoch of each private method, beside the DP-BNN paper's, and Opacus where it is."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any

import torch
from torch import nn

from dpbnn.methods import BBP, SGD, SGLD, MCDropout
from dpbnn.methods.method import Method
from dpbnn.networks import cnn, mlp
from dpbnn.priors import Gaussian
from dpbnn.privacy.plan import open_plan, plan
from dpbnn.reproduce.cells import Cells
from dpbnn.reproduce.result import Result, Settings, Summary
from dpbnn.training import fit

__all__ = ["speed"]

BATCH, EPOCH = 256, 60_000 / 256
METHODS: dict[str, tuple[Method, float, float | None]] = {
    "SGLD": (SGLD.paper(keep=1), 0.0, 10.0),
    "BBP, weight space": (BBP(learning_rate=0.15, clip=1.5), 0.0, 480.0),
    "BBP, Algorithm 3, one draw": (BBP.paper(), 0.0, 480.0),
    "MC Dropout": (MCDropout(learning_rate=0.1, clip=1.5), 0.5, 9.0),
    "SGD": (SGD(learning_rate=0.25, clip=1.5), 0.0, 10.0),
}
"""Method, dropout and the paper's seconds an epoch on a P100."""


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _seconds(cell: dict[str, Any], settings: Settings) -> float:
    """Return seconds an epoch: a long run less a short one, after one that warms up."""
    device, n = settings.device, 2000 if settings.fast else 60_000
    x = torch.randn(n, 1, 28, 28, device=device)
    y = torch.randint(0, 10, (n,), device=device)
    hidden = (32, 32) if settings.fast else (1200, 1200)
    way, dropout, _ = METHODS.get(cell["method"], (SGD(learning_rate=0.25), 0.0, None))

    def make() -> nn.Module:
        return cnn() if cell["network"] == "cnn" else mlp(hidden=hidden, dropout=dropout)

    if cell["method"] == "Opacus, SGD":
        return _opacus(make().to(device), x, y, cell["steps"])
    times = []
    for steps in (cell["steps"], cell["steps"], 3 * cell["steps"]):
        budget = open_plan(n=n, batch_size=BATCH, steps=steps)
        if cell["method"] != "SGD, not private":
            sigma = 1.3
            if isinstance(way, SGLD):
                sigma = way.noise_multipliers(n, BATCH, 1)[0]
            budget = plan(noise_multiplier=sigma, delta=1e-5, n=n, batch_size=BATCH, steps=steps)
        _wait(device)
        begin = time.perf_counter()
        fit(make, (x, y), "categorical", Gaussian(0.1), way, budget, device=device, progress=False)
        _wait(device)
        times.append(time.perf_counter() - begin)
    return (times[2] - times[1]) / (2 * cell["steps"]) * EPOCH


def _opacus(model: nn.Module, x: Any, y: Any, steps: int) -> float:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.25), noise_multiplier=1.3, max_grad_norm=1.5,
        expected_batch_size=BATCH,
    )  # fmt: skip
    times = []
    for step in range(steps + 2):
        rows = torch.randint(0, len(x), (BATCH,), device=x.device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x[rows]), y[rows]).backward()
        optimizer.step()
        _wait(str(x.device))
        if step >= 2:
            times.append(time.perf_counter() - begin)
    return sum(times) / len(times) * EPOCH


def speed(settings: Settings) -> Result:
    """Seconds an epoch of every private method, MLP and CNN, batch 256."""
    steps = 2 if settings.fast else 1000 if settings.device.startswith("cuda") else 10
    names = ["SGD, not private", *METHODS]
    cpu = settings.device == "cpu"
    if cpu and importlib.util.find_spec("opacus") is not None and not settings.fast:
        names.append("Opacus, SGD")
    cells = [
        {"method": name, "network": net, "steps": 5 if name.startswith("Opacus") else steps,
         "device": settings.device}
        for name in names
        for net in ("mlp", "cnn")
        if not (net == "cnn" and name == "MC Dropout")
    ]  # fmt: skip
    kept = Cells("speed", settings)
    found = kept.all(
        cells, lambda cell: {"seconds": _seconds(cell, settings), "cores": os.cpu_count()}
    )
    elsewhere = [line for line in kept.lines.values() if line["cell"]["device"] != settings.device]
    settings.used.extend(elsewhere)
    found += [(line["cell"], line["value"]) for line in elsewhere]
    rows = [
        (c["method"], c["network"].upper(), METHODS.get(c["method"], (0, 0, None))[2]
         if c["network"] == "mlp" else None, v["seconds"], c["device"])
        for c, v in found
    ]  # fmt: skip
    by = {row[:2]: row for row in sorted(rows, key=lambda row: row[4])}  # "cuda" after "cpu"
    bbp, sgd = by.get(("BBP, weight space", "MLP")), by.get(("SGD", "MLP"))
    ready = bbp is not None and sgd is not None and min(bbp[3], sgd[3]) > 0
    return Result(
        title="Speed: seconds an epoch of MNIST's size, batch 256",
        columns=("method", "network", "paper: s an epoch (P100)", "s an epoch", "device"),
        rows=tuple(rows),
        notes=(
            "random images; the time of a long run less that of a short one, so that setting up is "
            "not in it; on a machine that others use, only ratios mean something",
        ),
        summary=Summary(
            paper="10 s (SGLD, SGD), 9 s (MC Dropout), 480 s (BBP), on a P100",
            protocol="-",
            corrected=f"SGD {sgd[3]:.2g} s, BBP {bbp[3]:.2g} s" if ready else "-",  # type: ignore[index]
            epsilon="-",
            verdict=f"BBP costs {bbp[3] / sgd[3]:.1f} times SGD, not 48 times"  # type: ignore[index]
            if ready
            else "not complete, or too few steps to measure",
        ),
    )


ITEMS = {"speed": speed}
