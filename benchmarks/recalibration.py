"""Ways to choose a temperature privately, and what the default one does to fitted models.

    python -m benchmarks.recalibration             # excess log-loss on test records
    python -m benchmarks.recalibration --training  # fits at T = 1 and at the default's T

noise-aware: five noised sums of derivatives, clipped at 3, each at the posterior mean of log T
    given those before (what dpbnn.recalibrate does).
bisection: eight noised sums of derivatives, clipped at 3, of which only the signs are used.
losses: one noised vector of log-loss differences at 64 temperatures, each clipped to [-2, 2],
    smoothed by a polynomial.
Brier: the same with Brier scores, jointly clipped at 4.

The settings of the noise-aware way were chosen on other simulated tables and other splits than
those of --training, but for how much it spends.
"""

import argparse
import math
import time
import warnings

import numpy as np
import torch
from numpy.polynomial import chebyshev
from sklearn import datasets

import dpbnn
from dpbnn.calibration import temperature, tempered
from dpbnn.data import load
from dpbnn.estimators import held_out
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


def bisection(predictive, y, epsilon, rng, steps=8):
    """The temperature at which the signs of noised derivatives lead."""
    plan = dpbnn.plan(epsilon=epsilon, delta=1e-5, n=len(y), steps=steps, sampling="full-batch")
    kept = torch.ones(len(y), dtype=torch.bool)
    rows, _ = temperature._contributed(predictive, y, kept, 0.0, "classification")
    clip = temperature.CLIP["classification"]
    low, high = -math.log(10), math.log(10)
    for _ in range(steps):
        middle = (low + high) / 2
        total = rows(0, len(y), math.exp(middle)).clamp(-clip, clip).sum().item()
        total += rng.normal() * plan.noise_multiplier * clip
        low, high = (low, middle) if total > 0 else (middle, high)
    return math.exp((low + high) / 2)


def chosen(name, predictive, y, epsilon, rng):
    n = len(y)
    if name == "noise-aware":
        return dpbnn.recalibrate(Fixed(predictive), (y, y), epsilon, 1e-5).temperature
    if name == "bisection":
        return bisection(predictive, y, epsilon, rng)
    plan = dpbnn.plan(epsilon=epsilon, delta=1e-5, n=n, steps=1, sampling="full-batch")
    if name == "losses":
        values, clip = np.clip(losses(predictive, y, "nll"), -2, 2), 2 * np.sqrt(len(GRID))
    else:
        values, clip = losses(predictive, y, "brier"), 4.0
        norms = np.linalg.norm(values, axis=1, keepdims=True)
        values = values * np.minimum(1, clip / np.maximum(norms, 1e-12))
    noise = rng.normal(size=len(GRID)) * plan.noise_multiplier * clip
    return smoothed(values.sum(0) + noise)


def compare():
    """Print the excess log-loss of every way."""
    rng = np.random.default_rng(0)
    names = ("noise-aware", "bisection", "losses", "Brier")
    print(f"{'spread':>6} {'too sure':>8} {'n':>5} {'epsilon':>7} {'T = 1':>8}", end="")
    print("".join(f"{name:>12}" for name in names))
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
                row = "".join(f"{found[name]:>12.4f}" for name in names)
                print(f"{spread:>6g} {scale:>8g} {n:>5} {epsilon:>7g} {excess(1.0):>8.4f}{row}")


def clusters(n, seed):
    """Ten classes with 64 features, as those of a fixed network are: positive, many of them 0."""
    rng = np.random.default_rng(seed)
    centres = 0.5 * np.random.default_rng(100).normal(size=(10, 64))
    y = rng.integers(10, size=n)
    return np.maximum(centres[y] + rng.normal(size=(n, 64)), 0).clip(0, 3), y


def heavy(n, seed):
    """A smooth function of eight inputs, with noise of Student's t with 2.2 degrees of freedom."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(n, 8))
    mean = np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] - 0.5 * x[:, 3]
    return x, (mean + 0.3 * rng.standard_t(2.2, n)).clip(-6, 6)


def table(name, seed):
    """Training rows and test rows, and what is public of them."""
    if name == "digits":
        x, y = datasets.load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(x))
        x, y, n, public = x[order], y[order], 1257, {"bounds": (0, 16), "classes": range(10)}
    elif name == "adult":
        data = load("adult")
        order = np.random.default_rng(seed).permutation(len(data.x_train))[:20_000]
        x = np.concatenate([np.asarray(data.x_train)[order], np.asarray(data.x_test)])
        y = np.concatenate([np.asarray(data.y_train)[order], np.asarray(data.y_test)])
        n, public = 20_000, {"bounds": (-1, 1), "classes": range(2)}
    elif name.startswith("clusters"):
        n, public = int(name.split()[1]), {"bounds": (0, 3), "classes": range(10)}
        x, y = clusters(n + 5000, seed)
    elif name == "friedman1":
        n, public = 3000, {"bounds": (0, 1), "target_bounds": (-5, 35)}
        x, y = datasets.make_friedman1(n + 5000, 10, noise=1.0, random_state=seed)
    else:
        n, public = 3000, {"bounds": (-1, 1), "target_bounds": (-6, 6)}
        x, y = heavy(n + 5000, seed)
    return x[:n], y[:n], x[n:], y[n:], public


def figures(name, method, epsilon, seed):
    """Loss and calibration at T = 1 and at the model's T, T, share of mu^2, share of the time."""
    x, y, x_test, y_test, public = table(name, seed)
    classes = "classes" in public
    kind = dpbnn.PrivateBayesClassifier if classes else dpbnn.PrivateBayesRegressor
    model = kind(method, epsilon=epsilon, random_state=seed, **public)
    spent = {"found": 0.0}
    calibrating = held_out.HeldOut.found

    def timed(*arguments):
        begin = time.process_time()
        result = calibrating(*arguments)
        spent["found"] += time.process_time() - begin
        return result

    held_out.HeldOut.found = timed
    begin = time.process_time()
    model.fit(x, y)
    whole_time = time.process_time() - begin
    held_out.HeldOut.found = calibrating

    def measured():
        found = model.evaluate(x_test, y_test, resamples=0)
        if classes:
            return [found.metrics["nll"].value, found.metrics["ece"].value]
        covered = next(row.observed for row in found.coverage if abs(row.nominal - 0.9) < 1e-9)
        return [-found.metrics["log_likelihood"].value, covered]

    t = model.temperature_
    after = measured()
    model.temperature_ = None
    before = measured()
    sigma = held_out._budget(10, epsilon, model.plan_.delta).noise_multiplier
    last = model.plan_.beside[-1]  # that of the temperature
    share = last.count / last.noise_multiplier**2 * sigma**2 if t else 0.0
    return [*before, *after, t or 1.0, share, spent["found"] / (whole_time - spent["found"])]


def training(seeds):
    """Print figures of fits at temperature 1 and at that from the training rows."""
    print("before: log-loss, ECE or coverage; after: the same; T, share of mu^2, share of time")
    for epsilon in (1.0, 0.1, 3.0, 0.3):
        for method in ("sgld", "sgd"):
            for name in ("digits", "clusters 5000", "adult", "friedman1", "heavy tails"):
                m = np.mean([figures(name, method, epsilon, 50 + s) for s in range(seeds)], 0)
                print(
                    f"{epsilon:g} {method} {name}: {m[0]:.4f} {m[1]:.4f} | {m[2]:.4f} {m[3]:.4f} | "
                    f"{m[4]:.2f} {m[5]:.4f} {m[6]:.3f}", flush=True,
                )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.training:
        training(options.seeds)
    else:
        compare()


if __name__ == "__main__":
    main()
