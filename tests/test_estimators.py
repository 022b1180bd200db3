"""The estimators: scikit-learn's contract, and privacy that nobody can lose by accident."""

import copy
import functools
import json
import logging
import pickle
import secrets
import types

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.model_selection import GridSearchCV, PredefinedSplit, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import dpbnn
from dpbnn import PrivateBayesClassifier, PrivateBayesRegressor
from dpbnn.estimators import fitting
from dpbnn.estimators.open_prior import chosen_prior
from dpbnn.estimators.recipes import METHODS
from dpbnn.estimators.scaling import Scaling, parsed_bounds
from dpbnn.privacy.plan import open_plan

pytestmark = pytest.mark.long

QUICK = {"epsilon": None, "epochs": 50, "learning_rate": 5e-3, "random_state": 0}
LINE = {"bounds": (0, 1), "classes": [0, 1], "epochs": 20, "random_state": 0}
DECLARED = "labels are declared, not learned: those that are none of [0, 1, 2] are refused"
BUDGET = "a few private steps on a few dozen rows are not accurate, and are not meant to be"
WEIGHTS = {
    "check_class_weight_classifiers": "weights are for the training; probabilities, and with them "
    "the most probable class, are those of the population"
}
EXPECTED = {
    PrivateBayesClassifier: {
        **WEIGHTS,
        "check_dtype_object": DECLARED,
        "check_classifiers_classes": DECLARED,
        "check_classifiers_train": BUDGET,
    },
    PrivateBayesRegressor: {"check_regressors_train": BUDGET},
}


def line(n=60, seed=0):
    """Rows whose first column tells the class."""
    x = np.random.default_rng(seed).random((n, 3))
    return x, (x[:, 0] > 0.5).astype(int)


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return x[order[:1300]], y[order[:1300]], x[order[1300:]], y[order[1300:]]


@pytest.fixture(scope="module")
def fitted(digits):
    x, y, _, _ = digits
    estimator = PrivateBayesClassifier(epsilon=3.0, bounds=(0, 16), classes=range(10),
                                       random_state=0)  # fmt: skip
    return estimator.fit(x, y)


@parametrize_with_checks(
    [
        PrivateBayesClassifier(**QUICK),
        PrivateBayesRegressor(**{**QUICK, "epochs": 250, "learning_rate": 1e-3}),
    ],
    expected_failed_checks=lambda estimator: (
        WEIGHTS if isinstance(estimator, PrivateBayesClassifier) else {}
    ),
)
def test_scikit_learn_contract_without_privacy(estimator, check, monkeypatch):
    monkeypatch.setattr(fitting, "chosen_prior", lambda *given: given[-1])  # it takes five fits
    check(estimator)


@parametrize_with_checks(
    [
        PrivateBayesClassifier(epsilon=5.0, bounds=(-5, 5), classes=[0, 1, 2], epochs=3),
        PrivateBayesRegressor(epsilon=5.0, bounds=(-5, 5), target_bounds=(-3, 3), epochs=3),
    ],
    expected_failed_checks=lambda estimator: EXPECTED[type(estimator)],
)
def test_scikit_learn_contract_under_privacy(estimator, check, monkeypatch):
    """With the same noise in every fit, since some checks compare two of them."""
    monkeypatch.setattr(secrets, "token_bytes", bytes)
    check(estimator)


def test_two_private_fits_differ_whatever_the_random_state():
    x, y = line()
    one, two = (
        PrivateBayesClassifier(epsilon=5.0, **LINE).fit(x, y).predict_proba(x) for _ in range(2)
    )
    assert (one != two).any()


def test_a_private_fit_learns_and_states_its_budget(digits, fitted):
    _, _, x, y = digits
    assert fitted.score(x, y) > 0.85
    assert fitted.privacy_.private
    assert fitted.privacy_.epsilon <= 3.0
    assert fitted.privacy_.delta == pytest.approx(1e-5)
    assert fitted.plan_.steps == 800
    assert fitted.ledger_.releases == 2 + 800 + 5  # standardisation, training, temperature
    assert fitted.classes_.tolist() == list(range(10))


def test_predictions_agree_with_each_other(digits, fitted):
    _, _, x, y = digits
    shares = fitted.predict_proba(x)
    labels, spread = fitted.predict(x, return_std=True)
    assert np.array_equal(fitted.classes_[shares.argmax(1)], labels)
    assert np.allclose(shares.sum(1), 1, atol=1e-12)
    assert ((spread >= 0) & (spread <= 0.5)).all()
    assert np.allclose(fitted.predictive(x).mean.numpy(), shares)
    report = fitted.evaluate(x, y, resamples=10)
    assert report.metrics["accuracy"].value == pytest.approx(fitted.score(x, y))


def test_regression_is_in_the_units_of_the_target():
    x, y = load_diabetes(return_X_y=True)
    model = PrivateBayesRegressor(epsilon=5.0, bounds=(-0.2, 0.2), target_bounds=(0, 400),
                                  random_state=0)  # fmt: skip
    model.fit(x[:350], y[:350])
    mean, std = model.predict(x[350:], return_std=True)
    assert model.score(x[350:], y[350:]) > 0.2
    low, high = model.predictive(x[350:]).interval(0.9)
    inside = (low.numpy() <= y[350:]) & (y[350:] <= high.numpy())
    assert 0.75 < inside.mean() <= 1
    assert 30 < std.mean() < 120
    assert 100 < mean.mean() < 200
    assert model.privacy_.epsilon <= 5.0


