"""The learners of `benchmarks.tables`, in one registry, and how their predictions are scored.

A learner takes a split of a table, a budget and a seed, and returns what it predicts for the test
rows. `dpbnn` is the estimator with its defaults; `dpbnn-vi` and the like name a method. Peers run
in a process of their own (`benchmarks.peers`). Probabilities of all learners are kept above FLOOR
before they are scored, so that one sure mistake does not decide a table.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import math
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

import dpbnn
from benchmarks.table_data import Split, Table

FLOOR = 1e-3
LEVEL = 0.9
PEERS = ("dp-ebm", "diffprivlib")
LEARNERS = ("dpbnn", *PEERS, "moment-ridge", "base-rate", "boosting")
"""Names that are run by default; `dpbnn-METHOD` is one too."""


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Predictions for the test rows.

    Attributes:
        probabilities: [rows, classes], for classes.
        mean: [rows], for numbers, like what follows.
        log_density: of the test targets.
        low: lower end of the 90 % interval.
        high: upper end.
        about: further entries of the record.
    """

    probabilities: np.ndarray | None = None
    mean: np.ndarray | None = None
    log_density: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


def normal(mean: np.ndarray, std: Any, y: np.ndarray, **about: Any) -> Predicted:
    """Return a prediction by normal distributions."""
    half = norm.ppf(0.5 + LEVEL / 2) * std
    density = norm.logpdf(y, mean, std)
    return Predicted(None, mean, density, mean - half, mean + half, about)


def runs(learner: str, table: Table, epsilon: float | None) -> bool:
    """Return whether there is something to run."""
    if learner == "boosting":
        return epsilon is None
    if learner in PEERS:
        return epsilon is not None
    return not (learner in ("moment-ridge", "dpbnn-sep") and table.classes)


def predict(
    learner: str, table: Table, split: Split, epsilon: float | None, seed: int
) -> tuple[Predicted, float]:
    """Return a learner's predictions and the seconds of its fit."""
    if learner in PEERS:
        return _peer(learner, table, split, epsilon, seed)
    if learner == "dpbnn" or learner.startswith("dpbnn-"):
        return _dpbnn(learner, table, split, epsilon, seed)
    begin = time.perf_counter()
    found = _OWN[learner](table, split, epsilon, np.random.default_rng([seed, 1]))
    return found, time.perf_counter() - begin


def scores(table: Table, predicted: Predicted, y: np.ndarray) -> dict[str, float]:
    """Return the metrics of a table's task."""
    if not table.classes:
        return {
            "rmse": float(np.sqrt(np.mean((predicted.mean - y) ** 2))),
            "log_likelihood": float(predicted.log_density.mean()),
            "coverage": float(np.mean((predicted.low <= y) & (y <= predicted.high))),
            "width": float(np.mean(predicted.high - predicted.low)),
        }
    p = np.maximum(predicted.probabilities, FLOOR)
    p = p / p.sum(1, keepdims=True)
    y = y.astype(int)
    present = np.unique(y)
    areas = [roc_auc_score(y == label, p[:, label]) for label in present]
    return {
        "accuracy": float(np.mean(p.argmax(1) == y)),
        "auroc": float(areas[-1] if table.classes == 2 else np.mean(areas)),
        "nll": float(-np.log(p[np.arange(len(y)), y]).mean()),
        "ece": float(dpbnn.evaluation.ece(p, y)),
        "ece_by_chance": _by_chance(p),
    }


def _by_chance(p: np.ndarray, draws: int = 20) -> float:
    """Return the mean ECE of labels drawn from the probabilities themselves, which are then right.

    It is above 0 since test rows are few.
    """
    rng = np.random.default_rng(0)
    labels = [(p.cumsum(1) > rng.random((len(p), 1))).argmax(1) for _ in range(draws)]
    return float(np.mean([dpbnn.evaluation.ece(p, label) for label in labels]))


def delta(n: int) -> float:
    """Return the delta of all learners that have one."""
    return min(1e-5, 1 / (10 * n))


