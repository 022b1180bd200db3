"""What it costs to clip all records of a person together, against clipping each record.

    python -m benchmarks.persons [--rounds 60] [--models mlp,table,cnn,transformer]

Both steps have the same records: forward, backward, norms, clipped sum, noise, and the update by
torch.optim.SGD. Every round runs both, one after the other. Reported is the median over rounds of
the ratio within a round, of the time and of the processor time of all threads. "equal" has four
records a person; "mixed" one and more, geometric with mean 4, at most 32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dpbnn
from dpbnn.contributions import attach

ROWS = 512
MOST = 32  # records of a person


class Mean(nn.Module):
    """The mean over the positions of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def transformer() -> nn.Module:
    block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(16, 64), block, Mean(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 25, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: dpbnn.mlp(784, (256,), 10), (784,)),
    "wide table": (lambda: dpbnn.mlp(100, (256, 256), 10), (100,)),
    "table": (lambda: dpbnn.mlp(50, (32,), 10), (50,)),
    "cnn": (cnn, (1, 28, 28)),
    "transformer": (transformer, (16, 16)),
}


def persons(kind: str) -> Tensor:
    """Return whose record each one is."""
    sizes = torch.full((ROWS,), 4)
    if kind == "mixed":
        torch.manual_seed(0)
        sizes = torch.distributions.Geometric(0.25).sample((ROWS,)).long().add(1).clamp(max=MOST)
    return torch.arange(ROWS).repeat_interleave(sizes)[:ROWS]


def step(model: nn.Module, x: Tensor, y: Tensor, units: Tensor | None) -> Callable[[], None]:
    """Return one private step."""
    count = ROWS if units is None else len(units.unique())
    draw = dpbnn.Poisson(100 * count, count, unit="" if units is None else "person")
    gate = dpbnn.Gate(1.0, 1.0, draw)
    gate.reserve(100_000)
    attached, optimizer = attach(model, "categorical"), torch.optim.SGD(model.parameters(), 1e-6)
    options: dict[str, Any] = {}
    if units is not None:
        options = {"units": units, "most_rows": draw.most(0) * MOST}

    def run() -> None:
        release = gate(attached(x, y), mean=True, **options)
        for name, parameter in model.named_parameters():
            parameter.grad = release[name]
        optimizer.step()

    return run


def ratio(name: str, kind: str, rounds: int) -> tuple[float, float, float]:
    """Return the time of a step by record in ms, and the ratios of one by person; medians.

    The first ratio is of time, the second of processor time.
    """
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, *shape), torch.randint(0, 10, (ROWS,))
    steps = [step(make(), x, y, units) for units in (None, persons(kind))]
    clocks = (time.perf_counter, time.process_time)
    times: list[list[list[float]]] = []  # [round][clock][step]
    for number in range(rounds + 3):
        found = [[0.0, 0.0], [0.0, 0.0]]
        for which in (0, 1) if number % 2 else (1, 0):
            begun = [clock() for clock in clocks]
            steps[which]()
            for own, clock, start in zip(found, clocks, begun, strict=True):
                own[which] = clock() - start
        if number >= 3:
            times.append(found)
    wall, processor = (
        statistics.median(found[c][1] / found[c][0] for found in times) for c in range(2)
    )
    return 1e3 * statistics.median(found[0][0] for found in times), wall, processor


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--models", default=",".join(MODELS))
    given = parser.parse_args()
    for name in given.models.split(","):
        for kind in ("equal", "mixed"):
            record, wall, processor = ratio(name, kind, given.rounds)
            print(
                f"{name:12s} {kind:6s} {record:8.2f} ms by record, x {wall:.2f} by person "
                f"(x {processor:.2f} of processor time)"
            )


if __name__ == "__main__":
    main()
