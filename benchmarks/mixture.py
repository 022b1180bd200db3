"""The DP-SEP paper's mixture (Table 1, Figure 1), with every privacy number by PLD.

    python -m benchmarks.mixture [--draws 10] [--seed 60] [--private] [--printed PASSES]
                                 [--clipped PASSES] [--figure mixture.svg]

N = 1000 points of J = 4 components in D = 4 dimensions, noise std 0.5 and weights 1/4 known, prior
N(c_j, 10 I) with c_j drawn from a standard normal. Errors are against the closed-form posterior
given the true labels: squared distances summed over entries and averaged over components, as in the
paper. Of methods with noise the median over draws is shown, and the largest. The settings were
chosen by comparing about 140 of them on synthetic data, which costs no privacy: most on seeds 1 to
6, some on seed 60 itself (number of DP-SEP steps, clip against step size, step of SEP without
noise). So the rows of seed 60 are optimistic; seeds 101 to 105 were run once, with all settings
frozen.

`--printed PASSES` adds Algorithm 3 as printed (one record a step, gamma = 1, C = 1), `--clipped
PASSES` the same without noise at C = 20, 10 and 1; a pass takes some seconds.
`--figure` draws the plane in which the true means lie furthest apart, with rings that hold 98 % of
the posterior of each mean.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time

import numpy as np
import torch

import dpbnn
from dpbnn.methods.method import Method
from dpbnn.mixtures import synthetic_mixture
from dpbnn.posteriors import MixturePosterior
from dpbnn.reproduce.dp_sep import (
    MixtureError,
    confidence_ring,
    label_posterior,
    match_components,
    mixture_error,
)

N, J, D, NOISE, PRIOR, DELTA = 1000, 4, 4, 0.5, dpbnn.Gaussian(math.sqrt(10)), 1e-5
EPSILONS = (1.0, 5.0, 50.0)
SEP = dpbnn.SEP(step_size=(0.03, 0.01), clip=0.2)
EM = dpbnn.EM(clip=2.0, anneal=0.03, average=True)
PAPER = {
    "SEP, Eq. 5, 100 passes": (0.0020, 0.0004),
    "clipped SEP, C = 20, 100 passes": (0.0263, 0.0004),
    "clipped SEP, C = 10, 100 passes": (1.4950, 0.0005),
    "clipped SEP, C = 1, 100 passes": (2.2065, 0.0459),
    "DP-SEP, epsilon 1": (82.9746, 5.0777),
    "DP-SEP, epsilon 5": (12.1623, 1.0655),
    "DP-SEP, epsilon 50": (2.2411, 0.0358),
    "DP-EM, epsilon 1": (7.5166, 57.8665),
    "DP-EM, epsilon 5": (10.4548, 3.7573),
    "DP-EM, epsilon 50": (5.3769, 1.3189),
}


@functools.cache
def problem(seed: int = 60) -> tuple[torch.Tensor, ...]:
    x, labels, _ = synthetic_mixture(N, J, D, NOISE, seed)
    centres = torch.from_numpy(np.random.default_rng(0).standard_normal((J, D)))
    return x, labels, centres, *label_posterior(x, labels, centres, PRIOR.std, NOISE)


def full_batch(steps: int) -> dpbnn.Plan:
    return dpbnn.open_plan(n=N, sampling="full-batch", steps=steps)


@functools.cache
def private(epsilon: float, steps: int) -> dpbnn.Plan:
    return dpbnn.plan(epsilon=epsilon, delta=DELTA, n=N, sampling="full-batch", steps=steps)


@functools.cache
def passes(epsilon: float, count: int) -> dpbnn.Plan:
    return dpbnn.plan(
        epsilon=epsilon, delta=DELTA, n=N, sampling="partition", batch_size=1, epochs=count,
        relation="replace-one",
    )  # fmt: skip


def fitted(method: Method, plan: dpbnn.Plan, seed: int = 60) -> MixturePosterior:
    x, _, centres, _, _ = problem(seed)
    model = dpbnn.GaussianMixture(J, D, NOISE, centres=centres)
    posterior = dpbnn.fit(model, x, prior=PRIOR, method=method, plan=plan, progress=False)
    assert isinstance(posterior, MixturePosterior)
    return posterior


def error(posterior: MixturePosterior, seed: int = 60) -> MixtureError:
    _, _, _, means, covariances = problem(seed)
    return mixture_error(posterior.means, means, posterior.covariance, covariances)


def rows(printed: int, clipped: int) -> dict[str, tuple[Method, dpbnn.Plan]]:
    """Methods and plans by name."""
    found: dict[str, tuple[Method, dpbnn.Plan]] = {
        "EP, 10 passes": (dpbnn.EP(damping=1.0), full_batch(10)),
        "SEP, Eq. 5, 100 passes": (dpbnn.EP(shared=True, damping=1 / N), full_batch(100)),
        "SEP, Li's weight, 10 passes": (dpbnn.EP(shared=True, damping=1.0), full_batch(10)),
        "SEP, 200 full steps of 0.1": (
            dpbnn.SEP(step_size=0.1, average=None),
            full_batch(200),
        ),
        "EM, 60 steps": (dpbnn.EM(anneal=0.03), full_batch(60)),
    }
    for epsilon in EPSILONS:
        found[f"DP-SEP, epsilon {epsilon:g}"] = SEP, private(epsilon, 100)
    for epsilon in EPSILONS:
        found[f"DP-EM, epsilon {epsilon:g}"] = EM, private(epsilon, 40)
    for clip in (20, 10, 1) if clipped else ():
        found[f"clipped SEP, C = {clip}, {clipped} passes"] = (
            dpbnn.SEP.paper(clip=float(clip), blocks=2, always_clip=True),
            dpbnn.open_plan(n=N, sampling="partition", batch_size=1, epochs=clipped),
        )
    if printed:
        for epsilon in EPSILONS:
            name = f"Algorithm 3, {printed} passes, epsilon {epsilon:g}"
            found[name] = dpbnn.SEP.paper(clip=1.0, blocks=2), passes(epsilon, printed)
    return found


def table(arguments: argparse.Namespace) -> dict[str, MixturePosterior]:
    draws, seed = arguments.draws, arguments.seed
    print("| method | mean | largest | covariance | largest | epsilon | seconds | paper |")
    print("|---|---|---|---|---|---|---|---|")
    kept = {}
    for name, (method, plan) in rows(arguments.printed, arguments.clipped).items():
        if arguments.private and not plan.private and not name.startswith("EM"):
            continue
        begin, count = time.perf_counter(), draws if plan.private else 1
        posteriors = [fitted(method, plan, seed) for _ in range(count)]
        seconds = (time.perf_counter() - begin) / count
        errors = [error(posterior, seed) for posterior in posteriors]
        cells = []
        for field in ("mean", "covariance"):
            values = [getattr(e, field) for e in errors]
            cells += [f"{statistics.median(values):.2g}", f"{max(values):.2g}"]
        epsilon = f"{plan.epsilon:.4g}" if plan.private else "not private"
        paper = " / ".join(f"{v:g}" for v in PAPER.get(name, ())) or "-"
        print(f"| {name} | {' | '.join(cells)} | {epsilon} | {seconds:.1f} | {paper} |", flush=True)
        kept[name] = posteriors[0]
    return kept


def figure(posteriors: dict[str, MixturePosterior], path: str, seed: int) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    x, labels, _, means, covariances = problem(seed)
    panels = [("truth", labels, means, covariances)]
    for name, posterior in posteriors.items():
        own = posterior.responsibilities(x).argmax(-1)
        place = torch.tensor(match_components(posterior.means, means)).argsort()
        panels.append((name, place[own], posterior.means, posterior.covariance))
    _, _, directions = torch.linalg.svd(means - means.mean(0))
    plane = directions[:2].T
    flat = x @ plane
    columns = 3
    lines = math.ceil(len(panels) / columns)
    grid, axes = pyplot.subplots(
        lines, columns, figsize=(3 * columns, 2.6 * lines), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, own, centre, spread) in zip(axes.flat, panels, strict=False):
        axis.scatter(
            flat[:, 0],
            flat[:, 1],
            c=own,
            cmap="tab10",
            vmin=0,
            vmax=9,
            s=2,
            linewidths=0,
            rasterized=True,
        )
        for mean, covariance in zip(centre, spread, strict=True):
            ring = confidence_ring(mean @ plane, plane.T @ covariance @ plane)
            axis.plot(ring[:, 0], ring[:, 1], color="black", linewidth=1)
        axis.set_title(name, fontsize=8)
        axis.tick_params(labelsize=6)
    axes[0, 0].set_xlim(flat[:, 0].min() - 0.2, flat[:, 0].max() + 0.2)
    axes[0, 0].set_ylim(flat[:, 1].min() - 0.2, flat[:, 1].max() + 0.2)
    grid.tight_layout()
    grid.savefig(path, dpi=150)
    print(f"figure: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seed", type=int, default=60)
    parser.add_argument("--private", action="store_true", help="EM and the private rows alone")
    parser.add_argument("--printed", type=int, default=0, metavar="PASSES")
    parser.add_argument("--clipped", type=int, default=0, metavar="PASSES")
    parser.add_argument("--figure", metavar="FILE.svg")
    arguments = parser.parse_args()
    posteriors = table(arguments)
    if arguments.figure:
        figure(posteriors, arguments.figure, arguments.seed)


if __name__ == "__main__":
    main()
