import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import run

import dpbnn
from dpbnn.estimators.workspace import new_run
from dpbnn.messages import HiddenError
from dpbnn.runs import Run

PLAN = ["plan", "--delta", "1e-5", "--n", "60000", "--batch-size", "256", "--epochs", "15"]


def test_plan_prints_noise_steps_and_every_epsilon(capsys):
    code, out, _ = run(capsys, *PLAN, "--noise-multiplier", "1.3")
    assert code == 0
    for word in ("0.8646", "0.9546", "0.8346", "3516", "approximation", "noise / signal"):
        assert word in out, word


def test_plan_as_json_is_a_plan(capsys):
    code, out, _ = run(capsys, *PLAN, "--epsilon", "1", "--json")
    assert code == 0
    values = json.loads(out)
    assert 0.995 <= values["epsilon"] <= 1
    assert set(values["epsilons"]) == {"pld", "rdp", "gdp-clt"}
    assert dpbnn.Plan.from_json(out).steps == 3516


def test_account_reads_a_ledger(capsys, tmp_path):
    path = tmp_path / "ledger.jsonl"
    book = dpbnn.Ledger(path, epsilon=2.0, delta=1e-5)
    book.spend(dpbnn.Poisson(1000, 10).event(1.5, 100), label="training", clip=1.0)
    code, out, _ = run(capsys, "account", str(path))
    assert code == 0
    assert "100 releases" in out
    assert "Budget: epsilon 2" in out
    assert "training" in out
    code, out, _ = run(capsys, "account", str(path), "--json")
    values = json.loads(out)
    assert values["releases"] == 100
    assert values["statement"]["epsilon"] == pytest.approx(book.epsilon())


