"""Folders that earlier versions wrote still load, and predict what they predicted then."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import run

import dpbnn

SAVED = Path(__file__).parent / "saved"
EXPECTED = json.loads((SAVED / "expected.json").read_text())


@pytest.fixture
def saved(tmp_path):
    """A copy, so that nothing changes the originals."""
    shutil.copytree(SAVED, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("kind", ["iterates", "mean-field"])
def test_a_posterior_of_the_first_format(saved, kind):
    posterior = dpbnn.load(saved / kind)
    assert posterior.kind == kind
    assert posterior.privacy.private
    found = posterior.predict(torch.tensor(EXPECTED["inputs"]), seed=3).mean
    torch.testing.assert_close(found, torch.tensor(EXPECTED[kind]))


def test_an_estimator_of_the_first_format(saved):
    model = dpbnn.PrivateBayesRegressor.load(saved / "estimator")
    assert model.get_params()["prior"] == dpbnn.ScaleMixture()
    assert model.get_params()["method"] == dpbnn.BBP()
    found = model.predict(np.array(EXPECTED["estimator inputs"]))
    np.testing.assert_allclose(found, EXPECTED["estimator"], rtol=1e-5)
    model.save(saved / "estimator", overwrite=True)
    again = dpbnn.PrivateBayesRegressor.load(saved / "estimator")
    assert np.array_equal(again.predict(np.array(EXPECTED["estimator inputs"])), found)


def test_a_run_of_the_first_format(saved, capsys):
    out = saved / "predictions.csv"
    code, _, err = run(capsys, "predict", str(saved / "run"), str(saved / "table.csv"), "--out",
                       str(out), "--quiet")  # fmt: skip
    assert (code, err) == (0, "")
    found = [line.split(",") for line in out.read_text().splitlines()]
    expected = [line.split(",") for line in EXPECTED["run"]]
    assert [row[0] for row in found] == [row[0] for row in expected]
    np.testing.assert_allclose(
        np.array([row[1:3] for row in found[1:]], float),
        np.array([row[1:3] for row in expected[1:]], float),
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    "name", ["schema.toml", "model/estimator.json", "model/posterior/iterates.safetensors"]
)
def test_a_changed_file_of_the_first_format_is_refused(saved, capsys, name):
    path = saved / "run" / name
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    code, _, err = run(capsys, "predict", str(saved / "run"), str(saved / "table.csv"))
    assert code
    assert path.name in err
