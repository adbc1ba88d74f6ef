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
from kvsim.report.servers.page import render_server
from kvsim.report.template import SHARED_SCRIPT
from kvsim.report.validation.repeated_page import render_repeated
from kvsim.report.validation.validation import render_validation
from tests.report.fake_machine import validated
from tests.report.servers import test_page
from tests.report.validation import test_repeated, test_validation

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

FILTER = """<script>
window.addEventListener("load", async () => {
  const input = document.querySelector(".filter input"), said = document.querySelector(".filter [role=status]");
  const table = document.querySelector("table.sortable");
  const rows = which =>
    [...table.querySelectorAll(which)].filter(row => row.offsetHeight > 0).map(row => row.cells[0].textContent.trim());
  const lines = () => [...document.querySelectorAll(".js-plotly-plot")].map(plot =>
    plot.data.filter(trace => trace.visible !== false && trace.showlegend !== false).map(trace => trace.name));
  const points = () => [...document.querySelectorAll(".js-plotly-plot")].map(plot =>
    plot.data.filter(trace => trace.meta && trace.meta.cases && trace.visible !== false).map(trace => trace.x.length));
  const seen = {};
  const look = name => { seen[name] = {
    runs: rows("tr[data-case]"), bounds: rows("tbody tr:not([data-case])"), said: said.textContent,
    lines: lines(), points: points(),
    choosers: [...document.querySelectorAll(".chooser")].filter(chooser => chooser.offsetHeight > 0).length,
  }; };
  const type = async (name, text) => {
    input.value = text;
    input.dispatchEvent(new Event("input", {bubbles: true}));
    await new Promise(done => setTimeout(done, 400));
    look(name);
  };
  look("before");
  input.focus();
  seen.isFocused = document.activeElement === input;
  for (const [name, text] of WORDS) await type(name, text);
  seen.address = location.hash;
  table.tHead.rows[0].cells[0].querySelector("button").click();
  look("sorted");
  await type("after", "");
  seen.width = [input.getBoundingClientRect().right, window.innerWidth];
  const told = document.createElement("pre");
  told.id = "told";
  told.textContent = JSON.stringify(seen);
  document.body.appendChild(told);
});
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


def filtered(page: Path, *words: tuple[str, str]) -> dict[str, Any]:
    """What is seen of a page of many runs under each of these filters, by name."""
    copy = with_script(page, FILTER.replace("WORDS", json.dumps(words)), page.with_name("filtered.html"))
    return told_by(copy, "--window-size=1600,900", "--virtual-time-budget=20000")


def test_a_filter_keeps_rows_by_their_words_and_pictures_follow(pages: list[Path]) -> None:
    """Six runs: lru, lfu and sieve, each without and with CPU memory."""
    seen = filtered(pages[1], ("lru", "lru"), ("both", "LRU 4gib"), ("not", "-lru -4gib"), ("part", "fu"), ("last", "sieve"))
    assert len(seen["before"]["runs"]) == 6 and seen["before"]["said"] == "" and seen["isFocused"]
    assert len(seen["lru"]["runs"]) == 2 and seen["lru"]["said"].startswith("2 of 6 rows")
    assert len(seen["both"]["runs"]) == 1 and len(seen["not"]["runs"]) == 2
    assert seen["part"]["runs"] == [], "words are found by their beginnings"
    for line in (name for plot in seen["lru"]["lines"] for name in plot):
        assert "lfu" not in line and "sieve" not in line
    assert any("lru" in name for plot in seen["lru"]["lines"] for name in plot)
    assert seen["lru"]["choosers"] == 0 < seen["before"]["choosers"]
    assert max(number for plot in seen["both"]["points"] for number in plot) == 1
    assert len(seen["both"]["bounds"]) < len(seen["lru"]["bounds"]) == len(seen["before"]["bounds"])
    assert seen["address"] == "#filter=sieve" and sorted(seen["sorted"]["runs"]) == sorted(seen["last"]["runs"])
    after = seen["after"]
    assert sorted(after["runs"]) == sorted(seen["before"]["runs"]) and after["lines"] == seen["before"]["lines"]
    assert after["points"] == seen["before"]["points"] and after["choosers"] == seen["before"]["choosers"]


@pytest.mark.long
def test_the_filter_fits_a_phone_and_is_asked_for_by_the_address(pages: list[Path], tmp_path: Path) -> None:
    page, frame = pages[1], pages[1].with_name("frame.html")
    with_script(page, FILTER.replace("WORDS", "[]"), page.with_name("filtered.html"))
    frame.write_text(
        '<body style="margin:0"><iframe id=f style="border:0;width:420px;height:900px" src="filtered.html#filter=lru%204gib">'
        "</iframe><script>f.onload = () => setTimeout("
        '() => document.body.append(f.contentDocument.getElementById("told")), 3000)</script>'
    )
    seen = told_by(frame, "--window-size=500,900", "--virtual-time-budget=20000")
    assert seen["before"]["said"].startswith("1 of 6 rows") and len(seen["before"]["runs"]) == 1
    right, width = seen["width"]
    assert width == 420 and right <= width


PRICES = """
currency: USD
per: hour
gpus_per_host: 8
gpus: {h100: 2.5, l40s: 1.0}
choices: {engines: [1, 2], gpus_per_engine: [1]}
"""


@pytest.fixture(scope="module")
def other_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of a plan, of a search for the highest rate, and of the three kinds of validation."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "prices.yaml").write_text(PRICES)
    asked = ["slo.ttft_s=2s", "saturate.attainment=0.95", "trace.arrivals=open_loop", "trace.sessions=20"]
    assert main(["plan", f"prices={folder}/prices.yaml", *asked, f"output={folder}/plan"]) == 0
    assert main(["saturate", "-m", *asked, "cluster.engines=1,2", f"output={folder}/rates"]) == 0
    shutil.copy(folder / "plan" / SHARED_SCRIPT, folder)
    real = test_validation.run(test_validation.HITS, [1.0, 2.5, 3.0, 4.2], 900, substrate="hardware")
    several = [test_repeated.measured(test_repeated.times(first)) for first in (11.0, 13.0)]
    one = test_validation.compared(test_validation.SIMULATED, real)
    (folder / "one.html").write_text(render_validation(one))
    (folder / "many.html").write_text(render_repeated(validated(test_repeated.SIMULATED, several)))
    (folder / "server.html").write_text(render_server(test_page.WHOLE))
    named = {name: folder / f"{name}.html" for name in ("one", "many", "server")}
    return named | {"plan": folder / "plan" / "plan.html", "rates": folder / "rates" / "saturate.html"}


@pytest.mark.long
@pytest.mark.parametrize("width", [420, 1440])
@pytest.mark.parametrize("which", ["plan", "rates", "one", "many", "server"])
def test_labels_and_legends_of_every_kind_of_page_have_room(
    which: str, width: int, other_pages: dict[str, Path], tmp_path: Path
) -> None:
    told = opened(other_pages[which], tmp_path, width=width)
    assert told["heard"] == [] and told["requests"] == [] and told["plots"] > 0
    assert told["onOthers"] == [] and told["tallLegends"] == []
    assert told["isCopyShown"] and told["width"] <= width


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
