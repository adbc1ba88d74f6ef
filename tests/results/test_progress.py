import io

from rich.console import Console

from kvsim.results.progress import progress


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