@pytest.mark.parametrize("method", ["sghmc", "sgd", "bbp", "vi", "mcdropout"])
def test_every_method_learns_on_its_defaults(method):
    x, y = load_breast_cancer(return_X_y=True)
    low, high = x.min(0), x.max(0)
    model = PrivateBayesClassifier(method, epsilon=4.0, bounds=(low, high), classes=[0, 1],
                                   epochs=150, random_state=0)  # fmt: skip
    assert model.fit(x[:400], y[:400]).score(x[400:], y[400:]) > 0.85
    assert 3.9 < model.privacy_.epsilon <= 4.0


def test_sep_has_no_learning_rate():
    x, y = load_diabetes(return_X_y=True)
    model = PrivateBayesRegressor("sep", bounds=(-1, 1), target_bounds=(0, 400), learning_rate=0.1)
    with pytest.raises(ValueError, match="SEP has none"):
        model.fit(x, y)


def test_sep_is_for_regression():
    x, y = load_diabetes(return_X_y=True)
    model = PrivateBayesRegressor("sep", epsilon=8.0, bounds=(-0.2, 0.2), target_bounds=(0, 400),
                                  epochs=10)  # fmt: skip
    model.fit(x, y)
    assert model.privacy_.epsilon <= 8.0
    assert model.predict(x[:5]).shape == (5,)
    assert model.diagnostics_ is None


def test_a_method_object_brings_its_own_settings():
    x, y = line()
    method = dpbnn.SGD(learning_rate=0.5, clip=2.0)
    model = PrivateBayesClassifier(method, **LINE).fit(x, y)
    assert model.posterior_.settings["clip"] == 2.0
    assert model.get_params()["method"] is method
    with pytest.raises(ValueError, match=r"clip=1\.0: the method object has its own"):
        PrivateBayesClassifier(method, clip=1.0, **LINE).fit(x, y)


def test_of_clip_and_learning_rate_the_other_one_follows():
    x, y = line()
    given = PrivateBayesClassifier("sgld", clip=2.0, **LINE).fit(x, y)
    assert given.posterior_.settings["clip"] == 2.0
    rate = given.posterior_.settings["learning_rate"]
    again = PrivateBayesClassifier("sgld", learning_rate=rate, **LINE).fit(x, y)
    assert again.posterior_.settings["clip"] == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds": None}, r"pass bounds=\(low, high\)"),
        ({"classes": None}, r"as in classes=\[0, 1\]"),
        ({"classes": [0]}, "at least 2 classes"),
        ({"classes": [0, 2]}, "add them to classes"),
        ({"bounds": "learned"}, "bounds='learned': must be"),
        ({"bounds": (0, np.inf)}, "must be finite"),
        ({"bounds": (1, 0)}, "low <= high"),
        ({"bounds": ([0, 0], [1, 1])}, "3 columns"),
        ({"bounds": 3}, r"bounds=3: must be \(low, high\)"),
        ({"bounds": {"a": (0, 1)}}, "columns that have names"),
        ({"method": "magic"}, "method='magic': must be one of 'auto', 'sgld'"),
        ({"hidden": (0,)}, "hidden="),
        ({"on_bad_rows": "drop"}, "on_bad_rows='drop'"),
        ({"epsilon": -1.0}, "epsilon=-1"),
        ({"delta": 2.0}, "delta=2"),
        ({"method": "sep"}, "is for regression"),
    ],
)
def test_bad_arguments_are_one_line_and_spend_nothing(tmp_path, change, message):
    path = tmp_path / "ledger.jsonl"
    dpbnn.Ledger(path)
    with pytest.raises(ValueError, match=message) as caught:
        PrivateBayesClassifier(**{**LINE, "ledger": str(path), **change}).fit(*line())
    assert "\n" not in str(caught.value)
    assert dpbnn.Ledger(path).releases == 0


def test_target_bounds_are_asked_for():
    x, y = line()
    with pytest.raises(ValueError, match=r"pass target_bounds=\(low, high\)"):
        PrivateBayesRegressor(bounds=(0, 1)).fit(x, y)


def test_bounds_by_column_name(tmp_path):
    pandas = pytest.importorskip("pandas")
    x, y = line()
    frame = pandas.DataFrame(x, columns=["a", "b", "c"])
    bounds = {"c": (0, 3), "a": (0, 1), "b": (0, 2)}
    model = PrivateBayesClassifier(**{**LINE, "bounds": bounds}).fit(frame, y)
    assert model.bounds_[1].tolist() == [1, 2, 3]
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"column 'b' has none.*add 'b'"):
        PrivateBayesClassifier(**{**LINE, "bounds": {"a": (0, 1), "c": (0, 1)}}).fit(frame, y)
    with pytest.raises(ValueError, match=r"'bb' is no column of the data; correct the name"):
        PrivateBayesClassifier(**{**LINE, "bounds": {**bounds, "bb": (0, 1)}}).fit(frame, y)


def test_scaling_clips_and_hides_nothing_else():
    scaling = parsed_bounds(([0, 10, 5], [1, 20, 5]), 3)
    values = np.array([[0.5, 15, 5], [-9, 99, 7], [np.nan, np.inf, 5]])
    assert np.array_equal(
        scaling(values), [[0, 0, 0], [-1, 1, 0], [np.nan, np.nan, 0]], equal_nan=True
    )
    big = Scaling(np.float64(-1.7e308), np.float64(1.7e308))
    assert big(np.array([1.7e308, 0, -1.7e308])).tolist() == [1, 0, -1]


