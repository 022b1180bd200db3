"""Grades as ordered classes, or as any classes: `python -m benchmarks.ordinal --seeds 5`.

Generated tables with 6 columns, 3000 training rows, epsilon 1, Adam without standardisation or
temperature. Means over the seeds. The scale of the likelihood's distances was chosen among 0.1, 0.3
and 1 on other seeds (0.1 at 3 and 8 grades alone).
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings

import numpy as np
import torch

import dpbnn
from dpbnn.evaluation import evaluate, rps

N = 3000
CUTS = {3: (-0.5, 2.0), 8: (-3.0, -2.0, -1.0, -0.3, 0.3, 1.5, 3.0)}


def table(grades, seed):
    """Inputs and grades: a latent variable with logistic noise, cut at fixed points."""
    rng = np.random.default_rng(500 + seed)
    x = rng.normal(size=(N + 5000, 6))
    latent = x[:, 0] + np.abs(x[:, 1]) - x[:, 2] + 0.5 * x[:, 4] * x[:, 5]
    y = np.digitize(latent + rng.logistic(size=len(x)), CUTS[grades])
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def main():
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    plan = dpbnn.plan(epsilon=1.0, delta=1e-5, n=N, sampling="full-batch", steps=200)
    method = dpbnn.SGD(learning_rate=0.02, optimizer="adam", schedule="linear", keep=25)
    print("| grades | likelihood | rps | nll | accuracy | ece |")
    for grades in CUTS:
        for name, outputs in (("categorical", grades), ("ordinal", grades - 1)):
            rows = []
            for seed in range(seeds):
                x, y = table(grades, seed)
                torch.manual_seed(seed)
                make = functools.partial(dpbnn.mlp, 6, (16,), outputs, linear_path=True)
                prior = dpbnn.Gaussian(1.0)
                found = dpbnn.fit(make, (x[:N], y[:N]), name, prior, method, plan).predict(x[N:])
                metrics = evaluate(found, y[N:], resamples=0).metrics
                shown = [metrics[key].value for key in ("nll", "accuracy", "ece")]
                rows.append([rps(found, y[N:]), *shown])
            means = " | ".join(f"{value:.3f}" for value in np.mean(rows, 0))
            print(f"| {grades} | {name} | {means} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
