"""How far a run is, on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class _Done(ProgressColumn):
    def render(self, task: Task) -> Text:
        per_s = task.completed / task.elapsed if task.elapsed else 0.0
        return Text(f"{task.completed:,.0f} of {task.total or 0:,.0f} requests, {per_s:,.0f} a second")


@contextmanager
def progress(total: int, label: str, console: Console | None = None, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a bar with requests a second while the block runs; nothing unless it is to be ``shown`` and ``console`` (standard
    error) is a terminal. Gives what is to be told how many requests are done so far."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), _Done(), TimeElapsedColumn())
    off = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, refresh_per_second=5, disable=off) as bar:
        bar.add_task(label, total=total)
        task = bar.tasks[0]

        def advance(done: int) -> None:
            """Costs one assignment: the bar is redrawn by its own thread, 5 times a second."""
            task.completed = done

        yield advance
