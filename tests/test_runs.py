"""Run folders: one format for estimators and the command line, and fits that go on."""

import csv
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from interruption import stop_after, stopped_after

import dpbnn
from dpbnn import PrivateBayesClassifier, PrivateBayesRegressor, training
from dpbnn.data import Column, Schema, read_table
from dpbnn.estimators import budget, fitting
from dpbnn.estimators.held_out import HeldOut

SCHEMA = Schema(
    (Column("score", bounds=(0, 100)), Column("city", categories=("Ulm", "Bonn"))),
    Column("hired", categories=("yes", "no")),
    ignore=("wage",),
)
STEPS = {"epochs": 12, "epsilon": 2.0, "random_state": 0}
FIT = ("fit", "train.csv", "--schema", "schema.toml", "--epsilon", "2", "--epochs", "12", "--quiet")


def columns(n, seed):
    rng = np.random.default_rng(seed)
    score = rng.uniform(0, 100, n)
    hired = np.where(score + 5 * rng.normal(size=n) > 50, "yes", "no")
    city = rng.choice(["Ulm", "Bonn"], n)
    return {"score": score, "city": city, "hired": hired, "wage": 1000 + 20 * score}


def write_csv(path, table):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))


def read_csv(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "train.csv", columns(300, 0))
    write_csv(tmp_path / "test.csv", columns(100, 1))
    (tmp_path / "schema.toml").write_text(SCHEMA.to_toml())
    return tmp_path


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


# One format


