"""Builds the documentation as a site: the guides, the tutorials and, under api/, every public name.

    python scripts/site.py FOLDER

Links between pages stay links, by whatever way a file names the other. Pictures are copied.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    "README", "docs/getting-started", "docs/choosing-a-method", "docs/guide", "docs/tables",
    "docs/report", "docs/evaluation", "docs/methods", "docs/privacy", "docs/scaling",
    "docs/bayesian", "docs/reproduction", "docs/pitfalls", "docs/architecture",
    "benchmarks/README", "benchmarks/table-means", "benchmarks/tuning", "SECURITY",
    "CONTRIBUTING", "CHANGELOG",
)  # fmt: skip
_FIRST = re.compile(r"<h1[^>]*>(.*?)</h1>")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title} - dpbnn</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.55 system-ui, sans-serif; margin: 0; display: flex; flex-wrap: wrap; }}
nav {{ flex: 0 0 13rem; padding: 1.5rem; }}
nav a {{ display: block; padding: .15rem 0; text-decoration: none; }}
main {{ flex: 1 1 20rem; max-width: 52rem; padding: 1rem 1.5rem 4rem; min-width: 0; }}
pre {{ overflow-x: auto; padding: .7rem; border: 1px solid #8884; font-size: .85em; }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; font-size: .9em; }}
th, td {{ border: 1px solid #8886; padding: .2rem .5rem; text-align: left; }}
img {{ max-width: 100%; }}
@media (max-width: 48rem) {{ nav {{ order: 2; flex-basis: auto; }} }}
{style}
</style></head><body><nav>{links}</nav><main>{body}</main></body></html>
"""


def _code(text: str, language: str, _: str) -> str:
    try:
        return str(
            highlight(text, get_lexer_by_name(language or "text"), HtmlFormatter(nowrap=True))
        )
    except ClassNotFound:
        return html.escape(text)


def _anchors(page: str) -> str:
    """Give every heading the anchor that links on GitHub use."""

    def anchor(match: re.Match[str]) -> str:
        plain = html.unescape(re.sub(r"<[^>]+>", "", match[2])).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        return f'<h{match[1]} id="{name}">{match[2]}</h{match[1]}>'

    return re.sub(r"<h([1-6])>(.*?)</h\1>", anchor, page)


def files() -> dict[Path, str]:
    """Return the name of its page for every file, in the order of the menu."""
    found = [ROOT / f"{name}.md" for name in ORDER if (ROOT / f"{name}.md").exists()]
    found += [path for path in sorted((ROOT / "docs").glob("*.md")) if path not in found]
    found += sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
    names = {ROOT / "README.md": "index", ROOT / "benchmarks" / "README.md": "benchmarks"}
    return {path: names.get(path) or _name(path) for path in found}


def _name(path: Path) -> str:
    return f"tutorials/{path.stem}" if path.suffix == ".ipynb" else path.stem


def page_of(path: Path) -> str:
    """Return a file as HTML, with its links as the file has them."""
    text = notebook(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    page = MarkdownIt("commonmark", {"highlight": _code}).enable("table").render(text)
    return _anchors(page)


def rendered(path: Path, names: dict[Path, str]) -> str:
    """Return a file's page as HTML.

    Args:
        path: of a Markdown file or a notebook.
        names: of all pages, by their file.
    """
    here = Path(names[path]).parent

    def link(match: re.Match[str]) -> str:
        target, mark, anchor = match[2].partition("#")
        file = Path(os.path.normpath(path.parent / target)) if target else path
        if file in names:
            to = Path(f"{names[file]}.html")
        elif file.is_relative_to(ROOT / "docs"):
            to = file.relative_to(ROOT / "docs")
        else:
            return match[0]
        return f'{match[1]}="{os.path.relpath(to, here)}{mark}{anchor}"'

    return re.sub(r'(href|src)="(?!\w+:)([^"]*)"', link, page_of(path))


def notebook(path: Path) -> str:
    """Return a notebook as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = ("".join(c["source"]) if c["cell_type"] == "markdown" else
             f"```python\n{''.join(c['source'])}\n```" for c in cells)  # fmt: skip
    return "\n\n".join(parts)


def write(out: Path) -> None:
    """Write the guides and the tutorials, with their pictures, into a folder."""
    (out / "tutorials").mkdir(parents=True)
    names = files()
    pages = {name: rendered(path, names) for path, name in names.items()}
    titles = {
        name: re.sub(r"<[^>]+>", "", match[1]) if (match := _FIRST.search(page)) else name
        for name, page in pages.items()
    }
    dark = HtmlFormatter(style="github-dark").get_style_defs("pre")
    style = (
        f"{HtmlFormatter().get_style_defs('pre')} @media (prefers-color-scheme: dark) {{{dark}}}"
    )
    for name, body in pages.items():
        up = "../" * name.count("/")
        links = "".join(f'<a href="{up}{n}.html">{title}</a>' for n, title in titles.items())
        links += f'<a href="{up}api/dpbnn.html">Every public name</a>'
        page = PAGE.format(title=titles[name], style=style, links=links, body=body)
        (out / f"{name}.html").write_text(page, encoding="utf-8")
    for picture in (ROOT / "docs").rglob("*"):
        if picture.suffix in (".svg", ".png", ".json", ".jsonl"):
            target = out / picture.relative_to(ROOT / "docs")
            target.parent.mkdir(exist_ok=True)
            shutil.copy(picture, target)


def main() -> None:
    """Write the site."""
    out = Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    write(out)
    command = [
        sys.executable,
        "-m",
        "pdoc",
        "--output-directory",
        out / "api",
        "--docformat",
        "google",
        "dpbnn",
    ]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
