"""Estimators on raw data frames: by the schema alone, whatever the frame holds."""

import datetime
import pickle
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

import dpbnn
from dpbnn import PrivateBayesClassifier, PrivateBayesRegressor
from dpbnn.data import Column, Schema, TableWarning

pandas = pytest.importorskip("pandas")
SCHEMA = Schema.from_toml(
    """
ignore = ["wage"]
[target]
name = "ill"
classes = ["yes", "no"]
[columns.age]
bounds = [0, 100]
missing = "indicator"
[columns.city]
categories = ["Ulm", "Bonn", "Rom"]
other = true
missing = "category"
[columns.smokes]
categories = [true, false]
[columns.admitted]
bounds = [2020-01-01, 2024-12-31]
missing = "middle"
"""
)
pytestmark = pytest.mark.filterwarnings("ignore:epsilon = ")
WAGE = Schema(SCHEMA.columns, Column("wage", bounds=(0, 200)), ignore=("ill",))
QUICK = {"epsilon": 20.0, "epochs": 30, "random_state": 0}


def frame(n=300, seed=0):
    """People of whom the old ones and the smokers are ill."""
    rng = np.random.default_rng(seed)
    age = rng.uniform(10, 90, n).round()
    smokes = rng.random(n) < 0.3
    ill = age + 30 * smokes + rng.normal(0, 5, n) > 60
    start = np.datetime64("2020-01-01")
    made = pandas.DataFrame(
        {
            "ill": np.where(ill, "yes", "no"),
            "admitted": start + rng.integers(0, 1800, n).astype("timedelta64[D]"),
            "smokes": smokes,
            "city": pandas.Categorical(rng.choice(["Ulm", "Bonn", "Rom"], n)),
            "age": age,
            "wage": (age + 10 * rng.normal(size=n)).clip(0, 200),
        }
    )
    made.loc[3, "age"] = np.nan
    made.loc[4, "city"] = None
    made.loc[5, "admitted"] = pandas.NaT
    return made


@pytest.fixture(scope="module")
def people():
    return frame()


@pytest.fixture(scope="module")
def fitted(people):
    return PrivateBayesClassifier(schema=SCHEMA, **QUICK).fit(
        people.drop(columns="ill"), people.ill
    )


def test_a_raw_frame_gives_labels_back_and_follows_scikit_learn(fitted, people):
    assert fitted.classes_.tolist() == ["no", "yes"]
    assert fitted.n_features_in_ == 4
    assert fitted.feature_names_in_.tolist() == ["age", "city", "smokes", "admitted"]
    assert set(fitted.predict(people)) == {"yes", "no"}
    proba = fitted.predict_proba(people)
    assert (fitted.classes_[proba.argmax(1)] == fitted.predict(people)).all()
    assert fitted.score(people) == np.mean(fitted.predict(people) == people.ill) > 0.8
    assert fitted.score(people.drop(columns="ill"), people.ill) == fitted.score(people)
    found = fitted.evaluate(people)
    assert found.metrics["accuracy"].value == pytest.approx(fitted.score(people))
    assert fitted.numbers(["yes", "no", "maybe", None]).tolist() == [1, 0, -1, -1]
    again = clone(fitted)
    assert again.schema == SCHEMA
    assert not hasattr(again, "posterior_")


def test_columns_are_found_by_name_in_any_order(fitted, people):
    shuffled = people[["city", "age", "admitted", "smokes"]]
    expected = fitted.predict_proba(people)
    assert np.array_equal(fitted.predict_proba(shuffled), expected)
    with pytest.warns(TableWarning, match="'shoe'"):
        assert np.array_equal(fitted.predict_proba(people.assign(shoe=1)), expected)
    with pytest.raises(ValueError, match="column 'age' of the schema is absent"):
        fitted.predict(people.drop(columns="age"))
    with pytest.raises(ValueError, match="no column names"):
        fitted.predict(people.to_numpy())


