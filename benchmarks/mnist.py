"""The DP-BNN paper's MNIST runs, with every privacy number by PLD.

    python -m benchmarks.mnist [--device cuda] [--seeds 3] [--runs sgld-mlp,sgd-cnn] [--validate]

Needs MNIST in the folder DPBNN_DATA. 60 000 training and 10 000 test images, 15 epochs, expected
batch 256 drawn by Poisson sampling, delta 1e-5, noise as in the paper (sigma 1.3; SGLD by Theorem
1). Pixels are scaled by the published constants 0.1307 and 0.3081, which are treated as public.
Accuracy is that of the predictive mean at the end of training; nothing is selected on test data.
`--validate` trains on the first 50 000 images and scores on the last 10 000 training images: that
is how the settings below were chosen, in 22 runs, which are not part of epsilon.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import dpbnn

N, BATCH, EPOCHS, DELTA = 60_000, 256, 15, 1e-5


def mnist(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = dpbnn.data.load("mnist", folder)
    x, x_test = ((torch.from_numpy(x) - 0.1307) / 0.3081 for x in (data.x_train, data.x_test))
    return x, torch.from_numpy(data.y_train), x_test, torch.from_numpy(data.y_test)


def mlp() -> nn.Module:
    return dpbnn.mlp()


def dropped() -> nn.Module:
    return dpbnn.mlp(dropout=0.5)


NARROW = dpbnn.Gaussian(0.1)
SGLD = dpbnn.SGLD.paper()
RUNS: dict[str, tuple[Callable[[], nn.Module], dpbnn.Gaussian, object, bool]] = {
    "sgld-mlp": (mlp, NARROW, SGLD, True),
    "sgld-cnn": (dpbnn.cnn, NARROW, SGLD, True),
    "sgd-mlp": (mlp, NARROW, dpbnn.SGD(learning_rate=0.25, clip=1.5, average="polyak"), True),
    "sgd-cnn": (dpbnn.cnn, NARROW, dpbnn.SGD(learning_rate=0.25, clip=1.5, average="polyak"), True),
    "bbp-mlp": (mlp, NARROW, dpbnn.BBP(learning_rate=0.15, clip=1.5, average="polyak"), True),
    "mcdropout-mlp": (
        dropped,
        dpbnn.Gaussian(1.0),
        dpbnn.MCDropout(learning_rate=0.1, clip=1.5, average="polyak"),
        True,
    ),
    "sgld-mlp-open": (mlp, NARROW, dpbnn.SGLD.paper(learning_rate=3e-6, clip=None), False),
    "sgd-mlp-open": (mlp, dpbnn.Gaussian(1.0), dpbnn.SGD(learning_rate=0.1, momentum=0.9), False),
    "bbp-mlp-open": (
        mlp,
        NARROW,
        dpbnn.BBP(learning_rate=1e-3, optimizer="adam", schedule="cosine"),
        False,
    ),
    "mcdropout-mlp-open": (
        dropped,
        dpbnn.Gaussian(1.0),
        dpbnn.MCDropout(learning_rate=0.1, momentum=0.9),
        False,
    ),
}


def run(name: str, seed: int, data: tuple[Tensor, ...], device: str) -> dict[str, float]:
    make, prior, method, private = RUNS[name]
    x, y, x_test, y_test = data
    arguments = {"n": len(x), "batch_size": BATCH * len(x) / N, "epochs": EPOCHS}
    if private and isinstance(method, dpbnn.SGLD):
        sigma = method.noise_multipliers(len(x), BATCH * len(x) / N, 1)[0]
        plan = dpbnn.plan(noise_multiplier=sigma, delta=DELTA, **arguments)
    elif private:
        plan = dpbnn.plan(noise_multiplier=1.3, delta=DELTA, **arguments)
    else:
        plan = dpbnn.open_plan(**arguments)
    begin = time.perf_counter()
    posterior = dpbnn.fit(
        make, (x, y), "categorical", prior, method, plan, seed=seed, device=device
    )
    trained = time.perf_counter() - begin
    predictive = posterior.to(device).predict(x_test, seed=seed)
    confidence, guess = predictive.mean.cpu().max(1)
    right = (guess == y_test).double()
    bins = torch.bucketize(confidence.double(), torch.linspace(0, 1, 16).double()[1:-1])
    gaps = [
        (bins == b).double().mean() * abs(right[bins == b].mean() - confidence[bins == b].mean())
        for b in bins.unique()
    ]
    return {
        "accuracy": float(right.mean()),
        "nll": -float(predictive.log_prob(y_test.to(device)).mean()),
        "ece": float(sum(gaps)),
        "epsilon": posterior.privacy.epsilon if private else math.inf,
        "seconds": trained,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    x, y, x_test, y_test = mnist(Path(os.environ["DPBNN_DATA"]))
    if arguments.validate:
        x, y, x_test, y_test = x[:50_000], y[:50_000], x[50_000:], y[50_000:]
    data = (x.to(arguments.device), y.to(arguments.device), x_test.to(arguments.device), y_test)
    print("| run | accuracy | by seed | NLL | ECE (15 bins) | epsilon (pld) | s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    results = {}
    for name in arguments.runs.split(","):
        rows = [run(name, seed, data, arguments.device) for seed in range(arguments.seeds)]
        mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
        each = " ".join(f"{row['accuracy']:.4f}" for row in rows)
        epsilon = "not private" if math.isinf(mean["epsilon"]) else f"{mean['epsilon']:.4f}"
        print(
            f"| {name} | {mean['accuracy']:.4f} | {each} | {mean['nll']:.3f} | {mean['ece']:.3f} "
            f"| {epsilon} | {mean['seconds']:.0f} |",
            flush=True,
        )
        results[name] = rows
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
