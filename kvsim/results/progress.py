"""Shows the progress of a run on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

INSTANT_S = 0.05
"""A job that is over sooner was finished before, or failed at once."""


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
    """Format a time to come: seconds below 90, minutes below 90, then hours."""
    minutes = seconds / 60
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


@contextmanager
def progress(
    total: int, label: str, console: Console | None = None, *, shown: bool = True, unit: str = "requests"
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar with requests (or another ``unit``) per second while the block runs, if ``shown`` and if ``console``
    (by default standard error) is a terminal. Yields a callback that takes the number done so far."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), _Done(unit), TimeElapsedColumn())
    off = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, refresh_per_second=5, disable=off) as bar:
        bar.add_task(label, total=total)
        task = bar.tasks[0]

        def advance(done: int) -> None:
            """Record progress; costs one assignment, because the bar's own thread redraws it 5 times per second."""
            task.completed = done

        yield advance
