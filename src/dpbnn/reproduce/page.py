"""The page of all reproductions, rendered from their JSON files; no number on it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpbnn.reproduce import NEEDS, items
from dpbnn.reproduce.result import table

__all__ = ["render"]

_COLUMNS = ("item", "paper", "paper's protocol, run here", "corrected", "true epsilon", "verdict")
_OPENING = """# Reproduction: every table and figure of the papers

Each result is computed by the command beside it. The columns: what the paper prints; what its
protocol gives here, as stated or as in its code; what a correct protocol gives; the epsilon that
the private runs really have, by PLD where batches are sampled and by the exact curve where they are
not; and one line on how the two agree. What does not reproduce is shown so. Private runs go through
the library's gate; delta is 1e-5 where nothing else is said.

    $ dpbnn reproduce --list
    $ dpbnn reproduce NAME --out docs/reproduction     # finished runs are kept and not made again
    $ python scripts/reproduction.py                   # renders this page from the JSON files

The papers: **dp-bnn** is Differentially private Bayesian neural networks (Zhang, Bu, Chen, Long);
**dp-sep** is DP-SEP (Vinaroz, Park, TMLR 2022); **bayesian-dp** is Bayesian differential privacy
for machine learning (Triastcyn, Faltings, ICML 2020), see also [bayesian.md](bayesian.md);
**dp-bbb** is a note on DP Bayes by Backprop (2020). **records** and **speed** are the
library's own.
"""


def render(folder: Path) -> str:
    """Return the page in Markdown.

    Args:
        folder: holds NAME.json, and NAME.svg for figures, as `dpbnn reproduce` writes them; its
            name is used in links, relative to the folder above it.
    """
    rows, sections = [], []
    for name, item in items().items():
        words = (item.__doc__ or "").splitlines()[0]
        path = folder / f"{name}.json"
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if values is None or _empty(values["record"]):
            missing = f"{NEEDS[name]}; then " if name in NEEDS else ""
            verdict = f"not run: {missing}`dpbnn reproduce {name}`"
            rows.append((f"{name}: {words}", "", "", "", "", verdict))
            continue
        rows.append((f"[{name}](#{_anchor(name)})", *_summary(values)))
        sections.append(_section(name, values, folder))
    return "\n".join([_OPENING, *table(_COLUMNS, rows), "", *sections])


def _empty(record: dict[str, Any]) -> bool:
    """Whether nothing was run in full."""
    return record["settings"]["fast"] or 0 < record["cells"] == record["unfinished"]


def _summary(values: dict[str, Any]) -> tuple[str, ...]:
    given = values.get("summary")
    if given is None:
        return ("", "", "", "", "see below")
    left = values["record"]["unfinished"]
    verdict = given["verdict"]
    if left:
        verdict = f"incomplete, {left} of {values['record']['cells']} runs to be made; {verdict}"
    return (given["paper"], given["protocol"], given["corrected"], given["epsilon"], verdict)


def _section(name: str, values: dict[str, Any], folder: Path) -> str:
    record = values["record"]
    lines = [f"## {name}", "", values["title"], ""]
    if values["rows"]:
        columns = list(values["rows"][0])
        lines += [*table(columns, [list(row.values()) for row in values["rows"]]), ""]
    if (folder / f"{name}.svg").is_file():
        lines += [f"![{values['title']}]({folder.name}/{name}.svg)", ""]
    lines += [f"- {note}" for note in values["notes"]]
    found = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    lines += [
        f"- `{record['command']}`: {record['seconds']:g} s on {record['device']}; {found}",
        "",
    ]
    return "\n".join(lines)


def _anchor(name: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return "".join(c for c in name.lower() if c.isalnum() or c == "-")
