"""DP-BBB: the note's bounds, corrected, and a run of its algorithm."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from dpbnn import evaluation
from dpbnn.methods import BBP
from dpbnn.networks import mlp
from dpbnn.priors import Gaussian
from dpbnn.privacy.accountants import gaussian_epsilon
from dpbnn.privacy.plan import open_plan, plan
from dpbnn.reproduce.cells import Cells
from dpbnn.reproduce.dp_bbb import compare_passes
from dpbnn.reproduce.images import images
from dpbnn.reproduce.result import Result, Settings, Summary
from dpbnn.training import fit

__all__ = ["bounds", "run"]


def bounds(settings: Settings) -> Result:
    """Epsilon of passes over fixed batches and of Poisson batches; the note calls them equal."""
    delta = 1e-5
    cases = [(4.0, 10_000, 100, 10), (1.3, 60_000, 256, 15), (10.0, 60_000, 256, 15),
             (20.0, 60_000, 1024, 60)]  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for sigma, n, batch, epochs in cases[: 2 if settings.fast else None]:
        both = compare_passes(sigma, n, batch, epochs, delta)
        single = math.sqrt(2 * math.log(1.25 / delta)) / sigma
        replaced = gaussian_epsilon(2 * both.mu_partition, delta)
        gain, root = both.mu_poisson / both.mu_partition, math.sqrt(batch / n)
        rows.append((sigma, n, batch, epochs, single, both.partition, replaced, both.poisson,
                     gain, root))  # fmt: skip
    return Result(
        title="DP-BBB: privacy of passes over fixed batches, and of sampled batches",
        columns=(
            "sigma",
            "n",
            "batch",
            "epochs",
            "the note: epsilon of one epoch",
            "fixed batches, zero-out",
            "fixed batches, replace-one",
            "Poisson batches (PLD)",
            "mu Poisson / mu fixed",
            "sqrt(b/n)",
        ),
        rows=tuple(rows),
        notes=(
            "delta 1e-5. The note's argument that an epoch over fixed disjoint batches touches a "
            "record once is right: T epochs cost mu = sqrt(T)/sigma",
            "the note derives a sensitivity of 2 max |g| for an exchanged record and then uses C: "
            "under replace-one mu is twice as large",
            "it takes the amplification of a step to be sqrt(b/n), which would make both bounds "
            "equal. It is b/n, so that sampled batches are better by about sqrt(b/n)",
            "sigma = sqrt(2 log(1.25/delta))/epsilon, which the note uses, holds for epsilon < 1",
        ),
        summary=Summary(
            paper="DP-BBB's bound is the same as that of DP-SGD",
            protocol="epsilon " + " / ".join(f"{r[5]:.3g}" for r in rows) + " (fixed batches)",
            corrected="epsilon " + " / ".join(f"{r[7]:.3g}" for r in rows) + " (Poisson batches)",
            epsilon="as stated",
            verdict="wrong: sampling is better by up to "
            f"{max(r[5] / r[7] for r in rows):.0f} times in epsilon",
        ),
    )


_RUNS = {
    "digits": (64, 20, (128,), 0.5),
    "mnist": (256, 15, (1200, 1200), 0.15),
}
"""Batch size, epochs, hidden layers and learning rate by dataset."""


def _data(name: str, settings: Settings) -> tuple[Tensor, ...]:
    if name == "mnist":
        found = images(settings).standardised()
        return found.x, found.y, found.x_test, found.y_test
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    inputs = torch.from_numpy(x / 8 - 1).float().to(settings.device)
    labels = torch.from_numpy(y)
    return inputs[:1437], labels[:1437].to(settings.device), inputs[1437:], labels[1437:]


def run(settings: Settings) -> Result:
    """The note's algorithm, corrected, with fixed and with sampled batches at one epsilon."""
    cells = [
        {"data": name, "batches": batches, "seed": seed, "settings": list(_RUNS[name])}
        for name in (("digits",) if settings.fast else _RUNS)
        for batches in ("not private", "partition", "poisson")
        for seed in range(settings.seed, settings.seed + settings.count(3))
    ]

    def one(cell: dict[str, Any]) -> dict[str, Any]:
        x, y, x_test, y_test = _data(cell["data"], settings)
        batch, epochs, hidden, rate = _RUNS[cell["data"]]
        length: dict[str, Any] = {"n": len(x), "batch_size": batch}
        length["epochs"] = 1 if settings.fast else epochs
        if cell["batches"] == "not private":
            budget = open_plan(**length)
        else:
            budget = plan(epsilon=2.0, delta=1e-5, sampling=cell["batches"], **length)
        posterior = fit(
            lambda: mlp(x[0].numel(), hidden), (x, y), "categorical", Gaussian(0.1),
            BBP(learning_rate=rate, clip=1.5, average="polyak"), budget, seed=cell["seed"],
            device=settings.device, progress=False,
        ).to(settings.device)  # fmt: skip
        mean = posterior.predict(x_test, seed=cell["seed"]).mean.double().cpu().numpy()
        mean = mean / mean.sum(1, keepdims=True)
        return {
            "accuracy": evaluation.accuracy(mean, y_test),
            "nll": evaluation.nll(mean, y_test),
            "ece": evaluation.ece(mean, y_test),
            "sigma": budget.noise_multiplier,
            "epsilon": posterior.privacy.epsilon if budget.private else None,
        }

    found = Cells("dp-bbb.run", settings).all(cells, one)
    rows: list[tuple[Any, ...]] = []
    for key in dict.fromkeys((c["data"], c["batches"]) for c, _ in found):
        own = [v for c, v in found if (c["data"], c["batches"]) == key]
        means = [statistics.mean(v[k] for v in own) for k in ("accuracy", "nll", "ece", "sigma")]
        rows.append((*key, *means, own[0]["epsilon"], len(own)))
    by = {row[:2]: row for row in rows}
    gains = {
        name: by[name, "poisson"][2] - by[name, "partition"][2]
        for name in _RUNS
        if (name, "poisson") in by and (name, "partition") in by
    }
    words = ", ".join(f"{name} {gain:+.3f}" for name, gain in gains.items())
    return Result(
        title="DP-BBB: Bayes by Backprop in weight space at epsilon 2",
        columns=("data", "batches", "accuracy", "NLL", "ECE", "sigma", "epsilon", "seeds"),
        rows=tuple(rows),
        notes=(
            "the note's algorithm with its missing gradient of log q, the KL weighted 1/n and "
            "outside the clip; delta 1e-5, zero-out; fixed batches by the exact curve of passes, "
            "Poisson batches by PLD. Digits: 1437 for training, 360 for test",
            "the note has no numbers of its own; settings were not tuned for this table; means "
            "over seeds; an NLL of - is infinite: a true class had probability 0",
        ),
        summary=Summary(
            paper="an algorithm, no numbers",
            protocol=", ".join(f"{r[0]} {r[2]:.3f}" for r in rows if r[1] == "partition"),
            corrected=", ".join(f"{r[0]} {r[2]:.3f}" for r in rows if r[1] == "poisson"),
            epsilon=", ".join(dict.fromkeys(f"{r[6]:.3f}" for r in rows if r[6])),
            verdict=f"the corrected algorithm learns; sampled instead of fixed batches change "
            f"accuracy by {words}"
            if gains
            else "not complete",
        ),
    )


ITEMS = {"bounds": bounds, "run": run}
