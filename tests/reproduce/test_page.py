"""The page of reproductions is rendered from the committed results, and is up to date."""

import json
from pathlib import Path

import pytest

from dpbnn import reproduce
from dpbnn.reproduce.page import render

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_up_to_date():
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    assert page == render(DOCS / "reproduction"), "run: python scripts/reproduction.py"


def test_every_item_is_on_the_page_and_every_result_is_of_an_item():
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    for name in reproduce.items():
        assert f"[{name}](#" in page or f"| {name}: " in page
    results = {path.name.removesuffix(".json") for path in (DOCS / "reproduction").glob("*.json")}
    assert results <= set(reproduce.items())


def test_what_needs_a_file_that_is_not_here_says_which_and_the_command(tmp_path):
    for name in reproduce.NEEDS:
        line = row(render(tmp_path), name)
        assert "DPBNN_DATA/" in line
        assert f"`dpbnn reproduce {name}`" in line
        with pytest.raises(ValueError, match="is not here") as refused:
            reproduce.reproduce(name, reproduce.Settings(data=tmp_path))
        path = line.partition("DPBNN_DATA/")[2].split()[0]
        assert str(tmp_path / path) in str(refused.value)


def test_the_table_of_the_readme_has_the_numbers_of_the_page():
    """Epsilon, accuracy here and the paper's, MLP / CNN, of Table 1 of the DP-BNN paper."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| DP-") and line.count("|") == 5
    ]
    assert len(lines) == 4
    rows = json.loads((DOCS / "reproduction" / "dp-bnn.table1.json").read_text())["rows"]
    for name, epsilon, here, paper in lines:
        method, _, networks = name.removeprefix("DP-").partition(", ")
        own = [
            r for network in networks.split(" / ") for r in rows
            if (r["method"], r["network"]) == (method, network) and r["prior"] != "laplace"
        ]  # fmt: skip
        assert {f"{r['epsilon (PLD)']:.3f}" for r in own} == {epsilon}
        assert " / ".join(f"{r['own settings: DP accuracy']:.3f}" for r in own) == here
        assert " / ".join(f"{r['paper: DP accuracy']:.2f}" for r in own) == paper


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


def test_what_has_no_result_or_a_fast_one_is_not_run(tmp_path):
    assert "not run: `dpbnn reproduce speed`" in row(render(tmp_path))
    (tmp_path / "speed.json").write_text(json.dumps(result(fast=True)))
    assert "not run: `dpbnn reproduce speed`" in row(render(tmp_path))
    (tmp_path / "speed.json").write_text(json.dumps(result(unfinished=7)))
    assert "not run: `dpbnn reproduce speed`" in row(render(tmp_path))
    (tmp_path / "speed.json").write_text(json.dumps(result()))
    page = render(tmp_path)
    assert row(page) == "| [speed](#speed) | p | q | c | e | it holds |"
    assert "| 1.5 | - |" in page
    assert "`dpbnn reproduce speed`: 3 s on CPU; dpbnn 1" in page


def test_an_incomplete_result_says_so(tmp_path):
    (tmp_path / "speed.json").write_text(json.dumps(result(unfinished=2)))
    assert "incomplete, 2 of 7 runs to be made; it holds" in row(render(tmp_path))