def test_demo_trains_on_the_digits_and_writes_a_report(capsys, tmp_path):
    folder = tmp_path / "demo"
    code, out, _ = run(capsys, "demo", "--out", str(folder))
    assert code == 0
    assert "1347 training images" in out
    assert "Differential privacy: epsilon =" in out
    assert f"Wrote {folder / 'report.html'}" in out
    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    assert metrics["accuracy"]["value"] > 0.88
    assert "<svg" in (folder / "report.html").read_text()
    assert run(capsys, "demo", "--out", str(folder), "--quiet")[:2] == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN, "--epsilon", "-1"], "epsilon=-1"),
        ([*PLAN, "--epsilon", "nan"], "epsilon=nan"),
        ([*PLAN, "--epsilon", "one"], "'one' is not a valid float"),
        ([*PLAN], "missing: give all of epsilon"),
        ([*PLAN, "--epsilon", "1", "--relation", "swap"], "relation='swap'"),
        ([*PLAN, "--epsilon", "1", "--sampling", "full"], "leave batch_size out"),
        (["plan", "--epsilon", "1"], "Missing option '--delta'"),
        (["account", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["nothing"], "No such command 'nothing'"),
        (["fit", "t.csv", "--out", "run"], "give a budget, such as --epsilon 1"),
        (["fit", "t.csv", "--out", "run", "--epsilon", "1", "--non-private"], "and not both"),
        (["fit", "t.csv", "--out", "no/where/run", "--epsilon", "1"], "its parent is not a folder"),
        (["predict", "nowhere", "t.csv"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["compare", "t.csv", "--epsilons", "0", "--test", "t.csv", "--out", "c"], "--epsilons 0"),
        (
            [
                "compare",
                "t.csv",
                "--epsilons",
                "1",
                "--methods",
                "magic",
                "--test",
                "t.csv",
                "--out",
                "c",
            ],
            "--methods magic",
        ),
    ],
)
def test_bad_values_give_one_line_and_exit_code_two(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_error_on_private_data_is_one_line_too(capsys, monkeypatch):
    def fails(**arguments):
        raise HiddenError("the network fails on the data (ValueError); change it")

    monkeypatch.setattr(dpbnn, "plan", fails, raising=False)
    code, out, err = run(capsys, "plan", "--delta", "1e-5", "--n", "100")
    assert (code, out) == (2, "")
    assert err == "dpbnn: the network fails on the data (ValueError); change it\n"


def test_a_damaged_ledger_is_one_line_too(capsys, tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text("not a ledger\n")
    code, _, err = run(capsys, "account", str(path))
    assert code == 2
    assert "is no ledger" in err


@pytest.mark.parametrize(
    "command",
    [[], *([name] for name in ("plan", "account", "demo", "fit", "predict", "evaluate", "report",
                               "compare"))],
)  # fmt: skip
def test_help_has_an_example(capsys, command):
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    assert "Usage: dpbnn" in out
    assert "\\b" not in out
    assert "\b" not in out
    if command:
        above, example = re.split(r"^ *Example:\n", out, flags=re.MULTILINE)
        assert above.endswith("\n\n"), "a paragraph of its own"
        assert example.startswith(f"    dpbnn {command[0]}"), "a line of its own"


SCHEMA = """
[target]
name = "hired"
classes = ["no", "yes"]
[columns.score]
bounds = [0, 100]
[columns.city]
categories = ["Ulm", "Bonn"]
"""
FIT = ("fit", "train.csv", "--schema", "schema.toml", "--epsilon", "2", "--epochs", "100",
       "--tuning-runs", "0")  # fmt: skip


def write_table(path, n, seed, target=True):
    """Write n rows in which a high score gets hired, and earns more."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["score", "city", *(["hired", "wage"] if target else [])])
        for _ in range(n):
            score, city = rng.uniform(0, 100), rng.choice(["Ulm", "Bonn"])
            hired = "yes" if score + 5 * rng.normal() > 50 else "no"
            wage = 1000 + 20 * score + 100 * rng.normal()
            writer.writerow([f"{score:.3f}", city, *([hired, f"{wage:.2f}"] if target else [])])


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with tables, schemas and a fitted run, as the working directory."""
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "train.csv", 400, 0)
    write_table(tmp_path / "test.csv", 200, 1)
    write_table(tmp_path / "new.csv", 7, 2, target=False)
    (tmp_path / "schema.toml").write_text('ignore = ["wage"]\n' + SCHEMA)
    return tmp_path


def fitted(capsys, *more):
    code, _, err = run(capsys, *FIT, "--out", "run", "--quiet", *more)
    assert (code, err) == (0, "")
    return Run.open(Path("run"))


def test_fit_predict_evaluate_report(capsys, place):
    code, out, err = run(capsys, *FIT, "--out", "run")
    assert code == 0
    assert "400 rows, 2 columns (3 after encoding), classification of 'hired'" in out
    assert "Differential privacy: epsilon = 1.99" in out
    assert "training: step 100/100" in err
    held = {path.name for path in (place / "run").iterdir()}
    files = {"manifest.json", "ledger.jsonl", "ledger.jsonl.head", "schema.toml", "model", ".lock"}
    assert held == {*files, "private.json"}
    assert sorted(path.name for path in place.iterdir() if path.name.startswith(".")) == []

    assert run(capsys, "predict", "run", "new.csv", "--out", "p.csv")[0] == 0
    rows = list(csv.DictReader((place / "p.csv").open()))
    assert list(rows[0]) == ["prediction", "p(no)", "p(yes)", "std", "epistemic", "aleatoric"]
    scores = [float(row["score"]) for row in csv.DictReader((place / "new.csv").open())]
    for score, row in zip(scores, rows, strict=True):
        assert float(row["p(no)"]) + float(row["p(yes)"]) == pytest.approx(1, abs=1e-5)
        if abs(score - 50) > 20:
            assert row["prediction"] == ("yes" if score > 50 else "no")

    code, out, _ = run(capsys, "evaluate", "run", "test.csv", "--report", "report.html")
    assert code == 0
    assert "accuracy" in out
    assert (
        json.loads((place / "run/metrics.json").read_text())["metrics"]["accuracy"]["value"] > 0.85
    )
    page = (place / "report.html").read_text()
    assert "not declared public" in page
    assert not re.search(r"test record \d", page)

    assert run(capsys, "report", "run")[0] == 0
    assert "calibration" in (place / "run/report.html").read_text().lower()
    run(capsys, "evaluate", "run", "test.csv", "--test-data-public")
    assert re.search(r"test record \d", (place / "run/report.html").read_text())


def test_a_regression_in_its_own_units(capsys, place):
    """The noise moves the means by some 150; limits of 700 give a false alarm of about 1e-4."""
    (place / "bounds.toml").write_text(
        'score = [0, 100]\ncity = ["Ulm", "Bonn"]\nhired = ["no", "yes"]\nwage = [0, 4000]\n'
    )
    code, _, err = run(capsys, "fit", "train.csv", "--target", "wage", "--bounds", "bounds.toml",
                       "--epsilon", "200", "--out", "run", "--json")  # fmt: skip
    assert code == 0, err
    (place / "more.csv").write_text("score,city,hired\n10,Ulm,no\n90,Bonn,yes\n")
    code, out, _ = run(capsys, "predict", "run", "more.csv")
    assert code == 0
    low, high = ({k: float(v) for k, v in row.items()} for row in csv.DictReader(out.splitlines()))
    assert list(low) == ["mean", "std", "epistemic", "aleatoric", "low", "high"]
    assert low["mean"] == pytest.approx(1200, abs=700)
    assert high["mean"] == pytest.approx(2800, abs=700)
    for row in (low, high):
        assert row["std"] ** 2 == pytest.approx(
            row["epistemic"] ** 2 + row["aleatoric"] ** 2, rel=1e-4
        )
        assert row["low"] < row["mean"] < row["high"]
    code, out, _ = run(capsys, "evaluate", "run", "test.csv", "--json")
    assert json.loads(out)["metrics"]["rmse"]["value"] < 700


def test_json_is_all_that_is_printed(capsys, place):
    code, out, err = run(capsys, *FIT, "--out", "run", "--json")
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert values["rows"] == 400
    assert values["privacy"]["epsilon"] <= 2
    code, out, _ = run(capsys, "evaluate", "run", "test.csv", "--json")
    assert json.loads(out)["n"] == 200
    code, out, _ = run(capsys, "predict", "run", "new.csv", "--out", "p.csv", "--json")
    assert json.loads(out)["rows"] == 7


def test_no_loss_and_no_score_in_the_log(capsys, place):
    _, out, err = run(capsys, *FIT, "--out", "run")
    for word in ("loss", "accuracy", "gradient"):
        assert word not in (out + err).replace("privacy loss", "")


def test_a_run_is_replaced_only_if_told_and_its_spending_is_kept(capsys, place):
    first = fitted(capsys)
    once = dpbnn.Ledger("run/ledger.jsonl").releases
    code, _, err = run(capsys, *FIT, "--out", "run")
    assert code == 2
    assert "--overwrite" in err
    second = fitted(capsys, "--overwrite")
    assert dpbnn.Ledger("run/ledger.jsonl").releases == 2 * once
    assert second.manifest["privacy"]["epsilon"] > first.manifest["privacy"]["epsilon"]
    code, _, err = run(capsys, *FIT, "--out", "run", "--overwrite", "--ledger", "other.jsonl")
    assert code == 2
    assert "has a ledger of its own" in err
    (place / "thesis").mkdir()
    (place / "thesis" / "text.txt").write_text("mine")
    code, _, err = run(capsys, *FIT, "--out", "thesis", "--overwrite")
    assert code == 2
    assert "is not a run" in err


def test_a_spent_ledger_is_exit_code_one_and_says_what_is_left(capsys, place):
    fitted(capsys, "--ledger", "book.jsonl")
    once = dpbnn.Ledger("book.jsonl").releases
    assert dpbnn.Ledger("book.jsonl").budget == (2.0, 1e-5)
    code, _, err = run(capsys, *FIT, "--out", "again", "--ledger", "book.jsonl", "--quiet")
    assert code == 1
    assert "is left" in err
    assert len(err.strip().splitlines()) == 1
    assert not (place / "again").exists()
    assert dpbnn.Ledger("book.jsonl").releases == once


def test_a_failed_run_leaves_its_ledger_if_something_was_spent(tmp_path):
    out = tmp_path / "run"

    def fail(spend):
        with new_run(out, overwrite=False) as workspace:
            if spend:
                dpbnn.Ledger(workspace.ledger).spend(dpbnn.Poisson(100, 10).event(1.0, 5))
            raise RuntimeError("power cut")

    for spend in (False, True):
        with pytest.raises(RuntimeError, match="power cut"):
            fail(spend)
        assert out.exists() == spend
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    left = {path.name for path in out.iterdir()}
    assert left == {"ledger.jsonl", "ledger.jsonl.head", ".lock"}
    assert dpbnn.Ledger(out / "ledger.jsonl").releases == 5


def test_without_privacy_every_output_says_so(capsys, place):
    code, out, _ = run(capsys, "fit", "train.csv", "--target", "hired", "--non-private", "--epochs",
                       "100", "--out", "run")  # fmt: skip
    assert code == 0
    assert out.count("NOT PRIVATE") == 2
    assert json.loads((place / "run/manifest.json").read_text())["privacy"]["private"] is False
    assert "NOT PRIVATE" in (place / "run/schema.toml").read_text()
    run(capsys, "report", "run")
    assert "NOT PRIVATE" in (place / "run/report.html").read_text().upper()
    code, _, err = run(capsys, "fit", "train.csv", "--schema", "run/schema.toml", "--epsilon", "1",
                       "--out", "other")  # fmt: skip
    assert code == 2
    assert "learned from the data" in err


def test_private_training_needs_public_bounds(capsys, place):
    code, _, err = run(capsys, "fit", "train.csv", "--target", "hired", "--epsilon", "1", "--out",
                       "run")  # fmt: skip
    assert code == 2
    assert "age = [17, 90]" in err
    (place / "bounds.toml").write_text("score = [0, 100]\n")
    code, _, err = run(capsys, "fit", "train.csv", "--target", "hired", "--bounds", "bounds.toml",
                       "--epsilon", "1", "--out", "run")  # fmt: skip
    assert code == 2
    assert "no line for the target 'hired'" in err
    assert not (place / "run").exists()


def test_a_changed_file_is_noticed(capsys, place):
    fitted(capsys)
    path = place / "run" / "schema.toml"
    path.write_text(path.read_text().replace("100", "10"))
    code, _, err = run(capsys, "predict", "run", "new.csv")
    assert code == 2
    assert "not what was saved" in err


def test_schema_draft(capsys, place):
    code, out, _ = run(capsys, "schema", "draft", "train.csv", "--target", "hired")
    assert code == 0
    assert "TODO" in out
    assert "Ulm" not in out
    run(capsys, "schema", "draft", "train.csv", "--target", "hired", "--out", "draft.toml")
    code, _, err = run(capsys, "fit", "train.csv", "--schema", "draft.toml", "--epsilon", "1",
                       "--out", "run")  # fmt: skip
    assert code == 2
    assert "TODO" in err


def test_compare_shows_the_composed_budget_first(capsys, place):
    arguments = ["compare", "train.csv", "--schema", "schema.toml", "--methods", "sgld,sgd",
                 "--epsilons", "1,2", "--epochs", "40", "--test", "test.csv",
                 "--out", "all"]  # fmt: skip
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert "Together they spend epsilon" in out
    assert "ledger.jsonl is a new ledger" in " ".join(out.split())
    assert "--yes" in err
    assert not (place / "all").exists()
    known = run(capsys, *arguments, "--ledger", "ledger.jsonl")[1]
    assert "new ledger" not in " ".join(known.split())
    code, out, err = run(capsys, *arguments, "--yes", "--json")
    assert code == 0, err
    values = json.loads(out)
    assert [(r["method"], round(r["epsilon"])) for r in values["runs"]] == [
        ("sgld", 1), ("sgld", 2), ("sgd", 1), ("sgd", 2)
    ]  # fmt: skip
    assert 2 < values["privacy"]["epsilon"] < 6
    assert dpbnn.Ledger("all/ledger.jsonl").releases == 160 + 2 * 2 + 4 * 5  # two standardised
    assert "sgld-1/report.html" in (place / "all/compare.html").read_text()
    assert (place / "all/sgd-2/report.html").is_file()


def test_adult_in_short(capsys, either_folder, place):
    """Two thousand rows of the Adult table: the whole way, better than the majority class."""
    from dpbnn.data import load_table

    train, test, schema = load_table("adult", either_folder)
    for name, table in (("adult.csv", train.rows(0, 2000)), ("test-adult.csv", test.rows(0, 1000))):
        with (place / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.names)
            writer.writerows(zip(*(table.raw(c) for c in table.names), strict=True))
    (place / "adult.toml").write_text(schema.to_toml())
    code, _, err = run(capsys, "fit", "adult.csv", "--schema", "adult.toml", "--epsilon", "1",
                       "--out", "run", "--quiet")  # fmt: skip
    assert code == 0, err
    code, out, _ = run(capsys, "evaluate", "run", "test-adult.csv", "--json")
    assert json.loads(out)["metrics"]["accuracy"]["value"] > 0.79


def test_the_command_is_installed_and_quick():
    """`dpbnn --help` needs no torch."""
    code = "import sys; import dpbnn.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert shutil.which("dpbnn", path=Path(sys.executable).parent)
