"""Class weights on rare classes: `python -m benchmarks.imbalance --seeds 5`.

Generated tables with 8 columns and about 3 % of the rare class, 6000 training rows, epsilon 1.
Each method is fitted without weights and with weight 25 for the rare class; "uncorrected" puts the
weights back into the predictions, as training with weights leaves them. Means over the seeds. The
scale of the weights was chosen on tables of another function, with other seeds (90 fits).
"""

from __future__ import annotations

import argparse
import sys
import warnings

import numpy as np

import dpbnn
from dpbnn.evaluation import evaluate
from dpbnn.predictive import ClassPredictive

N, WEIGHT = 6000, 25.0
SHOWN = ("nll", "ece", "auroc", "average_precision")


def table(seed):
    """Training and test rows; the rare class is a ring in two columns and a slope in others."""
    rng = np.random.default_rng(1000 + seed)
    x = rng.normal(size=(N + 20_000, 8)).clip(-4, 4)
    score = np.abs(x[:, 0] ** 2 + x[:, 1] ** 2 - 2) * 0.8 + 1.2 * x[:, 2] - 0.6 * x[:, 3] - 6.0
    y = (rng.random(len(x)) < 1 / (1 + np.exp(-score))).astype(int)
    return x[:N], y[:N], x[N:], y[N:]


def metrics(predictive, y):
    """Return what is printed of a prediction."""
    found = evaluate(predictive, y, resamples=0).metrics
    return [found[name].value for name in SHOWN]


def main():
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="*", default=["auto", "vi", "sgld"])
    arguments = parser.parse_args()
    print("| method | weights | " + " | ".join(SHOWN) + " |")
    for method in arguments.methods:
        rows: dict[str, list] = {"none": [], "corrected": [], "uncorrected": []}
        for seed in range(arguments.seeds):
            x, y, x_test, y_test = table(seed)
            for name, weights in (("none", None), ("corrected", {1: WEIGHT})):
                fitted = dpbnn.PrivateBayesClassifier(
                    method, epsilon=1.0, bounds=(-4, 4), classes=[0, 1], class_weight=weights,
                    random_state=seed,
                ).fit(x, y)  # fmt: skip
                found = fitted.predictive(x_test)
                rows[name].append(metrics(found, y_test))
            logs = found.plain.log_probabilities
            raw = logs + logs.new_tensor([1.0, WEIGHT]).log()
            rows["uncorrected"].append(metrics(ClassPredictive.from_logits(raw), y_test))
        for name, values in rows.items():
            means = " | ".join(f"{value:.4f}" for value in np.mean(values, 0))
            print(f"| {method} | {name} | {means} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