def test_scaling_is_the_same_in_blocks_and_in_single_precision(monkeypatch):
    values = np.random.default_rng(0).normal(0, 2, (1000, 7))
    scaling = parsed_bounds((-1.5, np.arange(1, 8)), 7)
    expected = 2 * (np.clip(values, -1.5, scaling.high) + 1.5) / (scaling.high + 1.5) - 1
    for block in (1, 100, 1 << 16):
        monkeypatch.setattr("dpbnn.estimators.scaling._BLOCK", block)
        np.testing.assert_allclose(scaling(values), expected, atol=1e-12)
    single = values.astype(np.float32)
    np.testing.assert_array_equal(
        scaling(single, np.float32), scaling(single.astype(np.float64)).astype(np.float32)
    )


def test_what_is_scaled_already_stays_as_it_is():
    unit = parsed_bounds((-1, 1), 2)
    inside = np.array([[-1.0, 0.5], [0.0, 1.0]], dtype=np.float32)
    np.testing.assert_array_equal(unit(inside, np.float32), inside)
    assert unit(inside).dtype == np.float64
    beyond = np.array([[-3.0, np.inf], [np.nan, 1.0]], dtype=np.float32)
    np.testing.assert_array_equal(unit(beyond, np.float32), [[-1, np.nan], [np.nan, 1]])


def test_tensors_and_polars_are_taken_too():
    x, y = line()
    tensors = PrivateBayesClassifier(**LINE).fit(torch.tensor(x), torch.tensor(y))
    assert tensors.predict(torch.tensor(x[:4])).shape == (4,)
    polars = pytest.importorskip("polars")
    model = PrivateBayesClassifier(**LINE).fit(polars.DataFrame(x, schema=["a", "b", "c"]), y)
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]


def test_text_labels_and_a_pipeline():
    x, y = line()
    names = np.array(["no", "yes"])[y]
    model = PrivateBayesClassifier(**{**LINE, "classes": ["yes", "no"]})
    pipeline = make_pipeline(FunctionTransformer(np.sqrt), model).fit(x, names)
    assert set(pipeline.predict(x)) <= {"no", "yes"}
    assert pipeline[-1].classes_.tolist() == ["no", "yes"]


def test_bad_rows_contribute_nothing_if_so_asked():
    x, y = line()
    x[3, 1], labels = np.nan, y.astype(float)
    labels[5] = 7
    with pytest.raises(ValueError, match="NaN"):
        PrivateBayesClassifier(**LINE).fit(x, y)
    model = PrivateBayesClassifier(on_bad_rows="zero", **LINE).fit(x, labels)
    assert np.isfinite(model.predict_proba(line()[0])).all()
    numbers = np.where(np.arange(60) == 4, np.nan, labels)
    regressor = PrivateBayesRegressor(bounds=(0, 1), target_bounds=(0, 1), epochs=20,
                                      on_bad_rows="zero")  # fmt: skip
    assert np.isfinite(regressor.fit(x, numbers).predict(line()[0])).all()


def test_without_privacy_it_says_so_and_repeats_itself():
    x, y = line()
    model = PrivateBayesClassifier(**QUICK).fit(x, y)
    assert not model.privacy_.private
    assert "NOT PRIVATE" in str(model.privacy_)
    assert "epsilon=None" in model.privacy_.reason
    assert np.array_equal(model.predict_proba(x), clone(model).fit(x, y).predict_proba(x))


def test_the_seed_does_not_reach_the_noise():
    x, y = line()
    first, second = (PrivateBayesClassifier(**LINE).fit(x, y).predict_proba(x) for _ in range(2))
    assert not np.allclose(first, second)


def test_delta_follows_from_n_or_from_the_ledger():
    x, y = line()
    assert PrivateBayesClassifier(**LINE).fit(x, y).plan_.delta == 1e-5
    from dpbnn.estimators.budget import default_delta

    assert default_delta(100_000) == pytest.approx(1e-6)
    ledger = dpbnn.Ledger(epsilon=4.0, delta=1e-7)
    assert PrivateBayesClassifier(ledger=ledger, **LINE).fit(x, y).plan_.delta == 1e-7


def test_private_bounds_are_paid_for_within_the_budget():
    rng = np.random.default_rng(0)
    x = rng.normal(50, 10, (4000, 2))
    y = (x[:, 0] > 50).astype(int)
    model = PrivateBayesClassifier(epsilon=2.0, bounds="private", classes=[0, 1], epochs=20,
                                   batch_size=4000, random_state=0)  # fmt: skip
    model.fit(x, y)
    low, high = model.bounds_
    assert ((low >= 0) & (low < 40) & (high > 60) & (high <= 200)).all()
    assert 1.9 < model.privacy_.epsilon <= 2.0
    labels = [mechanism["label"] for mechanism in model.privacy_.mechanisms]
    assert labels == ["private bounds", "private standardisation", "sgd", "recalibration"]


def test_private_bounds_that_the_budget_does_not_hold_are_not_looked_for(tmp_path):
    path = tmp_path / "ledger.jsonl"
    dpbnn.Ledger(path, epsilon=0.5, delta=1e-5)
    x = np.random.default_rng(0).random((4000, 2))
    model = PrivateBayesClassifier(**{**LINE, "bounds": "private"}, ledger=path, batch_size=4000)
    with pytest.raises(dpbnn.BudgetExceeded):
        model.fit(x, (x[:, 0] > 0.5).astype(int))
    assert dpbnn.Ledger(path).releases == 0