@functools.cache
def noise_multiplier(epsilon: float | None, n: int) -> float:
    """Return the noise of one release of all records, exact Gaussian accounting."""
    if epsilon is None:
        return 0.0
    one = dpbnn.plan(epsilon=epsilon, delta=delta(n), n=n, sampling="full-batch", steps=1)
    return one.noise_multiplier


def estimator(learner: str, table: Table, epsilon: float | None, seed: int, **more: Any) -> Any:
    """Return the estimator of a learner's name, with the table's public knowledge."""
    method = {} if learner == "dpbnn" else {"method": learner.removeprefix("dpbnn-")}
    about = {"epsilon": epsilon, "bounds": (table.low, table.high), "random_state": seed}
    if table.classes:
        kind, public = dpbnn.PrivateBayesClassifier, {"classes": range(table.classes)}
    else:
        kind, public = dpbnn.PrivateBayesRegressor, {"target_bounds": table.target}
    return kind(**method, **about, **public, **more)


def _dpbnn(
    learner: str, table: Table, split: Split, epsilon: float | None, seed: int
) -> tuple[Predicted, float]:
    model = estimator(learner, table, epsilon, seed)
    begin, cpu = time.perf_counter(), time.process_time()
    model.fit(split.x, split.y)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    spent = None if epsilon is None else model.privacy_.epsilon
    about = {"method": str(model.method), "spent": spent, "cpu_seconds": round(cpu, 3)}
    if table.classes:
        return Predicted(model.predict_proba(split.x_test), about=about), seconds
    found = model.predictive(split.x_test)
    low, high = (end.double().cpu().numpy().ravel() for end in found.interval(LEVEL))
    target = found.mean.new_tensor(split.y_test).reshape(found.mean.shape)
    density = found.log_prob(target).double().cpu().numpy().ravel()
    mean = found.mean.double().cpu().numpy().ravel()
    return Predicted(None, mean, density, low, high, about), seconds


def _ridge(
    table: Table, split: Split, epsilon: float | None, rng: np.random.Generator
) -> Predicted:
    """Least squares on one noised release of the second moments of z = (1, u, t).

    u and t are inputs and target, scaled to [-1, 1] by public bounds. A record's z z^T has norm
    |z|^2, clipped to R^2 = 1 + 0.4 (d + 1). The ridge is the size of the noise's largest
    eigenvalue. The predictive is normal: the residual variance of the same moments, and the
    variance of the coefficients by sampling and by the noise, which is known.
    """
    x, x_test = (_scaled(values, table.low, table.high) for values in (split.x, split.x_test))
    low, high = table.target
    half, middle = (high - low) / 2, (high + low) / 2
    t = _scaled(split.y, low, high)
    n, d = x.shape
    z = np.column_stack([np.ones(n), x, t])
    radius = 1 + 0.4 * (d + 1)
    weight = np.minimum(1, radius / (z**2).sum(1))
    noise = radius * noise_multiplier(epsilon, n)  # of a diagonal entry
    raw = np.triu(rng.standard_normal((d + 2, d + 2))) * noise
    symmetric = np.diag(np.diag(raw)) + (np.triu(raw, 1) + np.triu(raw, 1).T) / math.sqrt(2)
    moments = (z * weight[:, None]).T @ z + symmetric
    a, b, c = moments[:-1, :-1], moments[:-1, -1], moments[-1, -1]
    ridge = noise * math.sqrt(2 * (d + 2)) + 1e-6 * n
    values, vectors = np.linalg.eigh(a)
    inverse = (vectors / (np.maximum(values, 0) + ridge)) @ vectors.T
    beta = inverse @ b
    count = max(a[0, 0], n / 10)  # records, less what was clipped
    residual = (c - 2 * beta @ b + beta @ a @ beta) / count
    floor = noise * (1 + beta @ beta) / count
    variance = max(residual, 0.0) + max(floor, 1e-6)
    spread = inverse * variance + inverse @ inverse * noise**2 / 2 * (1 + beta @ beta)
    points = np.column_stack([np.ones(len(x_test)), x_test])
    mean = middle + half * (points @ beta)
    std = half * np.sqrt(variance + np.einsum("ij,jk,ik->i", points, spread, points))
    return normal(mean, std, split.y_test)


