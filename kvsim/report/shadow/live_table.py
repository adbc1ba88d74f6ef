"""What a shadow sees, on a terminal that refreshes, or as lines where there is none."""

import io
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvsim.report.summary import Table
from kvsim.report.terminal import print_table, width_of

LINE_EVERY_S = 10.0
"""Least time between two lines where there is no terminal."""


class LiveTable:
    """Shows tables: in place on a terminal; elsewhere a line from time to time, and the tables at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._last_line_s = 0.0
        self._shown = ""

    def start(self) -> None:
        """Take the lower part of the terminal, if there is one."""
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()

    def say(self, line: str) -> None:
        """Print a line above the tables."""
        self.console.print(Text(line), soft_wrap=True)

    def warn(self, line: str) -> None:
        """Print a line about a problem: above the tables or, without a terminal, to standard error."""
        if self._live is not None:
            self.console.print(Text(f"kvsim: {line}", "yellow"), soft_wrap=True)
        else:
            print(f"kvsim: {line}", file=sys.stderr, flush=True)

    def show(self, tables: Sequence[Table], notes: Sequence[str], line: str, now_s: float) -> None:
        """Show the tables as they are now, or the line that says the same in short."""
        if self._live is not None:
            self._live.update(self._drawn(tables, notes), refresh=True)
        elif line != self._shown and now_s - self._last_line_s >= LINE_EVERY_S:
            if self._last_line_s:  # the first one has nothing to say yet
                self.say(line)
            self._last_line_s, self._shown = now_s, line

    def end(self, tables: Sequence[Table], notes: Sequence[str]) -> None:
        """Leave the tables as they are at the end."""
        self.close()
        _print(self.console, tables, notes)

    def close(self) -> None:
        """Give the terminal back, without the tables."""
        if self._live is not None:
            self._live.update(Text(""), refresh=True)
            self._live.stop()
            self._live = None

    def _drawn(self, tables: Sequence[Table], notes: Sequence[str]) -> Text:
        file: Any = io.StringIO()
        plain = Console(file=file, width=self.console.width, force_terminal=True, color_system="truecolor", highlight=False)
        _print(plain, tables, notes)
        return Text.from_ansi(file.getvalue())


def _print(console: Console, tables: Sequence[Table], notes: Sequence[str]) -> None:
    width = width_of(console)
    for table in tables:
        console.print(Text(table.title, "bold"))
        print_table(console, table.columns, table.rows, width, words=_words(table), left=(0, *_words(table)))
        console.print(Text(table.note, "dim") if table.note else "", width=min(width, 100))
    for note in notes:
        console.print(Text(note, "dim"), width=min(width, 100))


def _words(table: Table) -> list[int]:
    """Return the columns of texts: those called settings or state."""
    return [number for number, name in enumerate(table.columns) if name in ("settings", "state")]
