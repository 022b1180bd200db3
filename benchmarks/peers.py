"""DP-EBM (interpret) and diffprivlib, in a process and an environment of their own.

`benchmarks.tables` starts this file with the Python of that environment. Every line on stdin names
two npz files: a job to read and a file to write the predictions to. It may not import dpbnn, nor
torch. Each peer gets its documented defaults and the public bounds through the arguments that it
has for them; epsilon is the whole budget of a fit.

DP-EBM knows two classes only. With more there is one model per class against the rest, with an
equal share of epsilon and delta, as diffprivlib does by itself; probabilities are normalised.
Its categorical columns are given as such, and not as one-hot columns.

Neither has a predictive distribution for numbers. They get a normal one whose standard deviation is
that of their residuals on the training rows, which they do NOT pay for: a favour to the peers.
Their predictions are cut off at the public bounds of the target.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

import numpy as np


def ebm(job: dict, x: np.ndarray, y: np.ndarray, points: list[np.ndarray]) -> list[np.ndarray]:
    """Return predictions of DP-EBM at several sets of points."""
    from interpret.privacy import DPExplainableBoostingClassifier as Classifier
    from interpret.privacy import DPExplainableBoostingRegressor as Regressor

    groups = job["groups"]
    inside = {column for group in groups for column in group}
    numeric = [column for column in range(x.shape[1]) if column not in inside]

    def native(values: np.ndarray) -> np.ndarray:
        codes = [values[:, group].argmax(1)[:, None].astype(float) for group in groups]
        cut = np.clip(values[:, numeric], job["low"][numeric], job["high"][numeric])
        return np.concatenate([cut, *codes], 1)

    bounds = {k: (job["low"][c], job["high"][c]) for k, c in enumerate(numeric)}
    common = {
        "feature_types": ["continuous"] * len(numeric) + ["nominal"] * len(groups),
        "privacy_bounds": bounds, "random_state": job["seed"], "n_jobs": 1,
    }  # fmt: skip
    x, points = native(x), [native(values) for values in points]
    classes = job["classes"]
    if not classes:
        low, high = job["target"]
        model = Regressor(epsilon=job["epsilon"], delta=job["delta"], privacy_target_min=low,
                          privacy_target_max=high, **common)  # fmt: skip
        model.fit(x, np.clip(y, low, high))
        return [model.predict(values) for values in points]
    found = []
    share = 1 if classes == 2 else classes
    for label in [1] if classes == 2 else range(classes):
        model = Classifier(epsilon=job["epsilon"] / share, delta=job["delta"] / share, **common)
        model.fit(x, (y == label).astype(int))
        found.append([model.predict_proba(values)[:, 1] for values in points])
    if classes == 2:
        return [np.column_stack([1 - p, p]) for p in found[0]]
    stacked = [np.column_stack(list(p)) for p in zip(*found, strict=True)]
    return [p / p.sum(1, keepdims=True) for p in stacked]


def diffprivlib(
    job: dict, x: np.ndarray, y: np.ndarray, points: list[np.ndarray]
) -> list[np.ndarray]:
    """Return predictions of diffprivlib's logistic or linear regression."""
    from diffprivlib.models import LinearRegression, LogisticRegression

    low, high = job["low"], job["high"]
    if not job["classes"]:
        low = low.copy()
        low[[column for group in job["groups"] for column in group]] = 0
        redundant = [group[0] for group in job["groups"]]  # least squares needs the others only
        free = [column for column in range(x.shape[1]) if column not in redundant]
        model = LinearRegression(
            epsilon=job["epsilon"], bounds_X=(low[free], high[free]),
            bounds_y=tuple(job["target"]), random_state=job["seed"],
        )  # fmt: skip
        model.fit(x[:, free], y)
        return [model.predict(np.clip(values, low, high)[:, free]) for values in points]

    def scaled(values: np.ndarray) -> np.ndarray:
        return np.clip((2 * values - low - high) / (high - low), -1, 1)

    inside = sum(len(group) for group in job["groups"])
    norm = np.sqrt(x.shape[1] - inside + len(job["groups"]))  # one 1 in every one-hot group
    model = LogisticRegression(
        epsilon=job["epsilon"], data_norm=norm, random_state=job["seed"], n_jobs=1
    )
    model.fit(scaled(x), y)
    found = [model.predict_proba(scaled(values)) for values in points]
    full = [np.zeros((len(p), job["classes"])) for p in found]
    for whole, part in zip(full, found, strict=True):
        whole[:, model.classes_.astype(int)] = part
    return full


PEERS = {"dp-ebm": ebm, "diffprivlib": diffprivlib}


def answer(source: str, target: str) -> None:
    """Fit one job, and write predictions, noise and seconds."""
    with np.load(source) as file:
        arrays = dict(file)
    job = json.loads(str(arrays["job"]))
    job["low"], job["high"] = arrays["low"], arrays["high"]
    x, y, x_test = arrays["x"], arrays["y"], arrays["x_test"]
    begin = time.perf_counter()
    points = [x_test] if job["classes"] else [x_test, x]
    found = PEERS[job["learner"]](job, x, y, points)
    seconds = time.perf_counter() - begin
    if not job["classes"]:
        found = [np.clip(values, *job["target"]) for values in found]
    result = {"prediction": found[0], "seconds": seconds}
    if not job["classes"]:
        result["std"] = np.sqrt(np.mean((found[1] - y) ** 2))
    np.savez(target, **result)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        try:
            answer(*json.loads(line))
            reply = {}
        except Exception as error:  # reported by the benchmark, which goes on
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)
