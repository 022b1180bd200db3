"""Pages that the tests of the report share."""

import dataclasses

import numpy as np
import torch

import dpbnn
from dpbnn import report
from dpbnn.evaluation import chain_diagnostics, evaluate
from dpbnn.predictive import ClassPredictive, RealPredictive

EVIL = "<script>alert('x')</script>"
LONG = "a_column_with_a_very_long_name_that_nobody_ever_thought_of_breaking_anywhere_at_all"

CLASS_SECTIONS = [
    *("privacy", "public", "metrics", "groups", "confusion", "reliability", "confidence"),
    *("risk-coverage", "examples"),
    *("diagnostics", "settings", "versions", "hashes", "verify"),
]
REAL_SECTIONS = [
    *("privacy", "metrics", "coverage", "pit", "intervals", "band", "examples"),
    *("settings", "versions", "hashes", "verify"),
]
_LAST = ("settings", "versions", "hashes", "verify")
_CLASSES = (
    *("privacy", "public", "metrics", "groups", "confusion", "reliability", "confidence"),
    *("risk-coverage", "examples", *_LAST),
)
_NUMBERS = ("privacy", "public", "metrics", "groups", "coverage", "pit", "intervals", "examples")
FITTED_SECTIONS = {
    "counts": [*_NUMBERS, *_LAST],
    "ordinal": [*_CLASSES],
    "persons": [*_NUMBERS, "diagnostics", *_LAST],
    "conformal": [*_CLASSES],
}


def statement(epsilon=1.0, **changes):
    event = dpbnn.Poisson(1000, 50).event(2.0, 100)
    found = dpbnn.PrivacyStatement.of(
        [event], delta=1e-5, epsilon=epsilon, labels=["sgld"], clip=1.5
    )
    return dataclasses.replace(found, **changes)


def class_predictive(n=120, classes=3, draws=40):
    generator = torch.Generator().manual_seed(0)
    centre = 2 * torch.randn(n, classes, generator=generator)
    return ClassPredictive.from_logits(centre + torch.randn(draws, n, classes, generator=generator))


def class_labels(predictive):
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(predictive.mean, 1, generator=generator).squeeze(1).numpy()


def real_predictive(n=80, draws=30):
    generator = torch.Generator().manual_seed(2)
    x = torch.linspace(-2, 2, n, dtype=torch.double)
    tilt = 0.3 * torch.randn(draws, 1, generator=generator, dtype=torch.double)
    return x.numpy(), RealPredictive(torch.sin(x) + tilt * x, 0.04)


def class_page(**changes):
    predictive = class_predictive()
    y = class_labels(predictive)
    images = np.random.default_rng(3).random((len(y), 8, 8))
    page = report.RunPage(
        privacy=statement(),
        evaluation=evaluate(
            predictive,
            y,
            resamples=50,
            classes=["no", EVIL, LONG],
            groups=[EVIL, LONG, *["b"] * (len(y) - 2)],
            group=f"site {EVIL}",
        ),
        rows={"training": 1000, "calibration": 20},
        public={EVIL: "number, 0 to 1", LONG: f"categories: {EVIL}, {LONG}"},
        promise=f"Sets hold the truth for 80 % of the records {EVIL}.",
        title=f"Three classes {EVIL}",
        settings={"method": "sgld", EVIL: EVIL, "model": {"hidden": [64, 32], LONG: 1 / 3}},
        versions={"dpbnn": dpbnn.__version__, "torch": torch.__version__},
        hashes={"posterior.safetensors": "0123456789abcdef" * 4},
        diagnostics=chain_diagnostics(predictive.log_probabilities[None, :, :20]),
        examples=report.select_examples(
            predictive, y, images=images, classes=["no", EVIL, LONG], count=2
        ),
        test_data_public=True,
        ledger="run/ledger.jsonl",
        created="2025-01-31",
    )
    return dataclasses.replace(page, **changes)


def real_page(**changes):
    x, predictive = real_predictive()
    y = np.sin(x)
    page = report.RunPage(
        privacy=statement(0.5),
        evaluation=evaluate(predictive, y, resamples=50),
        title="A curve",
        settings={"method": "sgld"},
        examples=report.select_examples(
            predictive, y, rows=[{EVIL: float(v), LONG: LONG} for v in x], count=2
        ),
        band=report.band(
            predictive, x, x_label=EVIL, y_label="height", points=(x, y), truth=np.sin(x)
        ),
        bayesian={
            "kind": "bayesian-privacy-estimate",
            "epsilon_mu": 0.123,
            "dp": statement().to_dict(),
        },
        test_data_public=True,
    )
    return dataclasses.replace(page, **changes)


def rows(with_open=True):
    predictive = class_predictive()
    found = evaluate(predictive, class_labels(predictive), resamples=50)
    kept = [
        report.ComparisonRow(method, statement(epsilon), found, note=EVIL)
        for method in ("sgld", LONG, "bbp")
        for epsilon in (0.5, 1.998 if method == "bbp" else 2.0)
    ]
    if with_open:
        kept.append(report.ComparisonRow("sgld", dpbnn.PrivacyStatement.not_private(), found))
    return kept


def pages():
    """Every kind of page, by name, with the sections it must have."""
    return {
        "classes": (report.render(class_page()), CLASS_SECTIONS),
        "real": (report.render(real_page()), REAL_SECTIONS),
        "open": (
            report.render(
                class_page(privacy=dpbnn.PrivacyStatement.not_private(), test_data_public=False)
            ),
            CLASS_SECTIONS,
        ),
        "comparison": (report.render_comparison(rows()), ["privacy", "runs", "charts"]),
    }


def fitted_pages(folder):
    """Pages of fitted estimators, by name: a count, ordered classes, persons, conformal sets."""
    chance = np.random.default_rng(4)
    x = chance.uniform(0, 1, (400, 2))
    sizes, site = chance.poisson(8 * x[:, 0]), np.where(x[:, 1] > 0.5, "north", "south")
    bounds, few = {"bounds": (0, 1)}, {"epochs": 20, "random_state": 0}
    grades = np.array(["low", "middle", "high"])[np.digitize(x[:, 0], [0.3, 0.7])]
    counts = dpbnn.PrivateBayesRegressor(
        likelihood="poisson", target_bounds=(0, 40), epsilon=3.0, **bounds, **few
    ).fit(x[:300], sizes[:300])
    ordered = dpbnn.PrivateBayesClassifier(
        likelihood="ordinal", classes=["low", "middle", "high"], epsilon=3.0, **bounds, **few
    ).fit(x[:300], grades[:300])
    persons = dpbnn.PrivateBayesRegressor(
        "sgld", target_bounds=(0, 40), epsilon=3.0, delta=3.07116e-6, **bounds, **few
    ).fit(x[:300], sizes[:300], units=np.arange(300) // 3, unit="patient")
    covered = dpbnn.PrivateBayesClassifier(
        classes=["low", "middle", "high"], epsilon=8.0, conformal=0.2, **bounds, **few
    ).fit(np.tile(x, (5, 1)), np.tile(grades, 5))
    found = {}
    kinds = {
        "counts": (counts, sizes), "ordinal": (ordered, grades), "persons": (persons, sizes),
        "conformal": (covered, grades),
    }  # fmt: skip
    for name, (model, y) in kinds.items():
        path = folder / f"{name}.html"
        model.report(path, x[300:], y[300:], groups=site[300:], group="site", resamples=50)
        found[name] = (path.read_text(encoding="utf-8"), FITTED_SECTIONS[name])
    return found
