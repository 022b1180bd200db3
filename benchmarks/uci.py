"""Settings of the methods on five UCI regression sets, and how long DP-SEP takes.

    python -m benchmarks.uci tune grid.json --processes 2 --out tuned.json
    python -m benchmarks.uci speed

`tune` runs a list of settings on nine tenths of a split's training data and scores them on the
rest, so a split's tuning does not see that split's test rows. The settings are shared by all
splits, though, and the splits overlap: a row that is tested in one split may have been tuned on in
another.
The number of tuning runs is kept beside the settings, in `dpbnn/reproduce/uci.json`, and goes into
the statement of every private run. `speed` times a pass over data of Protein's size and training on
data of Year's, both synthetic. `benchmarks.uci_sweep` tunes DP-SEP on a GPU, many settings at once.
The tables are `dpbnn reproduce dp-sep.table3` and its neighbours.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

import dpbnn
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.reproduce.uci import network, one


def _guarded(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    try:
        return one(job)
    except (ValueError, RuntimeError) as error:
        return {**job, "error": str(error), "rmse": math.inf, "ll": -math.inf, "seconds": 0.0}


def run(jobs: list[dict[str, Any]], processes: int, out: Path | None) -> list[dict[str, Any]]:
    """Return the results of all jobs, run in parallel processes."""
    results = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for result in pool.imap_unordered(_guarded, jobs):
            results.append(result)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    return results


def tune(arguments: argparse.Namespace) -> None:
    """Run the jobs of a grid file on parts of the training data, and print the best first."""
    jobs = [
        {"tuning": True, "device": arguments.device, "split": 0, **job}
        for job in json.loads(Path(arguments.grid).read_text())
    ]
    results = run(jobs, arguments.processes, arguments.out)
    for result in sorted(results, key=lambda r: (r["dataset"], r["method"], r["rmse"])):
        print(
            f"{result['dataset']} {result['method']} {result['rmse']:.4g} {result['ll']:.3f} "
            f"{result['seconds']:.0f} s {json.dumps(result['settings'])}"
        )
    print(f"{len(results)} tuning runs", file=sys.stderr)


def speed(arguments: argparse.Namespace) -> None:
    """Print the time of a DP-SEP pass, and of training on half a million records."""
    sizes = {"Protein": (41_157, 9, 100, None, 5), "Year": (500_000, 90, 50, 5000, 100)}
    print("| size | records x features, hidden | batch | steps | s a step | s in all | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for name, (n, features, hidden, batch, steps) in sizes.items():
        x = torch.randn(n, features)
        y = x[:, :4].sum(1).sin()
        sampling = "full-batch" if batch is None else "poisson"
        plan = dpbnn.plan(
            noise_multiplier=20.0, delta=1e-6, n=n, sampling=sampling, batch_size=batch, steps=steps
        )
        begin = time.perf_counter()
        dpbnn.fit(
            lambda f=features, h=hidden: network(f, h, 1.0), (x, y), GaussianNoise(0.5),
            dpbnn.Gaussian(1.0), dpbnn.SEP(), plan, device=arguments.device, progress=False,
        )  # fmt: skip
        spent = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {name} | {n} x {features}, {hidden} | {batch or n} | {steps} | {spent / steps:.2f} "
            f"| {spent:.0f} | {peak:.0f} |"
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, function in (("tune", tune), ("speed", speed)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--processes", type=int, default=2)
        command.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
        command.add_argument("--out", type=Path)
        if name == "tune":
            command.add_argument("grid")
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
