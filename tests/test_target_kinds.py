"""Counts, ordered classes, two classes, and class weights of a schema: from a table to the page."""

import csv
import json

import numpy as np
import pytest
import torch
from command_line import run
from sklearn.base import clone

import dpbnn
from dpbnn.data import Column, Schema, TableError
from dpbnn.estimators.kinds import Counts
from dpbnn.likelihoods import Bernoulli, Ordinal, Poisson, ScaledPoisson
from dpbnn.predictive import CountPredictive, OrdinalPredictive

GRADES = ("low", "middle", "high")
VISITS = """
[target]
name = "visits"
kind = "count"
bounds = [0, 12]
[columns.a]
bounds = [-1, 1]
[columns.b]
bounds = [-1, 1]
"""
GRADED = VISITS.replace('"visits"', '"grade"').replace('"count"', '"ordinal"').replace(
    "bounds = [0, 12]", 'classes = ["low", "middle", "high"]\nweights = {high = 4, middle = 2.0}'
)  # fmt: skip
INPUTS = {"bounds": (-1, 1), "epsilon": 3.0, "delta": 1e-4, "random_state": 0}


def counted(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (n, 2))
    return x, rng.poisson(2 * np.exp(0.8 * x[:, 0]))


def graded(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (n, 2))
    return x, np.array(GRADES)[np.digitize(3 * x[:, 0] + rng.logistic(size=n), [-1, 1])]


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name, (seed, n) in {"train": (0, 150), "test": (1, 120)}.items():
        x, visits = counted(n, seed)
        grades = graded(n, seed)[1]
        lines = [
            f"{a:.4f},{b:.4f},{count},{grade}"
            for (a, b), count, grade in zip(x, visits, grades, strict=True)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,visits,grade", *lines]) + "\n")
    (tmp_path / "visits.toml").write_text('ignore = ["grade"]\n' + VISITS)
    (tmp_path / "grade.toml").write_text('ignore = ["visits"]\n' + GRADED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# The schema


@pytest.mark.parametrize("text", [VISITS, GRADED])
def test_a_schema_with_a_kind_is_written_and_read(text):
    schema = Schema.from_toml(text)
    assert Schema.from_toml(schema.to_toml()) == schema
    assert schema.target.kind in ("count", "ordinal")


def test_counts_are_encoded_as_they_are_and_clipped():
    schema = Schema.from_toml(VISITS)
    table = {"a": [0.0] * 3, "b": [0.0] * 3, "visits": ["0", "7", "400"]}
    _, y = schema.encode(table)
    assert y.dtype == np.int64
    assert y.tolist() == [0, 7, 12]
    assert schema.decode_target(y).tolist() == [0.0, 7.0, 12.0]


@pytest.mark.parametrize("value", ["2.5", "-1", "many", ""])
def test_what_is_no_count_is_a_bad_row_and_is_not_quoted(value):
    schema = Schema.from_toml(VISITS)
    table = {"a": [0.0, 0.5], "b": [0.0, 0.5], "visits": ["3", value]}
    with pytest.raises(TableError, match="column 'visits'") as error:
        schema.encode(table, target=True)
    assert value not in str(error.value).replace("visits", "") or not value
    x, _ = schema.encode(table, target=True, on_bad_rows="zero")
    assert np.isnan(x).all(1).tolist() == [False, True]


def test_cuts_can_have_an_order():
    target = {"name": "age", "kind": "ordinal", "cuts": [8, 10], "classes": [*GRADES]}
    schema = Schema.from_dict({"target": target, "columns": {"a": {"bounds": [0, 1]}}})
    assert schema.encode({"a": [0, 0, 1], "age": [3, 9, 30]})[1].tolist() == [0, 1, 2]
    assert Schema.from_toml(schema.to_toml()) == schema


COUNT = 'kind = "count"\nbounds = [0, 12]'
ORDER = 'kind = "ordinal"\nclasses = ["low", "middle", "high"]'
WEIGHTS = "weights = {high = 4, middle = 2.0}"


@pytest.mark.parametrize(
    ("text", "old", "new", "words"),
    [
        (VISITS, '"count"', '"counts"', "must be 'count' or 'ordinal'"),
        (VISITS, "[0, 12]", "[0, 12.5]", "whole numbers from 0"),
        (VISITS, "[0, 12]", "[-3, 12]", "whole numbers from 0"),
        (VISITS, "[0, 12]", "[0, 1e9]", "whole numbers from 0"),
        (VISITS, "bounds = [0, 12]", 'classes = ["0", "1"]', "a count has no classes"),
        (VISITS, "\n[target]", 'task = "count"\n[target]', "write kind = 'count' under"),
        (VISITS, "bounds = [0, 12]", "bounds = [0, 12]\nweights = {a = 1}", "go with classes"),
        (VISITS, "[columns.b]\n", '[columns.b]\nkind = "count"\n', "is for the target"),
        (GRADED, 'classes = ["low", "middle", "high"]', "bounds = [0, 2]", "the lowest first"),
        (GRADED, "\n[columns.b]\nbounds = [-1, 1]",
         '\n[columns.b]\nkind = "ordinal"\ncategories = ["x", "y"]', "give categories alone"),
        (GRADED, WEIGHTS, "weights = {higher = 4}", "'higher' is none of its 3 classes"),
        (GRADED, WEIGHTS, "weights = [1, 2, 4]", "must be given by class"),
        (GRADED, WEIGHTS, 'weights = "balanced"', "which epsilon does not cover"),
        (GRADED, WEIGHTS, "weights = {high = 0}", "finite numbers > 0"),
        (GRADED, WEIGHTS, 'weights = {high = "much"}', "finite numbers > 0"),
        (GRADED, WEIGHTS, "weights = {high = true}", "finite numbers > 0"),
    ],
)  # fmt: skip
def test_schema_check_says_what_is_wrong_with_a_target(place, capsys, text, old, new, words):
    assert old in text
    (place / "wrong.toml").write_text(text.replace(old, new, 1))
    code, _, err = run(capsys, "schema", "check", "train.csv", "--schema", "wrong.toml")
    assert code == 2
    assert words in err


def test_schema_check_finds_numbers_that_are_no_counts(place, capsys):
    rows = (place / "train.csv").read_text().splitlines()
    a, b, _, grade = rows[1].split(",")
    (place / "train.csv").write_text("\n".join([rows[0], f"{a},{b},2.5,{grade}", *rows[2:]]))
    code, _, err = run(capsys, "schema", "check", "train.csv", "--schema", "visits.toml")
    assert code == 2
    assert "column 'visits': 1 value cannot be used; one is not a count" in err
    assert "2.5" not in err


def test_bounds_of_a_count_that_are_learned_privately_are_whole(place, capsys):
    (place / "todo.toml").write_text((place / "visits.toml").read_text().replace(
        "[0, 12]", '["TODO", "TODO"]'))  # fmt: skip
    code, _, err = run(
        capsys, "schema", "bounds", "train.csv", "--schema", "todo.toml", "--epsilon", 5,
        "--ledger", "ledger.jsonl", "--out", "new.toml",
    )  # fmt: skip
    assert code == 0, err
    low, high = Schema.read("new.toml").target.bounds
    assert low == 0
    assert high >= 6
    assert float(high).is_integer()


# Counts


def regressor(**options):
    return dpbnn.PrivateBayesRegressor(
        **{**INPUTS, "likelihood": "poisson", "target_bounds": (0, 12), "epochs": 20, **options}
    )


@pytest.mark.parametrize("method", ["auto", "sgd", "bbp", "sgld"])
def test_a_regressor_of_counts_stays_within_public_bounds(method, tmp_path):
    x, y = counted(300)
    model = regressor(method=method).fit(x, y)
    assert isinstance(model.posterior_.likelihood, ScaledPoisson if method == "auto" else Poisson)
    predictive = model.predictive(100 * x)
    assert isinstance(predictive, CountPredictive)
    assert predictive.bounds == (0, 12)
    far = CountPredictive(predictive.log_rates + 5, (0.0, 12.0))  # a network that says too much
    for found in (predictive, model._original(far)):
        low, high = found.interval(0.9)
        for part in (found.mean, found.mode, low, high):
            assert part.min() >= 0
            assert part.max() <= 12
        assert torch.equal(low, low.round())
    model.save(tmp_path / "saved")
    loaded = dpbnn.PrivateBayesRegressor.load(tmp_path / "saved")
    np.testing.assert_array_equal(loaded.predict(x), model.predict(x))
    assert clone(model).likelihood == "poisson"


def test_a_regressor_of_counts_learns_their_rates():
    """Without noise. A constant has a mean error of about 0.8, and clipped gradients of 0.5."""
    x, y = counted(4000)
    model = regressor(epsilon=None, hidden=(), epochs=None, target_bounds=(0, 60)).fit(x, y)
    rate = 2 * np.exp(0.8 * x[:, 0])
    assert np.abs(model.predict(x) - rate).mean() < 0.15
    assert 0.9 < model.evaluate(x, y, resamples=0).coverage[-1].observed <= 1


def test_few_counts_have_no_temperature_without_privacy():
    """Held-out rows choose a prior there, as for numbers, and nothing else."""
    assert regressor(epsilon=None).fit(*counted(100)).temperature_ is None


def test_a_released_mean_is_the_usual_count():
    counts = Counts((0.0, 100.0))
    y = np.array([0.0, 0.0, 0.0, 25.0])
    scaled = counts.rooted(y)
    assert (np.abs(scaled) <= 1).all()
    found = counts.learned(scaled.mean(), scaled.std(), scaled=True)
    assert found.typical == pytest.approx(y.mean())
    wild = counts.learned(-3.0, 0.001, scaled=True)  # what noise may release
    assert 0 < wild.typical <= 100
    assert counts.learned(9.0, 5.0, scaled=False).typical == 100


def test_gradients_of_scaled_counts_are_those_of_poisson_over_the_unit():
    y = torch.tensor([[0.0], [3.0], [12.0]])
    found = []
    for likelihood in (Poisson(12, 2.0), ScaledPoisson(12, 2.0, 5.0)):
        outputs = torch.tensor([[0.3], [-1.0], [4.0]], requires_grad=True)
        value = likelihood.log_prob(outputs, y)
        (gradient,) = torch.autograd.grad(value.sum(), outputs)
        found.append((value.detach(), gradient))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], 5.0 * found[1][1])