def test_a_saved_estimator_is_a_run_of_the_command_line(place, capsys):
    model = PrivateBayesClassifier(schema=SCHEMA, conformal=0.3, **{**STEPS, "epsilon": 8.0})
    model.fit(columns(1500, 0)).save("model")
    assert names("model") == {"manifest.json", "model", "schema.toml"}
    assert run(capsys, "predict", "model", "test.csv", "--out", "p.csv", "--quiet")[0] == 0
    lines = read_csv("p.csv")
    assert list(lines[0])[:3] == ["prediction", "p(yes)", "p(no)"]
    table = read_table("test.csv")
    assert [line["prediction"] for line in lines] == model.predict(table).tolist()
    inside = model.predict_set(table)
    assert inside.any(1).any()
    for line, row in zip(lines, inside, strict=True):
        held = [name for name in line["set"].split("|") if name]
        assert sorted(held) == model.classes_[row].tolist()
    code, out, _ = run(capsys, "evaluate", "model", "test.csv", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["metrics"]["accuracy"]["value"] == pytest.approx(model.score(table))
    assert found["conformal"]["kind"] == "sets"
    assert run(capsys, "report", "model", "--out", "page.html", "--quiet")[0] == 0
    assert "Classification of hired" in Path("page.html").read_text()


def test_a_run_of_the_command_line_is_an_estimator(place, capsys):
    assert run(capsys, *FIT, "--out", "run")[0] == 0
    opened = dpbnn.load_run("run")
    model = PrivateBayesClassifier.load("run")
    test = columns(100, 1)
    assert opened.schema == SCHEMA
    assert model.classes_.tolist() == ["no", "yes"]
    assert np.array_equal(opened.predict(test), model.predict(test))
    assert np.array_equal(opened.predict("test.csv"), model.predict(test))
    assert opened.predictive(test).mean.shape == (100, 2)
    assert opened.privacy == model.privacy_
    assert 1.9 < opened.privacy.epsilon <= 2.0
    assert model.ledger_.releases == dpbnn.Ledger("run/ledger.jsonl").releases
    assert opened.evaluate(test).metrics["accuracy"].value == pytest.approx(model.score(test))
    with pytest.raises(ValueError, match="the one that the run was trained on"):
        opened.evaluate("train.csv")
    opened.evaluate("train.csv", training_table=True)
    assert opened.metrics is None
    assert opened.report("page.html", test, test_data_public=True) == Path("page.html")
    assert opened.metrics["task"] == "classification"
    assert "most certain" in Path("page.html").read_text().lower()
    assert opened.report() == Path("run/report.html")
    with pytest.raises(ValueError, match=r"dpbnn\.PrivateBayesClassifier\.load"):
        PrivateBayesRegressor.load("run")


def test_a_saved_estimator_without_a_schema_predicts_files_too(place, capsys):
    pandas = pytest.importorskip("pandas")
    data = columns(300, 0)
    x = pandas.DataFrame({"score": data["score"], "more": data["wage"]})
    model = PrivateBayesClassifier(
        bounds={"score": (0, 100), "more": (0, 4000)}, classes=["no", "yes"], **STEPS
    ).fit(x, data["hired"])
    model.save("model")
    assert not Path("model/schema.toml").exists()
    test = columns(100, 1)
    frame = pandas.DataFrame({"more": test["wage"], "score": test["score"]})
    write_csv(place / "new.csv", {"id": range(100), **frame, "hired": test["hired"]})
    expected = model.predict(frame[["score", "more"]])
    assert dpbnn.load_run("model").predict("new.csv").tolist() == expected.tolist()
    code, _, err = run(capsys, "predict", "model", "new.csv", "--id", "id", "--out", "p.csv")
    assert code == 0, err
    lines = read_csv("p.csv")
    assert [line["prediction"] for line in lines] == expected.tolist()
    code, _, err = run(capsys, "evaluate", "model", "new.csv")
    assert code == 2
    assert "--target: missing" in err
    code, out, err = run(capsys, "evaluate", "model", "new.csv", "--target", "hired", "--json")
    assert code == 0, err
    right = np.mean(expected == test["hired"])
    assert json.loads(out)["metrics"]["accuracy"]["value"] == pytest.approx(right)
    page = model.report("page.html", frame[["score", "more"]], test["hired"])
    assert "number, 0 to 4000" in page.read_text()


def test_a_page_of_an_estimator_in_memory(place):
    model = PrivateBayesRegressor(
        schema=Schema(SCHEMA.columns, Column("wage", bounds=(0, 4000)), ignore=("hired",)), **STEPS
    ).fit(columns(300, 0))
    text = model.report("page.html", columns(100, 1)).read_text()
    assert "Regression of wage" in text
    assert "Metrics" in text or "metrics" in text
    assert "RMSE" in text.upper()
    assert model.report("plain.html").is_file()


def test_runs_of_earlier_versions_are_estimators_now():
    """Their estimators took encoded inputs; tests/test_saved.py has what they predicted."""
    folder = Path(__file__).parent / "saved"
    expected = json.loads((folder / "expected.json").read_text())["run"]
    model = dpbnn.PrivateBayesClassifier.load(folder / "run")
    found = model.predict(folder / "table.csv")
    assert [str(label) for label in found] == [line.split(",")[0] for line in expected[1:]]
    assert model.schema_ is not None
    assert model.get_params()["bounds"] is None
    bare = dpbnn.load_run(folder / "estimator")
    assert bare.schema is None
    assert bare.privacy.private


# Fits that are interrupted


@pytest.fixture
def interrupted(place):
    """A fit into run/ that was stopped after 5 of its 12 steps."""
    model = PrivateBayesClassifier(schema=SCHEMA, **STEPS)
    with stopped_after(5):
        model.fit(columns(300, 0), out="run")
    assert not hasattr(model, "posterior_")
    return model


def test_a_fit_into_a_folder_is_a_run(place, capsys):
    model = PrivateBayesClassifier(schema=SCHEMA, **STEPS).fit(columns(300, 0), out="run")
    files = {"manifest.json", "ledger.jsonl", "ledger.jsonl.head", "schema.toml", "model", ".lock"}
    assert names("run") == {*files, "private.json"}
    assert np.array_equal(dpbnn.load_run("run").predict("test.csv"), model.predict("test.csv"))
    assert run(capsys, "evaluate", "run", "test.csv", "--quiet")[0] == 0
    with pytest.raises(ValueError, match="holds a run already"):
        model.fit(columns(300, 0), out="run")
    with pytest.raises(ValueError, match="holds no interrupted fit, and its run is complete"):
        model.fit(columns(300, 0), out="run", resume=True)


def test_a_resumed_fit_makes_every_release_once(interrupted):
    """The standardisation of the first attempt is used, and nothing is paid twice."""
    assert {"progress", "ledger.jsonl"} <= names("run")
    with pytest.raises(ValueError, match=r"interrupted and is no model yet; .*resume=True"):
        dpbnn.load_run("run")
    before = dpbnn.Ledger("run/ledger.jsonl")
    kept = json.loads(Path("run/progress/released.json").read_text())["values"]
    assert before.releases == 2 + 12  # the steps are charged in one block
    interrupted.fit(columns(300, 0), out="run", resume=True)
    assert "progress" not in names("run")
    book = dpbnn.Ledger("run/ledger.jsonl")
    labels = [mechanism["label"] for mechanism in interrupted.privacy_.mechanisms]
    assert [label.split(",")[0] for label in labels] == [
        "private standardisation", "sgd", "recalibration",
    ]  # fmt: skip
    planned = sorted(map(repr, interrupted.plan_.events))
    assert sorted(map(repr, book.events)) == planned
    assert interrupted.privacy_.epsilon == pytest.approx(book.statement(delta=1e-5).epsilon)
    assert interrupted.privacy_.epsilon <= 2.0
    standard = kept["standard"]["tuple"][0]["array"]
    assert interrupted.standardisation_[0].tolist() == standard[:3]


def test_a_resumed_fit_is_the_fit_that_was_not_interrupted(place, monkeypatch):
    """With the same keys, the resumed fit ends where the other one does."""
    import secrets

    monkeypatch.setattr(secrets, "token_bytes", lambda count: bytes(count))
    table = columns(300, 0)
    whole = PrivateBayesClassifier(schema=SCHEMA, **STEPS).fit(table, out="whole")
    parts = PrivateBayesClassifier(schema=SCHEMA, **STEPS)
    with stopped_after(5):
        parts.fit(table, out="parts")
    parts.fit(table, out="parts", resume=True)
    assert np.array_equal(parts.predict_proba(table), whole.predict_proba(table))


def test_an_interruption_says_what_was_spent_and_how_to_go_on(place, capsys, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(5, patch)
        code, _, err = run(capsys, *FIT, "--out", "run")
    assert code == 130
    assert "epsilon " in err
    assert "is spent, by the ledger run/ledger.jsonl" in err
    assert "--resume" in err
    spent = float(err.split("epsilon ")[1].split()[0])
    found = dpbnn.Ledger("run/ledger.jsonl").statement(delta=1e-5).epsilon
    assert found <= spent <= found + 0.01
    code, _, err = run(capsys, *FIT, "--out", "run")
    assert code == 2
    assert "was interrupted" in err
    assert "--resume" in err
    code, _, err = run(capsys, *FIT, "--out", "run", "--resume")
    assert code == 0, err
    assert dpbnn.load_run("run").privacy.epsilon <= 2.0
    code, _, err = run(capsys, *FIT, "--out", "new", "--resume")
    assert code == 2
    assert "holds no interrupted fit" in err
    assert not Path("new").exists()


def test_without_a_folder_an_interruption_says_that_it_cannot_go_on(place):
    model = PrivateBayesClassifier(schema=SCHEMA, **STEPS)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(KeyboardInterrupt) as stop:
            model.fit(columns(300, 0))
    assert "is spent" in stop.value.__notes__[0]
    assert "out='run/'" in stop.value.__notes__[0]


@pytest.mark.parametrize("kind", ["a value", "a label", "the order", "fewer rows"])
@pytest.mark.parametrize("keys", ["kept", "lost"])
def test_a_changed_table_is_not_gone_on_with(interrupted, kind, keys):
    """Without keys, the rule of dpbnn.fit would let it go on with new noise."""
    table = columns(300, 0)
    if kind == "a value":
        table["score"][7] += 1
    elif kind == "a label":
        table["hired"][7] = {"yes": "no", "no": "yes"}[str(table["hired"][7])]
    elif kind == "the order":
        table = {name: values[::-1] for name, values in table.items()}
    else:
        table = {name: values[:-1] for name, values in table.items()}
    if keys == "lost":
        Path("run/progress/training/keys.json").unlink()
    before = dpbnn.Ledger("run/ledger.jsonl").releases
    with pytest.raises(ValueError, match="the table is not that of the fit"):
        interrupted.fit(table, out="run", resume=True)
    assert dpbnn.Ledger("run/ledger.jsonl").releases == before
    interrupted.fit(columns(300, 0), out="run", resume=True)


def test_other_settings_are_not_gone_on_with(interrupted):
    for change in ({"epsilon": 3.0}, {"hidden": (8,)}, {"epochs": 20}, {"recalibrate": None}):
        before = interrupted.get_params()
        with pytest.raises(ValueError, match=f"{next(iter(change))}: not as in the fit"):
            interrupted.set_params(**change).fit(columns(300, 0), out="run", resume=True)
        interrupted.set_params(**{name: before[name] for name in change})


def test_lost_keys_are_paid_for(interrupted):
    """The steps after the checkpoint get new noise, so they are other releases."""
    Path("run/progress/training/keys.json").unlink()
    interrupted.fit(columns(300, 0), out="run", resume=True)
    book = dpbnn.Ledger("run/ledger.jsonl")
    steps = sum(event.count for event in book.events) - 2
    assert steps > 12 + 7 - 1
    assert interrupted.privacy_.epsilon > 2.0
    assert interrupted.privacy_.epsilon == pytest.approx(book.statement(delta=1e-5).epsilon)


@pytest.mark.parametrize("loss", ["another", "an old copy"])
def test_a_ledger_without_the_first_part_is_refused(place, loss):
    model = PrivateBayesClassifier(schema=SCHEMA, ledger="book.jsonl", **STEPS)
    dpbnn.Ledger("book.jsonl", epsilon=4.0, delta=1e-5)
    if loss == "an old copy":
        shutil.copytree(".", "backup")
    with stopped_after(5):
        model.fit(columns(300, 0), out="run")
    for name in ("book.jsonl", "book.jsonl.head"):
        if loss == "an old copy":
            shutil.copy(f"backup/{name}", name)
        else:
            os.unlink(name)
    with pytest.raises(ValueError, match="not in the ledger book"):
        model.fit(columns(300, 0), out="run", resume=True)
    assert dpbnn.Ledger("book.jsonl").releases == 0


def test_a_budget_pays_for_a_resumed_fit_once(place):
    """It holds one fit; neither an interruption nor a forgotten ledger makes it too small."""
    model = PrivateBayesClassifier(schema=SCHEMA, ledger="book.jsonl", **STEPS)
    with stopped_after(5):
        model.fit(columns(300, 0), out="run")
    with pytest.raises(ValueError, match="not in the ledger run"):  # and nothing is lost by it
        model.set_params(ledger=None).fit(columns(300, 0), out="run", resume=True)
    model.set_params(ledger="book.jsonl").fit(columns(300, 0), out="run", resume=True)
    assert model.ledger_.budget == (2.0, 1e-5)
    assert model.privacy_.epsilon <= 2.0
    with pytest.raises(dpbnn.BudgetExceeded):
        model.fit(columns(300, 0), out="again")
    assert not Path("again").exists()


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("where", "name"), [(budget, "standardisation"), (HeldOut, "found")], ids=["before", "after"]
)
def test_releases_beside_the_training_are_never_lost_to_an_interruption(place, where, name):
    """Ctrl-C in the middle of one waits until what was released is on disk."""
    model = PrivateBayesClassifier(schema=SCHEMA, **STEPS)
    original = getattr(where, name)

    def struck(*arguments):
        interrupt()
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, struck)
        with pytest.raises(KeyboardInterrupt) as stop:
            model.fit(columns(300, 0), out="run")
    assert "is spent" in stop.value.__notes__[0]
    if name == "found":
        assert "run is complete" in stop.value.__notes__[0]
        assert dpbnn.load_run("run").privacy.epsilon <= 2.0
    else:
        model.fit(columns(300, 0), out="run", resume=True)
    planned = dpbnn.load_run("run").estimator.plan_.events
    book = dpbnn.Ledger("run/ledger.jsonl")
    assert sorted(map(repr, book.events)) == sorted(map(repr, planned))


