"""Reports: one self-contained HTML file per run, and one per comparison of runs.

    from dpbnn import report
    report.write(report.RunPage(privacy=statement, evaluation=evaluation), "run/report.html")

`render` and `render_comparison` are pure functions from plain values to a page.
"""

from dpbnn.report.comparison import render_comparison, write_comparison
from dpbnn.report.page import Band, ComparisonRow, Example, Examples, RunPage
from dpbnn.report.render import render, write
from dpbnn.report.select import band, select_examples

__all__ = [
    "Band",
    "ComparisonRow",
    "Example",
    "Examples",
    "RunPage",
    "band",
    "render",
    "render_comparison",
    "select_examples",
    "write",
    "write_comparison",
]
