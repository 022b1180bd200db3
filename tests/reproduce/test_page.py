"""The page of reproductions is rendered from the committed results, and is up to date."""

import json
from pathlib import Path

from dpbnn import reproduce
from dpbnn.reproduce.page import render

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_up_to_date():
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    assert page == render(DOCS / "reproduction"), "run: python scripts/reproduction.py"


def test_every_item_is_on_the_page_and_every_result_is_of_an_item():
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    for name in reproduce.items():
        assert f"[{name}](#" in page or f"not run yet: `dpbnn reproduce {name}`" in page
    results = {path.name.removesuffix(".json") for path in (DOCS / "reproduction").glob("*.json")}
    assert results <= set(reproduce.items())


def result(fast=False, unfinished=0):
    return {
        "title": "A title",
        "rows": [{"a": 1.5, "b": None}],
        "notes": ["a note"],
        "summary": {"paper": "p", "protocol": "q", "corrected": "c", "epsilon": "e",
                    "verdict": "it holds"},
        "record": {"settings": {"fast": fast}, "unfinished": unfinished, "cells": 7,
                   "versions": {"dpbnn": "1"}, "command": "dpbnn reproduce speed", "seconds": 3.0,
                   "device": "CPU"},
    }  # fmt: skip


def row(page, name="speed"):
    return next(
        line for line in page.splitlines() if line.startswith((f"| [{name}]", f"| {name}:"))
    )


def test_what_has_no_result_or_a_fast_one_is_not_run_yet(tmp_path):
    assert "not run yet" in row(render(tmp_path))
    (tmp_path / "speed.json").write_text(json.dumps(result(fast=True)))
    assert "not run yet" in row(render(tmp_path))
    (tmp_path / "speed.json").write_text(json.dumps(result(unfinished=7)))
    assert "not run yet" in row(render(tmp_path))
    (tmp_path / "speed.json").write_text(json.dumps(result()))
    page = render(tmp_path)
    assert row(page) == "| [speed](#speed) | p | q | c | e | it holds |"
    assert "| 1.5 | - |" in page
    assert "`dpbnn reproduce speed`: 3 s on CPU; dpbnn 1" in page


def test_an_incomplete_result_says_so(tmp_path):
    (tmp_path / "speed.json").write_text(json.dumps(result(unfinished=2)))
    assert "incomplete, 2 of 7 runs to be made; it holds" in row(render(tmp_path))