def test_intervals_of_counts_cover_as_promised():
    """2000 test records: below 0.84, 12 standard errors away, the promise of 0.89 is broken."""
    x, y = counted(3000)
    model = regressor(epochs=10, conformal=0.1).fit(x, y)
    x, y = counted(2000, seed=7)
    y = y.clip(0, 12)
    low, high = model.predict_interval(x)
    assert ((low <= y) & (y <= high)).mean() > 0.84
    assert (low >= 0).all()
    assert (high <= 12).all()
    assert (low == np.round(low)).all()
    score = np.abs(y - model.predictive(x).means.mean(0).numpy().clip(0, 12))
    inside = score <= model.threshold_ * model.predictive(x).std.numpy()
    assert ((low <= y) & (y <= high))[inside].all()  # the score that was calibrated


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"likelihood": "poison"}, "must be one of 'gaussian', 'poisson'"),
        ({"method": "moments"}, "is not for likelihood='poisson'"),
        ({"method": dpbnn.SEP()}, "is not for likelihood='poisson'"),
        ({"recalibrate": 0.1}, "counts have no temperature"),
        ({"noise_std": 1.0}, "counts have none"),
        ({"target_bounds": (0, 2.5)}, "whole numbers from 0"),
        ({"target_bounds": (-1, 5)}, "whole numbers from 0"),
        ({"target_bounds": None}, "target_bounds: missing"),
    ],
)
def test_wrong_settings_for_counts_are_refused_before_anything_is_spent(change, words):
    x, y = counted(100)
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match=words):
        regressor(ledger=ledger, **change).fit(x, y)
    assert ledger.releases == 0


