"""Figures of the training table are no releases: they are refused, or marked wherever they are."""

import json

import broken_versions as broken
import numpy as np
import pytest
from command_line import run
from twins import fails_on, twins_of

import dpbnn

pytestmark = pytest.mark.filterwarnings("ignore:epsilon = ")
NOTHING_ELSE = "nothing else that depends on the training data was published"
SCHEMA = """
[target]
name = "y"
bounds = [0, 9]
[columns.x]
bounds = [0, 1]
"""


def records(seed, n=60):
    rng = np.random.default_rng(seed)
    x = rng.random((n, 1)).round(3)
    return x, rng.poisson(3 * x[:, 0])


def counted(**more):
    return dpbnn.PrivateBayesRegressor(
        bounds=(0, 1), target_bounds=(0, 9), likelihood="poisson", epsilon=5.0, epochs=3, **more
    )


def write(path, x, y):
    lines = [f"{a},{b}" for a, b in zip(x[:, 0], y, strict=True)]
    path.write_text("\n".join(["x,y", *lines]) + "\n")


@fails_on(67, broken.figures_of_the_training_table_look_like_others)
def test_item_67_figures_of_the_training_table_are_marked_wherever_they_are(tmp_path):
    data, folder = records(0), tmp_path / "run"
    counted().fit(*data, out=folder)
    opened = dpbnn.load_run(folder)
    page = folder / "report.html"
    opened.report(page, *records(1))
    assert NOTHING_ELSE in page.read_text()
    assert "training_table" not in json.loads((folder / "metrics.json").read_text())
    opened.report(page, *records(1), training_table=True)
    assert NOTHING_ELSE in page.read_text()  # another table, whatever was asked for
    for own in (data, None):  # from the table, and again from what is stored
        opened.report(page, *(own or ()), **({"training_table": True} if own else {}))
        assert json.loads((folder / "metrics.json").read_text()).get("training_table") is True
        text = page.read_text()
        assert "Do not publish this page" in text
        assert "60 training records" in text
        assert NOTHING_ELSE not in text
        assert "no training record may be among them" not in text


@fails_on(67, broken.figures_of_the_training_table_look_like_others, by_schema=True)
@pytest.mark.parametrize("by_schema", [False, True])
def test_item_67_an_estimator_marks_them_without_a_run_folder(tmp_path, by_schema):
    x, y = records(0)
    other = records(1)
    if by_schema:
        schema = dpbnn.data.Schema.from_toml(SCHEMA)
        model = dpbnn.PrivateBayesRegressor(schema=schema, epsilon=5.0, epochs=3)
        (x, y), other = (({"x": a[:, 0], "y": b}, None) for a, b in ((x, y), other))
    else:
        model = counted()
    model.fit(x, y)
    model.report(tmp_path / "page.html", *other)
    assert NOTHING_ELSE in (tmp_path / "page.html").read_text()
    model.report(tmp_path / "page.html", x, y)
    text = (tmp_path / "page.html").read_text()
    assert "Do not publish this page" in text
    assert NOTHING_ELSE not in text
    assert "_training" not in model.__getstate__()  # no copy that is given away tells the table


def test_item_67_the_command_says_that_epsilon_does_not_cover_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.csv", *records(0))
    (tmp_path / "schema.toml").write_text(SCHEMA)
    fit = ["fit", "train.csv", "--schema", "schema.toml", "--epsilon", 5, "--epochs", 3]
    assert run(capsys, *fit, "--out", "run")[0] == 0
    code, out, err = run(capsys, "evaluate", "run", "train.csv", "--training-table")
    assert code == 0
    assert "epsilon does not cover them" in out + err


@fails_on(67, broken.targets_keep_their_type, on_bad_rows="zero")
@pytest.mark.parametrize("on_bad_rows", ["error", "zero"])
def test_item_67_the_training_table_is_known_again_whatever_the_type_of_its_targets(
    on_bad_rows, tmp_path
):
    x, y = records(0)
    counted(on_bad_rows=on_bad_rows).fit(x, y.astype(np.int64), out=tmp_path / "run")
    opened = dpbnn.load_run(tmp_path / "run")
    for own in (y.astype(np.int64), y.astype(np.float64)):
        with pytest.raises(ValueError, match="the one that the run was trained on"):
            opened.evaluate(x, own)


@pytest.mark.parametrize("broken_row", ["", "0.5,many", "none,3"])
def test_item_67_compare_knows_the_training_table_with_its_bad_rows(
    broken_row, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.csv", *records(0))
    with (tmp_path / "train.csv").open("a") as file:
        file.write(broken_row + "\n" if broken_row else "")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    code, _, err = run(
        capsys, "compare", "train.csv", "--schema", "schema.toml", "--methods", "sgd",
        "--epsilons", 5, "--test", "train.csv", "--on-bad-rows", "zero", "--out", "out", "--yes",
    )  # fmt: skip
    assert code == 2
    assert "is the training table" in err
    assert not (tmp_path / "out").exists()


def test_compare_refuses_budgets_that_would_share_a_folder(tmp_path, capsys, monkeypatch):
    """Before the first of them is spent."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.csv", *records(0))
    write(tmp_path / "test.csv", *records(1))
    (tmp_path / "schema.toml").write_text(SCHEMA)
    code, _, err = run(
        capsys, "compare", "train.csv", "--schema", "schema.toml", "--methods", "sgd",
        "--epsilons", "1,1.0000001", "--test", "test.csv", "--out", "out", "--yes",
    )  # fmt: skip
    assert code == 2
    assert "alike to six digits" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
