"""Private learners on many tables: `python -m benchmarks.tables --results tables.jsonl`.

Every (table, learner, epsilon, seed) is one line of the results, with all metrics of the table's
task; what is there already is not run again. A seed is a split of the table and the seed of what a
learner draws. `--render` prints the results as Markdown, with the counts of what they must show.

`make bench-tables` sets up the environment of the peers, DP-EBM and diffprivlib, and runs all.
Without it they are left out, and that is said. Jobs run in processes of one thread each, the
longest first.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.results import read, run, waiting
from benchmarks.table_data import TABLES, present, table

EPSILONS = ("0.1", "0.3", "1", "3", "none")
FOLDER = Path(__file__).resolve().parents[1]


NAMES = ("table", "learner", "epsilon", "seed")
"""Entries that name a job."""


def work(name: str, learner: str) -> float:
    """Return a rough cost of a fit, to start the longest ones first."""
    one = table(name)
    rows = one.train or len(one.splits[0][0])
    weight = {"dp-ebm": 1e-5 * max(1, one.classes), "boosting": 1e-6, "diffprivlib": 1e-6}
    if learner.startswith("dpbnn"):
        return 1.0 + 1e-5 * rows
    return weight.get(learner, 1e-7) * rows * max(1, len(one.numeric()) + len(one.groups))


def jobs(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is to run, the longest first."""
    from benchmarks import learners

    chosen = list(arguments.learners)
    if any(name in learners.PEERS for name in chosen):
        problem = learners.peers_missing(os.environ["PEERS_PYTHON"])
        if problem:
            print(f"LEFT OUT: the peers ({problem}); see make bench-tables", file=sys.stderr)
            chosen = [name for name in chosen if name not in learners.PEERS]
    budgets = [None if word == "none" else float(word) for word in arguments.epsilons]
    found = [
        {"table": name, "learner": learner, "epsilon": epsilon, "seed": seed}
        for name in present(arguments.tables)
        for learner in chosen
        for epsilon in budgets
        for seed in range(arguments.seeds)
        if learners.runs(learner, table(name), epsilon)
    ]
    left = waiting(found, arguments.results)
    return sorted(left, key=lambda job: -work(job["table"], job["learner"]))


def one(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job and return its metrics."""
    from benchmarks import learners

    data = table(job["table"])
    split = data.split(job["seed"])
    found, seconds = learners.predict(job["learner"], data, split, job["epsilon"], job["seed"])
    return {
        "rows": len(split.x), "columns": split.x.shape[1], "classes": data.classes,
        **learners.scores(data, found, split.y_test), "seconds": round(seconds, 3), **found.about,
    }  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("tables.jsonl"))
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES, metavar="NAME")
    parser.add_argument(
        "--learners", nargs="+", metavar="NAME",
        default=["dpbnn", "dp-ebm", "diffprivlib", "moment-ridge", "base-rate", "boosting"],
        help="dpbnn is the estimator's default, dpbnn-METHOD a method of it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--epsilons", nargs="+", default=list(EPSILONS), metavar="NUMBER|none")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--peers", default=str(FOLDER / ".venv-peers/bin/python"),
        help="Python of the peers; PEERS_PATH is where it imports from, if set",
    )  # fmt: skip
    parser.add_argument("--render", action="store_true", help="print the results as Markdown")
    parser.add_argument(
        "--judged", default="dpbnn", metavar="LEARNER", help="whose counts to print"
    )
    arguments = parser.parse_args()
    if arguments.render:
        from benchmarks.table_report import report

        print(report(read(arguments.results, NAMES), arguments.judged))
        return
    os.environ["PEERS_PYTHON"] = arguments.peers
    run(one, jobs(arguments), arguments.jobs, arguments.results)


if __name__ == "__main__":
    main()
