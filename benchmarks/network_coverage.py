"""How often 90 % bands of P(y | x) hold the truth: networks whose weights are drawn from the prior.

    python -m benchmarks.network_coverage --method noiseaware sgld vi --epsilon 0.1 1 none

Each data set has weights of its own, drawn from the estimators' prior N(0, 1); inputs are uniform
in the bounds; one label per input. The bands are those of `predictive(X)` at fresh inputs, from the
5 % to the 95 % quantile of the posterior's probabilities.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings

import numpy as np
import torch

import dpbnn

FRESH = 200  # inputs of every data set
STEPS = {"noiseaware": 20}  # with all rows in a step, more of them say no more


def drawn(n: int, columns: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return inputs and labels of a network drawn from the prior, and fresh inputs and P(1 | x)."""
    generator = torch.Generator().manual_seed(seed)
    network = dpbnn.mlp(columns, (32,), 2).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(generator=generator)
        x = torch.rand(n + FRESH, columns, generator=generator, dtype=torch.float64) * 2 - 1
        truth = network(x).softmax(1)[:, 1]
    y = (torch.rand(n, generator=generator, dtype=torch.float64) < truth[:n]).long()
    return x[:n], y, x[n:], truth[n:]


def measured(method: str, epsilon: float | None, n: int, columns: int, seed: int) -> list[float]:
    """Return coverage, mean width, loss of the mean, loss of the truth, and seconds of one fit."""
    x, y, fresh, truth = drawn(n, columns, seed)
    started = time.perf_counter()
    model = dpbnn.PrivateBayesClassifier(
        method, epsilon=epsilon, delta=1e-5, bounds=(-1, 1), classes=[0, 1], random_state=seed,
        epochs=STEPS.get(method) if n <= 2048 else None,
    ).fit(x.numpy(), y.numpy())  # fmt: skip
    seconds = time.perf_counter() - started
    chances = model.predictive(fresh.numpy()).probabilities[..., 1].double()
    low, high = torch.quantile(chances, torch.tensor([0.05, 0.95]).double(), dim=0)
    mean = chances.mean(0)
    cross = torch.nn.functional.binary_cross_entropy
    return [
        float(((low <= truth) & (truth <= high)).double().mean()),
        float((high - low).mean()),
        float(cross(mean.clamp(1e-6, 1 - 1e-6), truth)),
        float(cross(truth, truth)),
        seconds,
    ]


def main() -> None:
    """Print one line per method and epsilon: means over data sets, with a standard error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", nargs="+", default=["noiseaware", "sgld", "vi"])
    parser.add_argument("--epsilon", nargs="+", default=["0.1", "0.3", "1", "3", "none"])
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--columns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=100_000)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print("epsilon method      sets  coverage (s.e.)  width   NLL  (truth)  seconds", flush=True)
    for name in given.epsilon:
        epsilon = None if name == "none" else float(name)
        for method in given.method:
            rows = np.array(
                [
                    measured(method, epsilon, given.n, given.columns, given.seed + i)
                    for i in range(given.sets)
                ]
            )
            mean, error = rows.mean(0), rows[:, 0].std(ddof=1) / math.sqrt(len(rows))
            print(
                f"{name:7} {method:10} {len(rows):5}    {mean[0]:.3f} ({error:.3f})   {mean[1]:.3f}"
                f"  {mean[2]:.3f}  ({mean[3]:.3f})  {mean[4]:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
