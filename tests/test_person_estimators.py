"""Estimators and the command line with a person as the unit."""

import json

import numpy as np
import pytest
import torch
from command_line import run

import dpbnn
from dpbnn.data.standardising import private_standardisation
from dpbnn.estimators.persons import unit_name
from dpbnn.estimators.workspace import _owners
from dpbnn.privacy.units import by_unit
from dpbnn.units import Units

PERSONS = 60


@pytest.fixture(scope="module")
def table():
    chance = np.random.default_rng(0)
    who = np.repeat(np.arange(PERSONS), chance.integers(1, 6, PERSONS))
    x = chance.uniform(-1, 1, (len(who), 3)) + chance.normal(size=(PERSONS, 3))[who] / 4
    y = (x @ [2.0, -1.0, 0.5] + chance.logistic(size=len(who)) / 3 > 0).astype(int)
    order = chance.permutation(len(who))
    return x[order].clip(-1, 1), y[order], np.array([f"p{w}" for w in who])[order]


def classifier(**options):
    return dpbnn.PrivateBayesClassifier(
        **{"method": "sgd", "epsilon": 3.0, "delta": 1e-4, "bounds": (-1, 1), "classes": [0, 1],
           "hidden": (), "epochs": 20, **options})  # fmt: skip


@pytest.mark.parametrize("method", ["auto", "sgd", "sgld"])
def test_an_estimator_protects_persons(table, method):
    x, y, who = table
    model = classifier(method=method).fit(x, y, units=who, unit="patient")
    assert model.privacy_.unit == "one patient"
    assert model.plan_.n == PERSONS
    assert model.privacy_.epsilon <= 3
    assert all(part.event.unit == "patient" for part in model.privacy_.released)
    assert model.predict_proba(x).shape == (len(x), 2)


def test_a_regressor_does_too(table):
    x, _, who = table
    model = dpbnn.PrivateBayesRegressor(
        "sgd", epsilon=3.0, delta=1e-4, bounds=(-1, 1), target_bounds=(-4, 4), epochs=20
    )
    assert model.fit(x, x.sum(1), units=who).privacy_.unit == "one person"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"method": "moments"}, "units: Moments is for single records"),
        ({"method": dpbnn.NoiseAware()}, "units: NoiseAware is for single records"),
        ({"bounds": "private"}, "bounds: its release would protect one row"),
        ({"recalibrate": 0.1}, "recalibrate: its release would protect one row"),
        ({"conformal": 0.1}, "conformal: its release would protect one row"),
    ],
)
def test_what_would_protect_single_rows_is_refused_before_anything_is_spent(
    table, options, problem
):
    x, y, who = table
    book = dpbnn.Ledger(delta=1e-4)
    with pytest.raises(ValueError, match=problem):
        classifier(ledger=book, **options).fit(x, y, units=who)
    assert book.untouched


def test_labels_must_be_as_many_as_rows(table):
    x, y, who = table
    with pytest.raises(ValueError, match="one label for each of the"):
        classifier().fit(x, y, units=who[:-1])


def test_a_standardisation_by_persons_moves_by_one_person_at_most(table):
    x, _, who = table
    owners = Units.of(who, PERSONS)
    plan = by_unit(
        dpbnn.plan(noise_multiplier=9.0, delta=1e-4, n=PERSONS, sampling="full-batch", steps=2),
        "person",
    )

    def released(values):
        found = private_standardisation(values, plan=plan, owners=owners)
        return found.centre, found.spread

    ends = np.ones_like(x)
    other = ends.copy()
    other[who == "p4"] = np.nan
    result = dpbnn.replay(released, ends, other).check()
    assert result.worst == pytest.approx(1.0, rel=1e-3)  # and no more, with several records


def test_means_of_persons_are_theirs(table):
    x, _, who = table
    owners = Units.of(who, PERSONS)
    keep = torch.ones(len(x), dtype=torch.bool)
    found = owners.means(10, 20, x[owners.records(10, 20)], keep)
    names = list(dict.fromkeys(who))[10:20]
    assert found == pytest.approx(np.stack([x[who == name].mean(0) for name in names]))


def test_records_of_nobody_are_no_part_of_the_first_person(table):
    x, _, who = table
    labels = [*who, *[None] * 50]
    values = np.concatenate([x, np.ones((50, 3))])
    owners = Units.of(labels, PERSONS, on_bad_rows="zero")
    found = owners.means(0, 1, values[owners.records(0, 1)], None)
    assert found[0] == pytest.approx(x[who == who[0]].mean(0))
    assert len(Units.of([None, None], None, on_bad_rows="zero")) == 0


@pytest.mark.parametrize("name", ["record", "Row"])
def test_a_person_is_not_called_a_record(table, name):
    """A ledger could not tell its releases from those for single rows."""
    x, y, who = table
    with pytest.raises(ValueError, match="is what a single row is called"):
        classifier().fit(x, y, units=who, unit=name)
    with pytest.raises(ValueError, match="is what a single row is called"):
        dpbnn.Poisson(10, 5, unit=name)


