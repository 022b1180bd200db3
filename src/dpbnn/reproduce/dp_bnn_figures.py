"""DP-BNN on MNIST: the figures, made of the runs of `dp_bnn_mnist` and of two scans of a CNN."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from dpbnn import evaluation
from dpbnn.methods import SGD, SGLD
from dpbnn.privacy.langevin import sgld_noise_multiplier
from dpbnn.reproduce.cells import Cells
from dpbnn.reproduce.dp_bnn_mnist import EASY, HARD, NAMES, N, cell_of, found, mean_of, trained
from dpbnn.reproduce.images import Images, images
from dpbnn.reproduce.result import Curve, Figure, Result, Settings, Summary

__all__ = ["fig1", "fig2", "fig3", "fig5", "fig6", "fig7", "fig8", "fig9"]

Wanted = list[tuple[str, str, str, bool]]
BAYESIAN = ("sgld", "bbp", "mcdropout")


def _reliability(
    settings: Settings,
    number: int,
    wanted: Wanted,
    paper: str,
    verdict: Callable[[dict[str, float]], str],
) -> Result:
    """Reliability diagrams of MLPs by (panel, method, prior, private); own settings.

    The verdict is made of the ECE by panel.
    """
    pairs = list(dict.fromkeys((kind, belief) for _, kind, belief, _ in wanted))
    runs = found(settings, pairs, ("mlp",), ("own",))
    curves, rows = [], []
    for panel, kind, belief, private in wanted:
        of = {"method": kind, "prior": belief, "private": private}
        numbers = [mean_of(runs, of, key) for key in ("accuracy", "ece", "mce", "epsilon")]
        rows.append((panel, *numbers))
        first = next((v for c, v in runs if all(c[k] == x for k, x in of.items())), None)
        curves.append(Curve("perfect", [0.0, 1.0], [0.0, 1.0], panel))
        if first is not None:
            confidence, accuracy, _ = first["reliability"]
            kept = [(c, a) for c, a in zip(confidence, accuracy, strict=True) if a >= 0]
            curves.append(Curve("accuracy", *zip(*kept, strict=True), panel=panel, kind="dots"))
            curves.append(Curve("accuracy", *zip(*kept, strict=True), panel=panel))
    ready = [row for row in rows if row[2] is not None]
    words = ", ".join(f"{row[0]} {row[2]:.3f}" for row in ready)
    return Result(
        title=f"DP-BNN, Figure {number}: reliability on MNIST, MLP",
        columns=("panel", "accuracy", "ECE", "MCE", "epsilon (PLD)"),
        rows=tuple(rows),
        notes=(
            "accuracy against mean confidence in 20 bins, first seed; numbers are means over "
            "seeds; own settings, see dp-bnn.table1",
        ),
        figure=Figure("confidence", "accuracy", tuple(curves), log=False),
        summary=Summary(
            paper=paper,
            protocol="see dp-bnn.table2",
            corrected=f"ECE: {words}" if ready else "-",
            epsilon=", ".join(sorted({f"{row[4]:.3f}" for row in ready if row[4]})) or "-",
            verdict=verdict({row[0]: row[2] for row in rows})
            if len(ready) == len(rows)
            else "not complete",
        ),
    )


def fig3(settings: Settings) -> Result:
    """Reliability of SGD, DP-SGD and DP-SGLD on MNIST (Figure 3)."""
    wanted = [
        ("SGD, no prior", "sgd", "none", False),
        ("DP-SGD, no prior", "sgd", "none", True),
        ("DP-SGLD, no prior", "sgld", "none", True),
        ("DP-SGLD, Gaussian prior", "sgld", "gaussian", True),
    ]

    def verdict(ece: dict[str, float]) -> str:
        sgd, bare, sgld = (ece[panel] for panel, *_ in wanted[1:])
        return (
            f"{'holds' if sgld < sgd else 'does not hold'}: ECE of DP-SGLD with prior {sgld:.3f}, "
            f"of DP-SGD {sgd:.3f}. Without prior DP-SGLD has {bare:.3f}: it is "
            f"{'the prior that helps, not' if bare > sgd else 'not the prior alone, but'} SGLD"
        )

    claim = "DP-SGD is over-confident, DP-SGLD with prior is not"
    return _reliability(settings, 3, wanted, claim, verdict)


def fig8(settings: Settings) -> Result:
    """Reliability of the DP-BNNs on MNIST, with and without prior (Figure 8)."""
    wanted = [
        (f"DP-{NAMES[kind]}, {'Gaussian' if belief == 'gaussian' else 'no'} prior", kind, belief,
         True)
        for belief in ("gaussian", "none")
        for kind in BAYESIAN
    ]  # fmt: skip

    def verdict(ece: dict[str, float]) -> str:
        pairs = {
            NAMES[kind]: [ece[f"DP-{NAMES[kind]}, {word} prior"] for word in ("no", "Gaussian")]
            for kind in BAYESIAN
        }
        better = [name for name, (without, given) in pairs.items() if given < without]
        words = ", ".join(f"{n} from {a:.3f} to {b:.3f}" for n, (a, b) in pairs.items())
        holds = "holds" if len(better) == len(pairs) else "does not hold for all"
        return f"{holds}: the prior lowers the ECE of {len(better)} of {len(pairs)}: {words}"

    claim = "the prior mends the calibration of all three"
    return _reliability(settings, 8, wanted, claim, verdict)


def fig9(settings: Settings) -> Result:
    """Reliability of the BNNs without privacy and prior on MNIST (Figure 9)."""
    wanted = [(f"{NAMES[kind]}, no prior", kind, "none", False) for kind in BAYESIAN]

    def verdict(ece: dict[str, float]) -> str:
        worst = max(ece.values())
        return f"{'holds' if worst < 0.02 else 'does not hold'}: the largest ECE is {worst:.3f}"

    return _reliability(settings, 9, wanted, "without DP and prior, nearly calibrated", verdict)


def fig5(settings: Settings) -> Result:
    """The easy and the hard test image of Figures 6 and 7 (Figure 5)."""
    data = images(settings)
    curves, rows = [], []
    for name, index in (("easy", EASY), ("hard", HARD)):
        place = index % len(data.x_test)
        picture = data.x_test[place, 0].cpu()
        down, across = (picture > 0.5).nonzero().T.tolist()
        panel = f"{name}: test image {place}, class {int(data.y_test[place])}"
        curves.append(Curve("dark", across, [27 - d for d in down], panel, "dots"))
        rows.append((name, place, int(data.y_test[place])))
    labels = [row[2] for row in rows]
    return Result(
        title="DP-BNN, Figure 5: two test images",
        columns=("image", "number", "class"),
        rows=tuple(rows),
        notes=("pixels above one half; numbers count from 0, as in the paper's code",),
        figure=Figure("column", "row", tuple(curves), log=False),
        summary=Summary("an easy 2 and a hard 3", "-", f"an easy {labels[0]}, a hard {labels[1]}",
                        "-", "the same images" if labels == [2, 3] else "other images"),
    )  # fmt: skip


def _digit(
    settings: Settings,
    number: int,
    which: int,
    label: int,
    paper: str,
    verdict: Callable[[dict[str, int]], str],
) -> Result:
    """Histograms of the class probabilities of one image over 100 draws.

    The verdict is made of the most probable class by method.
    """
    pairs = [(kind, "gaussian") for kind in BAYESIAN]
    runs = found(settings, pairs, ("mlp",), ("own",))
    curves, rows = [], []
    for private in (False, True):
        for kind in BAYESIAN:
            panel = f"{'DP-' if private else ''}{NAMES[kind]}"
            value = next(
                (v for c, v in runs if c["method"] == kind and c["private"] is private), None
            )
            if value is None:
                rows.append((panel, None, None, None))
                continue
            counts = value["digits"][which]
            centres = [0.1, 0.3, 0.5, 0.7, 0.9]
            means = [sum(c * x for c, x in zip(bins, centres, strict=True)) for bins in counts]
            order = sorted(range(10), key=lambda k: -means[k])
            for rank, k in enumerate(order[:3]):
                places = [x + 0.05 * (rank - 1) for x in centres]
                curves.append(Curve(f"class {k}", places, [float(c) for c in counts[k]], panel,
                                    "bars"))  # fmt: skip
            sure = sum(counts[label][i] for i in (3, 4))
            rows.append((panel, order[0], sure, value["epsilon"]))
    ready = [row for row in rows if row[1] is not None]
    right = [row[0] for row in ready if row[1] == label]
    return Result(
        title=f"DP-BNN, Figure {number}: 100 predictions of one test image of class {label}",
        columns=("method", "most probable class", f"draws with p({label}) above 0.6", "epsilon"),
        rows=tuple(rows),
        notes=("the three most probable classes; five bins on [0, 1]; first seed; own settings",),
        figure=Figure("probability", "draws", tuple(curves), log=False) if curves else None,
        summary=Summary(
            paper=paper,
            protocol="-",
            corrected=f"right: {', '.join(right) or 'none'}" if ready else "-",
            epsilon=", ".join(sorted({f"{row[3]:.3f}" for row in ready if row[3]})) or "-",
            verdict=verdict({row[0]: row[1] for row in rows})
            if len(ready) == len(rows)
            else "not complete",
        ),
    )


def fig6(settings: Settings) -> Result:
    """Predictions of the easy image by all BNNs (Figure 6)."""

    def verdict(classes: dict[str, int]) -> str:
        right = [name for name, found in classes.items() if found == 2]
        same = len(right) == len(classes)
        return f"{'holds' if same else 'does not hold'}: {len(right)} of {len(classes)} are right"

    return _digit(settings, 6, 0, 2, "all methods are right, private or not", verdict)


def fig7(settings: Settings) -> Result:
    """Predictions of the hard image by all BNNs (Figure 7)."""

    def verdict(classes: dict[str, int]) -> str:
        same = classes["DP-SGLD"] == classes["DP-BBP"] == 5
        words = ", ".join(f"{name} {found}" for name, found in classes.items())
        return f"{'holds' if same else 'does not hold'}; most probable classes: {words}"

    return _digit(settings, 7, 1, 3, "DP-SGLD and DP-BBP tend to class 5", verdict)


def _scan(settings: Settings, name: str, cells: list[dict[str, Any]]) -> list[Any]:
    """Train the CNN by SGD or SGLD at other clips, noises, batches and learning rates."""
    loaded: list[Images] = []

    def run(cell: dict[str, Any]) -> dict[str, Any]:
        if not loaded:
            loaded.append(images(settings).standardised())
        data, rate = loaded[0], cell["rate"]
        chosen = SGD(learning_rate=rate, clip=cell["clip"])
        if cell["method"] == "sgld":
            chosen = SGLD.paper(learning_rate=rate / N, clip=cell["clip"])
        posterior, _, _ = trained(cell, data, settings.device, chosen)
        mean = posterior.predict(data.x_test, seed=cell["seed"]).mean.cpu()
        accuracy = evaluation.accuracy(mean.double().numpy(), data.y_test)
        return {"accuracy": accuracy, "epsilon": posterior.privacy.epsilon}

    return Cells(f"dp-bnn.{name}", settings).all(cells, run)


def _cnn(kind: str, seed: int, **values: Any) -> dict[str, Any]:
    return {**cell_of(kind, "cnn", "none", True, "paper", seed), **values}


def fig1(settings: Settings) -> Result:
    """DP-SGLD inside the family of DP-SGD: accuracy against epsilon of CNNs (Figure 1)."""
    seed = settings.seed
    clips, sigmas = (0.5, 1.5, 5.0), (0.5, 0.8, 1.3, 2.0, 3.0)
    cells = [_cnn("sgd", seed, rate=0.25, clip=c, sigma=s) for c in clips for s in sigmas]
    cells += [
        _cnn("sgld", seed, rate=1e-5 * N, clip=c) for c in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)
    ]
    if settings.fast:
        cells = cells[:2] + cells[-2:]
    runs = _scan(settings, "fig1", cells)
    rows = []
    for cell, value in runs:
        sigma = cell.get("sigma")
        if cell["method"] == "sgld":
            sigma = sgld_noise_multiplier(cell["rate"] / N, cell["clip"], N, 256,
                                          convention="paper")  # fmt: skip
        name = f"DP-{NAMES[cell['method']]}"
        rows.append((name, cell["clip"], sigma, value["epsilon"], value["accuracy"]))
    names = [f"DP-SGD, C = {c:g}" for c in clips]
    curves = [
        Curve(name, [r[3] for r in rows if r[0] == "DP-SGD" and r[1] == c],
              [r[4] for r in rows if r[0] == "DP-SGD" and r[1] == c], kind=kind)
        for name, c in zip(names, clips, strict=True)
        for kind in ("line", "dots")
    ]  # fmt: skip
    langevin = sorted((r[3], r[4]) for r in rows if r[0] == "DP-SGLD")
    for kind in ("line", "dots"):
        curves.append(Curve("DP-SGLD", [a for a, _ in langevin], [b for _, b in langevin],
                            kind=kind))  # fmt: skip
    beaten = [any(r[3] <= e and r[4] >= a for r in rows if r[0] == "DP-SGD") for e, a in langevin]
    return Result(
        title="DP-BNN, Figure 1: DP-SGLD within the DP-SGD family, CNN on MNIST",
        columns=("method", "clip", "sigma", "epsilon (PLD)", "accuracy"),
        rows=tuple(rows),
        notes=(
            "batch 256, 15 epochs, learning rate 0.25 (SGD) and 1e-5 (SGLD, paper's convention, "
            "which is 0.6 for SGD), no prior, one seed; the paper's own scan is not published",
        ),
        figure=Figure("epsilon (PLD)", "accuracy", tuple(c for c in curves if len(c.x)), log=False)
        if rows
        else None,
        summary=Summary(
            paper="DP-SGLD has the top left corner",
            protocol="; ".join(f"{e:.2f}: {a:.3f}" for e, a in langevin) + " (epsilon: DP-SGLD)",
            corrected="-",
            epsilon="as on the axis",
            verdict=f"{'does not hold' if any(beaten) else 'holds'}: {sum(beaten)} of "
            f"{len(beaten)} DP-SGLD runs are matched or beaten by a DP-SGD run of the scan with no "
            "larger epsilon"
            if len(runs) == len(cells)
            else "not complete",
        ),
    )


def fig2(settings: Settings) -> Result:
    """Batch size and learning rate of DP-SGD and DP-SGLD: accuracy and epsilon (Figure 2)."""
    seed = settings.seed
    batches, rates = (128, 256, 512, 1024), (0.05, 0.1, 0.25, 0.5, 1.0)
    groups = {
        "DP-SGD, batch size": [_cnn("sgd", seed, rate=0.25, clip=1.5, batch=b) for b in batches],
        "DP-SGLD, batch size": [_cnn("sgld", seed, rate=0.25, clip=1.5, batch=b) for b in batches],
        "DP-SGLD, learning rate": [
            _cnn("sgld", seed, rate=r, clip=1.5, batch=256) for r in rates
        ],
    }  # fmt: skip
    if settings.fast:
        groups = {name: cells[:2] for name, cells in groups.items()}
    every = [cell for cells in groups.values() for cell in cells]
    every = [cell for i, cell in enumerate(every) if cell not in every[:i]]
    runs = _scan(settings, "fig2", every)
    rows, curves, ways = [], [], {}
    for name in groups:
        kind, _, what = name.partition(", ")
        key = "batch" if what == "batch size" else "rate"
        own = [(c, v) for c, v in runs if any({**c, "fast": 0} == {**g, "fast": 0}
               for g in groups[name])]  # fmt: skip
        rows += [(kind, c["batch"], c["rate"], v["epsilon"], v["accuracy"]) for c, v in own]
        epsilons = [v["epsilon"] for c, v in sorted(own, key=lambda p: p[0][key])]
        steps = list(itertools.pairwise(epsilons))
        ways[name] = "rises" if all(a < b for a, b in steps) else "falls" if all(
            a > b for a, b in steps) else "mixed"  # fmt: skip
        at = [(v["epsilon"], v["accuracy"]) for _, v in own]
        for mark in ("line", "dots") if at else ():
            curves.append(Curve("accuracy", *zip(*sorted(at), strict=True), panel=name, kind=mark))
    right = [ways[n] for n in groups] == ["rises", "falls", "rises"]
    return Result(
        title="DP-BNN, Figure 2: batch size and learning rate, CNN on MNIST",
        columns=("method", "batch size", "learning rate (of SGD)", "epsilon (PLD)", "accuracy"),
        rows=tuple(rows),
        notes=(
            "15 epochs, clip 1.5; DP-SGD has sigma 1.3, DP-SGLD that of Theorem 1; learning rates "
            "of DP-SGLD are n times the Langevin step; one seed",
        ),
        figure=Figure("epsilon (PLD)", "accuracy", tuple(curves), log=False) if curves else None,
        summary=Summary(
            paper="larger batches are less private in DP-SGD, more private in DP-SGLD; larger "
            "learning rates are less private in DP-SGLD",
            protocol="; ".join(f"{n}: epsilon {w}" for n, w in ways.items()),
            corrected="-",
            epsilon="as on the axis",
            verdict="not complete"
            if len(runs) < len(every)
            else "the directions reproduce"
            if right
            else "the directions do not reproduce",
        ),
    )  # fmt: skip


ITEMS = {
    "fig1": fig1, "fig2": fig2, "fig3": fig3, "fig5": fig5, "fig6": fig6, "fig7": fig7,
    "fig8": fig8, "fig9": fig9,
}  # fmt: skip
