"""The pages in a real browser: nothing scrolls sideways, nothing fails, nothing is fetched.

Needs Chromium on the PATH; `make test-browser` installs it where that is allowed.
"""

import html
import json
import os
import re
import shutil
import subprocess

import pytest
from report_pages import pages

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"NO BROWSER: none of {', '.join(NAMES)} is here; run make test-browser"
)

# Headless windows have a smallest width, so the page is measured in a frame.
FRAME = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" style="border:0;width:{width}px;height:800px" srcdoc="{page}"></iframe>
<pre id="result"></pre>
<script>
const errors = [];
const frame = document.getElementById("frame");
frame.addEventListener("load", () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  const wide = [...page.body.querySelectorAll("*")]
    .filter((e) => e.getBoundingClientRect().right > {width} + 1 && !e.closest("svg"))
    .map((e) => e.outerHTML.slice(0, 120));
  const sections = [...page.querySelectorAll("section[id]")]
    .filter((e) => e.getBoundingClientRect().height > 20).map((e) => e.id);
  const text = [...page.querySelectorAll("svg text")]
    .map((e) => parseFloat(view.getComputedStyle(e).fontSize)
      * e.ownerSVGElement.getBoundingClientRect().width / e.ownerSVGElement.viewBox.baseVal.width);
  document.getElementById("result").textContent = JSON.stringify({{
    scroll: page.documentElement.scrollWidth, wide, sections,
    smallest: Math.min(...text),
    fetched: view.performance.getEntriesByType("resource")
      .map((e) => e.name).filter((name) => !name.startsWith("data:")),
    background: view.getComputedStyle(page.body).backgroundColor,
    title: page.title,
  }});
}});
</script>
"""


def chromium(folder, *arguments):
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    return subprocess.run(
        [
            BROWSER,
            "--headless=new",
            *flags,
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def measure(folder, page, width, scheme="light"):
    """Return what the browser found in a page that is `width` wide, and the console's lines."""
    path = folder / "frame.html"
    path.write_text(FRAME.format(width=width, page=html.escape(page)), encoding="utf-8")
    chosen = {"dark": 0, "light": 1}[scheme]
    done = chromium(
        folder,
        f"--blink-settings=preferredColorScheme={chosen}",
        "--window-size=1280,900",
        "--virtual-time-budget=5000",
        "--dump-dom",
        path.as_uri(),
    )
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result, done.stderr[-2000:]
    assert result[1], done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(result[1])), console


@pytest.fixture(scope="module")
def every_page():
    return pages()


@pytest.mark.parametrize("name", ["classes", "real", "open", "comparison"])
def test_a_phone_shows_every_section_without_sideways_scroll(every_page, tmp_path, name):
    page, sections = every_page[name]
    found, console = measure(tmp_path, page, 390)
    assert found["wide"] == []
    assert found["scroll"] <= 390
    assert found["sections"] == sections
    assert found["smallest"] >= 8
    assert found["fetched"] == []
    assert console == []
    assert found["title"].startswith("NOT PRIVATE") == (name in ("open", "comparison"))


def test_a_desktop_does_too_and_the_themes_differ(every_page, tmp_path):
    page, sections = every_page["classes"]
    light, console = measure(tmp_path, page, 1200)
    dark, _ = measure(tmp_path, page, 1200, "dark")
    assert light["scroll"] <= 1200
    assert light["sections"] == sections
    assert console == []
    assert light["background"] == "rgb(255, 255, 255)"
    assert dark["background"] == "rgb(19, 22, 26)"


def test_a_bad_page_is_seen(every_page, tmp_path):
    """The same measures reject a page with a wide table, a fetched picture and an error."""
    page, sections = every_page["classes"]
    bad = page.replace(
        "</main>",
        '<div style="width:900px">wide</div><img src="http://nowhere.invalid/x.png">'
        "<script>undefined_name()</script></main>",
    ).replace('id="hashes"', 'id="other"')
    found, console = measure(tmp_path, bad, 390)
    assert found["scroll"] > 390
    assert found["wide"]
    assert found["fetched"]
    assert found["sections"] != sections
    assert any("undefined_name" in line for line in console)


def test_a_page_prints_to_pdf(every_page, tmp_path):
    path, target = tmp_path / "page.html", tmp_path / "page.pdf"
    path.write_text(every_page["classes"][0], encoding="utf-8")
    chromium(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={target}", path.as_uri())
    content = target.read_bytes()
    assert content.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 12