def test_a_crash_after_the_training_does_not_train_again(place, monkeypatch):
    """The posterior is on disk; only what the crash broke off is paid for again."""
    model = PrivateBayesClassifier(schema=SCHEMA, **STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting._Fit, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.fit(columns(300, 0), out="run")
    monkeypatch.setattr(training, "fit", lambda *_, **__: pytest.fail("trained again"))
    model.fit(columns(300, 0), out="run", resume=True)
    assert model.privacy_.epsilon <= 2.0
    book = dpbnn.Ledger("run/ledger.jsonl")
    assert sorted(map(repr, book.events)) == sorted(map(repr, model.plan_.events))


def test_a_calibration_that_is_repeated_is_paid_for(place):
    """A crash after the temperature was released, and before it was on disk."""
    model = PrivateBayesClassifier(schema=SCHEMA, **STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting._Fit, "_stamped", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.fit(columns(300, 0), out="run")
    once = dpbnn.Ledger("run/ledger.jsonl").releases
    model.fit(columns(300, 0), out="run", resume=True)
    book = dpbnn.Ledger("run/ledger.jsonl")
    assert book.releases > once
    assert model.privacy_.epsilon == pytest.approx(book.statement(delta=1e-5).epsilon)
    assert model.privacy_.epsilon > PrivateBayesClassifier.planned(model, 300, 3, 2).epsilon


def test_private_bounds_and_numbers_go_on_too(place):
    """Without a schema: bounds that were paid for, then an interruption."""
    rng = np.random.default_rng(0)
    x = rng.normal(50, 10, (4000, 2))
    y = (x[:, 0] > 50).astype(int)
    model = PrivateBayesClassifier(bounds="private", classes=[0, 1], epochs=3, random_state=0)
    with stopped_after(5):
        model.fit(x, y, out="run")
    model.fit(x, y, out="run", resume=True)
    assert sorted(map(repr, model.ledger_.events)) == sorted(map(repr, model.plan_.events))
    opened = dpbnn.load_run("run")
    assert opened.estimator.score(x, y) == model.score(x, y) > 0.8
    with pytest.raises(ValueError, match="the one that the run was trained on"):
        opened.evaluate(x, y)
    with pytest.raises(ValueError, match="one in memory"):
        model.set_params(ledger=dpbnn.Ledger()).fit(x, y, out="other")


@pytest.mark.parametrize("method", ["sgld", "vi", "moments", "not private"])
def test_every_method_goes_on(place, method, monkeypatch):
    """SGLD writes its iterates beside the checkpoint; moments has few releases.

    Without privacy the prior is chosen once.
    """
    chosen = []
    prior = dpbnn.Gaussian(0.2)
    monkeypatch.setattr(fitting, "chosen_prior", lambda *given: chosen.append(given) or prior)
    given = {"method": "auto" if method == "not private" else method, "random_state": 0}
    given |= {"hidden": () if method == "moments" else (8,)}
    given |= {"epsilon": None if method == "not private" else 2.0}
    if method != "moments":
        given |= {"epochs": 40}
    model = PrivateBayesClassifier(schema=SCHEMA, **given)
    with stopped_after(1 if method == "moments" else 30):
        model.fit(columns(300, 0), out="run")
    model.fit(columns(300, 0), out="run", resume=True)
    assert "progress" not in names("run")
    assert model.score(columns(100, 1)) > 0.5
    assert np.array_equal(dpbnn.load_run("run").predict("test.csv"), model.predict("test.csv"))
    assert len(chosen) == (method == "not private")
    if method != "not private":
        assert sorted(map(repr, model.ledger_.events)) == sorted(map(repr, model.plan_.events))


def test_beginning_again_keeps_what_was_spent(interrupted):
    before = dpbnn.Ledger("run/ledger.jsonl").releases
    interrupted.fit(columns(300, 0), out="run", overwrite=True)
    book = dpbnn.Ledger("run/ledger.jsonl")
    assert book.releases > before
    assert interrupted.privacy_.epsilon == pytest.approx(book.statement(delta=1e-5).epsilon)
    assert interrupted.privacy_.epsilon > 2.0
    assert any("before this fit" in caveat for caveat in interrupted.privacy_.caveats)
