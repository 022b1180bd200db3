"""The tutorials run from top to bottom, and the site's pages lead to each other."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
BOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def test_there_are_tutorials_for_a_table_a_network_and_an_audit():
    assert {"table", "network", "audit"} <= {book.stem for book in BOOKS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_a_tutorial_runs(book, tmp_path):
    pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", str(book),
               "--output-dir", str(tmp_path), "--ExecutePreprocessor.timeout=500"]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"output_type": "error"' not in (tmp_path / book.name).read_text(encoding="utf-8")


def test_links_of_the_site_lead_somewhere():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    names = site.files()
    pages = {name: site.rendered(path, names) for path, name in names.items()}
    anchors = {name: set(re.findall(r' id="([^"]+)"', page)) for name, page in pages.items()}
    lost = []
    for name, page in pages.items():
        folder = Path(name).parent
        for link in re.findall(r'href="([^":]*\.html[^"]*|#[^"]*)"', page):
            target, _, anchor = link.partition("#")
            to = os.path.normpath(folder / target.removesuffix(".html")) if target else name
            if to not in pages or (anchor and anchor not in anchors[to]):
                lost.append(f"{name}: {link}")
    assert not lost
