"""How objects show themselves in a notebook: their own text, escaped, as a small piece of HTML."""

from __future__ import annotations

from html import escape

__all__ = ["Shown"]

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
