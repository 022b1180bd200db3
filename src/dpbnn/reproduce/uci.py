"""The UCI regressions: public bounds, private scaling, and one run of any method on one split.

Private runs see nothing of the data but through the gate: inputs and targets are scaled by public
bounds (below), and where `statistics` is set, that share of the budget pays for their second
moments, which centre and whiten them. References that are not private are standardised with the
training data, as in the papers. Datasets are read from DPBNN_DATA. The settings are in `uci.json`,
with the number of runs that chose them; `benchmarks/uci.py` is how.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dpbnn
from dpbnn.contributions import DenseContributions
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.reproduce.dp_sep_references import ClippedSEP, PlainVI

__all__ = [
    "DATASETS", "DELTA", "EPSILON", "Dataset", "Scaled", "chosen", "indices", "network", "one",
    "open_data", "private_data", "raw", "settings_of", "within_bounds", "year_file",
]  # fmt: skip

EPSILON, DELTA = 1.0, 1e-5


@functools.cache
def chosen() -> dict[str, Any]:
    """Return the settings by method and dataset, and how many runs chose them."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("uci.json").read_text())
    return found


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A dataset and what is publicly known about it.

    Attributes:
        folder: its folder in the data directory.
        target: column of the target.
        hidden: hidden units in the papers.
        low: public lower bounds of the features, in order.
        high: public upper bounds.
        bounds: public bounds of the target.
        logarithm: features that are positive amounts over several orders, scaled by their
            logarithm.
    """

    folder: str
    target: int
    hidden: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    bounds: tuple[float, float]
    logarithm: tuple[int, ...] = ()


# Bounds are taken for public: round numbers near the ranges of the plant's sensors, of laboratory
# values of red wine, of joint angles, of ship instruments and of the sizes of proteins. They were
# written by someone who had seen the ranges of these (public) datasets; on data of your own take
# them from elsewhere, or pay for them. They need not hold: what lies outside is cut off.
DATASETS = {
    "power": Dataset(
        "power-plant", 4, 50,
        (0, 25, 990, 25), (40, 85, 1035, 100), (420, 500),
    ),
    "wine": Dataset(
        "wine-quality-red", 11, 50,
        (5, 0.2, 0, 1.2, 0.04, 3, 8, 0.992, 3.0, 0.4, 9),
        (13, 1.0, 0.75, 8, 0.2, 50, 150, 1.002, 3.7, 1.1, 13), (3, 8), (3, 4, 5, 6, 9),
    ),
    "kin8nm": Dataset(
        "kin8nm", 8, 50,
        (-math.pi / 2,) * 8, (math.pi / 2,) * 8, (0, 1.5),
    ),
    "naval": Dataset(
        "naval-propulsion-plant", 16, 50,
        (1, 3, 200, 1300, 6500, 5, 5, 440, 280, 540, 1, 0.9, 5, 1, 0, 0),
        (10, 27, 73000, 3600, 9800, 650, 650, 1120, 300, 790, 5, 1.1, 24, 1.06, 100, 2), (0.95, 1),
    ),
    "protein": Dataset(
        "protein-tertiary-structure", 9, 100,
        (2000, 400, 0.1, 10, 3e5, 30, 0, 0, 15), (4e4, 1.5e4, 0.6, 370, 5.5e6, 600, 1e4, 350, 55),
        (0, 21), (0, 1, 3, 4, 5),
    ),
    "year": Dataset(
        "year-prediction-msd", 0, 100,
        (0, *(-400,) * 11, *(-5000,) * 78), (65, *(400,) * 11, *(5000,) * 78), (1920, 2012),
    ),
}  # fmt: skip
YEAR = "YearPredictionMSD.txt"


@functools.cache
def raw(name: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return features, target and splits."""
    about = DATASETS[name]
    if name == "year":
        return _year(year_file())
    folder = Path(os.environ["DPBNN_DATA"]) / "uci" / about.folder
    table = np.loadtxt(folder / "data.txt")
    with np.load(folder / "splits.npz") as file:
        splits = {key: file[key] for key in file.files}
    return table[:, : len(about.low)], table[:, about.target], splits


def year_file() -> Path:
    """Return where YearPredictionMSD is, if it is there; it is not among the usual datasets."""
    folder = Path(os.environ.get("DPBNN_DATA", ".")) / "uci"
    return folder / DATASETS["year"].folder / YEAR


def _year(path: Path) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return the songs in their order: the last 51 630 of 515 345, a tenth, are tested on."""
    table = np.loadtxt(path, delimiter=",")
    rows = np.arange(len(table))
    tested = 51_630 if len(table) == 515_345 else len(table) // 10
    return table[:, 1:], table[:, 0], {"train_0": rows[:-tested], "test_0": rows[-tested:]}


def settings_of(kind: str, name: str) -> dict[str, Any]:
    """Return a copy of a method's settings; Year has those of Protein where it has none."""
    every = chosen()["settings"][kind]
    if "all" in every:
        return dict(every["all"])
    return dict(every["protein" if name == "year" and name not in every else name])


