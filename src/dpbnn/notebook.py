"""What a notebook shows: an object's own text as a small piece of HTML, and pieces that change.

IPython is not needed: it is looked for among what is running already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from typing import Any

__all__ = ["Shown", "in_notebook", "live"]

_BOX = "border-left:3px solid #888;padding:0 .75em;margin:.25em 0"
_TEXT = "white-space:pre-wrap;margin:.25em 0"


class Shown:
    """Gives a class `_repr_html_`: the first line of its text in bold, the rest as it is.

    The piece loads nothing and runs nothing, and takes its colours from the notebook.
    """

    def _repr_html_(self) -> str:
        title, _, rest = str(self).partition("\n")
        body = f'<pre style="{_TEXT}">{escape(rest)}</pre>' if rest else ""
        return f'<div style="{_BOX}"><strong>{escape(title)}</strong>{body}</div>'


def in_notebook() -> bool:
    """Return whether this code runs in the kernel of a notebook."""
    running: Any = sys.modules.get("IPython")
    shell = None if running is None else running.get_ipython()
    return getattr(shell, "kernel", None) is not None


def live(page: str) -> Callable[[str], None]:
    """Show a piece of HTML in the notebook, and return what replaces it by another one.

    Args:
        page: the piece.
    """
    from IPython.display import HTML, display

    handle: Any = display(HTML(page), display_id=True)
    return lambda following: handle.update(HTML(following))