def test_targets_that_are_no_counts_are_refused_or_contribute_nothing():
    x, y = counted(100)
    y = y.astype(float)
    y[3], y[5] = 2.5, -1
    with pytest.raises(ValueError, match="y: 2 values are not counts"):
        regressor().fit(x, y)
    assert regressor(on_bad_rows="zero", epochs=2).fit(x, y).privacy_.private


@pytest.mark.filterwarnings("ignore:epsilon = ")
@pytest.mark.parametrize(("kind", "odd"), [("count", "many"), ("count", "2.5"), ("ordinal", "top")])
def test_an_odd_target_moves_its_own_contribution_only(kind, odd):
    """Through the standardisation of counts and the weights of classes; replay refuses more."""
    schema, (x, y) = {
        "count": (VISITS, counted(60)),
        "ordinal": (GRADED, graded(60)),
    }[kind]
    schema = Schema.from_toml(schema)
    frame = {"a": x[:, 0], "b": x[:, 1], schema.target.name: y.astype(str).astype(object)}
    other = {**frame, schema.target.name: np.array([odd, *frame[schema.target.name][1:]], object)}
    estimator = dpbnn.PrivateBayesRegressor if kind == "count" else dpbnn.PrivateBayesClassifier

    def fit(table):
        model = estimator(
            schema=schema, epsilon=20.0, delta=1e-3, epochs=3, on_bad_rows="zero", random_state=0
        )
        return model.fit(table).standardisation_

    result = dpbnn.replay(fit, frame, other, trace=False).check()
    assert 0 < result.worst <= 1


