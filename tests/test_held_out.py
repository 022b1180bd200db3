"""A temperature and a conformal threshold inside a fit's own budget."""

import csv
import json

import numpy as np
import pytest
from command_line import run

import dpbnn
from dpbnn import PrivateBayesClassifier, PrivateBayesRegressor
from dpbnn.estimators.held_out import HeldOut

BOTH = {"recalibrate": 0.2, "conformal": 0.2}
COMMON = {"method": "sgld", "bounds": (-3, 3), "epochs": 20, "random_state": 0}
CLASSES = {"classes": [0, 1, 2], **COMMON}
NUMBERS = {"target_bounds": (-8, 8), **COMMON}


def classes(n, seed=0):
    """Three classes that overlap."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    logits = 1.5 * x + rng.gumbel(size=x.shape)
    return x, logits.argmax(1)


def line(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    return x, x[:, 0] - x[:, 1] + rng.standard_t(4, n)


@pytest.fixture(scope="module")
def fitted():
    return PrivateBayesClassifier(epsilon=4.0, **CLASSES, **BOTH).fit(*classes(6000))


def test_everything_is_in_one_ledger_within_the_budget(fitted):
    statement = fitted.privacy_
    assert [m["label"] for m in statement.mechanisms] == [
        "sgld", "recalibration", "conformal calibration",
    ]  # fmt: skip
    assert [m["n"] for m in statement.mechanisms] == [3600, 1200, 1200]
    assert [m["releases"] for m in statement.mechanisms] == [fitted.plan_.steps, 6, 1]
    assert 0.99 * 4 <= statement.epsilon <= 4
    assert statement.epsilon == pytest.approx(fitted.ledger_.epsilon(statement.delta))
    assert fitted.plan_.events == fitted.ledger_.events
    tempering, covering = fitted.ledger_.events[1:]
    for event, share in ((tempering, 0.2), (covering, 0.2)):
        own = dpbnn.ACCOUNTANTS["exact"].epsilon([event], statement.delta)
        assert 0.99 * share * 4 <= own <= share * 4


def test_rows_are_shared_out_by_their_number_alone():
    for given, sizes in (
        (HeldOut(0.1, None), (800, 200, 0)),
        (HeldOut(None, 0.1), (800, 0, 200)),
        (HeldOut(0.1, 0.1), (600, 200, 200)),
        (HeldOut(None, None), (1000, 0, 0)),
    ):
        parts = given.parts(1000)
        shares = (parts.train, parts.temper, parts.cover)
        assert tuple(map(len, shares)) == sizes
        np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(1000))
        again = given.parts(1000)
        np.testing.assert_array_equal(again.cover, parts.cover)
    assert len(HeldOut(0.1, 0.1).parts(10**6).cover) == 20_000


def covered(estimator, x, y):
    if isinstance(estimator, PrivateBayesClassifier):
        return estimator.predict_set(x)[np.arange(len(y)), y].mean()
    low, high = estimator.predict_interval(x)
    return ((low <= y) & (y <= high)).mean()


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_sets_and_intervals_cover_as_promised(kind):
    """False alarms below 1e-4: 1200 held-out and 20 000 test rows leave a std of 0.012."""
    made, build, settings = {
        "classes": (classes, PrivateBayesClassifier, CLASSES),
        "numbers": (line, PrivateBayesRegressor, NUMBERS),
    }[kind]
    test = made(20_000, seed=1)

    def coverage(alpha):
        estimator = build(epsilon=4.0, conformal=alpha, **settings).fit(*made(6000))
        assert estimator.calibration_["coverage at least"] == pytest.approx(0.99 - alpha)
        return covered(estimator, *test)

    lowest = 0.79 - 4 * 0.012
    assert lowest <= coverage(0.2) <= 0.93
    assert coverage(0.4) < lowest  # the test can tell


def test_an_overconfident_model_is_tempered():
    """Without privacy all is seeded: 240 training rows, 30 columns, no prior to speak of."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4300, 30))
    y = (x[:, 0] + rng.logistic(size=len(x)) > 0).astype(int)
    settings = {
        "method": "sgd", "epsilon": None, "prior": dpbnn.Gaussian(10.0), "random_state": 0,
    }  # fmt: skip
    train, test = slice(0, 300), slice(300, None)
    raw = PrivateBayesClassifier(**settings).fit(x[train], y[train])
    mended = PrivateBayesClassifier(**settings, recalibrate=0.5).fit(x[train], y[train])
    assert raw.temperature_ is None
    assert mended.temperature_ > 1.5
    nll = [e.evaluate(x[test], y[test], resamples=0).metrics["nll"].value for e in (raw, mended)]
    assert nll[1] < nll[0] - 0.1
    assert not mended.privacy_.private


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recalibrate": 1.5}, "recalibrate=1.5: must be a share of epsilon between 0 and 1"),
        ({"recalibrate": 0.9, "conformal": 0.1}, "between 0 and 0.8"),
        ({"recalibrate": 0.0}, "recalibrate=0.0"),
        ({"conformal": 1.0}, "conformal=1.0: must be a share of misses"),
        ({"conformal": 0.01}, "conformal=0.01: 400 held-out rows are too few for a fifth of"),
        ({"recalibrate": 0.01}, "recalibrate=0.01: 400 held-out rows are too few"),
    ],
)
def test_bad_requests_are_one_line_and_spend_nothing(tmp_path, change, message):
    path = tmp_path / "ledger.jsonl"
    book = dpbnn.Ledger(path, epsilon=10.0, delta=1e-5)
    settings = {**CLASSES, "epsilon": 4.0, "ledger": path, **change}
    with pytest.raises(ValueError, match=message) as error:
        PrivateBayesClassifier(**settings).fit(*classes(2000))
    assert "\n" not in str(error.value)
    assert book.releases == 0


