"""A temperature and a conformal threshold inside a fit's own budget."""

import csv
import json

import numpy as np
import pytest
import torch
from command_line import run

import dpbnn
from dpbnn import PrivateBayesClassifier, PrivateBayesRegressor
from dpbnn.estimators.held_out import HeldOut
from dpbnn.predictive import RealPredictive

BOTH = {"recalibrate": 0.2, "conformal": 0.2}
COMMON = {"method": "sgld", "bounds": (-3, 3), "epochs": 20, "random_state": 0}
CLASSES = {**COMMON, "classes": [0, 1, 2]}
NUMBERS = {**COMMON, "target_bounds": (-8, 8)}


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
    assert [m["releases"] for m in statement.mechanisms] == [fitted.plan_.steps, 5, 1]
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


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_by_default_training_rows_decide_the_temperature_within_the_budget(kind):
    """The rows are those of the training, so its releases and these compose.

    A statement for disjoint rows would print the larger of the two epsilons.
    """
    made, build, settings = {
        "classes": (classes, PrivateBayesClassifier, CLASSES),
        "numbers": (line, PrivateBayesRegressor, NUMBERS),
    }[kind]
    fitted = build(epsilon=1.0, **settings).fit(*made(1000))
    statement, book = fitted.privacy_, fitted.ledger_
    assert [m["label"] for m in statement.mechanisms] == ["sgld", "recalibration"]
    assert [m["n"] for m in statement.mechanisms] == [1000, 1000]
    assert [m["releases"] for m in statement.mechanisms] == [fitted.plan_.steps, 5]
    assert fitted.plan_.events == book.events
    exact, delta = dpbnn.ACCOUNTANTS["exact"], statement.delta
    alone = [exact.epsilon([event], delta) for event in book.events]
    assert 0.99 <= statement.epsilon <= 1
    assert statement.epsilon == pytest.approx(exact.epsilon(book.events, delta), rel=1e-2)
    assert statement.epsilon > 1.01 * max(alone)
    without = build(epsilon=1.0, recalibrate=None, **settings).fit(*made(1000))
    assert fitted.plan_.noise_multiplier > 1.01 * without.plan_.noise_multiplier
    whole = sum(event.count / event.noise_multiplier**2 for event in book.events)
    most = {"classes": 0.2, "numbers": 0.1}[kind]
    assert 0.01 < 5 / book.events[1].noise_multiplier ** 2 / whole < 1.02 * most
    assert sorted(fitted.calibration_) == ["temperature"]


def masked(x, y, row):
    """The neighbour under zero-out: on_bad_rows="zero" lets the row contribute nothing."""
    x = x.clone()
    x[row] = float("nan")
    return x, y


def released(data, kind=PrivateBayesClassifier, settings=None):
    settings = {**CLASSES, **(settings or {}), "epochs": 4, "on_bad_rows": "zero"}
    found = kind(epsilon=50.0, samples=10, **settings).fit(*(part.numpy() for part in data))
    return found.temperature_, found.predict_proba(torch.zeros(1, 3).numpy())


def test_replay_of_a_whole_fit_finds_a_row_in_the_training_and_in_the_temperature():
    data = tuple(map(torch.from_numpy, classes(150)))
    found = dpbnn.replay(released, data, masked(*data, 7)).check()
    assert len(found.distances) == 4 + 5
    assert min(found.distances) > 0


def test_replay_finds_a_temperature_that_is_not_released(monkeypatch):
    """A broken twin: the temperature is read off the training rows, beside the gate."""
    from dpbnn.estimators import held_out

    def peeked(posterior, data, **options):
        found = dpbnn.recalibrate(posterior, data, **options)
        found.temperature *= 1 + float(data[0].nan_to_num().abs().mean())
        return found

    monkeypatch.setattr(held_out, "recalibrate", peeked)
    data = tuple(map(torch.from_numpy, classes(150)))
    with pytest.raises(dpbnn.PrivacyBug, match="result"):
        dpbnn.replay(released, data, masked(*data, 7)).check()


def test_a_temperature_that_noise_would_decide_costs_nothing():
    """300 rows at epsilon 0.1, and without privacy, where training rows would be too kind."""
    for epsilon, count in ((0.1, 300), (None, 300)):
        settings = {**CLASSES, "epochs": 2, "epsilon": epsilon}
        found = PrivateBayesClassifier(**settings).fit(*classes(count))
        assert (found.temperature_, found.calibration_) == (None, {})
        assert found.ledger_.releases == found.plan_.steps
        assert not found.plan_.beside


def test_without_privacy_plenty_of_rows_mend_the_scale_of_a_regressor_and_few_do_not():
    """The user's noise_std is four times too large; 8 rows for a weight are plenty."""
    settings = {**NUMBERS, "epsilon": None, "noise_std": 5.0, "hidden": (4,), "epochs": 2}
    few, many = (PrivateBayesRegressor(**settings).fit(*line(n)) for n in (60, 4000))
    assert few.temperature_ is None
    assert many.temperature_ < 0.5
    assert not many.privacy_.private
    x, y = line(10_000, seed=1)
    low, high = (part.numpy() for part in many.predictive(x).interval(0.9))
    assert abs(((low <= y) & (y <= high)).mean() - 0.9) < 0.05


