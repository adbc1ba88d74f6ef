"""The page of a sweep while its jobs run: when it is written, what it says, and that nothing of it stays."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvsim
from kvsim.cli import main
from kvsim.sweeps import live
from kvsim.sweeps.command_jobs import CommandJobs, OutputLost
from kvsim.sweeps.live import EVERY_S, LivePage, note_end
from tests.report.test_html import Page

SMALL = ("trace.sessions=3", "tiers.gpu.capacity=3000pages")
SWEEP = ("replay", "-m", *SMALL, "eviction=lru,arc,fifo", "output=sweep")
REFRESH = '<meta http-equiv="refresh"'


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Writes the page after each job; the fixture is what it then was."""
    seen: list[str] = []
    look = LivePage.look

    def noted(self: LivePage) -> None:
        look(self)
        page = self.folder / "report.html"
        seen.append(page.read_text() if page.exists() else "")

    monkeypatch.setattr(live, "EVERY_S", 0.0)
    monkeypatch.setattr(live, "MOST_SHARE", 1e9)
    monkeypatch.setattr(LivePage, "look", noted)
    return seen


def stays(folder: Path) -> bool:
    """Whether the page in a folder is the last one, and nothing else of the live view is there."""
    return REFRESH not in (folder / "report.html").read_text() and not (folder / ".ended").exists()


def test_the_page_grows_with_the_jobs_and_stays_as_kvsim_report_writes_it(always: list[str], folder: Path) -> None:
    assert main([*SWEEP]) == 0
    first, second, third = always
    for number, page in enumerate((first, second), 1):
        assert f'{REFRESH} content="1">' in page
        assert re.search(rf"{number} of 3 jobs, about \d+ s left", Page(page).text)
        assert f'<progress max="3" value="{number}">' in page and "setTimeout" in page
        assert f": {number} run" in page.split("</title>")[0]
    assert third == second, "the last page is written at the end"
    assert "exceed chance is said when all jobs have ended" in Page(second).text
    last = (folder / "sweep" / "report.html").read_bytes()
    assert b"exceed chance is said" not in last
    assert stays(folder / "sweep") and b"of 3 jobs" not in last and b"3 runs" in last
    assert main(["report", "sweep"]) == 0
    assert (folder / "sweep" / "report.html").read_bytes() == last
    assert main(["report", "sweep", "output=alone.html"]) == 0
    assert len((folder / "alone.html").read_bytes()) > len(last) + 1e6, "it contains plotly.js"


def test_jobs_that_had_finished_before_count_and_take_no_time(always: list[str], folder: Path) -> None:
    assert main([*SWEEP]) == 0
    always.clear()
    assert main([*SWEEP]) == 0
    assert "1 of 3 jobs " in Page(always[0]).text and "left" not in Page(always[0]).text
    assert stays(folder / "sweep")


def test_jobs_that_cannot_run_are_not_waited_for(always: list[str], folder: Path) -> None:
    assert main([*SWEEP, "trace.limit=null,0"]) == 2
    pages = [page for page in always if page]
    assert "of 3 jobs" in Page(pages[0]).text


def test_a_sweep_from_python_has_the_page_too(always: list[str], folder: Path) -> None:
    trace = kvsim.load_trace("synthetic", sessions=3)
    done: list[int] = []
    kvsim.sweep(trace, {"eviction": ["lru", "arc"]}, *SMALL[1:], output="sweep", advance=done.append)
    assert done == [1, 2] and "1 of 2 jobs" in Page(always[0]).text
    assert stays(folder / "sweep")


@pytest.mark.parametrize(
    "what", [KeyboardInterrupt(), OutputLost(OSError(28, "No space left on device"))], ids=["ctrl-c", "output"]
)
def test_a_sweep_that_is_cut_short_leaves_a_page_that_stays(
    what: BaseException, always: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_job = CommandJobs.run_job

    def cut(self: CommandJobs, number: int, *rest: object) -> object:
        if number == 1:
            raise what
        return run_job(self, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(CommandJobs, "run_job", cut)
    assert main([*SWEEP]) != 0
    assert REFRESH in always[0] and stays(folder / "sweep")
    assert ": 1 run" in (folder / "sweep" / "report.html").read_text()


def test_a_page_that_cannot_be_made_ends_no_sweep(always: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "read_runs", lambda *_, **__: 1 / 0)
    assert main([*SWEEP]) == 0
    assert always == [""] * 3 and stays(folder / "sweep")


# --- when it is written --------------------------------------------------------------------------------------------------


@pytest.fixture
def sweep(folder: Path) -> Path:
    """A folder with a sweep of three jobs."""
    assert main([*SWEEP]) == 0
    (folder / "sweep" / "report.html").unlink()
    return folder / "sweep"


def written(sweep: Path, page: LivePage) -> bool:
    """Whether a look writes the page."""
    (sweep / "report.html").unlink(missing_ok=True)
    page.look()
    return (sweep / "report.html").exists()


def test_pages_are_seconds_apart_and_take_a_small_share_of_the_time(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    page = LivePage(sweep, 4, now_s=clock, unix_s=lambda: 0.0)
    note_end(sweep, is_earlier=False)
    clock.now_s += EVERY_S - 1
    assert not written(sweep, page), "a short sweep has only the last one"
    made: Callable[..., str] = live.sweep_page

    def slow(*given: object) -> str:
        clock.now_s += 1.0
        return made(*given)

    monkeypatch.setattr(live, "sweep_page", slow)
    clock.now_s += 1
    assert written(sweep, page)
    clock.now_s += 49
    assert not written(sweep, page), "a page that takes a second is written every 50 s"
    clock.now_s += 1
    assert written(sweep, page)


def test_time_left_is_by_the_jobs_that_ran(sweep: Path) -> None:
    """30 s for three jobs that ran and one that had finished before: 10 s for each of the 8 that are left."""
    clock = Clock()
    page = LivePage(sweep, 12, now_s=clock)
    for is_earlier in (False, True, False, False):
        note_end(sweep, is_earlier=is_earlier)
    clock.now_s += 30
    assert written(sweep, page)
    assert "4 of 12 jobs, about 80 s left" in Page((sweep / "report.html").read_text()).text


def test_nobody_knows_how_many_jobs_an_optimizer_will_choose(sweep: Path) -> None:
    clock = Clock()
    page = LivePage(sweep, None, now_s=clock)
    note_end(sweep, is_earlier=False)
    clock.now_s += 10
    assert written(sweep, page)
    text = (sweep / "report.html").read_text()
    assert "1 job so far" in Page(text).text and "<progress" not in text


def test_while_jobs_run_in_other_processes_it_looks_by_itself(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_S", 0.001)
    monkeypatch.setattr(live, "EVERY_S", 0.0)
    page = LivePage(sweep, 4)
    has_looked = threading.Event()
    look = page.look

    def noted() -> None:
        look()
        if page.is_shown:
            has_looked.set()

    monkeypatch.setattr(page, "look", noted)
    note_end(sweep, is_earlier=False)
    with page.watching():
        assert has_looked.wait(timeout=60)
    assert "1 of 4 jobs" in Page((sweep / "report.html").read_text()).text
    page.close()
    assert stays(sweep)
