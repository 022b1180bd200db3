"""What estimators and commands refuse: in one line, before anything is spent."""

import datetime
import json

import numpy as np
import pytest
import torch
from command_line import run

import dpbnn

X = np.random.default_rng(0).uniform(size=(60, 3))
Y = np.arange(60) % 2
LINE = {"epsilon": 2.0, "bounds": (0, 1), "classes": [0, 1], "epochs": 3}


def holed(value):
    found = X.copy()
    found[3, 1] = value
    return found


def refused(ledger, call, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert ledger.releases == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": 0}, "clip=0: must be a finite number > 0"),
        ({"clip": 0, "method": "sgd"}, "clip=0"),
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"epsilon": "1"}, "epsilon='1': is of type str"),
        ({"epochs": "3"}, "epochs='3'"),
        ({"batch_size": "all"}, "batch_size='all'"),
        ({"delta": 0.5}, r"delta=0\.5: must lie in \(0, 0\.1\)"),
        ({"hidden": None}, "hidden=None: must be widths"),
        ({"hidden": "32"}, "hidden='32'"),
        ({"hidden": (3.5,)}, r"hidden=\(3\.5,\)"),
        ({"samples": 0}, "samples=0: must be a whole number >= 1"),
        ({"samples": -1}, "samples=-1"),
        ({"samples": 2.5}, r"samples=2\.5"),
        ({"tuning_runs": -1}, "tuning_runs=-1: must be a whole number >= 0"),
        ({"tuning_runs": "a"}, "tuning_runs='a'"),
        ({"prior": "gaussian"}, r"prior='gaussian': must be a prior, such as dpbnn\.Gaussian"),
        ({"prior": 1.0, "bounds": "private"}, "prior="),
        ({"samples": 0, "bounds": "private"}, "samples=0"),
        ({"device": "abacus"}, "device='abacus': cannot be used here"),
    ],
)
def test_wrong_settings_of_an_estimator(change, message):
    ledger = dpbnn.Ledger()
    model = dpbnn.PrivateBayesClassifier(**{**LINE, **change}, ledger=ledger)
    refused(ledger, lambda: model.fit(X, Y), message)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(value):
    ledger = dpbnn.Ledger()
    model = dpbnn.PrivateBayesClassifier(**LINE, ledger=ledger)
    refused(ledger, lambda: model.fit(holed(value), Y), r"contains.*on_bad_rows='zero'")
    model.set_params(on_bad_rows="zero").fit(holed(value), Y)
    with pytest.raises(ValueError, match="remove or correct those rows") as caught:
        model.predict(holed(value))
    assert "\n" not in str(caught.value)


def test_columns_that_are_no_numbers():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=list("abc"))
    ledger = dpbnn.Ledger()
    model = dpbnn.PrivateBayesClassifier(**LINE, ledger=ledger)
    for value, message in (
        (pandas.Timestamp("2020-01-01"), "column 'when' holds datetime64.*days since"),
        (pandas.Timedelta(days=3), "column 'when' holds timedelta64"),
        (datetime.date(2020, 1, 1), "must hold numbers.*date"),
        ("Ulm", r"must hold numbers \(some cells are text, column 'when': 60 bad cells\)"),
    ):
        wrong = table.assign(when=value)
        refused(ledger, lambda wrong=wrong: model.fit(wrong, Y), message)
    shown = dpbnn.PrivateBayesClassifier(**LINE, ledger=ledger, on_bad_rows="show")
    refused(ledger, lambda: shown.fit(wrong, Y), "row 0, column 'when': 'Ulm'")
    dates = np.full((60, 1), np.datetime64("2020-01-01"))
    refused(ledger, lambda: model.fit(dates, Y), "X: holds datetime64")
    refused(ledger, lambda: model.fit(X, dates[:, 0]), "y: holds datetime64")


def test_frames_of_polars():
    polars = pytest.importorskip("polars")
    table = polars.DataFrame({"a": X[:, 0]})
    ledger = dpbnn.Ledger()
    model = dpbnn.PrivateBayesClassifier(**LINE, ledger=ledger)
    refused(ledger, lambda: model.fit(table.lazy(), Y), r"X: is a LazyFrame.*X\.collect\(\)")
    dated = table.with_columns(when=polars.lit(datetime.date(2020, 1, 1)))
    refused(ledger, lambda: model.fit(dated, Y), "column 'when' holds Date")
    assert model.fit(table, Y).predict(table).shape == (60,)