def _scaled(values: np.ndarray, low: Any, high: Any) -> np.ndarray:
    return np.clip((2 * values - low - high) / (high - low), -1, 1)


def _base_rate(
    table: Table, split: Split, epsilon: float | None, rng: np.random.Generator
) -> Predicted:
    """Shares of the classes, or mean and deviation of the target, through one noised release."""
    if not table.classes:
        empty = {"x": split.x[:, :0], "x_test": split.x_test[:, :0]}
        none = dataclasses.replace(table, low=table.low[:0], high=table.high[:0])
        return _ridge(none, dataclasses.replace(split, **empty), epsilon, rng)
    counts = np.bincount(split.y.astype(int), minlength=table.classes).astype(float)
    counts += noise_multiplier(epsilon, len(split.y)) * rng.standard_normal(table.classes)
    share = np.maximum(counts, 1)
    return Predicted(np.tile(share / share.sum(), (len(split.y_test), 1)))


def _boosting(
    table: Table, split: Split, epsilon: float | None, rng: np.random.Generator
) -> Predicted:
    """Boosted trees of scikit-learn, NOT private: what the table has to give."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import cross_val_predict

    seed = int(rng.integers(2**31))
    if table.classes:
        model = HistGradientBoostingClassifier(random_state=seed).fit(split.x, split.y)
        return Predicted(model.predict_proba(split.x_test))
    model = HistGradientBoostingRegressor(random_state=seed)
    apart = cross_val_predict(model, split.x, split.y, cv=5)
    std = np.sqrt(np.mean((apart - split.y) ** 2))
    return normal(model.fit(split.x, split.y).predict(split.x_test), std, split.y_test)


_OWN = {"moment-ridge": _ridge, "base-rate": _base_rate, "boosting": _boosting}


# Peers: one process of their environment for every worker


def environment() -> dict[str, str]:
    """Return the environment of the peers' process: one thread, and PEERS_PATH to import from."""
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    return {**os.environ, **threads, "PYTHONPATH": os.environ.get("PEERS_PATH", "")}


def peers_missing(python: str) -> str | None:
    """Return why the peers cannot run there, or None."""
    code = "import diffprivlib.models, interpret.privacy"
    try:
        found = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True,
                               env=environment(), check=False)  # fmt: skip
    except OSError as error:
        return str(error)
    return found.stderr.strip().splitlines()[-1] if found.returncode else None


@functools.cache
def _server() -> subprocess.Popen[str]:
    call = [os.environ["PEERS_PYTHON"], str(Path(__file__).with_name("peers.py"))]
    found = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env=environment())  # fmt: skip
    atexit.register(found.kill)
    return found


def _peer(
    learner: str, table: Table, split: Split, epsilon: float | None, seed: int
) -> tuple[Predicted, float]:
    job = {"learner": learner, "epsilon": epsilon, "delta": delta(len(split.x)), "seed": seed,
           "classes": table.classes, "target": table.target, "groups": table.groups}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        source, target = (str(Path(place) / name) for name in ("job.npz", "found.npz"))
        np.savez(source, job=json.dumps(job), low=table.low, high=table.high, x=split.x,
                 y=split.y, x_test=split.x_test)  # fmt: skip
        server = _server()
        print(json.dumps([source, target]), file=server.stdin, flush=True)
        reply = json.loads(server.stdout.readline() or '{"error": "the peers\' process died"}')
        if "error" in reply:
            raise RuntimeError(reply["error"])
        with np.load(target) as file:
            found = dict(file)
    seconds = float(found["seconds"])
    if table.classes:
        return Predicted(found["prediction"]), seconds
    return normal(found["prediction"], float(found["std"]), split.y_test), seconds
