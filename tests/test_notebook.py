"""How plan, statement, ledger, posterior and evaluation show themselves in a notebook."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

import dpbnn
from dpbnn.evaluation import evaluate

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
