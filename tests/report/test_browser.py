"""What a browser makes of the pages: no errors, no requests, nothing wider than the screen. Needs a Chromium."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main
from kvsim.report.screenshot import BROWSERS
from kvsim.report.template import SHARED_SCRIPT

BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

LISTEN = """<script>
window.heard = [];
window.addEventListener("error", event => heard.push("error: " + (event.message || event.target.src || event.target.href)), true);
window.addEventListener("unhandledrejection", event => heard.push("rejected: " + event.reason));
for (const level of ["error", "warn"]) console[level] = (...words) => heard.push(level + ": " + words.join(" "));
</script>"""
TELL = """<script>
window.addEventListener("load", () => setTimeout(() => {
  const told = document.createElement("pre");
  told.id = "told";
  const meet = (one, other) =>
    one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom;
  const onOthers = [], tallLegends = [];
  document.querySelectorAll(".chooser button").forEach(button => button.click());
  document.querySelectorAll(".chooser button").forEach(button => button.click());
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {
    for (const axis of [".xtick text", ".ytick text"]) {
      const labels = [...plot.querySelectorAll(axis)];
      labels.forEach((label, number) => {
        const next = labels[number + 1];
        if (next && meet(label.getBoundingClientRect(), next.getBoundingClientRect())) onOthers.push(label.textContent);
      });
    }
    const legend = plot.querySelector(".legend .bg"), area = plot.querySelector(".nsewdrag");
    if (legend && area && legend.getBoundingClientRect().height > area.getBoundingClientRect().height) tallLegends.push(plot.id);
  }
  const copy = document.querySelector(".copy");
  Object.defineProperty(navigator, "clipboard", {value: {writeText: text => { window.copied = text; }}});
  copy.click();
  told.textContent = JSON.stringify({
    copied: window.copied,
    isCopyShown: copy.offsetHeight > 0,
    heard: heard,
    onOthers: onOthers,
    tallLegends: tallLegends,
    firstMoves: [...document.querySelectorAll(".wide")].filter(wide => wide.scrollWidth > wide.clientWidth).map(wide => {
      const cell = wide.querySelector("tbody td"), before = cell.getBoundingClientRect().left;
      wide.scrollLeft = 80;
      return Math.round(cell.getBoundingClientRect().left - before);
    }),
    choosers: document.querySelectorAll(".chooser button").length,
    requests: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !/^(data|blob):/.test(name)),
    width: document.documentElement.scrollWidth,
    screen: window.innerWidth,
    plots: document.querySelectorAll(".main-svg").length,
    background: getComputedStyle(document.body).backgroundColor,
    colour: getComputedStyle(document.body).color,
  });
  document.body.appendChild(told);
}, 500));
</script>"""

TELL_WHEN_DRAWN = """<script>
window.addEventListener("load", () => {
  const plots = [...document.querySelectorAll(".js-plotly-plot")];
  document.body.offsetHeight;  // lays out what is not laid out yet
  const told = document.createElement("pre");
  told.id = "told";
  told.textContent = JSON.stringify({
    s: performance.now() / 1000,
    drawn: plots.map(plot => plot.querySelectorAll(".trace, .point").length),
  });
  document.body.appendChild(told);
});
</script>"""
"""Plots are drawn by scripts in the page, each as it is read: all of them before the page counts as loaded."""


def opened(page: Path, folder: Path, *flags: str, width: int = 1600) -> dict[str, Any]:
    """What a page tells of itself after it was drawn in a window of this width."""
    frame = folder / "frame.html"
    if (page.parent / SHARED_SCRIPT).exists():
        shutil.copy(page.parent / SHARED_SCRIPT, folder)
    assert page.read_text().count("<head>") == 1
    probed = with_script(page, TELL, folder / "probed.html")
    probed.write_text(probed.read_text().replace("<head>", f"<head>{LISTEN}", 1))
    # A window cannot be narrower than some 500 pixels; a frame can.
    frame.write_text(
        f'<body style="margin:0"><iframe id=f style="border:0;width:{width}px;height:900px" src="probed.html"></iframe><script>'
        'f.onload = () => setTimeout(() => document.body.append(f.contentDocument.getElementById("told")), 1500)</script>'
    )
    return told_by(frame, f"--window-size={width},900", "--virtual-time-budget=20000", *flags)


def drawn(page: Path, folder: Path) -> tuple[float, list[int]]:
    """Seconds of real time from the navigation to a page until its plots are drawn, by the browser's own clock; and what is drawn
    in each plot, lines and points. The browser's start is not part of it."""
    told = told_by(with_script(page, TELL_WHEN_DRAWN, folder / "timed.html"), "--window-size=1600,900")
    return told["s"], told["drawn"]