@pytest.mark.filterwarnings("ignore:epsilon = ")
def test_counts_of_persons_are_protected_by_person():
    """Standardisation and training: all rows of a person are bad in one of the two tables."""
    x, y = counted(90)
    schema = Schema.from_toml('unit = "patient"\n' + VISITS)
    frame = {"patient": np.arange(90) // 3, "a": x[:, 0], "b": x[:, 1], "visits": y.astype(object)}
    other = {**frame, "visits": np.array(["many"] * 3 + frame["visits"][3:].tolist(), object)}

    def fit(table):
        model = dpbnn.PrivateBayesRegressor(
            schema=schema, epsilon=20.0, delta=1e-3, epochs=3, on_bad_rows="zero", random_state=0
        )
        return model.fit(table, max_records=3)

    result = dpbnn.replay(lambda table: fit(table).standardisation_, frame, other, trace=False)
    assert 0 < result.check().worst <= 1
    assert fit(other).privacy_.unit == "one patient"


# Classes


def classifier(**options):
    return dpbnn.PrivateBayesClassifier(
        **{**INPUTS, "classes": [*GRADES], "likelihood": "ordinal", "epochs": 30, **options}
    )


@pytest.mark.parametrize("method", ["auto", "sgd", "vi", "sgld"])
def test_ordered_classes_keep_their_order(method, tmp_path):
    x, y = graded(400)
    model = classifier(method=method).fit(x, y)
    assert model.classes_.tolist() == [*GRADES]
    assert isinstance(model.posterior_.likelihood, Ordinal)
    predictive = model.predictive(x)
    assert isinstance(predictive, OrdinalPredictive)
    assert model.predict_proba(x).shape == (400, 3)
    assert model.score(x, y) > 0.5
    far = np.array([[-1.0, 0.0], [1.0, 0.0]])
    assert model.predictive(far).expected.tolist() == sorted(model.predictive(far).expected)
    assert "rps" in model.evaluate(x, y, resamples=0).metrics
    model.save(tmp_path / "saved")
    loaded = dpbnn.PrivateBayesClassifier.load(tmp_path / "saved")
    assert loaded.classes_.tolist() == [*GRADES]
    np.testing.assert_array_equal(loaded.predict_proba(x), model.predict_proba(x))


@pytest.mark.parametrize("labels", [[3, 1, 2], ["c", "a", "b"]])
def test_labels_are_numbered_in_the_order_given(labels):
    x, y = graded(300)
    given = np.array(labels)[[GRADES.index(grade) for grade in y]]
    model = classifier(classes=labels, epochs=5).fit(x, given)
    assert model.classes_.tolist() == labels
    assert model.numbers(given).tolist() == [GRADES.index(grade) for grade in y]
    assert set(model.predict(x)) <= set(labels)


def test_two_classes_by_one_output():
    x, y = graded(400)
    ill = np.where(y == "high", "ill", "well")
    model = classifier(
        classes=["well", "ill"], likelihood="bernoulli", class_weight={"ill": 3.0}, epsilon=10.0
    ).fit(x, ill)
    assert isinstance(model.posterior_.likelihood, Bernoulli)
    assert model.posterior_.likelihood.weights == (1.0, 1 / 3)  # in the order of classes_
    assert model.classes_.tolist() == ["ill", "well"]
    assert model.score(x, ill) > 0.7
    assert model.predict_proba(x)[ill == "ill", 0].mean() > model.predict_proba(x)[:, 0].mean()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"likelihood": "poisson"}, "must be one of 'categorical', 'bernoulli', 'ordinal'"),
        ({"likelihood": "bernoulli"}, "is for two classes, and there are 3"),
        ({"classes": None, "epsilon": None}, "the order of the labels is needed"),
        ({"classes": ["low", "middle", "high", "low"]}, "is there twice"),
        ({"classes": {"low", "middle", "high"}}, "a set has no order"),
        ({"method": "noiseaware"}, "is not for likelihood='ordinal'"),
    ],
)
def test_wrong_settings_for_classes_are_refused_before_anything_is_spent(change, words):
    x, y = graded(100)
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match=words):
        classifier(ledger=ledger, **change).fit(x, y)
    assert ledger.releases == 0


