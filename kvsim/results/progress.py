"""Shows the progress of a run on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class _Done(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        per_s = task.completed / task.elapsed if task.elapsed else 0.0
        return Text(f"{task.completed:,.0f} of {task.total or 0:,.0f} {self.unit}, {per_s:,.{0 if per_s >= 10 else 1}f}/s")


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
