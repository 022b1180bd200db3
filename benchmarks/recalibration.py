"""Three ways to choose a temperature privately, side by side: excess log-loss on test records.

    python -m benchmarks.recalibration

bisection: eight noised sums of derivatives, clipped at 3 (what dpbnn.recalibrate does).
losses: one noised vector of log-loss differences at 64 temperatures, each clipped to [-2, 2],
    smoothed by a polynomial.
Brier: the same with Brier scores, jointly clipped at 4.
"""

import numpy as np
import torch
from numpy.polynomial import chebyshev

import dpbnn
from dpbnn.calibration import tempered
from dpbnn.predictive import ClassPredictive

CLASSES, REPETITIONS, TEST = 10, 20, 20_000
GRID = np.exp(np.linspace(-np.log(10), np.log(10), 64))


def records(n, spread, scale, seed):
    """Logits that are `scale` times too large, and labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(n, CLASSES, generator=generator, dtype=torch.double)
    y = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return ClassPredictive.from_logits(scale * logits[None]), y


class Fixed:
    """A posterior whose prediction is given."""

    privacy = None

    def __init__(self, predictive):
        self.predictive = predictive

    def predict(self, x, samples, seed):
        return self.predictive


def losses(predictive, y, kind):
    """Per-record losses at every temperature of the grid, minus those at temperature 1."""

    def at(temperature):
        t = tempered(predictive, temperature)
        if kind == "nll":
            return -t.log_prob(y)
        return t.mean.square().sum(1) - 2 * t.log_prob(y).exp() + 1

    return torch.stack([at(t) for t in GRID], 1).numpy() - at(1.0).numpy()[:, None]


def smoothed(values):
    """The temperature at which a polynomial through noisy values is least."""
    u = np.log(GRID) / np.log(10)
    fit = chebyshev.chebfit(u, values, 5)
    fine = np.linspace(-1, 1, 1001)
    return 10 ** fine[chebyshev.chebval(fine, fit).argmin()]


def chosen(name, predictive, y, epsilon, rng):
    n = len(y)
    if name == "bisection":
        return dpbnn.recalibrate(Fixed(predictive), (y, y), epsilon, 1e-5).temperature
    plan = dpbnn.plan(epsilon=epsilon, delta=1e-5, n=n, steps=1, sampling="full-batch")
    if name == "losses":
        values, clip = np.clip(losses(predictive, y, "nll"), -2, 2), 2 * np.sqrt(len(GRID))
    else:
        values, clip = losses(predictive, y, "brier"), 4.0
        norms = np.linalg.norm(values, axis=1, keepdims=True)
        values = values * np.minimum(1, clip / np.maximum(norms, 1e-12))
    noise = rng.normal(size=len(GRID)) * plan.noise_multiplier * clip
    return smoothed(values.sum(0) + noise)


def main():
    rng = np.random.default_rng(0)
    names = ("bisection", "losses", "Brier")
    print(f"{'spread':>6} {'too sure':>8} {'n':>5} {'epsilon':>7} {'T = 1':>8}", end="")
    print("".join(f"{name:>11}" for name in names))
    for spread, scale in ((2.0, 2.5), (2.0, 0.5), (6.0, 3.0)):
        test, labels = records(TEST, spread, scale, 10**6)
        best = -tempered(test, scale).log_prob(labels).mean().item()

        def excess(temperature, test=test, labels=labels, best=best):
            return -tempered(test, temperature).log_prob(labels).mean().item() - best

        for n in (300, 1000, 5000):
            for epsilon in (0.2, 1.0):
                found = {
                    name: np.mean([
                        excess(chosen(name, *records(n, spread, scale, seed), epsilon, rng))
                        for seed in range(REPETITIONS)
                    ])
                    for name in names
                }  # fmt: skip
                row = "".join(f"{found[name]:>11.4f}" for name in names)
                print(f"{spread:>6g} {scale:>8g} {n:>5} {epsilon:>7g} {excess(1.0):>8.4f}{row}")


if __name__ == "__main__":
    main()
