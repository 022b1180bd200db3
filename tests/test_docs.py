"""Links of the guides, as they stand in the repository and as the site has them."""

import html
import importlib.util
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("markdown_it")
ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("site_script", ROOT / "scripts" / "site.py")
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)

LINK = re.compile(r'(?:href|src)="(?!\w+:)([^"]*)"')
ANCHOR = re.compile(r'id="([^"]*)"')


def broken(text, folder, anchors):
    """Return the links of a page that lead nowhere.

    Args:
        text: the page.
        folder: where it lies.
        anchors: of every file that is a page, by its path.
    """
    found = []
    for link in map(html.unescape, LINK.findall(text)):
        target, _, anchor = link.partition("#")
        path = Path(os.path.normpath(folder / target)) if target else None
        if (path is not None and not path.exists()) or (
            anchor and anchor not in (ANCHOR.findall(text) if path is None else anchors(path))
        ):
            found.append(link)
    return found


def test_links_in_the_repository_lead_somewhere():
    names = site.files()
    assert {"getting-started", "guide", "index", "tutorials/table"} <= set(names.values())
    pages = {path: site.page_of(path) for path in names}
    wrong = {
        path.relative_to(ROOT): bad
        for path, page in pages.items()
        if (bad := broken(page, path.parent, lambda to: ANCHOR.findall(pages.get(to, ""))))
    }
    assert wrong == {}
    assert broken('<a href="#no">', ROOT, list) == ["#no"]
    assert broken('<a href="no.md"> <a href="README.md">', ROOT, list) == ["no.md"]


def test_links_of_the_site_lead_somewhere(tmp_path):
    site.write(tmp_path)
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "dpbnn.html").touch()  # pdoc writes it
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    wrong = {
        path.relative_to(tmp_path): bad
        for path, page in pages.items()
        if (bad := broken(page, path.parent, lambda to: ANCHOR.findall(pages.get(to, ""))))
    }
    assert wrong == {}