def table(n=400, seed=0):
    """Rows whose columns fill a tenth of their bounds, with classes and a number to be learned."""
    rng = np.random.default_rng(seed)
    x = rng.normal([5, 40, 0.3], [0.3, 2, 0.05], (n, 3))
    score = (x[:, 0] - 5) / 0.3 + (x[:, 1] - 40) / 2
    return x, (score > 0).astype(int), 100 + 5 * score + rng.normal(size=n)


WIDE = {"bounds": ([0, 0, -1], [20, 100, 3]), "random_state": 0}


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
@pytest.mark.parametrize("neighbour", ["bad", "far"])
def test_replay_of_an_estimator_with_its_standardisation(kind, neighbour):
    """One record more: every release moves by its sensitivity at most, and nothing else does."""
    x, labels, numbers = table(60)
    x[7], numbers[7] = (1e6, -1e6, 1e6), 1e6
    other = x.copy()
    other[7] = np.nan
    if neighbour == "far":
        x[7] = -x[7]

    def fit(data):
        common = {**WIDE, "epsilon": 50.0, "epochs": 4, "on_bad_rows": "zero"}
        if kind == "classifier":
            model = PrivateBayesClassifier(classes=[0, 1], **common).fit(data, labels)
        else:
            model = PrivateBayesRegressor(target_bounds=(0, 500), **common).fit(data, numbers)
        public = np.linspace([0, 0, -1], [20, 100, 3], 5)
        return model.standardisation_, model.predictive(public).mean

    result = dpbnn.replay(fit, x, other, trace=False).check()
    assert len(result.distances) == 2 + 4 + 5
    assert 0.9 < result.distances[0] / result.sensitivities[0] <= 1


def test_the_standardisation_is_paid_for_and_kept(tmp_path):
    x, labels, numbers = table(3000)
    classifier = PrivateBayesClassifier(epsilon=3.0, classes=[0, 1], **WIDE).fit(x, labels)
    assert classifier.score(x, labels) > 0.9
    centre, spread = classifier.standardisation_
    np.testing.assert_allclose(centre, [-0.5, -0.2, -0.35], atol=0.02)
    np.testing.assert_allclose(spread, [0.03, 0.04, 0.025], atol=0.02)
    assert 2.9 < classifier.privacy_.epsilon <= 3.0
    planned, spent = classifier.plan_.events, classifier.ledger_.events
    assert sorted(map(repr, planned)) == sorted(map(repr, spent))
    regressor = PrivateBayesRegressor(epsilon=3.0, target_bounds=(0, 1000), **WIDE)
    regressor.fit(x, numbers)
    assert regressor.score(x, numbers) > 0.9
    low, high = regressor.predictive(x).interval(0.9)
    inside = (low.numpy() <= numbers) & (numbers <= high.numpy())
    assert 0.8 < inside.mean() < 0.99
    for model in (classifier, regressor):
        model.save(tmp_path / type(model).__name__)
        again = type(model).load(tmp_path / type(model).__name__)
        assert np.array_equal(again.predict(x), model.predict(x))
        np.testing.assert_array_equal(again.standardisation_, model.standardisation_)


def test_a_standardisation_that_the_budget_does_not_hold_is_not_made(tmp_path):
    path = tmp_path / "ledger.jsonl"
    dpbnn.Ledger(path, epsilon=0.5, delta=1e-5)
    x, labels, _ = table()
    with pytest.raises(dpbnn.BudgetExceeded):
        PrivateBayesClassifier(classes=[0, 1], ledger=path, **WIDE).fit(x, labels)
    assert dpbnn.Ledger(path).releases == 0


def test_rows_with_unknown_labels_stay_out_of_the_standardisation():
    x, labels, _ = table(4000)
    spoiled, wrong = np.vstack([x, np.full((4000, 3), 19.0)]), np.r_[labels, np.full(4000, 7)]
    model = PrivateBayesClassifier(epsilon=5.0, classes=[0, 1], on_bad_rows="zero", **WIDE)
    centre, _ = model.fit(spoiled, wrong).standardisation_
    np.testing.assert_allclose(centre, np.array([-0.5, -0.2, -0.35]) / 2, atol=0.02)


def test_noise_that_would_hide_every_column_is_not_paid_for():
    x, labels, _ = table(40)
    model = PrivateBayesClassifier(epsilon=0.1, classes=[0, 1], **WIDE).fit(x, labels)
    assert model.ledger_.releases == model.plan_.steps
    np.testing.assert_array_equal(model.standardisation_, [np.zeros(3), np.full(3, 0.5)])


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_a_budget_that_teaches_nothing_leaves_the_base_rate(kind):
    """Constant and odd columns included; no prediction is far from what is known without data."""
    x, labels, numbers = table(200)
    x[:, 2] = 0.3
    if kind == "classifier":
        model = PrivateBayesClassifier(epsilon=0.02, classes=[0, 1], **WIDE).fit(x, labels)
        assert np.abs(model.predict_proba(x) - 0.5).mean() < 0.35
    else:
        model = PrivateBayesRegressor(epsilon=0.02, target_bounds=(0, 200), **WIDE)
        assert np.sqrt(np.mean((model.fit(x, numbers).predict(x) - 100) ** 2)) < 50