def test_all_kinds_of_frames_say_the_same(fitted, people, tmp_path):
    polars, arrow = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    expected = fitted.predict_proba(people)
    people.to_csv(tmp_path / "people.csv", index=False)
    plain = people.astype({"city": object})
    forms = {
        "arrow": arrow.Table.from_pandas(plain),
        "polars": polars.DataFrame(arrow.Table.from_pandas(plain)),
        "nullable": people.convert_dtypes(),
        "mapping": {name: people[name] for name in people.columns},
        "file": str(tmp_path / "people.csv"),
        "dates": people.assign(
            admitted=[None if t is pandas.NaT else t.date() for t in people.admitted]
        ),
    }
    for form, given in forms.items():
        assert np.array_equal(fitted.predict_proba(given), expected), form
    with pytest.raises(ValueError, match=r"X\.collect\(\)"):
        fitted.predict(polars.DataFrame(plain[["age"]].to_dict("list")).lazy())


def test_a_regressor_takes_frames_too(people, tmp_path):
    model = PrivateBayesRegressor(schema=WAGE, **QUICK).fit(people)
    assert model.target_bounds_ == (0.0, 200.0)
    assert model.score(people) > 0.5
    assert model.score(people, people.wage) == pytest.approx(model.score(people))
    assert model.predictive(people).bounds == (0.0, 200.0)
    (tmp_path / "wage.toml").write_text(WAGE.to_toml())
    assert clone(model).set_params(schema=str(tmp_path / "wage.toml")).fit(people).schema_ == WAGE
    model.save(tmp_path / "model")
    again = PrivateBayesRegressor.load(tmp_path / "model")
    assert np.array_equal(again.predict(people), model.predict(people))
    assert again.schema_ == WAGE


@pytest.mark.parametrize(
    ("classes", "given", "kind"),
    [
        ((0, 1), np.array([0, 1]), "i"),
        ((True, False), np.array([False, True]), "b"),
        ((0.5, 1.5), np.array([0.5, 1.5]), "f"),
        (("01", "02"), np.array(["01", "02"]), "U"),
        (("b", "a"), np.array(["a", "b"]), "U"),
    ],
)
def test_labels_come_back_as_they_were_given(classes, given, kind):
    schema = Schema((Column("x", bounds=(0, 1)),), Column("y", categories=classes))
    x = np.random.default_rng(0).random(60)
    y = given[(x > 0.5).astype(int)]
    model = PrivateBayesClassifier(schema=schema, **QUICK).fit({"x": x}, y)
    assert model.classes_.tolist() == given.tolist()
    found = model.predict({"x": x})
    assert found.dtype.kind == kind
    assert np.mean(found == y) == model.score({"x": x}, y) > 0.8


def test_a_ranking_score_of_scikit_learn_knows_the_order_of_the_classes(people):
    """With classes in the order of the schema, "yes" first, it would be 1 - AUC."""
    model = PrivateBayesClassifier(schema=SCHEMA, **{**QUICK, "epsilon": None})
    scores = cross_val_score(model, people.drop(columns="ill"), people.ill, scoring="roc_auc", cv=2)
    assert scores.min() > 0.8


def test_pickles_of_a_frame_estimator(fitted, people):
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.predict_proba(people), fitted.predict_proba(people))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds": (0, 1)}, "bounds: the schema states it"),
        ({"classes": [0, 1]}, "classes: the schema states it"),
        ({"schema": 7}, "schema=7: must be"),
        ({"schema": WAGE}, "use dpbnn.PrivateBayesRegressor"),
        ({"schema": Schema(SCHEMA.columns, SCHEMA.target, public=False)}, "learned from the data"),
    ],
)
def test_wrong_schemas_are_refused_before_anything_is_spent(people, change, message):
    book = dpbnn.Ledger(epsilon=20.0, delta=1e-5)
    arguments = {"schema": SCHEMA, "ledger": book, **QUICK, **change}
    with pytest.raises(ValueError, match=message):
        PrivateBayesClassifier(**arguments).fit(people)
    assert book.releases == 0


