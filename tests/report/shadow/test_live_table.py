"""A terminal shows tables in place; a pipe gets lines, and the tables at the end."""

import io

import pytest
from rich.console import Console

from kvsim.report.shadow.live_table import LINE_EVERY_S, LiveTable
from kvsim.report.summary import Table

TABLE = Table("Ghost caches", ("cache", "points", "settings"), [("twice", "+6.1", "eviction=arc " * 20)], "a note")


def shown(*, is_terminal: bool) -> tuple[LiveTable, io.StringIO]:
    file = io.StringIO()
    return LiveTable(Console(file=file, width=100, force_terminal=is_terminal, color_system=None)), file


def test_a_pipe_gets_a_line_when_something_is_new_and_tables_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    table, file = shown(is_terminal=False)
    table.start()
    for number, line in enumerate(["none", "one", "one", "two"]):
        table.show([TABLE], [], line, 1000.0 + number * LINE_EVERY_S)
    table.show([TABLE], [], "too soon", 1001.0 + 3 * LINE_EVERY_S)
    assert file.getvalue() == "one\ntwo\n"
    table.warn("no server")
    table.end([TABLE], ["an estimate"])
    rest = file.getvalue().removeprefix("one\ntwo\n")
    assert rest.startswith("Ghost caches\n") and "+6.1" in rest and rest.rstrip().endswith("an estimate")
    assert capsys.readouterr().err == "kvsim: no server\n" and "\x1b" not in file.getvalue()


def test_a_terminal_shows_the_tables_in_place() -> None:
    table, file = shown(is_terminal=True)
    table.start()
    table.show([TABLE], ["an estimate"], "a line", 0.0)
    assert "+6.1" in file.getvalue() and "a line" not in file.getvalue() and "\x1b[?25l" in file.getvalue()
    table.warn("no server")
    table.say("listens")
    table.end([TABLE], [])
    text = file.getvalue()
    assert "kvsim: no server" in text and "listens" in text and text.rstrip().endswith("a note") and "\x1b[?25h" in text
    table.close()