def with_script(page: Path, script: str, copy: Path) -> Path:
    """A copy of the page with a script at its end."""
    html = page.read_text()
    end = html.rindex("</body>")
    copy.write_text(html[:end] + script + html[end:])
    return copy


def told_by(page: Path, *flags: str) -> dict[str, Any]:
    """What a script has written into the page's element ``told`` by the time that the browser is done with it."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", *flags, "--dump-dom",
        page.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    told = re.search(r'<pre id="told">(.*?)</pre>', dom, re.DOTALL)
    assert told is not None, dom[-2000:]
    answer: dict[str, Any] = json.loads(unescape(told[1]))
    return answer


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The page of a run, of a sweep, and of a curve."""
    folder = tmp_path_factory.mktemp("pages")
    small = ["trace.sessions=20", "tiers.gpu.capacity=8GiB"]
    more = ["tiers.cpu.capacity=4GiB", "tiers.disk.capacity=20GiB", "placement=write_back", "prefetch=threshold"]
    assert main(["simulate", *small, *more, f"output={folder}/run"]) == 0
    assert main(["simulate", "-m", *small, "eviction=lru,lfu,sieve", "tiers.cpu.capacity=0,4GiB", f"output={folder}/sweep"]) == 0
    assert main(["curve", "trace.sessions=20", "curve.policies=[lfu]", f"output={folder}/curve"]) == 0
    return [folder / "run" / "report.html", folder / "sweep" / "report.html", folder / "curve" / "curve.html"]


@pytest.mark.parametrize(
    ("which", "width"),
    [(0, 400), (1, 1600), *[pytest.param(*case, marks=pytest.mark.long) for case in ((0, 1600), (1, 400), (2, 400), (2, 1600))]],
    ids=lambda value: ("run", "sweep", "curve")[value] if value < 3 else str(value),
)
def test_a_page_asks_for_nothing_complains_of_nothing_and_fits(which: int, width: int, pages: list[Path], tmp_path: Path) -> None:
    told = opened(pages[which], tmp_path, width=width)
    assert told["heard"] == []
    assert told["requests"] == []  # the browser does not count scripts read from files
    assert told["plots"] > 0
    assert told["isCopyShown"] and told["copied"].startswith("kvsim "), "the command that reproduces the page"
    assert not any(told["firstMoves"]), "first columns stay in sight where a table scrolls"
    assert told["firstMoves"] or (which, width) != (1, 400), "the table of runs is wider than a phone"
    assert told["onOthers"] == [], "labels of an axis that lie on others"
    assert told["tallLegends"] == [], "legends that are taller than their plots"
    assert (told["choosers"] > 0) is (which == 1), "of six runs, some lines are drawn when they are chosen"
    assert brightness(told["background"]) > 200 > 100 > brightness(told["colour"])
    assert told["screen"] == width
    assert told["width"] <= width, "the page is wider than the screen"


def test_a_page_is_dark_where_the_reader_wants_it_dark(pages: list[Path], tmp_path: Path) -> None:
    dark = opened(pages[0], tmp_path, "--force-dark-mode")
    assert brightness(dark["background"]) < 60 < 150 < brightness(dark["colour"])


@pytest.mark.long
def test_a_page_over_many_runs_is_small_and_drawn_soon(pages: list[Path], tmp_path: Path) -> None:
    sweep = pages[1].parent
    for copy in range(7):
        for number in range(6):
            shutil.copytree(sweep / str(number), tmp_path / "many" / f"{copy}-{number}")
    assert main(["report", str(tmp_path / "many"), f"output={tmp_path}/page"]) == 0
    page = tmp_path / "page" / "report.html"
    assert page.stat().st_size < 8e6
    assert opened(page, tmp_path)["heard"] == []
    for _ in range(3):  # what else runs on the machine may hold up one of them
        seconds, plots = drawn(page, tmp_path)
        if seconds < 5:
            break
    assert len(plots) == page.read_text().count('class="plotly-graph-div"') > 0 and all(plots)
    assert seconds < 5, "from the navigation until the last plot is drawn"