ODD = {
    "an outlier": {"age": 1e12},
    "a new category": {"city": "Atlantis"},
    "text for a number": {"age": "HIV positive"},
    "an infinity": {"age": -np.inf},
    "a far date": {"admitted": "1066-10-14"},
    "a missing boolean": {"smokes": None},
    "a label of its own": {"ill": "perhaps"},
    "no label": {"ill": None},
    "an object": {"city": datetime.timedelta(3)},
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("model", ["classifier", "regressor"])
def test_one_odd_record_changes_nothing_but_its_own_contribution(kind, model):
    """Bounds, categories and labels are the schema's: replay finds no other difference."""
    change = ODD[kind]
    if model == "regressor" and "ill" in change:
        change = {"wage": {"perhaps": "much", None: None}[change["ill"]]}
    whole = frame(60)
    odd = whole.astype(object)
    for name, value in change.items():
        odd.at[7, name] = value
    blank = whole.astype(object)
    blank.loc[7, :] = None

    def fit(data):
        common = {"epsilon": 50.0, "epochs": 3, "on_bad_rows": "zero", "random_state": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TableWarning)
            if model == "classifier":
                made = PrivateBayesClassifier(schema=SCHEMA, **common).fit(data)
                public = made.classes_
            else:
                made = PrivateBayesRegressor(schema=WAGE, **common).fit(data)
                public = np.array(made.target_bounds_)
        names = made.feature_names_in_.tolist()
        return public, names, made.standardisation_, made.predictive(whole).mean

    result = dpbnn.replay(fit, odd, blank, trace=False).check()
    assert len(result.distances) >= 2 + 3


def test_bounds_learned_from_the_frame_would_be_seen(monkeypatch):
    """The twin: a schema that takes its bounds from the data. Replay must find it."""
    whole = frame(60)
    odd = whole.copy()
    odd.loc[7, "age"] = 99.0
    blank = whole.astype(object)
    blank.loc[7, :] = None

    def fit(data):
        ages = pandas.to_numeric(data["age"])
        wide = Column("age", bounds=(0.0, float(ages.max()) + 1), missing="indicator")
        schema = Schema((wide, *SCHEMA.columns[1:]), SCHEMA.target, ignore=("wage",))
        made = PrivateBayesClassifier(
            schema=schema, epsilon=50.0, epochs=3, on_bad_rows="zero", random_state=0
        ).fit(data)
        return made.standardisation_

    with pytest.raises(dpbnn.PrivacyBug):
        dpbnn.replay(fit, odd, blank, trace=False).check()


def test_messages_about_frames_quote_no_cell(people):
    odd = people.astype(object)
    odd.at[7, "age"] = "HIV positive"
    with pytest.raises(ValueError, match="'age'") as error:
        PrivateBayesClassifier(schema=SCHEMA, **QUICK).fit(odd)
    assert "HIV" not in str(error.value)


def test_dates_are_numbers_only_where_they_are_declared(people):
    days = Column("admitted", bounds=("2020-01-01", datetime.date(2020, 1, 11)))
    assert days.date
    values, faults = days.encode(np.array(["2020-01-06", "2020-01-01T12:00", "1999-01-01"], object))
    assert values[:, 0].tolist() == pytest.approx([0.0, -0.9, -1.0])
    assert not faults
    again = Schema.from_toml(Schema((days,), Column("y", bounds=(0, 1))).to_toml())
    assert again.columns[0] == days
    number = Schema((Column("admitted", bounds=(0, 1)),), SCHEMA.target)
    with pytest.warns(TableWarning), pytest.raises(ValueError, match="is a date"):
        number.encode(people)
    with pytest.raises(ValueError, match="is not a date"):
        Schema((days,), SCHEMA.target).encode({"admitted": ["soon"], "ill": ["yes"]})


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_a_private_choice_takes_raw_frames(people, kind):
    """Of two models, one of which has learned nothing; a bad row contributes nothing."""
    book = dpbnn.Ledger(epsilon=60.0, delta=1e-5)
    make, schema = {
        "classifier": (PrivateBayesClassifier, SCHEMA), "regressor": (PrivateBayesRegressor, WAGE),
    }[kind]  # fmt: skip
    common = {"schema": schema, "ledger": book, "random_state": 0}
    tried = {
        "good": make(epsilon=20.0, epochs=60, **common).fit(people),
        "bad": make(epsilon=0.1, epochs=1, **common).fit(people),
    }
    held = frame(300, seed=1).astype(object)
    held.at[7, "smokes"] = "perhaps"
    with pytest.raises(ValueError, match="'smokes'"):
        dpbnn.select(tried, (held, None), epsilon=5.0, ledger=book)
    choice = dpbnn.select(tried, (held, None), epsilon=5.0, ledger=book, on_bad_rows="zero")
    assert choice.name == "good"
    tried["bad"].schema_ = Schema(schema.columns[:2], schema.target)
    with pytest.raises(ValueError, match="different schemas"):
        dpbnn.select(tried, (held, None), epsilon=1.0, ledger=book)
