"""A short version of every MNIST run of benchmarks/mnist.py; the full ones are in its README."""

import json
import math
import sys

import pytest
import torch

from benchmarks import mnist


@pytest.fixture(scope="module")
def images(data_folder):
    return mnist.mnist(data_folder)


@pytest.mark.parametrize("name", list(mnist.RUNS))
def test_every_run_starts_learning(images, monkeypatch, name):
    """Thirty steps on all 60 000 images: better than chance, and the stated epsilon is small."""
    monkeypatch.setattr(mnist, "EPOCHS", 30 * mnist.BATCH / mnist.N)
    x, y, x_test, y_test = images
    torch.manual_seed(0)
    result = mnist.run(name, 0, (x, y, x_test[:500], y_test[:500]), "cpu")
    assert result["accuracy"] > 0.2
    assert math.isfinite(result["nll"])
    assert (result["epsilon"] < 0.5) == mnist.RUNS[name][3]


@pytest.mark.parametrize("name", list(mnist.RUNS))
def test_every_run_on_generated_images(generated_folder, monkeypatch, tmp_path, capsys, name):
    """Two steps on 300 of them, by the command: files are read, a table and figures written."""
    monkeypatch.setattr(mnist, "EPOCHS", 2 * mnist.BATCH / mnist.N)
    out = tmp_path / "mnist.json"
    monkeypatch.setattr(sys, "argv", ["mnist", "--runs", name, "--json", str(out)])
    torch.manual_seed(0)
    mnist.main()
    assert f"| {name} |" in capsys.readouterr().out
    (result,) = json.loads(out.read_text())[name]
    assert math.isfinite(result["nll"])
    assert (result["epsilon"] < math.inf) == mnist.RUNS[name][3]
