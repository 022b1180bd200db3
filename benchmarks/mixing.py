"""Does a private SGLD chain mix, and what does a chain that mixes predict?

`python -m benchmarks.mixing` fits scikit-learn's digits (epsilon 3 and 1) and Adult (epsilon 1)
with the estimator's default chain, and with larger steps, more of them, and a narrower prior. It
prints the medians of R-hat and bulk ESS of the network's outputs at 256 test inputs and at 256
public inputs drawn within the bounds, and accuracy, log-loss and ECE on test records. No
temperature is fitted.
"""

from __future__ import annotations

import argparse
import sys
import warnings

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dpbnn
from dpbnn.data import load
from dpbnn.estimators.scaling import Scaling
from dpbnn.evaluation import diagnose

SETTINGS = (  # (times the default step size, std of the prior, steps)
    (1, 1.0, 400), (16, 1.0, 400), (64, 1.0, 400), (64, 0.3, 400),
    (1, 1.0, 1600), (64, 1.0, 1600), (64, 0.3, 1600), (1024, 0.3, 1600),
)  # fmt: skip
ALL = 2048  # rows up to which every step uses all of them


def digits():
    """Training and test rows, and what is public of them."""
    x, y = load_digits(return_X_y=True)
    split = train_test_split(x, y, stratify=y, test_size=0.25, random_state=0)
    return (split[0], split[2], split[1], split[3]), {"bounds": (0, 16), "classes": range(10)}


def adult():
    """Training and test rows, and what is public of them."""
    data = load("adult")
    parts = (data.x_train, data.y_train, data.x_test, data.y_test)
    return tuple(np.asarray(p, float if i % 2 == 0 else int) for i, p in enumerate(parts)), {
        "bounds": (-1, 1), "classes": range(2),
    }  # fmt: skip


def line(table, public, epsilon, larger, prior, steps):
    """Fit one setting, and return what is printed of it."""
    x, y, x_test, y_test = table
    n = len(x)
    batch = n if n <= ALL else 1024
    method = dpbnn.SGLD(learning_rate=larger * 0.25 / n, keep=100, thin=max(1, steps // 200))
    classifier = dpbnn.PrivateBayesClassifier(
        method, epsilon=epsilon, delta=1e-5, **public, batch_size=batch, epochs=steps * batch / n,
        prior=dpbnn.Gaussian(prior), recalibrate=None, random_state=0,
    ).fit(x, y)  # fmt: skip
    metrics = classifier.evaluate(x_test, y_test, resamples=0).metrics
    scaled = Scaling(*classifier.bounds_)(np.asarray(x_test[:256], float))
    found = diagnose(classifier.posterior_, torch.from_numpy(scaled)), classifier.diagnostics_
    mixing = " | ".join(f"{d.median['rhat']:.2f}, {d.median['ess_bulk']:.0f}" for d in found)
    scores = " | ".join(f"{metrics[name].value:.3f}" for name in ("accuracy", "nll", "ece"))
    return f"{classifier.posterior_.settings['clip']:.2f} | {mixing} | {scores}"


def main():
    """Print a table for every data set and epsilon."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="*", default=["digits", "adult"])
    for name in parser.parse_args().tables:
        table, public = {"digits": digits, "adult": adult}[name]()
        for epsilon in (3.0, 1.0) if name == "digits" else (1.0,):
            print(f"\n{name}, epsilon {epsilon:g}")
            print("| run | clip | R-hat, ESS (test) | (public) | accuracy | nll | ece |")
            for larger, prior, steps in SETTINGS:
                print(f"| {steps}, x{larger}, {prior:g} | ", end="")
                print(line(table, public, epsilon, larger, prior, steps), "|", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