def indices(name: str, split: int, tuning: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return rows to train on and to score on; in tuning both are of the training split."""
    *_, splits = raw(name)
    train, test = splits[f"train_{split}"], splits[f"test_{split}"]
    if not tuning:
        return train, test
    order = np.random.default_rng(1000 + split).permutation(train)
    held = len(train) // 10
    return order[held:], order[:held]


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Inputs and targets as a network sees them, and the way back.

    Attributes:
        train: inputs and targets to train on.
        test: inputs to predict.
        centre: original value of a scaled target of 0.
        scale: original size of a scaled target's 1.
        plan: of the releases that the scaling cost, if any.
    """

    train: tuple[Tensor, Tensor]
    test: Tensor
    centre: float
    scale: float
    plan: dpbnn.Plan | None


def within_bounds(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return features and target, mapped to [-1, 1] by public bounds and cut off there."""
    about = DATASETS[name]
    x, y, _ = raw(name)
    x, low, high = x.copy(), np.array(about.low, float), np.array(about.high, float)
    for column in about.logarithm:
        least = max(low[column], 1e-3 * high[column])
        x[:, column] = np.log(np.maximum(x[:, column], least))
        low[column], high[column] = np.log(least), np.log(high[column])
    u = np.clip((2 * x - low - high) / (high - low), -1, 1)
    bottom, top = about.bounds
    return u, np.clip((2 * y - bottom - top) / (top - bottom), -1, 1)


def private_data(
    name: str, rows: tuple[np.ndarray, np.ndarray], share: float, whiten: bool
) -> Scaled:
    """Return the data scaled by public bounds, and by private second moments for a budget share.

    The moments of z = (1, u, t), inputs and target in [-1, 1], are one release of the upper
    triangle of sum_i z_i z_i^T. Inputs are whitened by (C + r I)^(-1/2), r the size of the noise's
    largest eigenvalue, so that noise is not amplified.
    """
    u, t = within_bounds(name)
    train, test = rows
    n, d = len(train), u.shape[1]
    bottom, top = DATASETS[name].bounds
    half = (top - bottom) / 2
    if share == 0:
        unit = math.sqrt(3)  # a uniform feature gets variance 1
        centre, scale = (top + bottom) / 2, half / unit
        return Scaled((_t(unit * u[train]), _t(unit * t[train])), _t(unit * u[test]),
                      centre, scale, None)  # fmt: skip
    whole = dpbnn.plan(epsilon=EPSILON, delta=DELTA, n=n, sampling="full-batch", steps=1)
    sigma = whole.noise_multiplier / math.sqrt(share)
    plan = dpbnn.plan(noise_multiplier=sigma, delta=DELTA, n=n, sampling="full-batch", steps=1)
    z = np.concatenate([np.ones((n, 1)), u[train], t[train, None]], 1)
    upper = np.triu_indices(d + 2)
    factor = np.where(upper[0] == upper[1], 1.0, math.sqrt(2))
    keep = slice(1, None)  # the first entry is the number of records, which is public
    products = (z[:, upper[0]] * z[:, upper[1]] * factor)[:, keep]
    clip = 1 + 0.4 * (d + 1)
    gate = dpbnn.Gate(clip, sigma, plan.sampler)
    released = gate(DenseContributions(torch.from_numpy(products)))["value"].numpy() / n
    moments = np.zeros((d + 2, d + 2))
    moments[upper] = np.concatenate([[1.0], released / factor[keep]])
    moments = np.triu(moments) + np.triu(moments, 1).T
    mean = moments[0, 1:]
    covariance = moments[1:, 1:] - np.outer(mean, mean)
    noise = sigma * clip / n * math.sqrt(2 * (d + 1))
    variance = max(covariance[-1, -1], noise)
    centred = u - mean[:-1]
    if whiten:
        values, vectors = np.linalg.eigh(covariance[:-1, :-1])
        matrix = vectors / np.sqrt(np.maximum(values, 0) + noise) @ vectors.T
        inputs = centred @ matrix
    else:
        inputs = centred / np.sqrt(np.maximum(np.diag(covariance)[:-1], 0) + noise)
    targets = (t - mean[-1]) / math.sqrt(variance)
    centre = (top + bottom) / 2 + half * mean[-1]
    return Scaled(
        (_t(inputs[train]), _t(targets[train])), _t(inputs[test]),
        centre, half * math.sqrt(variance), plan,
    )  # fmt: skip


def open_data(name: str, rows: tuple[np.ndarray, np.ndarray]) -> Scaled:
    """Return the data standardised with the training rows, as the papers do; not private."""
    x, y, _ = raw(name)
    train, test = rows
    mean, std = x[train].mean(0), x[train].std(0)
    std[std < 1e-12] = 1
    x = (x - mean) / std
    centre, scale = float(y[train].mean()), float(y[train].std())
    return Scaled((_t(x[train]), _t((y[train] - centre) / scale)), _t(x[test]), centre, scale, None)


def _t(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).float()


def method(job: dict[str, Any], n: int) -> tuple[Any, float, float]:
    """Return the method, its noise variance (None is learned) and the prior's std of a job.

    Args:
        job: see `one`.
        n: how many records are trained on.
    """
    settings = dict(job["settings"])
    if isinstance(settings.get("step_size"), list):
        settings["step_size"] = tuple(settings["step_size"])
    noise, prior = settings.pop("noise", None), settings.pop("prior", 1.0)
    for key in ("steps", "hidden", "statistics", "whiten", "epochs", "gain", "batch"):
        settings.pop(key, None)
    kind = job["method"]
    known = {"dp-sep": dpbnn.SEP, "dp-vi": dpbnn.VI, "dp-sgd": dpbnn.SGD}
    if kind in ("sep-clipped", "sep-code"):
        return ClippedSEP(**settings), noise, prior
    if kind == "sep-printed":  # equation 5 of the DP-SEP paper
        return ClippedSEP(damping=settings.pop("gamma") / n, **settings), noise, prior
    if kind == "vi":
        return PlainVI(**settings), noise, prior
    if kind == "vi-paper":
        noise, precision = 1 / settings.pop("noise_precision"), settings.pop("prior_precision")
        return PlainVI(optimizer="sgd", **settings), noise, precision**-0.5
    if kind == "sep":
        return dpbnn.SEP.original(**settings), noise, prior
    if kind == "dp-sep-paper":
        return dpbnn.SEP.paper(**settings), noise, prior
    if kind == "sgd":
        return dpbnn.SGD(optimizer="adam", schedule="cosine", **settings), noise, prior
    if kind in ("adf", "ep"):
        return {"adf": dpbnn.ADF, "ep": dpbnn.EP}[kind](**settings), noise, prior
    return known[kind](**settings), noise, prior


def network(inputs: int, hidden: int | list[int], gain: float) -> torch.nn.Module:
    """Return a network of one or more hidden layers, the first one's start `gain` times larger."""
    model = dpbnn.mlp(inputs, (hidden,) if isinstance(hidden, int) else hidden, 1)
    with torch.no_grad():
        model[1].weight *= gain
        model[1].bias *= gain
    return model


def one(job: dict[str, Any]) -> dict[str, Any]:
    """Train and score one job: dataset, split, method, settings, tuning, seed, device."""
    settings, name = job["settings"], job["dataset"]
    rows = indices(name, job["split"], job.get("tuning", False))
    private = job["method"].startswith("dp-")
    begin = time.perf_counter()
    n = len(rows[0])
    if private:
        data = private_data(
            name, rows, settings.get("statistics", 0.0), settings.get("whiten", True)
        )
        beside = [] if data.plan is None else [data.plan]
        length: dict[str, Any] = {"sampling": "full-batch", "steps": settings.get("steps")}
        if job["method"] == "dp-sep-paper":
            length = {"sampling": "partition", "batch_size": 1, "relation": "replace-one",
                      "epochs": settings["epochs"]}  # fmt: skip
        plan = dpbnn.plan(epsilon=EPSILON, delta=DELTA, n=n, beside=beside, **length)
    else:
        data = open_data(name, rows)
        epochs = settings.get("epochs", 40)
        plan = dpbnn.open_plan(n=n, sampling="full-batch", steps=epochs)
        if "batch" in settings:
            plan = dpbnn.open_plan(n=n, batch_size=settings["batch"], epochs=epochs)
    kind, noise, prior = method(job, n)
    hidden = settings.get("hidden", DATASETS[name].hidden)
    x, y = data.train
    posterior = dpbnn.fit(
        lambda: network(x.shape[1], hidden, settings.get("gain", 1.0)), (x, y),
        GaussianNoise(None if noise is None else math.sqrt(noise)),
        dpbnn.Gaussian(prior), kind, plan, seed=job.get("seed", job["split"]),
        device=job.get("device", "cpu"), progress=False, tuning_runs=job.get("tuning_runs"),
    )  # fmt: skip
    target = torch.from_numpy(raw(name)[1][rows[1]])
    with torch.no_grad():
        predictive = posterior.predict(data.test)
        mean = data.centre + data.scale * predictive.mean.double().cpu()
        scaled = ((target - data.centre) / data.scale).float()
        log_prob = predictive.log_prob(scaled.to(predictive.mean.device)).double().cpu()
    return {
        **job,
        "rmse": float((mean - target).square().mean().sqrt()),
        "ll": float(log_prob.mean()) - math.log(data.scale),
        "epsilon": posterior.privacy.epsilon if private else None,
        "seconds": time.perf_counter() - begin,
    }