def test_a_refit_composes_in_the_shared_ledger_and_stops_at_the_budget(tmp_path):
    path = tmp_path / "ledger.jsonl"
    x, y = line()
    model = PrivateBayesClassifier(ledger=path, **LINE).fit(x, y)
    assert dpbnn.Ledger(path).budget == (1.0, 1e-5)
    assert model.privacy_.epsilon <= 1.0
    with pytest.raises(dpbnn.BudgetExceeded, match=r"0\.\d+ is left|0 is left"):
        clone(model).fit(x, y)
    assert dpbnn.Ledger(path).releases == 20


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_grid_search_stops_at_the_budget_of_its_ledger(tmp_path, in_memory):
    """Three fits of epsilon 1 compose to about 1.8; a budget of 2 holds three and not four."""
    x, y = line()
    one = PrivateBayesClassifier(**LINE).fit(x, y).plan_
    three, four = dpbnn.compose(one, one, one).epsilon, dpbnn.compose(one, one, one, one).epsilon
    path = tmp_path / "ledger.jsonl"
    ledger = dpbnn.Ledger(None if in_memory else path, epsilon=(three + four) / 2, delta=1e-5)
    search = GridSearchCV(
        PrivateBayesClassifier(ledger=ledger if in_memory else str(path), **LINE),
        {"hidden": [(4,), (8,), (16,), (32,)]},
        cv=PredefinedSplit([-1] * 60 + [0] * 20),
        refit=False,
        error_score="raise",
    )
    more, labels = line(80)
    with pytest.raises(dpbnn.BudgetExceeded, match="is left"):
        search.fit(more, labels)
    book = ledger if in_memory else dpbnn.Ledger(path)
    assert book.releases == 3 * one.steps
    assert book.epsilon() <= ledger.budget[0]


def test_a_fit_under_a_budget_is_charged_as_a_whole(tmp_path, monkeypatch):
    """While one fit is under way, another one on its ledger sees all that the first will spend."""
    from dpbnn.training import _Run

    x, y = line()
    path = tmp_path / "ledger.jsonl"
    seen = []
    step = _Run._one

    def watched(run, batch):
        step(run, batch)
        seen.append(dpbnn.Ledger(path).releases)

    monkeypatch.setattr(_Run, "_one", watched)
    PrivateBayesClassifier(ledger=path, **{**LINE, "epochs": 120}).fit(x, y)
    assert set(seen) == {120}


def test_a_choice_by_raw_scores_is_stamped(tmp_path):
    x, y = line()
    ledger = dpbnn.Ledger(tmp_path / "ledger.jsonl", epsilon=5.0, delta=1e-5)
    first = PrivateBayesClassifier(ledger=ledger.path, **LINE).fit(x, y)
    assert not any("unaccounted" in caveat for caveat in first.privacy_.caveats)
    second = clone(first).fit(x, y)
    assert any("unaccounted" in caveat for caveat in second.privacy_.caveats)
    assert "unaccounted" in str(second.privacy_)
    assert second.privacy_.epsilon > first.privacy_.epsilon
    declared = clone(first).set_params(tuning_runs=0).fit(x, y)
    assert not any("unaccounted" in caveat for caveat in declared.privacy_.caveats)


def test_cross_validation_composes_in_the_ledger(tmp_path):
    x, y = line()
    path = tmp_path / "ledger.jsonl"
    dpbnn.Ledger(path, epsilon=10.0, delta=1e-5)
    scores = cross_val_score(
        PrivateBayesClassifier(ledger=path, **LINE), x, y, cv=3, error_score="raise"
    )
    assert len(scores) == 3
    assert dpbnn.Ledger(path).releases == 3 * 20
    assert 1.0 < dpbnn.Ledger(path).epsilon() < 3.0


def test_a_ledger_in_memory_is_shared_by_clones_and_never_copied():
    x, y = line()
    ledger = dpbnn.Ledger(epsilon=3.0, delta=1e-5)
    model = PrivateBayesClassifier(ledger=ledger, **LINE)
    assert clone(model).fit(x, y).ledger_ is ledger
    with pytest.raises(TypeError, match=r"ledger='ledger\.jsonl'"):
        pickle.dumps(model)
    with pytest.raises(TypeError, match="cannot be shared"):
        copy.deepcopy(model)


def test_save_and_load_without_pickle(tmp_path, digits, fitted):
    x = digits[2]
    folder = tmp_path / "model"
    fitted.save(folder)
    assert not [p for p in folder.rglob("*") if p.suffix in (".pkl", ".pickle", ".pt")]
    again = PrivateBayesClassifier.load(folder)
    assert np.array_equal(again.predict_proba(x), fitted.predict_proba(x))
    assert again.privacy_ == fitted.privacy_
    assert again.get_params()["classes"] == tuple(range(10))
    assert again.plan_ == fitted.plan_
    assert again.ledger_ is None
    with pytest.raises(FileExistsError, match="overwrite=True"):
        fitted.save(folder)
    fitted.save(folder, overwrite=True)
    with pytest.raises(ValueError, match=r"dpbnn\.PrivateBayesClassifier\.load"):
        PrivateBayesRegressor.load(folder)
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        PrivateBayesClassifier.load(tmp_path)
    held = json.loads((folder / "model" / "manifest.json").read_text())
    assert held["params"]["epsilon"] == 3.0


