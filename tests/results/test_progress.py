import io
import re
import threading
from threading import Event

import pytest
from rich.console import Console

from kvsim.results import progress as module
from kvsim.results.progress import Remaining, progress


def test_the_bar_shows_requests_done_and_requests_a_second():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress(1200, "replay", console) as advance:
        advance(300)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "replay" in text
    assert "300 of 1,200 requests" in text
    assert "/s" in text


class Told(io.StringIO):
    """A file that says when a number of lines have been written."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.expected, self.has_lines = lines, Event()

    def flush(self) -> None:
        if self.getvalue().count("\n") >= self.expected:
            self.has_lines.set()


def test_lines_say_what_is_done_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.001)
    file = Told(2)
    with progress(1200, "replay \x1b[1m of a", Console(file=file, force_terminal=False), unit="runs") as advance:
        advance(300)
        assert file.has_lines.wait(30)
    text = file.getvalue()
    *_, last = text.splitlines()
    assert re.fullmatch(r"replay \\x1b\[1m of a: 300 of 1,200 runs after \d+ s", last), last
    assert all(letter.isprintable() or letter == "\n" for letter in text) and text.endswith("\n")
    assert not any(isinstance(thread, module._Lines) for thread in threading.enumerate()), "no line comes after the block"


def test_a_short_job_a_hidden_one_and_one_of_a_program_write_nothing_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with progress(1200, "replay", console) as advance:
        advance(300)
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.0)
    for hidden in ({"shown": False}, {"lines": False}):
        with progress(1200, "replay", console, **hidden) as advance:
            advance(300)
            assert not any(isinstance(thread, module._Lines) for thread in threading.enumerate())
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == ""


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_a_run_goes_on_when_nobody_reads_its_lines(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.001)
    was_written = Event()

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            was_written.set()
            raise error

    with progress(10, "replay", Console(file=Closed(), force_terminal=False)) as advance:
        assert was_written.wait(30)
        advance(10)


def test_a_sweep_says_how_many_jobs_are_done_and_how_long_the_others_take() -> None:
    """Jobs of 60 s, after one that was finished before and takes no time."""
    times = iter([0.0, 0.0, 0.01, 60.01, 120.01, 7000.0])
    remaining = Remaining(100, lambda: next(times))
    assert remaining.next() == "1 of 100"
    assert remaining.next() == "2 of 100", "nothing is known of a job that was finished before"
    assert remaining.next() == "3 of 100, 1.6 h left"
    assert remaining.next() == "4 of 100, 1.6 h left"
    at = iter([0.0, 0.0, 20.0, 40.0])
    few = Remaining(3, lambda: next(at))
    assert [few.next() for _ in range(3)] == ["1 of 3", "2 of 3, 40 s left", "3 of 3, 20 s left"]