def test_a_budget_that_holds_the_training_alone_is_refused_before_it(tmp_path):
    x, y = classes(6000)
    path = tmp_path / "ledger.jsonl"
    book = dpbnn.Ledger(path, epsilon=4.0, delta=1e-5)
    earlier = dpbnn.plan(epsilon=1.0, delta=1e-5, n=6000, steps=1, sampling="full-batch")
    book.spend(*earlier.events)
    with pytest.raises(dpbnn.BudgetExceeded):
        PrivateBayesClassifier(epsilon=4.0, ledger=path, **CLASSES, **BOTH).fit(x, y)
    assert book.releases == 1


def test_what_was_not_asked_for_is_not_there():
    clf = PrivateBayesClassifier(epsilon=4.0, **{**CLASSES, "epochs": 2}).fit(*classes(200))
    assert (clf.temperature_, clf.threshold_, clf.calibration_) == (None, None, {})
    with pytest.raises(ValueError, match=r"pass conformal=0\.1"):
        clf.predict_set(classes(5)[0])


def test_saved_estimators_keep_temperature_and_threshold(tmp_path, fitted):
    x, _ = classes(50, seed=2)
    for threshold in (fitted.threshold_, float("inf")):
        fitted.threshold_, before = threshold, fitted.threshold_
        fitted.save(tmp_path / f"{threshold}")
        again = PrivateBayesClassifier.load(tmp_path / f"{threshold}")
        assert (again.temperature_, again.threshold_) == (fitted.temperature_, threshold)
        np.testing.assert_array_equal(again.predict_set(x), fitted.predict_set(x))
        np.testing.assert_allclose(again.predict_proba(x), fitted.predict_proba(x), rtol=1e-6)
        fitted.threshold_ = before


def table(path, made, n, seed):
    x, y = made(n, seed)
    rows = [[*map(repr, map(float, row)), target] for row, target in zip(x, y, strict=True)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[*(f"x{i}" for i in range(x.shape[1])), "y"], *rows])
    return path


@pytest.mark.parametrize("made", [classes, line])
def test_the_command_line_from_csv_to_csv(capsys, tmp_path, made):
    train = table(tmp_path / "train.csv", made, 6000, 0)
    test = table(tmp_path / "test.csv", made, 500, 1)
    bounds = tmp_path / "bounds.toml"
    target = "[0, 1, 2]" if made is classes else "[-8, 8]"
    bounds.write_text("x0 = [-3, 3]\nx1 = [-3, 3]\nx2 = [-3, 3]\ny = " + target)
    if made is line:
        bounds.write_text(bounds.read_text().replace("x2 = [-3, 3]\n", ""))
    given = ["--target", "y", "--bounds", bounds, "--epsilon", 4, "--epochs", 20]
    code, out, err = run(capsys, "fit", train, *given, "--recalibrate", 0.2, "--conformal", 0.2,
                         "--out", tmp_path / "run", "--json")  # fmt: skip
    assert code == 0, err
    values = json.loads(out)
    assert set(values["calibration"]) == {"temperature", "threshold", "coverage at least"}
    assert values["privacy"]["epsilon"] <= 4
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["calibration"] == values["calibration"]
    assert manifest["settings"]["conformal"] == 0.2
    code, out, _ = run(capsys, "predict", tmp_path / "run", test)
    rows = list(csv.DictReader(out.splitlines()))
    assert len(rows) == 500
    if made is classes:
        truth = made(500, 1)[1]
        held = [str(y) in row["set"].split("|") for y, row in zip(truth, rows, strict=True)]
    else:
        held = [
            float(row["conformal_low"]) <= y <= float(row["conformal_high"])
            for y, row in zip(made(500, 1)[1], rows, strict=True)
        ]
    assert np.mean(held) > 0.7
    code, out, _ = run(capsys, "evaluate", tmp_path / "run", test)
    assert f"cover {np.mean(held):.4f}, at least 0.79 were promised" in out
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["conformal"]["observed"] == pytest.approx(np.mean(held))
    for _ in range(2):
        page = (tmp_path / "run" / "report.html").read_text()
        for words in ("conformal calibration", "recalibration", "coverage on the test records"):
            assert words in page
        assert run(capsys, "report", tmp_path / "run")[0] == 0
    code, out, err = run(capsys, "fit", train, *given, "--conformal", 0.001,
                         "--out", tmp_path / "other")  # fmt: skip
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "other").exists()