SCHEMA = '[target]\nname = "y"\nclasses = ["no", "yes"]\n[columns.age]\nbounds = [0, 100]\n'
TABLE = "age,y\n" + "39,no\n50,yes\n61,no\n20,yes\n" * 5
FIT = ("fit", "table.csv", "--schema", "schema.toml", "--epsilon", "1", "--epochs", "5", "--out",
       "run", "--quiet")  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "table.csv").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--clip", "0"], "clip=0.0: must be a finite number > 0"),
        (["--clip", "0", "--method", "sgd"], "clip=0.0"),
        (["--samples", "0"], "samples=0: must be a whole number >= 1"),
        (["--tuning-runs", "-1"], "tuning_runs=-1"),
        (["--device", "abacus"], "device='abacus': cannot be used here"),
        (["--epochs", "0"], "epochs=0.0"),
        (["--batch-size", "0"], "batch_size=0.0"),
        (["--learning-rate", "0"], "learning_rate=0.0"),
        (["--delta", "0.5"], "delta=0.5"),
    ],
)
def test_wrong_options_of_fit(capsys, place, options, message):
    book = dpbnn.Ledger(place / "shared.jsonl", epsilon=2.0, delta=1e-5)
    before = sorted(path.name for path in place.iterdir())
    code, out, err = run(capsys, *FIT, "--ledger", "shared.jsonl", *options)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert err.startswith(f"dpbnn: {message}")
    assert sorted(path.name for path in place.iterdir()) == before
    assert book.releases == 0


def test_a_gpu_that_is_not_there(capsys, place):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, _, err = run(capsys, *FIT, "--device", "cuda")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "device='cuda': cannot be used here" in err
    assert "device='cpu'" in err
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("1,000", "take it out where it separates thousands"),
        ("12,500", "or read the table with decimal=',' where it is a decimal comma"),
        ("1,234,567", "separators of thousands; take them out"),
        ("12,345.67", "separators of thousands; take them out"),
        ("1.234,56", "separators of thousands; take them out"),
        ("1 234 567", "separators of thousands; take them out"),
        ("3,5", "read the table with decimal=','"),
    ],
)
def test_separators_of_thousands_are_not_taken_for_decimal_commas(capsys, place, text, advice):
    (place / "table.csv").write_text(TABLE + f'"{text}",no\n')
    code, _, err = run(capsys, *FIT)
    assert (code, len(err.splitlines())) == (2, 1)
    assert advice in err


def test_a_table_of_10000_columns_is_fitted(capsys, place):
    names = [f"c{i}" for i in range(10_000)]
    rows = [",".join([*("1" for _ in names), kind]) for kind in ("no", "yes") * 5]
    (place / "table.csv").write_text("\n".join([",".join([*names, "y"]), *rows]) + "\n")
    bounds = [f"{name} = [0, 2]" for name in names] + ['y = ["no", "yes"]']
    (place / "bounds.toml").write_text("\n".join(bounds))
    code, out, _ = run(
        capsys, "fit", "table.csv", "--target", "y", "--bounds", "bounds.toml", "--epsilon", "1",
        "--epochs", "2", "--out", "run", "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["rows"] == 10
    assert dpbnn.Ledger(place / "run" / "ledger.jsonl").releases == 2


def test_account_states_what_a_fresh_run_has_spent(capsys, place):
    """The command of the README, without a delta."""
    assert run(capsys, *FIT)[0] == 0
    privacy = json.loads((place / "run" / "manifest.json").read_text())["privacy"]
    code, out, err = run(capsys, "account", "run/ledger.jsonl")
    assert (code, err) == (0, "")
    assert "run/ledger.jsonl: 5 releases" in out
    assert "Differential privacy: epsilon =" in out
    code, out, _ = run(capsys, "account", "run/ledger.jsonl", "--json")
    values = json.loads(out)
    assert values["budget"] is None
    assert values["statement"]["epsilon"] == pytest.approx(privacy["epsilon"])
    assert values["statement"]["delta"] == privacy["delta"] == 1e-5
    code, out, _ = run(capsys, "account", "run/ledger.jsonl", "--delta", "1e-7", "--json")
    assert json.loads(out)["statement"]["delta"] == 1e-7
    assert run(capsys, *FIT, "--overwrite", "--delta", "1e-6")[0] == 0
    code, out, _ = run(capsys, "account", "run/ledger.jsonl")
    assert (code, "10 releases" in out) == (0, True)


def test_account_states_what_a_fit_in_a_folder_has_spent(capsys, tmp_path):
    plan = dpbnn.plan(noise_multiplier=2.0, delta=1e-4, n=60, batch_size=20, steps=3)
    data = torch.from_numpy(X).float(), torch.from_numpy(Y)
    posterior = dpbnn.fit(
        dpbnn.mlp(3, (4,), 2), data, method=dpbnn.SGD(), plan=plan, out=tmp_path / "run"
    )
    code, out, _ = run(capsys, "account", str(tmp_path / "run" / "ledger.jsonl"), "--json")
    assert code == 0
    assert json.loads(out)["statement"]["epsilon"] == pytest.approx(posterior.privacy.epsilon)