# Schema and estimator


def frame(n=150, seed=0):
    x, y = graded(n, seed)
    return {"a": x[:, 0], "b": x[:, 1], "grade": y}


def test_weights_of_the_schema_are_those_of_the_fit():
    schema = Schema.from_toml(GRADED)
    model = dpbnn.PrivateBayesClassifier(schema=schema, epsilon=3.0, epochs=3).fit(frame())
    assert model.posterior_.likelihood == Ordinal((0.25, 0.5, 1.0))
    assert model.classes_.tolist() == [*GRADES]
    plain = Schema.from_toml(GRADED.replace('kind = "ordinal"\n', ""))
    model = dpbnn.PrivateBayesClassifier(schema=plain, epsilon=3.0, epochs=3).fit(frame())
    assert model.posterior_.likelihood.weights == (0.25, 0.5, 1.0)
    assert model.classes_.tolist() == sorted(GRADES)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"class_weight": {"high": 2.0}}, "the schema states weights"),
        ({"likelihood": "categorical"}, "the schema says kind = 'ordinal'"),
        ({"method": "noiseaware"}, "is not for likelihood='ordinal'"),
    ],
)
def test_a_schema_and_other_settings_may_not_contradict(settings, words):
    ledger = dpbnn.Ledger()
    model = dpbnn.PrivateBayesClassifier(
        schema=Schema.from_toml(GRADED), epsilon=3.0, ledger=ledger, **settings
    )
    with pytest.raises(ValueError, match=words):
        model.fit(frame())
    assert ledger.releases == 0


def test_an_order_goes_into_the_schema_and_not_beside_it():
    schema = Schema(
        (Column("a", bounds=(-1, 1)), Column("b", bounds=(-1, 1))),
        Column("grade", categories=("high", "low", "middle")),
    )
    model = dpbnn.PrivateBayesClassifier(schema=schema, likelihood="ordinal")
    with pytest.raises(ValueError, match="write kind = 'ordinal' under"):
        model.fit(frame())


def test_a_schema_that_is_gone_after_the_fit_is_not_missed(place):
    model = dpbnn.PrivateBayesClassifier(schema="grade.toml", epsilon=3.0, epochs=2)
    model.fit("train.csv")
    (place / "grade.toml").unlink()
    model.report(place / "page.html", "test.csv")
    assert model.ordered


# The command line


