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
from report_pages import fitted_pages, pages

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"NO BROWSER: none of {', '.join(NAMES)} is here; run make test-browser"
)

# Headless windows have a smallest width, so pages are measured in frames, all in one window.
FRAMES = """<!doctype html><meta charset="utf-8"><body style="margin:0">
{frames}
<pre id="result"></pre>
<script>
const WIDTH = {width};
function parts(colour) {{
  const found = colour.match(/[\\d.]+/g).map(Number);
  return found.length < 4 ? [...found, 1] : found;
}}
function behind(element, view) {{
  for (let e = element; e; e = e.parentElement) {{
    const colour = parts(view.getComputedStyle(e).backgroundColor);
    if (colour[3] > 0.99) return colour;
  }}
  return [255, 255, 255, 1];
}}
function light(colour) {{
  const [r, g, b] = colour.slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}}
function contrast(one, other) {{
  const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}}
function overlaps(svg) {{
  const boxes = [...svg.querySelectorAll("text")]
    .map((e) => [e.textContent, e.getBoundingClientRect()]);
  return boxes.flatMap(([text, a], k) => boxes.slice(k + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.35 * a.height)
    .map(([other]) => text + " | " + other));
}}
function measured(frame) {{
  const page = frame.contentDocument, view = frame.contentWindow;
  const all = [...page.body.querySelectorAll("*")];
  const texts = all.filter((e) => e.getBoundingClientRect().width > 0
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  const size = (e) => parseFloat(view.getComputedStyle(e).fontSize)
    * e.ownerSVGElement.getBoundingClientRect().width / e.ownerSVGElement.viewBox.baseVal.width;
  return {{
    scroll: page.documentElement.scrollWidth,
    wide: all.filter((e) => e.getBoundingClientRect().right > WIDTH + 1 && !e.closest("svg"))
      .map((e) => e.outerHTML.slice(0, 120)),
    sections: [...page.querySelectorAll("section[id]")]
      .filter((e) => e.getBoundingClientRect().height > 20).map((e) => e.id),
    smallest: Math.min(...[...page.querySelectorAll("svg text")].map(size)),
    overlaps: [...page.querySelectorAll("svg")].flatMap(overlaps),
    faint: texts.map((e) => [contrast(parts(view.getComputedStyle(e)[e.closest("svg") ? "fill"
      : "color"]), behind(e, view)), e.textContent.trim().slice(0, 60)])
      .filter(([ratio]) => ratio < 4.5),
    fetched: view.performance.getEntriesByType("resource")
      .map((e) => e.name).filter((name) => !name.startsWith("data:")),
    background: view.getComputedStyle(page.body).backgroundColor,
    title: page.title,
    text: page.body.innerText,
  }};
}}
window.addEventListener("load", () => {{
  document.getElementById("result").textContent = JSON.stringify(
    [...document.querySelectorAll("iframe")].map(measured));
}});
</script>
"""
FRAME = '<iframe style="border:0;width:{width}px;height:800px" srcdoc="{page}"></iframe>'


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


def measure(folder, pages, width, scheme="light"):
    """Return what the browser found in pages that are `width` wide, and the console's lines."""
    path = folder / "frames.html"
    frames = [FRAME.format(width=width, page=html.escape(page)) for page in pages]
    path.write_text(FRAMES.format(width=width, frames="\n".join(frames)), encoding="utf-8")
    chosen = {"dark": 0, "light": 1}[scheme]
    done = chromium(
        folder,
        f"--blink-settings=preferredColorScheme={chosen}",
        "--window-size=1400,900",
        "--virtual-time-budget=8000",
        "--dump-dom",
        path.as_uri(),
    )
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result, done.stderr[-2000:]
    assert result[1], done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(result[1])), console


@pytest.fixture(scope="module")
def every_page(tmp_path_factory):
    return {**pages(), **fitted_pages(tmp_path_factory.mktemp("fitted"))}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_can_be_read(every_page, tmp_path, width, scheme):
    """On a phone and on a desk, in both themes: nothing is cut, covered, faint or fetched."""
    all_found, console = measure(tmp_path, [page for page, _ in every_page.values()], width, scheme)
    assert console == []
    for (name, (_, sections)), found in zip(every_page.items(), all_found, strict=True):
        assert found["wide"] == [], name
        assert found["scroll"] <= width, name
        assert found["sections"] == sections, name
        assert found["smallest"] >= 8, name
        assert found["overlaps"] == [], name
        assert found["faint"] == [], name
        assert found["fetched"] == [], name
        assert re.findall(r"\d\.\d{9,}|\.\d*?0{4,}\b|\bnan\b", found["text"]) == [], name
        assert found["title"].startswith("NOT PRIVATE") == (name in ("open", "comparison")), name
        dark = "rgb(19, 22, 26)" if scheme == "dark" else "rgb(255, 255, 255)"
        assert found["background"] == dark, name


def test_a_bad_page_is_seen(every_page, tmp_path):
    """The same measures reject a wide table, a fetched picture, an error and texts in the way."""
    page, sections = every_page["classes"]
    bad = page.replace(
        "</main>",
        '<div style="width:900px">wide</div><img src="http://nowhere.invalid/x.png">'
        '<svg viewBox="0 0 100 20" width="100"><text y="9">one</text><text x="2" y="9">two</text>'
        '</svg><p style="color:#eee;background:#fff">faint</p>'
        "<script>undefined_name()</script></main>",
    ).replace('id="hashes"', 'id="other"')
    [found], console = measure(tmp_path, [bad], 390)
    assert found["scroll"] > 390
    assert found["overlaps"] == ["one | two"]
    assert [text for _, text in found["faint"]] == ["faint"]
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
