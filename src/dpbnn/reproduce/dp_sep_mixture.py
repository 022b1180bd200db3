"""DP-SEP on a mixture of Gaussians (Table 1, Figure 1), with every privacy number by PLD.

N = 1000 points of J = 4 components in D = 4 dimensions, noise std 0.5 and weights 1/4 known, prior
N(c_j, 10 I) with c_j drawn from a standard normal. Errors are against the closed-form posterior
given the true labels: squared distances summed over entries and averaged over components, as in the
paper. The settings of the private methods were chosen by comparing about 140 of them on synthetic
data of the seeds 1 to 6 and 60, which costs no privacy; the table has the seeds 101 to 105.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbnn.methods import EM, EP, SEP
from dpbnn.methods.method import Method
from dpbnn.mixtures import GaussianMixture, synthetic_mixture
from dpbnn.posteriors import MixturePosterior
from dpbnn.priors import Gaussian
from dpbnn.privacy.plan import Plan, open_plan, plan
from dpbnn.reproduce.cells import Cells
from dpbnn.reproduce.dp_sep import confidence_ring, label_posterior, match_components, mixture_error
from dpbnn.reproduce.dp_sep_printed import AUTODP, Printed, run_printed, true_epsilon
from dpbnn.reproduce.result import Curve, Figure, Result, Settings, Summary
from dpbnn.training import fit

__all__ = ["fig1", "fitted", "problem", "table1"]

N, J, D, NOISE, PRIOR, DELTA = 1000, 4, 4, 0.5, Gaussian(math.sqrt(10)), 1e-5
EPSILONS = (1.0, 5.0, 50.0)
FIRST_SEED = 101
PAPER = {
    "SEP": (0.0020, 0.0004),
    "clipped SEP, C = 20": (0.0263, 0.0004),
    "clipped SEP, C = 10": (1.4950, 0.0005),
    "clipped SEP, C = 1": (2.2065, 0.0459),
    "DP-EM, epsilon 50": (5.3769, 1.3189),
    "DP-EM, epsilon 5": (10.4548, 3.7573),
    "DP-EM, epsilon 1": (7.5166, 57.8665),
    "DP-SEP, epsilon 50": (2.2411, 0.0358),
    "DP-SEP, epsilon 5": (12.1623, 1.0655),
    "DP-SEP, epsilon 1": (82.9746, 5.0777),
}
PRINTED = {
    "SEP": Printed(math.inf),
    **{f"clipped SEP, C = {c}": Printed(float(c)) for c in (20, 10, 1)},
    **{f"DP-SEP, epsilon {e:g}": Printed(1.0, AUTODP[e]) for e in reversed(EPSILONS)},
}


@functools.cache
def problem(seed: int) -> tuple[Tensor, ...]:
    """Return points, labels, prior means, and means and covariances of the true posterior."""
    x, labels, _ = synthetic_mixture(N, J, D, NOISE, seed)
    centres = torch.from_numpy(np.random.default_rng(0).standard_normal((J, D)))
    return x, labels, centres, *label_posterior(x, labels, centres, PRIOR.std, NOISE)


@functools.cache
def _budget(epsilon: float, steps: int) -> Plan:
    return plan(epsilon=epsilon, delta=DELTA, n=N, sampling="full-batch", steps=steps)


def correct(name: str) -> tuple[Method, Plan]:
    """Return the method and plan of a row by its name: a correct one, with a true epsilon."""
    kind, _, claim = name.partition(", epsilon ")
    if kind == "DP-SEP":
        return SEP(step_size=(0.03, 0.01), clip=0.2), _budget(float(claim), 100)
    if kind == "DP-EM":
        return EM(clip=2.0, anneal=0.03, average=True), _budget(float(claim), 40)
    if kind == "SEP":
        return SEP(step_size=0.1, average=None), open_plan(n=N, sampling="full-batch", steps=200)
    assert kind == "EP"
    return EP(damping=1.0), open_plan(n=N, sampling="full-batch", steps=10)


def fitted(name: str, seed: int) -> MixturePosterior:
    """Return the posterior of a row on the data of a seed."""
    x, _, centres, _, _ = problem(seed)
    method, budget = correct(name)
    model = GaussianMixture(J, D, NOISE, centres=centres)
    posterior = fit(model, x, prior=PRIOR, method=method, plan=budget, progress=False)
    assert isinstance(posterior, MixturePosterior)
    return posterior


def _errors(cell: dict[str, Any]) -> dict[str, Any]:
    """Run a cell: one correct method, or all runs of the printed algorithm at once."""
    if cell["protocol"] == "as coded":
        return _as_coded(cell["data seeds"], cell["passes"])
    *_, means, covariances = problem(cell["data seed"])
    posterior = fitted(cell["row"], cell["data seed"])
    error = mixture_error(posterior.means, means, posterior.covariance, covariances)
    epsilon = posterior.privacy.epsilon if posterior.privacy.private else None
    return {"mean": error.mean, "covariance": error.covariance, "epsilon": epsilon}


def _as_coded(seeds: list[int], passes: int) -> dict[str, Any]:
    """Return errors of means and covariances by row, one pair a data seed."""
    points = torch.stack([problem(seed)[0] for seed in seeds for _ in PRINTED])
    centres, generator = problem(seeds[0])[2], torch.Generator().manual_seed(seeds[0])
    found = run_printed(
        points, centres, PRIOR.std**2, NOISE, list(PRINTED.values()) * len(seeds), passes, generator
    )
    values: dict[str, Any] = {name: [] for name in PRINTED}
    names = [(name, seed) for seed in seeds for name in PRINTED]
    for (name, seed), own, spread in zip(names, *found, strict=True):
        *_, means, covariances = problem(seed)
        error = None
        if own.isfinite().all() and spread.isfinite().all():
            error = mixture_error(own, means, spread, covariances)
        values[name].append([error.mean, error.covariance] if error else [1e300, 1e300])
    return values


def _cells(settings: Settings) -> tuple[list[dict[str, Any]], int]:
    seeds = range(FIRST_SEED, FIRST_SEED + settings.count(5))
    passes = 1 if settings.fast else 100
    rows = ["EP", "SEP", *(name for name in PAPER if name.startswith("DP-"))]
    rows = ["DP-SEP, epsilon 1"] if settings.fast else rows
    printed = {"protocol": "as coded", "passes": passes, "data seeds": list(seeds)}
    return [printed] + [
        {"protocol": "correct", "row": row, "data seed": s} for row in rows for s in seeds
    ], passes


def table1(settings: Settings) -> Result:
    """Errors of SEP, clipped SEP, DP-SEP and DP-EM on mixtures of Gaussians (Table 1)."""
    cells, passes = _cells(settings)
    found = Cells("dp-sep.table1", settings).all(cells, _errors)
    printed = [value for cell, value in found if cell["protocol"] == "as coded"]
    rows: list[tuple[Any, ...]] = []
    for name in ("EP", *PAPER):
        own = [v for c, v in found if c.get("row") == name]
        coded = [pair for value in printed for pair in value.get(name, ())]
        right = [_median([v[key] for v in own]) for key in ("mean", "covariance")]
        theirs = [_median([v[i] for v in coded]) for i in (0, 1)]
        epsilon = max((v["epsilon"] for v in own if v["epsilon"]), default=None)
        run = PRINTED.get(name)
        true = true_epsilon(run, passes) if run and min(run.sigmas) else None
        rows.append((name, *PAPER.get(name, (None, None)), *theirs, true, *right, epsilon))
    by = {row[0]: row for row in rows}
    worst = max((v["mean"] for c, v in found if c.get("row") == "DP-SEP, epsilon 1"), default=0)
    one = by["DP-SEP, epsilon 1"]
    return Result(
        title="DP-SEP, Table 1: a mixture of Gaussians, squared errors of means and covariances",
        columns=(
            "method",
            "paper: mean",
            "paper: covariance",
            "as coded: mean",
            "as coded: covariance",
            "true epsilon as coded",
            "corrected: mean",
            "corrected: covariance",
            "epsilon corrected",
        ),
        rows=tuple(rows),
        notes=(
            f"medians over {settings.count(5)} data sets (seeds from {FIRST_SEED}; the data follow "
            f"the paper's recipe, not its random numbers), one draw of the noise each; the paper "
            f"averages five runs",
            f"as coded: {passes} passes in a fixed order, two blocks clipped apart, the noise that "
            f"autodp returns for the claimed epsilon; its true epsilon is that of passes without "
            f"amplification, under replace-one. Steps that it leaves out without noise make even "
            f"that optimistic",
            "corrected: full batches, one clip for all coordinates, zero-out, exact Gaussian "
            "accounting. DP-EM's covariance is that of the means given the responsibilities; "
            "the paper's DP-EM row is on data scaled to the unit ball and cannot be compared",
            f"Eq. 5 as printed moves the factor by 1/N^2 a record: after {passes} passes it is at "
            f"{-100 * math.expm1(-passes / N):.1f} % of its target, which is the covariance error "
            f"of the row SEP",
        ),
        summary=Summary(
            paper="DP-SEP mean error 83 / 12 / 2.2 at a claimed epsilon of 1 / 5 / 50",
            protocol=" / ".join(_short(by[f"DP-SEP, epsilon {e:g}"][3]) for e in EPSILONS)
            + ", SEP "
            + _short(by["SEP"][3]),
            corrected=" / ".join(_short(by[f"DP-SEP, epsilon {e:g}"][6]) for e in EPSILONS),
            epsilon="as coded "
            + " / ".join(_short(by[f"DP-SEP, epsilon {e:g}"][5]) for e in EPSILONS)
            + "; corrected "
            + " / ".join(_short(by[f"DP-SEP, epsilon {e:g}"][8]) for e in EPSILONS),
            verdict=f"as coded, the mean error is within a factor of 2 of the paper's for "
            f"{'; '.join(_near(rows, 2)) or 'no row'}; within 10 for "
            f"{'; '.join(n for n in _near(rows, 10) if n not in _near(rows, 2)) or 'no other'}; "
            f"not within 10 for {'; '.join(_far(rows, 10)) or 'none'}; the true epsilon is "
            f"{_short(one[5])} where 1 is claimed. Corrected DP-SEP at epsilon 1 has "
            f"{_short(one[6])} (largest {worst:.2g})",
        ),
    )


def fig1(settings: Settings) -> Result:
    """Points and posteriors of the means in a plane, for SEP, DP-SEP and DP-EM (Figure 1)."""
    x, labels, _, means, covariances = problem(FIRST_SEED)
    _, _, directions = torch.linalg.svd(means - means.mean(0))
    plane = directions[:2].T
    names = ("SEP", "DP-SEP, epsilon 50", "DP-SEP, epsilon 5", "DP-SEP, epsilon 1")
    names = names[-1:] if settings.fast else names
    shown = torch.arange(0, N, 20 if settings.fast else 8)
    panels = [("true labels", labels, means, covariances, None)]
    for name in names:
        posterior = fitted(name, FIRST_SEED)
        own = posterior.responsibilities(x).argmax(-1)
        place = torch.tensor(match_components(posterior.means, means)).argsort()
        epsilon = posterior.privacy.epsilon if posterior.privacy.private else None
        panels.append((name, place[own], posterior.means, posterior.covariance, epsilon))
    curves, rows = [], []
    for name, own, centre, spread, epsilon in panels:
        flat = (x @ plane)[shown]
        for j in range(J):
            part = flat[own[shown] == j]
            points = part[:, 0].tolist(), part[:, 1].tolist()
            curves.append(Curve(f"component {j}", *points, panel=name, kind="dots"))
        for mean, covariance in zip(centre, spread, strict=True):
            ring = confidence_ring(mean @ plane, plane.T @ covariance @ plane)
            curves.append(Curve("98 % of a mean", *ring.T.tolist(), panel=name))
        error = mixture_error(centre, means, spread, covariances)
        agree = float((own == labels).double().mean())
        rows.append((name, error.mean, error.covariance, agree, epsilon))
    least = min(row[3] for row in rows[1:])
    return Result(
        title="DP-SEP, Figure 1: posteriors of the means of a mixture",
        columns=(
            "panel",
            "mean error",
            "covariance error",
            "points put as by the labels",
            "epsilon",
        ),
        rows=tuple(rows),
        notes=(
            f"data of seed {FIRST_SEED}, every {20 if settings.fast else 8}th point, in the plane "
            f"in which the true means lie furthest apart; rings hold 98 % of the posterior of each "
            f"mean; corrected methods, see dp-sep.table1",
        ),
        figure=Figure("first direction", "second direction", tuple(curves), log=False),
        summary=Summary(
            paper="DP-SEP's clusters are not well separated at epsilon 1, and better above",
            protocol="see dp-sep.table1",
            corrected=f"all clusters found at epsilon 1: {100 * rows[-1][3]:.1f} % of the points "
            f"as by the labels"
            if rows[-1][3] > 0.9
            else f"at epsilon 1, {100 * rows[-1][3]:.1f} % of the points as by the labels",
            epsilon=" / ".join(_short(row[4]) for row in rows if row[4]),
            verdict="the corrected method keeps the clusters at every epsilon"
            if least > 0.9
            else "clusters are lost",
        ),
    )


def _ratios(rows: list[tuple[Any, ...]]) -> dict[str, float]:
    """Return the mean error, as coded, by that of the paper."""
    return {row[0]: row[3] / row[1] for row in rows if row[1] and row[3]}


def _near(rows: list[tuple[Any, ...]], factor: float) -> list[str]:
    """Return the rows whose mean error, as coded, is within a factor of the paper's."""
    return [name for name, ratio in _ratios(rows).items() if 1 / factor <= ratio <= factor]


def _far(rows: list[tuple[Any, ...]], factor: float) -> list[str]:
    """Return the other rows, with the ratio."""
    near = _near(rows, factor)
    return [f"{n} ({_short(r)} times it)" for n, r in _ratios(rows).items() if n not in near]


def _median(values: list[float]) -> float | None:
    finite = [math.inf if v is None else v for v in values]
    return statistics.median(finite) if finite else None


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.2g}" if value < 10 else f"{value:.0f}"


ITEMS = {"table1": table1, "fig1": fig1}