@pytest.mark.parametrize(
    ("regression", "rows", "most"),
    [(False, 3000, 0.2), (True, 3000, 0.1), (True, 500, 0.185), (True, 200, 0.4)],
)
def test_a_temperature_from_training_rows_costs_its_share_of_the_budget_at_most(
    regression, rows, most
):
    """A regressor's is larger for few rows: 0.9 times the error that all of the budget leaves."""
    held = HeldOut("training", None, regression)
    whole = dpbnn.plan(epsilon=0.1, delta=1e-5, n=10, steps=1, sampling="full-batch")
    plan, _ = held.plans(held.parts(rows), 0.1, 1e-5)
    share = 5 * (whole.noise_multiplier / plan.noise_multiplier) ** 2
    assert share == pytest.approx(most, rel=5e-3)


def test_of_many_rows_ten_thousand_decide_and_their_numbers_pick_them():
    held = HeldOut("training", None)
    parts = held.parts(50_000)
    assert (len(parts.train), len(parts.temper), len(parts.cover)) == (50_000, 10_000, 0)
    assert len(np.unique(parts.temper)) == 10_000
    np.testing.assert_array_equal(parts.temper, held.parts(50_000).temper)
    both = HeldOut("training", 0.1).parts(1000)
    np.testing.assert_array_equal(both.temper, both.train)
    assert not set(both.cover) & set(both.train)
    plan, _ = held.plans(parts, 1.0, 1e-5)
    share = 5 / plan.noise_multiplier**2
    whole = dpbnn.plan(epsilon=1.0, delta=1e-5, n=10, steps=1, sampling="full-batch")
    assert share * whole.noise_multiplier**2 < 0.02


def test_a_private_model_with_a_wrong_scale_is_mended():
    """The user's noise_std is four times too large: 90 % intervals then hold almost everything.

    The noise leaves log T an error of 0.04, so coverage one of 0.007; the bound is over 5 of it.
    """
    settings = {**NUMBERS, "epsilon": 1.0, "noise_std": 5.0}
    fitted = PrivateBayesRegressor(**settings).fit(*line(6000))
    x, y = line(10_000, seed=1)

    def coverage():
        low, high = (part.numpy() for part in fitted.predictive(x).interval(0.9))
        return ((low <= y) & (y <= high)).mean()

    assert fitted.temperature_ < 0.5
    assert abs(coverage() - 0.9) < 0.05
    fitted.temperature_ = None
    assert coverage() > 0.98


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
        ({"recalibrate": 1.5}, "recalibrate=1.5: must be 'training', None, or a share of epsilon"),
        ({"recalibrate": 0.9, "conformal": 0.1}, "between 0 and 0.8"),
        ({"recalibrate": 0.0}, "recalibrate=0.0"),
        ({"recalibrate": "held out"}, "recalibrate=held out: must be 'training', None, or"),
        ({"conformal": 1.0}, "conformal=1.0: must be a share of misses"),
        ({"conformal": 0.01}, "conformal=0.01: 400 held-out rows are too few for a fifth of"),
        ({"conformal": 0.05}, "raise conformal or epsilon, take 4995 rows or more, or leave"),
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


def test_a_refused_request_says_how_many_rows_it_needs():
    """That many are taken, and five fewer, of which one less is held out, are refused."""
    asked = HeldOut(None, 0.1)
    assert asked.plans(asked.parts(4695), 2.0, 1e-5)[1].n == 939
    with pytest.raises(ValueError, match="take 4695 rows or more"):
        asked.plans(asked.parts(4690), 2.0, 1e-5)
    with pytest.raises(ValueError, match="raise conformal or epsilon, or leave"):
        asked.plans(asked.parts(10**6), 0.001, 1e-5)  # no more than 20 000 are ever held out


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
    settings = {**CLASSES, "epochs": 2, "recalibrate": None}
    clf = PrivateBayesClassifier(epsilon=4.0, **settings).fit(*classes(200))
    assert [m["label"] for m in clf.privacy_.mechanisms] == ["sgld"]
    assert (clf.temperature_, clf.threshold_, clf.calibration_) == (None, None, {})
    with pytest.raises(ValueError, match=r"as in conformal=0\.1"):
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
    assert (
        f"truth for {100 * np.mean(held):.1f} % of the records; at least 79 % was promised" in out
    )
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


def test_clipping_to_public_bounds_keeps_the_promise():
    """Calibrated intervals are around the mean before clipping, and are clipped themselves.

    Half of the targets lie beyond the bounds. Intervals around a clipped mean would be other ones.
    """
    x, y = line(4000)
    narrow = {**NUMBERS, "target_bounds": (0.0, 3.0)}
    estimator = PrivateBayesRegressor(epsilon=4.0, conformal=0.2, **narrow).fit(x, y)
    predictive = estimator.predictive(x)
    low, high = estimator.predict_interval(x)
    assert low.min() >= 0
    assert high.max() <= 3
    for values in (estimator.predict(x), *(end.numpy() for end in predictive.interval(0.99))):
        assert values.min() >= 0
        assert values.max() <= 3
    centre, reach = np.linspace(-2, 5, 50), 0.5 * estimator.threshold_
    made = RealPredictive(torch.as_tensor(centre)[None], 0.25, (0.0, 3.0))
    low, high = estimator.covering(made)
    assert np.allclose(low, np.clip(centre - reach, 0, 3))
    assert np.allclose(high, np.clip(centre + reach, 0, 3))
    assert not np.allclose(low, np.clip(made.mean.numpy() - reach, 0, 3))
    fresh, truth = line(4000, seed=1)
    low, high = estimator.predict_interval(fresh)
    held = (low <= truth.clip(0, 3)) & (truth.clip(0, 3) <= high)
    assert held.mean() > 0.75