def test_counts_from_a_csv_to_the_page(place, capsys):
    code, out, err = run(
        capsys, "fit", "train.csv", "--schema", "visits.toml", "--epsilon", 3, "--epochs", 10,
        "--out", "run",
    )  # fmt: skip
    assert code == 0, err
    assert "counts of 'visits'" in out
    code, out, err = run(capsys, "evaluate", "run", "test.csv", "--report", "page.html", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert {"rmse", "mae", "r2", "log_likelihood", "crps"} <= found["metrics"].keys()
    assert found["baseline"]["mae"] > 0
    page = (place / "page.html").read_text()
    assert "Counts of visits" in page
    assert "count, 0 to 12" in page
    code, _, err = run(capsys, "predict", "run", "test.csv", "--out", "predicted.csv")
    assert code == 0, err
    with (place / "predicted.csv").open() as file:
        for line in csv.DictReader(file):
            assert 0 <= float(line["low"]) <= float(line["high"]) <= 12
            assert 0 <= float(line["mean"]) <= 12
            assert float(line["low"]).is_integer()


def test_ordered_classes_from_a_csv_to_the_page(place, capsys):
    code, out, err = run(
        capsys, "fit", "train.csv", "--schema", "grade.toml", "--epsilon", 3, "--epochs", 10,
        "--out", "run",
    )  # fmt: skip
    assert code == 0, err
    assert "classification in order of 'grade'" in out
    code, out, err = run(capsys, "evaluate", "run", "test.csv", "--report", "page.html", "--json")
    assert code == 0, err
    assert {"rps", "accuracy", "mae"} <= json.loads(out)["metrics"].keys()
    page = (place / "page.html").read_text()
    assert "Classification in order of grade" in page
    assert "ordered classes low, middle, high" in page
    assert "public weights in training: 1, 2, 4" in page
    code, _, err = run(capsys, "predict", "run", "test.csv", "--out", "predicted.csv")
    assert code == 0, err
    with (place / "predicted.csv").open() as file:
        for line in csv.DictReader(file):
            assert GRADES.index(line["low"]) <= GRADES.index(line["high"])


@pytest.mark.parametrize(
    ("task", "target", "bounds", "kind"),
    [("count", "visits", "[0, 12]", "count"), ("count", "visits", "[0, 1]", "count"),
     ("ordinal", "grade", '["low", "middle", "high"]', "ordinal")],
)  # fmt: skip
def test_a_task_says_what_two_numbers_or_texts_are(place, capsys, task, target, bounds, kind):
    (place / "bounds.toml").write_text(f"a = [-1, 1]\nb = [-1, 1]\n{target} = {bounds}\n")
    code, _, err = run(
        capsys, "fit", "train.csv", "--target", target, "--bounds", "bounds.toml", "--task", task,
        "--epsilon", 3, "--epochs", 2, "--out", "run",
    )  # fmt: skip
    assert code == 0, err
    assert Schema.read(place / "run" / "schema.toml").target.kind == kind


def test_without_privacy_a_count_may_be_learned_and_an_order_of_texts_may_not(place, capsys):
    common = ("fit", "train.csv", "--non-private", "--epochs", 2, "--quiet")
    code, _, err = run(capsys, *common, "--target", "visits", "--task", "count", "--out", "run")
    assert code == 0, err
    code, _, err = run(capsys, *common, "--target", "grade", "--task", "ordinal", "--out", "other")
    assert code == 2
    assert "cannot be learned" in err


def test_compare_takes_counts_and_refuses_methods_without_weights_first(place, capsys):
    common = ("--epsilons", "3", "--test", "test.csv", "--epochs", 2, "--yes")
    code, _, err = run(capsys, "compare", "train.csv", "--schema", "visits.toml", *common,
                       "--methods", "sgd,sgld", "--out", "cells")  # fmt: skip
    assert code == 0, err
    assert "mean absolute error" in (place / "cells" / "compare.html").read_text().lower()
    plain = (place / "grade.toml").read_text().replace('kind = "ordinal"\n', "")
    (place / "plain.toml").write_text(plain)
    code, _, err = run(capsys, "compare", "train.csv", "--schema", "plain.toml", *common,
                       "--methods", "sgd,noiseaware", "--out", "other")  # fmt: skip
    assert code == 2
    assert "noiseaware: has no class weights" in err
    assert not (place / "other").exists()
