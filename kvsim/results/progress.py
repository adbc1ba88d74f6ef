"""Shows the progress of a run: a bar on a terminal, a line now and then elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvsim.errors import one_line

INSTANT_S = 0.05
"""A job that is over sooner was finished before, or failed at once."""
LINE_EVERY_S = 30.0
"""Seconds between two lines where there is no terminal."""


class _Done(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        per_s = task.completed / task.elapsed if task.elapsed else 0.0
        return Text(f"{task.completed:,.0f} of {task.total or 0:,.0f} {self.unit}, {per_s:,.{0 if per_s >= 10 else 1}f}/s")


class Remaining:
    """Says how far a sweep is: ``3 of 12, 2 min left``. The time is that of the jobs before, on average."""

    def __init__(self, jobs: int, now_s: Callable[[], float] = perf_counter) -> None:
        self._jobs, self._now_s = jobs, now_s
        self._began_s = now_s()
        self._took_s: list[float] = []

    def next(self) -> str:
        """Return the line for the job that begins now; the one before it has ended."""
        now_s = self._now_s()
        begun = len(self._took_s)
        if begun:
            self._took_s[-1] = now_s - self._began_s
        self._began_s = now_s
        worked = [took_s for took_s in self._took_s if took_s >= INSTANT_S]
        self._took_s.append(0.0)
        left = f", {about(sum(worked) / len(worked) * (self._jobs - begun))} left" if worked else ""
        return f"{begun + 1} of {self._jobs}{left}"


def about(seconds: float) -> str:
    """Format a time: seconds below 90, minutes below 90, then hours."""
    minutes = seconds / 60
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


@contextmanager
def progress(
    total: int, label: str, console: Console | None = None, *, shown: bool = True, unit: str = "requests", lines: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show how far the block is while it runs, if ``shown``: yields a callback that takes the number done so far.

    On a terminal (``console``, by default standard error), a bar shows it with requests (or another ``unit``) per second.
    Elsewhere, such as in a file, a plain line says it each ``LINE_EVERY_S`` seconds, unless ``lines`` is False: a program that
    uses kvsim has a standard error of its own.
    """
    console = console or Console(stderr=True)
    if not shown or not (console.is_terminal or lines):
        yield _nothing
        return
    with _bar(total, label, console, unit) if console.is_terminal else _lines(total, label, console, unit) as advance:
        yield advance


def _nothing(done: int) -> None:
    """Show no progress."""


@contextmanager
def _bar(total: int, label: str, console: Console, unit: str) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), _Done(unit), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=5) as bar:
        bar.add_task(label, total=total)
        task = bar.tasks[0]

        def advance(done: int) -> None:
            """Record progress; costs one assignment, because the bar's own thread redraws it 5 times per second."""
            task.completed = done

        yield advance


@contextmanager
def _lines(total: int, label: str, console: Console, unit: str) -> Iterator[Callable[[int], None]]:
    lines = _Lines(total, label, console, unit)
    lines.start()
    try:
        yield lines.advance
    finally:
        lines.stop()


class _Lines(Thread):
    """Writes a line on what is done of what now and then, from a thread of its own, so that a long job is no silence."""

    def __init__(self, total: int, label: str, console: Console, unit: str) -> None:
        super().__init__(daemon=True)
        self._total, self._label, self._console, self._unit = total, one_line(label), console, unit
        self._done = 0
        self._has_ended = Event()

    def advance(self, done: int) -> None:
        """Record progress."""
        self._done = done

    def stop(self) -> None:
        """Write no more lines, and return when none is being written."""
        self._has_ended.set()
        self.join()

    def run(self) -> None:
        began_s = perf_counter()
        while not self._has_ended.wait(LINE_EVERY_S):
            line = f"{self._label}: {self._done:,} of {self._total:,} {self._unit} after {about(perf_counter() - began_s)}"
            try:
                print(line, file=self._console.file, flush=True)
            except (OSError, ValueError):  # closed, or nobody reads it any more: the run goes on
                return