def test_objects_among_the_arguments_are_saved(tmp_path):
    x, y = line()
    model = PrivateBayesRegressor(
        dpbnn.SGLD(learning_rate=1e-3), bounds={"x0": (0, 1), "x1": (0, 1), "x2": (0, 1)},
        target_bounds=(0, 1), prior=dpbnn.Gaussian(0.5), epochs=20, epsilon=None,
    )  # fmt: skip
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(x, columns=["x0", "x1", "x2"])
    model.fit(frame, y).save(tmp_path / "model")
    again = PrivateBayesRegressor.load(tmp_path / "model")
    assert again.get_params() == model.get_params()
    assert np.array_equal(again.predict(frame), model.predict(frame))
    assert not again.privacy_.private


def test_pickles_predict_the_same(digits, fitted):
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.predict_proba(digits[2]), fitted.predict_proba(digits[2]))


def test_diagnostics_are_of_public_inputs_and_of_chains_alone(digits, fitted):
    assert fitted.diagnostics_ is None
    chain = PrivateBayesClassifier("sgld", epsilon=3.0, bounds=(0, 16), classes=range(10),
                                   random_state=0).fit(*digits[:2])  # fmt: skip
    found = chain.diagnostics_
    assert found.draws == 100
    assert found.to_dict()["functions"] == 2560
    assert str(found.worst["rhat"]) == str(chain.diagnostics_.worst["rhat"])


def test_nothing_about_the_data_is_logged(caplog, capfd):
    x, y = line()
    with caplog.at_level(logging.DEBUG):
        PrivateBayesClassifier(**LINE, progress=True).fit(x, y)
    streams = capfd.readouterr()
    shown = caplog.text + streams.out + streams.err
    assert "step 20/20" in shown
    for word in ("loss", "score", "accuracy", "norm"):
        assert word not in shown.lower()


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_linear_model_is_fitted_by_moments_and_needs_no_temperature(kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 2))
    common = {"epsilon": 1.0, "bounds": (-5, 5), "hidden": (), "random_state": 0}
    if kind == "classes":
        y = (x[:, 0] + rng.logistic(size=len(x)) > 0).astype(int)
        model = PrivateBayesClassifier(classes=[0, 1], **common).fit(x, y)
    else:
        y = x[:, 0] + rng.normal(size=len(x))
        model = PrivateBayesRegressor(target_bounds=(-10, 10), **common).fit(x, y)
    labels = [mechanism["label"] for mechanism in model.privacy_.mechanisms]
    assert labels == ["private standardisation", "moments"]
    assert {m["sampling"] for m in model.privacy_.mechanisms} == {"full-batch"}
    assert model.temperature_ is None
    assert model.privacy_.epsilon <= 1.0
    assert model.score(x, y) > 0.4


def test_three_classes_and_hidden_layers_are_not_fitted_by_moments():
    from dpbnn.estimators.recipes import of_auto

    assert of_auto((), 3) is of_auto((32,), 2) is of_auto((32,), None) is METHODS["auto"]
    assert of_auto((), 2) is of_auto((), None) is METHODS["moments"]


def test_a_larger_budget_gets_a_network_with_steps_and_it_is_saved(tmp_path):
    """A small one has none and cuts inputs off, which a larger one does not."""
    from torch.nn import Hardtanh

    from dpbnn.networks import Steps

    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (600, 2))
    y = (x[:, 0] > 0).astype(int)
    common = {"bounds": (-1, 1), "classes": [0, 1], "epochs": 5, "random_state": 0}
    has = {}
    for epsilon in (0.1, 5.0):
        model = PrivateBayesClassifier(epsilon=epsilon, **common).fit(x, y)
        layers = list(model.posterior_.model.modules())
        has[epsilon] = [any(isinstance(m, kind) for m in layers) for kind in (Steps, Hardtanh)]
        model.save(tmp_path / f"model-{epsilon}")
        again = PrivateBayesClassifier.load(tmp_path / f"model-{epsilon}")
        assert np.array_equal(again.predict_proba(x), model.predict_proba(x))
    assert has == {0.1: [False, True], 5.0: [True, False]}


@pytest.mark.parametrize("regression", [False, True])
def test_only_a_classifier_of_a_small_budget_cuts_standardised_inputs_off_at_2(regression):
    from dpbnn.estimators.budget import settled_plan

    for n, cut in ((1000, not regression), (100_000, False)):
        plan = settled_plan(n, 0.3, 1e-6, None, None)
        network = METHODS["auto"].network(3, (32,), 2, plan, regression)()
        with torch.no_grad():
            network[-1].weight.fill_(1.0)
            far, edge = (network(torch.full((1, 3), value)) for value in (3.5, 2.0))
        assert torch.equal(far, edge) == cut


def test_only_a_regressor_of_a_large_budget_has_steep_units():
    """They start as the function that plain ones start as."""
    from dpbnn.estimators.budget import settled_plan
    from dpbnn.networks import SteepTanh, mlp

    def built(epsilon, columns, regression=True):
        torch.manual_seed(0)
        plan = settled_plan(8000, epsilon, 1e-5, None, None)
        return METHODS["auto"].network(columns, (32,), 1, plan, regression)()

    def steep(network):
        return any(isinstance(module, SteepTanh) for module in network.modules())

    assert steep(built(1.0, 4))
    assert steep(built(None, 20))
    others = built(0.3, 4), built(1.0, 10), built(None, 21), built(1.0, 4, regression=False)
    assert not any(map(steep, others))
    x = torch.randn(5, 20)
    torch.manual_seed(0)
    plain = mlp(20, (32,), 1, activation=torch.nn.Tanh, linear_path=True)
    torch.testing.assert_close(built(None, 20)[:-1](x)[:, :52], plain[:-1](x))


