"""What the methods cost against each other, and prediction against a loop, in one run.

    python -m benchmarks.methods [--device cuda] [--rounds 30]

- a private BBP step against a private SGD step on the MLP 784-1200-1200-10, batch 256;
- predicting 256 and 10 000 images with 100 posterior samples against a Python loop over them;
- an epoch of 235 SGLD steps that stores 100 iterates (960 MB) against one that stores one.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable

import torch

import dpbnn
from benchmarks.clipping import timed
from dpbnn.likelihoods import Categorical
from dpbnn.methods.method import Problem
from dpbnn.posteriors import MeanFieldPosterior

N, BATCH = 60_000, 256


def stepper(method: object, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = method.prepared(dpbnn.mlp().to(device))
    x = torch.randn(BATCH, 1, 28, 28, device=device)
    y = torch.randint(0, 10, (BATCH,), device=device)
    likelihood = Categorical()
    problem = Problem(model, likelihood, dpbnn.Gaussian(0.1), N, BATCH, 3516, True)
    process = method.start(problem)
    gate = dpbnn.Gate(1.0, 1.0)
    gate.reserve(10**5)
    state = process.begin()

    def step() -> None:
        nonlocal state
        state = process.draw(state)
        state = process.update(state, gate(process.contribute(state, x, y)))

    return step


def compare(runs: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    for run in runs.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, device))
    return {name: statistics.median(values) for name, values in times.items()}


def steps(rounds: int, device: str) -> None:
    methods = {
        "SGD": dpbnn.SGD(learning_rate=0.1),
        "SGLD": dpbnn.SGLD(learning_rate=1e-6, keep=1),
        "BBP, weights": dpbnn.BBP(learning_rate=0.1),
        "BBP, Algorithm 3": dpbnn.BBP.paper(kl_weight=None),
    }
    times = compare({k: stepper(m, device) for k, m in methods.items()}, rounds, device)
    for name, value in times.items():
        print(f"| private {name} step | {1e3 * value:.1f} ms | {value / times['SGD']:.2f} x SGD |")


def prediction(rounds: int, device: str) -> None:
    model = dpbnn.to_gaussian(dpbnn.mlp()).to(device)
    posterior = MeanFieldPosterior.of(model, "categorical")
    generator = torch.Generator(device).manual_seed(0)
    cases = ((256, 100), (10_000, 100)) if device == "cuda" else ((256, 20), (1000, 20))
    for count, samples in cases:
        x = torch.randn(count, 1, 28, 28, device=device)

        def loop(x: torch.Tensor = x, samples: int = samples) -> torch.Tensor:
            network, draws = posterior._draws(samples, generator, (x,))
            outputs = []
            with torch.no_grad():
                for _ in range(samples):
                    weights = {k: v[0] for k, v in draws.take(1).items()}
                    outputs.append(torch.func.functional_call(network, weights, (x,)))
            return torch.stack(outputs)

        runs = {"batched": functools.partial(posterior.outputs, x, samples), "loop": loop}
        few = max(3, rounds // (1 if count == 256 else 5))
        times = compare(runs, few, device)
        print(
            f"| predicting {count} images with {samples} samples | {1e3 * times['batched']:.1f} ms "
            f"| {times['loop'] / times['batched']:.1f} x faster than a loop |"
        )


def storing(device: str) -> None:
    x, y = torch.randn(N, 1, 28, 28), torch.randint(0, 10, (N,))
    plan = dpbnn.open_plan(n=N, batch_size=BATCH, steps=235)
    times: dict[int, list[float]] = {1: [], 100: []}
    for _ in range(3):
        for keep in times:
            with tempfile.TemporaryDirectory() as folder:
                method = dpbnn.SGLD(learning_rate=1e-7, keep=keep, folder=folder)
                run = functools.partial(dpbnn.fit, dpbnn.mlp, (x, y), device=device)
                fit = functools.partial(run, method=method, plan=plan)
                times[keep].append(timed(fit, device))
    one, many = (min(times[keep]) for keep in (1, 100))
    print(f"| SGLD epoch storing 100 iterates | {many:.2f} s | {many / one:.3f} x storing one |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(2)
    print("| | time | ratio |\n|---|---|---|")
    steps(arguments.rounds, arguments.device)
    prediction(arguments.rounds, arguments.device)
    storing(arguments.device)


if __name__ == "__main__":
    main()
