"""Private and other networks on five UCI regression sets, standard splits.

    python -m benchmarks.uci table --splits 5 --processes 2 --out uci.json
    python -m benchmarks.uci tune grid.json --processes 2 --out tuned.json
    python -m benchmarks.uci speed

`table` trains every method at the settings of `benchmarks/uci.json` on the standard training
splits and prints test RMSE and log-likelihood in original units. `tune` runs a list of settings on
nine tenths of a split's training data and scores them on the rest, so a split's tuning does not see
that split's test rows. The settings are shared by all splits, though, and the splits overlap: a row
that is tested in one split may have been tuned on in another. The number of tuning runs is kept
beside the settings and goes into the statement of every private run. `speed` times a pass over data
of Protein's size and training on data of Year's, both synthetic. `benchmarks.uci_sweep` tunes
DP-SEP on a GPU, many settings at once.

Private runs see nothing of the data but through the gate: inputs and targets are scaled by public
bounds (below), and where `statistics` is set, that share of the budget pays for their second
moments, which centre and whiten them. References that are not private are standardised with the
training data, as in the papers. Datasets are read from DPBNN_DATA.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dpbnn
from dpbnn.contributions import DenseContributions
from dpbnn.likelihoods import Gaussian as GaussianNoise

EPSILON, DELTA = 1.0, 1e-5
SETTINGS = Path(__file__).with_name("uci.json")


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
}  # fmt: skip


@functools.cache
def raw(name: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return features, target and splits."""
    about = DATASETS[name]
    folder = Path(os.environ["DPBNN_DATA"]) / "uci" / about.folder
    table = np.loadtxt(folder / "data.txt")
    with np.load(folder / "splits.npz") as file:
        splits = {key: file[key] for key in file.files}
    return table[:, : len(about.low)], table[:, about.target], splits


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


def method(job: dict[str, Any]) -> tuple[Any, float, float]:
    """Return the method, its noise variance (None is learned) and the prior's std of a job."""
    settings = dict(job["settings"])
    if isinstance(settings.get("step_size"), list):
        settings["step_size"] = tuple(settings["step_size"])
    noise, prior = settings.pop("noise", None), settings.pop("prior", 1.0)
    for key in ("steps", "hidden", "statistics", "whiten", "epochs", "gain"):
        settings.pop(key, None)
    kind = job["method"]
    known = {"dp-sep": dpbnn.SEP, "dp-vi": dpbnn.VI, "dp-sgd": dpbnn.SGD}
    if kind == "sep":
        return dpbnn.SEP.original(**settings), noise, prior
    if kind == "dp-sep-paper":
        return dpbnn.SEP.paper(**settings), noise, prior
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
        plan = dpbnn.open_plan(n=n, sampling="full-batch", steps=settings.get("epochs", 40))
    kind, noise, prior = method(job)
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


def _guarded(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    try:
        return one(job)
    except (ValueError, RuntimeError) as error:
        return {**job, "error": str(error), "rmse": math.inf, "ll": -math.inf, "seconds": 0.0}


def run(jobs: list[dict[str, Any]], processes: int, out: Path | None) -> list[dict[str, Any]]:
    """Return the results of all jobs, run in parallel processes."""
    results = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for result in pool.imap_unordered(_guarded, jobs):
            results.append(result)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    return results


def table(arguments: argparse.Namespace) -> None:
    """Print test RMSE and log-likelihood of every method and dataset."""
    chosen = json.loads(SETTINGS.read_text())
    jobs = [
        {"dataset": name, "split": split, "method": kind, "device": arguments.device,
         "tuning_runs": chosen["tuning_runs"].get(kind, {}).get(name),
         "settings": chosen["settings"][kind].get(name, chosen["settings"][kind].get("all"))}
        for name in arguments.datasets
        for kind in arguments.methods
        for split in range(arguments.splits)
    ]  # fmt: skip
    results = run(jobs, arguments.processes, arguments.out)
    print("| data | method | RMSE | log-likelihood | epsilon | splits | tuning runs | s a run |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.datasets:
        for kind in arguments.methods:
            own = [r for r in results if r["dataset"] == name and r["method"] == kind]
            if not own:
                continue
            cells = [_spread([r[key] for r in own]) for key in ("rmse", "ll")]
            worst = max((r["epsilon"] or math.nan for r in own if "error" not in r), default=0)
            runs = chosen["tuning_runs"].get(kind, {}).get(name, 0)
            seconds = statistics.mean(r["seconds"] for r in own)
            print(
                f"| {name} | {kind} | {cells[0]} | {cells[1]} | {worst:.4g} | {len(own)} | {runs} "
                f"| {seconds:.0f} |"
            )


def _spread(values: list[float]) -> str:
    error = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4g} ± {error:.2g}"


def tune(arguments: argparse.Namespace) -> None:
    """Run the jobs of a grid file on parts of the training data, and print the best first."""
    jobs = [
        {"tuning": True, "device": arguments.device, "split": 0, **job}
        for job in json.loads(Path(arguments.grid).read_text())
    ]
    results = run(jobs, arguments.processes, arguments.out)
    for result in sorted(results, key=lambda r: (r["dataset"], r["method"], r["rmse"])):
        print(
            f"{result['dataset']} {result['method']} {result['rmse']:.4g} {result['ll']:.3f} "
            f"{result['seconds']:.0f} s {json.dumps(result['settings'])}"
        )
    print(f"{len(results)} tuning runs", file=sys.stderr)


def speed(arguments: argparse.Namespace) -> None:
    """Print the time of a DP-SEP pass, and of training on half a million records."""
    sizes = {"Protein": (41_157, 9, 100, None, 5), "Year": (500_000, 90, 50, 5000, 100)}
    print("| size | records x features, hidden | batch | steps | s a step | s in all | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for name, (n, features, hidden, batch, steps) in sizes.items():
        x = torch.randn(n, features)
        y = x[:, :4].sum(1).sin()
        sampling = "full-batch" if batch is None else "poisson"
        plan = dpbnn.plan(
            noise_multiplier=20.0, delta=1e-6, n=n, sampling=sampling, batch_size=batch, steps=steps
        )
        begin = time.perf_counter()
        dpbnn.fit(
            lambda f=features, h=hidden: network(f, h, 1.0), (x, y), GaussianNoise(0.5),
            dpbnn.Gaussian(1.0), dpbnn.SEP(), plan, device=arguments.device, progress=False,
        )  # fmt: skip
        spent = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {name} | {n} x {features}, {hidden} | {batch or n} | {steps} | {spent / steps:.2f} "
            f"| {spent:.0f} | {peak:.0f} |"
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, function in (("table", table), ("tune", tune), ("speed", speed)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--processes", type=int, default=2)
        command.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
        command.add_argument("--out", type=Path)
        if name == "tune":
            command.add_argument("grid")
        elif name == "table":
            command.add_argument("--splits", type=int, default=5)
            command.add_argument("--datasets", nargs="+", default=list(DATASETS))
            command.add_argument(
                "--methods", nargs="+",
                default=["adf", "ep", "sep", "dp-sep", "dp-vi", "dp-sgd"],
            )  # fmt: skip
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