def test_only_a_regressor_of_a_large_budget_has_two_hidden_layers():
    """A user's widths stay, and steps of two layers are half as long."""
    from dpbnn.estimators.budget import settled_plan

    def layers(epsilon, columns, regression=True, hidden="auto", method="auto"):
        plan = settled_plan(8000, epsilon, 1e-5, None, None)
        return METHODS[method].layers(hidden, columns, plan, regression)

    assert layers(1.0, 4) == layers(None, 12) == (32, 32)
    small = layers(0.3, 4), layers(1.0, 12), layers(None, 13), layers(1.0, 4, regression=False)
    assert set(small) == {layers(1.0, 4, method="sgd"), (32,)}
    assert layers(1.0, 4, hidden=(32,)) == (32,)
    assert layers(1.0, 10, hidden=(5, 4)) == (5, 4)

    def rate(depth, regression=True, given=None):
        plan = settled_plan(8000, 1.0, 1e-5, None, None)
        return METHODS["auto"].settings(plan, None, regression, given, None, 4, depth).learning_rate

    assert rate(2) == rate(1) / 2
    assert rate(2, given=0.1) == 0.1
    assert rate(2, regression=False) == rate(1, regression=False)


@pytest.mark.parametrize(("rows", "sloped"), [(1000, False), (100_000, True)])
def test_only_the_noise_of_auto_with_enough_budget_goes_with_the_mean(rows, sloped):
    from dpbnn.estimators.budget import settled_plan

    plan = settled_plan(rows, 0.3, 1e-6, None, None)
    assert METHODS["auto"].learned_noise(plan).sloped == sloped
    assert not METHODS["moments"].learned_noise(plan).sloped


@pytest.mark.parametrize("epsilon", [0.1, 3.0, None])
def test_steps_of_auto_are_shorter_for_classes_on_many_columns(epsilon):
    from dpbnn.estimators.budget import settled_plan

    def rate(name, columns, regression=False, given=None, rows=8000):
        plan = settled_plan(rows, epsilon, 1e-6, None, None)
        settings = METHODS[name].settings(plan, None, regression, given, None, columns)
        return settings.learning_rate

    assert rate("auto", 12) == rate("auto", 2) >= 2 * rate("auto", 12 * 16)
    assert rate("auto", 48) <= 0.02 / 2
    tiny = [rate("auto", columns, rows=1000) for columns in (2, 48)]
    assert (tiny[0] == tiny[1]) == (epsilon == 0.1)
    assert rate("auto", 48, given=0.02) == 0.02
    assert rate("auto", 48, regression=True) == rate("auto", 2, regression=True)
    assert rate("sgd", 48) == rate("sgd", 2)


def test_a_classifier_of_a_tiny_budget_on_few_columns_has_a_small_clip():
    """With "auto" alone; what the user sets is kept."""
    from dpbnn.estimators.budget import settled_plan

    def clip(rows=1000, epsilon=0.1, regression=False, name="auto", given=None, columns=12):
        plan = settled_plan(rows, epsilon, 1e-6, None, None)
        return METHODS[name].settings(plan, None, regression, None, given, columns).clip

    assert clip() == clip(regression=True) == 1.0
    assert clip(rows=2000) == clip(epsilon=3.0) == clip(columns=13) == clip(name="sgd") == 3.0
    assert clip(epsilon=None) == 3.0
    assert clip(given=2.0) == 2.0


def test_without_privacy_auto_does_not_learn_the_noise_of_few_rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1150, 8))
    y = (rng.random(len(x)) < 1 / (1 + np.exp(-1.5 * x[:, 0]))).astype(int)
    common = {"epsilon": None, "bounds": (-4, 4), "classes": [0, 1], "random_state": 0}
    losses = []
    for prior in (None, dpbnn.Gaussian(1.0)):
        model = PrivateBayesClassifier(prior=prior, **common).fit(x[:150], y[:150])
        p = model.predict_proba(x[150:])[np.arange(1000), y[150:]]
        losses.append(-np.log(p).mean())
    assert losses[0] < 0.8
    assert losses[0] < losses[1] - 0.1


