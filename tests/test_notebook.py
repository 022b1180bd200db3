"""What a notebook shows: plan, statement, ledger, posterior, evaluation, and a run's progress."""

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch

import dpbnn
from dpbnn.evaluation import evaluate
from dpbnn.notebook import in_notebook

EVIL = "<script>alert('x')</script>&"


@pytest.fixture(scope="module")
def shown():
    plan = dpbnn.plan(epsilon=1.0, delta=1e-5, n=100, batch_size=10, steps=5)
    ledger = dpbnn.Ledger(epsilon=2.0, delta=1e-5)
    x, y = torch.randn(100, 2), torch.randint(2, (100,))
    posterior = dpbnn.fit(
        torch.nn.Linear(2, 2), (x, y), method=dpbnn.SGD(), plan=plan, ledger=ledger
    )
    p = np.full((4, 2), 0.5)
    return {
        "plan": (plan, "5 poisson releases"),
        "composed": (dpbnn.compose(plan, plan), "all together"),
        "statement": (posterior.privacy, "Differential privacy: epsilon ="),
        "open": (dpbnn.PrivacyStatement.not_private(), "NOT PRIVATE"),
        "ledger": (ledger, "5 releases on record"),
        "posterior": (posterior, "6 weights of Linear"),
        "evaluation": (evaluate(p, [0, 1, 0, 1], groups=[EVIL] * 4, group=EVIL), EVIL),
    }


@pytest.mark.parametrize(
    "name", ["plan", "composed", "statement", "open", "ledger", "posterior", "evaluation"]
)
def test_objects_show_their_text_escaped_and_small(shown, name):
    thing, words = shown[name]
    page = thing._repr_html_()
    root = ET.fromstring(page)
    text = "\n".join(root.itertext())
    assert words in text
    assert text.split() == str(thing).split()
    assert {element.tag for element in root.iter()} <= {"div", "strong", "pre"}
    assert len(page) < 6000
    assert "http" not in page
    assert "<script" not in page


def test_a_statement_of_no_guarantee_says_so_first(shown):
    page = shown["open"][0]._repr_html_()
    assert "<strong>*** NOT PRIVATE ***</strong>" in page


def test_one_release_is_one_release():
    ledger = dpbnn.Ledger()
    ledger.spend(dpbnn.FullBatch(10).event(1.0, 1), label="one")
    assert "1 release on record" in str(ledger)


BOOK = """
import torch, dpbnn
plan = dpbnn.plan(epsilon=1.0, delta=1e-5, n=100, batch_size=10, steps=7)
x, y = torch.randn(100, 2), torch.randint(2, (100,))
for progress in (None, False):
    dpbnn.fit(torch.nn.Linear(2, 2), (x, y), method=dpbnn.SGD(), plan=plan, progress=progress)
"""


@pytest.mark.timeout(300)
def test_a_run_in_a_notebook_shows_one_bar_that_is_replaced_in_place(tmp_path, monkeypatch):
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(Path(dpbnn.__file__).parents[1]))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(BOOK)])
    outputs = client.execute(book, timeout=240).cells[0].outputs
    shown = [out["data"]["text/html"] for out in outputs if out["output_type"] == "display_data"]
    assert len(shown) == 1
    assert '<progress value="7" max="7">' in shown[0]
    assert "step 7/7, epsilon <= " in shown[0]
    texts = [out["text"] for out in outputs if out["output_type"] == "stream"]
    assert not any("training" in text for text in texts)


def test_without_a_notebook_there_is_none():
    assert not in_notebook()
