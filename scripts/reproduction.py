"""Renders docs/reproduction.md from the results in docs/reproduction."""

from pathlib import Path

from dpbnn.reproduce.page import render

docs = Path(__file__).resolve().parents[1] / "docs"
(docs / "reproduction.md").write_text(render(docs / "reproduction"), encoding="utf-8")
print(docs / "reproduction.md")