def test_a_fit_goes_on_only_where_the_same_rows_are_nobodys():
    salt = bytes(16)
    labels = ["a", None, "a", "b"]
    one, other = (Units.of(own, 2, on_bad_rows="zero") for own in (labels, ["a", "a", "a", "b"]))
    assert _owners(one, salt) == _owners(Units.of(labels, 2, on_bad_rows="zero"), salt)
    assert _owners(one, salt) != _owners(other, salt)


def test_names_of_units():
    names = ("patient_id", "PatientID", "household", "id", "customer-id", "record_id")
    expected = ["patient", "Patient", "household", "person", "customer", "record group"]
    assert [unit_name(name) for name in names] == expected


SCHEMA = """
unit = "patient_id"

[target]
name = "ill"
classes = ["no", "yes"]

[columns.a]
bounds = [-1, 1]

[columns.b]
bounds = [-1, 1]
"""


@pytest.fixture
def place(tmp_path, table):
    x, y, who = table
    lines = [
        f"{name},{a:.3f},{b:.3f},{'yes' if label else 'no'}"
        for name, (a, b, _), label in zip(who, x, y, strict=True)
    ]
    (tmp_path / "train.csv").write_text("\n".join(["patient_id,a,b,ill", *lines]) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path


def test_the_schema_names_the_persons_column(place):
    schema = dpbnn.data.Schema.read(place / "schema.toml")
    assert dpbnn.data.Schema.from_toml(schema.to_toml()) == schema
    assert schema.features == ("a", "b")
    table = dpbnn.data.read_table(place / "train.csv")
    assert schema.ignored(table) == ()
    assert len(set(schema.units(table))) == PERSONS
    with pytest.raises(dpbnn.data.TableError, match="the unit 'patient_id' of the schema"):
        schema.units({"a": [0.1], "b": [0.2]})
    with pytest.raises(dpbnn.data.TableError, match="is there twice"):
        dpbnn.data.Schema.from_toml(SCHEMA.replace('"patient_id"', '"a"'))


FRAME = """
unit = "patient"

[target]
name = "state"
classes = ["well", "ill", "gone"]

[columns.age]
bounds = [0, 100]

[columns.sex]
categories = ["f", "m"]

[columns.seen]
bounds = [2000-01-01, 2020-12-31]
missing = "indicator"
"""


@pytest.mark.filterwarnings("ignore:epsilon = ")
@pytest.mark.parametrize(
    "odd",
    [{"sex": "x"}, {"state": "lost"}, {"age": "old"}, {"seen": "0001-01-01T00:00:00+23:00"}],
    ids=str,
)
def test_a_persons_odd_values_in_a_frame_move_only_its_own_contribution(odd):
    """With dates, classes out of order, weights, and a standardisation."""
    chance, n = np.random.default_rng(0), 120
    frame = {
        "patient": [f"{i // 3:03d}" for i in range(n)],
        "age": chance.uniform(0, 100, n).astype(object),
        "sex": chance.choice(["f", "m"], n).astype(object),
        "seen": np.full(n, "2003-04-05", dtype=object),
        "state": chance.choice(["well", "ill", "gone"], n).astype(object),
    }
    other = {**frame}
    for name, value in odd.items():
        other[name] = np.array([*frame[name][:15], *[value] * 3, *frame[name][18:]], dtype=object)

    def fit(table):
        model = dpbnn.PrivateBayesClassifier(
            schema=dpbnn.data.Schema.from_toml(FRAME), epsilon=20.0, delta=1e-3, epochs=3,
            on_bad_rows="zero", class_weight={"gone": 7.0}, random_state=0,
        )  # fmt: skip
        return model.fit(table).standardisation_

    result = dpbnn.replay(fit, frame, other, trace=False).check()
    assert 0 < result.worst <= 1


def test_the_command_line_protects_patients_by_the_schema(place, capsys):
    schema = str(place / "schema.toml")
    code, text, error = run(
        capsys, "fit", place / "train.csv", "--schema", schema, "--epsilon", 3, "--delta", 1e-4,
        "--method", "sgd", "--hidden", 0, "--epochs", 5, "--out", place / "run",
    )  # fmt: skip
    assert code == 0, error
    assert "one patient" in text
    assert "private standardisation: 2 releases" in " ".join(text.split())
    code, _, error = run(capsys, "report", place / "run", "--out", place / "page.html")
    assert code == 0, error
    page = (place / "page.html").read_text()
    assert "whether one patient was used" in page
    assert "People with several records" not in page
    assert f"{PERSONS} patients for training" in page


def test_a_check_finds_that_the_persons_column_is_absent(place, capsys):
    rows = (place / "train.csv").read_text().replace("patient_id,", "who,", 1)
    (place / "other.csv").write_text(rows)
    code, _, error = run(
        capsys, "schema", "check", place / "other.csv", "--schema", place / "schema.toml"
    )
    assert code
    assert "the unit 'patient_id' of the schema is absent" in error


def test_a_check_finds_records_of_nobody(place, capsys):
    rows = (place / "train.csv").read_text().splitlines()
    rows[2] = "," + rows[2].partition(",")[2]
    (place / "other.csv").write_text("\n".join(rows) + "\n")
    check = ("schema", "check", place / "other.csv", "--schema", place / "schema.toml")
    code, _, error = run(capsys, *check)
    assert code == 2
    assert "unit 'patient_id': 1 record do not say whose" not in error
    assert "unit 'patient_id': 1 record does not say whose it is; fill it in" in error
    code, _, error = run(capsys, *check, "--show-values")
    assert "line 3" in error
    (place / "other.csv").write_text("\n".join([rows[0], *(f"p1,{r.partition(',')[2]}"
                                                          for r in rows[1:])]) + "\n")  # fmt: skip
    code, _, error = run(capsys, *check)
    assert code == 2
    assert "all records are of one unit" in error


def test_compare_protects_patients(place, capsys):
    rows = (place / "train.csv").read_text().splitlines()
    (place / "test.csv").write_text("\n".join(rows[:40]) + "\n")
    common = (
        "compare", place / "train.csv", "--schema", place / "schema.toml", "--epsilons", "3",
        "--delta", 1e-4, "--methods", "auto,sgd", "--epochs", 3, "--test", place / "test.csv",
        "--out", place / "cells",
    )  # fmt: skip
    code, _, error = run(capsys, *common, "--yes", "--max-records", 2)
    assert code == 2
    assert "max_records=2" in error
    assert not (place / "cells").exists()
    code, text, error = run(capsys, *common, "--yes", "--max-records", 5)
    assert code == 0, error
    assert f"{len(rows) - 1} rows of {PERSONS} patients" in text
    ledger = dpbnn.Ledger(place / "cells" / "ledger.jsonl")
    statement = ledger.statement(delta=1e-4)
    assert statement.unit == "one patient"
    assert {part.event.unit for part in statement.released} == {"patient"}
    told = float(text.split("Together they spend epsilon ")[1].split()[0])
    assert statement.epsilon <= told
    page = (place / "cells" / "compare.html").read_text()
    assert "one patient" in page
    assert "one record" not in page


def test_a_plan_for_patients(capsys):
    common = ("plan", "--epsilon", 1, "--delta", 1e-5, "--n", 2000, "--batch-size", 200,
              "--epochs", 10)  # fmt: skip
    code, text, error = run(capsys, *common, "--unit", "patient")
    assert code == 0, error
    assert "one patient with all its" in " ".join(text.split())
    assert "2000 patients" in " ".join(text.split())
    found = [json.loads(run(capsys, *common, *more, "--json")[1])
             for more in ((), ("--unit", "patient"))]  # fmt: skip
    assert found[0]["epsilon"] == found[1]["epsilon"]  # the same noise, for another unit
    del found[1]["epsilons"], found[1]["attack"]
    assert dpbnn.Plan.from_dict(found[1]).sampler.unit == "patient"
    code, _, error = run(capsys, *common, "--unit", "record")
    assert code == 2


@pytest.mark.parametrize("on_bad_rows", ["error", "zero"])
def test_rows_beyond_max_records_are_bad_rows(table, on_bad_rows):
    x, y, who = table
    model = classifier(on_bad_rows=on_bad_rows, epochs=2)
    if on_bad_rows == "error":
        with pytest.raises(ValueError, match="max_records=2"):
            model.fit(x, y, units=who, max_records=2)
        model.fit(x, y, units=who, max_records=5)
    else:
        model.fit(x, y, units=who, max_records=2)
    assert model.privacy_.unit == "one person"


@pytest.mark.filterwarnings("ignore:epsilon = ")
@pytest.mark.parametrize("person", ["p3", "p11", "p40"])
def test_a_person_with_too_many_rows_moves_each_sum_by_the_clip_at_most(table, person):
    """Replay: in one table all of a person's rows are bad; some are beyond max_records."""
    x, y, who = table
    bad = x.copy()
    bad[who == person] = np.nan

    def fit(inputs):
        model = classifier(on_bad_rows="zero", epochs=2, epsilon=20.0)
        return model.fit(inputs, y, units=who, max_records=2).standardisation_

    result = dpbnn.replay(fit, x, bad, trace=False).check()
    assert 0 < result.worst <= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [({"max_records": 2}, "say whose they are"), ({"max_records": 0}, "max_records")],
)
def test_wrong_max_records_are_refused_first(table, options, words):
    x, y, who = table
    ledger = dpbnn.Ledger()
    more = {} if options["max_records"] else {"units": who}
    with pytest.raises(ValueError, match=words):
        classifier(ledger=ledger).fit(x, y, **more, **options)
    assert ledger.releases == 0
