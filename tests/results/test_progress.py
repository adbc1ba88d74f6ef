import io

from rich.console import Console

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


def test_nothing_is_written_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), force_terminal=False)
    with progress(1200, "replay", console) as advance:
        advance(300)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


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