def test_without_privacy_held_out_rows_choose_how_strong_the_prior_is(monkeypatch):
    """Forty columns of noise beside one that counts; a private fit never comes to that choice."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1400, 40))
    y = x[:, 0] + rng.normal(size=len(x))
    common = {"bounds": (-4, 4), "target_bounds": (-8, 8), "epochs": 300, "random_state": 0}
    errors = []
    for prior in (None, dpbnn.Gaussian(0.5)):
        model = PrivateBayesRegressor(epsilon=None, prior=prior, **common).fit(x[:400], y[:400])
        errors.append(np.mean((model.predict(x[400:]) - y[400:]) ** 2))
    assert errors[0] < errors[1] - 0.1
    called = []
    monkeypatch.setattr(fitting, "chosen_prior", lambda *a: called.append(a) or dpbnn.Gaussian(0.5))
    PrivateBayesRegressor(epsilon=1.0, **common).fit(x[:400], y[:400])
    assert not called
    PrivateBayesRegressor(epsilon=None, **common).fit(x[:400], y[:400])
    assert called


@pytest.mark.parametrize(
    ("first", "most_likely", "tried", "chosen"),
    [
        (0.3, 0.6, [0.3, 0.6], 0.6),  # 1.2 is not tried
        (0.3, 0.3, [0.3, 0.6, 0.15], 0.3),
        (0.3, 0.075, [0.3, 0.6, 0.15, 0.075, 0.0375], 0.075),
        (0.3, 0.0, [0.3, 0.6, 0.15, 0.075, 0.0375, 0.01875], 0.01875),
        (1.0, 9.0, [1.0, 0.5], 1.0),
    ],
)
def test_the_prior_is_doubled_up_to_1_or_halved_as_long_as_it_helps(
    first, most_likely, tried, chosen
):
    rng = torch.Generator().manual_seed(0)
    data = torch.randn(100, 2, generator=rng), torch.randn(100, 1, generator=rng)
    plan = open_plan(n=100, sampling="full-batch", steps=2)
    stds = []

    def train(*, prior, **_):
        stds.append(prior.std)
        posterior = types.SimpleNamespace()
        log_prob = torch.full((20,), -abs(np.log2((prior.std + 1e-9) / (most_likely + 1e-9))))
        posterior.predict = lambda x: types.SimpleNamespace(log_prob=lambda y: log_prob)
        return posterior

    network = functools.partial(dpbnn.mlp, 2, (32,), 1)
    prior = chosen_prior(train, data, torch.ones(100).bool(), network, plan, dpbnn.Gaussian(first))
    assert stds == pytest.approx(tried)
    assert prior.std == pytest.approx(chosen)


def test_where_rows_are_few_and_the_budget_is_not_a_regressor_has_a_narrow_prior():
    """Twenty columns of noise on 250 rows: what the noise of training does not hide is learned."""
    rng = np.random.default_rng(0)
    x = np.clip(rng.normal(size=(2250, 21)), -3, 3)
    y = x[:, 0] + rng.normal(size=len(x))
    losses = []
    for prior in (None, dpbnn.Gaussian(1.0)):
        model = PrivateBayesRegressor(
            epsilon=8.0, bounds=(-3, 3), target_bounds=(-6, 6), prior=prior, random_state=0
        )
        model.fit(x[:250], y[:250])
        losses.append(np.mean((model.predict(x[250:]) - y[250:]) ** 2))
    assert losses[0] < losses[1] - 0.05

    def std(epsilon, n, columns, regression=True):
        plan = dpbnn.plan(epsilon=epsilon, delta=1e-6, n=n, sampling="full-batch", steps=10)
        return METHODS["auto"].prior(plan, columns, regression).std

    assert std(3.0, 300, 10) == std(1.0, 300, 10) == 0.5
    assert std(0.3, 300, 10) == std(3.0, 1000, 10) == std(3.0, 300, 10, regression=False) == 1.0


def test_a_private_plan_may_not_have_its_prior_chosen():
    plan = dpbnn.plan(epsilon=1.0, delta=1e-5, n=100, sampling="full-batch", steps=2)
    data = torch.zeros(100, 2), torch.zeros(100, 1)
    with pytest.raises(ValueError, match="plan: is private"):
        chosen_prior(dpbnn.fit, data, torch.ones(100).bool(), dpbnn.mlp, plan, dpbnn.Gaussian())


@pytest.mark.parametrize("bad", ["oops", b"x", float("nan"), None, [0, 1], 1j])
def test_one_bad_label_of_a_list_changes_no_other_row(bad):
    """An array of one type would make texts of all labels for the sake of one."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (60, 3))
    y = (x[:, 0] > 0).astype(int).tolist()
    other = [*y[:7], bad, *y[8:]]

    def fit(labels):
        settings = {"epsilon": 5.0, "epochs": 2, "hidden": (4,), "bounds": (-1, 1)}
        model = PrivateBayesClassifier(
            classes=[0, 1], on_bad_rows="zero", random_state=0, **settings
        )
        return model.fit(x, labels).standardisation_

    dpbnn.replay(fit, y, other, trace=False).check()


def test_a_fit_that_fails_leaves_nothing_beside_an_older_statement():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (200, 2))
    model = PrivateBayesRegressor(
        epsilon=1.0, bounds=(-1, 1), target_bounds=(-9, 9), hidden=(), random_state=0
    ).fit(x, x[:, 0])
    model.set_params(epsilon=None, target_bounds=None, hidden=(32,), method="moments")
    with pytest.raises(ValueError, match=r"hidden=\(32,\)"):
        model.fit(x, x[:, 0])
    assert not hasattr(model, "posterior_")
    assert not hasattr(model, "standardisation_")


def test_settings_that_do_not_fit_are_refused_before_anything_is_paid():
    x = np.random.default_rng(0).uniform(-1, 1, (300, 2))
    y = (x[:, 0] > 0).astype(int)
    book = dpbnn.Ledger(epsilon=1.0, delta=1e-5)
    common = {"epsilon": 1.0, "bounds": (-1, 1), "classes": [0, 1], "ledger": book}
    for wrong in ({}, {"hidden": (), "batch_size": 100}, {"hidden": (), "prior": dpbnn.Laplace(1)}):
        with pytest.raises(ValueError):  # noqa: PT011, each has its own words
            PrivateBayesClassifier("moments", **common, **wrong).fit(x, y)
    assert book.releases == 0
