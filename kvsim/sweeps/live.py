"""The page of a sweep while its jobs run: written anew every few seconds, and loaded again by the browser that shows it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvsim.errors import UsageError
from kvsim.files.writing import replacing
from kvsim.report.refreshing import Refreshing
from kvsim.results.progress import about
from kvsim.results.runs import Run, read_runs
from kvsim.sweeps.folder import sweep_page, write_comparison

ENDED = ".ended"
"""The file in the folder of a sweep in which each job leaves a line when it ends; it is gone when the sweep has ended."""
RAN, EARLIER = "ran", "earlier"
EVERY_S = 5.0
"""Least seconds from one page to the next."""
MOST_SHARE = 0.02
"""Most of the time that writing pages takes."""
PATIENCE = 3.0
"""How many times as long as a job takes on average, and as the next page is away, nothing new may come."""
OVERDUE = "Nothing new has come since then: the sweep has stopped, or a job takes much longer than those before."
LOOK_S = 0.5


class Progress(NamedTuple):
    """How many jobs have ended, and how many of these ran: the others had been finished by an earlier sweep."""

    ended: int
    ran: int


def note_end(folder: Path, *, is_earlier: bool) -> None:
    """Note that a job of the sweep in ``folder`` has ended, in whatever process it ran."""
    with suppress(OSError), (folder / ENDED).open("a") as file:
        file.write(f"{EARLIER if is_earlier else RAN}\n")


def progress_of(folder: Path) -> Progress:
    """Return how far the sweep in ``folder`` is."""
    try:
        lines = (folder / ENDED).read_text().splitlines()
    except OSError:
        lines = []
    return Progress(len(lines), lines.count(RAN))


class LivePage:
    """Writes the page of a sweep of so many ``jobs`` (None: nobody knows) from time to time, and removes its traces.

    No error in it ends the sweep: the page at the end has the same one, after the jobs.
    """

    def __init__(
        self,
        folder: Path,
        jobs: int | None,
        now_s: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.is_shown = False
        """Whether the page in the folder is one that loads itself again."""
        self._jobs = jobs
        self._now_s, self._unix_s = now_s, unix_s
        self._began_s = now_s()
        self._every_s = EVERY_S
        self._due_s = self._began_s + EVERY_S
        self._forget()

    def look(self) -> None:
        """Write the page if one is due and some job has finished, unless all have."""
        began_s = self._now_s()
        if began_s < self._due_s:
            return
        progress = progress_of(self.folder)
        if progress.ended == self._jobs:
            return
        with suppress(Exception):
            self._write(progress, began_s - self._began_s)
        took_s = self._now_s() - began_s
        self._every_s = max(EVERY_S, took_s / MOST_SHARE)
        self._due_s = self._now_s() + self._every_s

    def _write(self, progress: Progress, elapsed_s: float) -> None:
        runs = read_runs([self.folder], damaged_fail=True)
        if all(run.result is None for run in runs):
            return
        job_s = elapsed_s / progress.ran if progress.ran else 0.0
        page = sweep_page(
            self.folder,
            runs,
            Refreshing(
                at_s=self._unix_s(),
                every_s=self._every_s,
                patience_s=PATIENCE * max(job_s, self._every_s) + EVERY_S,
                overdue=OVERDUE,
                progress=self._line(progress, job_s),
                ended=progress.ended,
                parts=self._jobs,
            ),
        )
        with replacing(self.folder / "report.html") as file:
            file.write(page.encode())
        self.is_shown = True

    def _line(self, progress: Progress, job_s: float) -> str:
        """Return how far the sweep is: ``7 of 12 jobs, about 40 s left``."""
        if self._jobs is None:
            return f"{progress.ended} job{'s' * (progress.ended != 1)} so far"
        left = f", about {about(job_s * (self._jobs - progress.ended))} left" if job_s else ""
        return f"{progress.ended} of {self._jobs} jobs{left}"

    def after(self, advance: Callable[[int], None]) -> Callable[[int], None]:
        """Return a callback that takes the number of jobs done: it passes that on to another one, and then looks."""

        def both(done: int) -> None:
            advance(done)
            self.look()

        return both

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look again and again during a block, whose jobs run in other processes."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(LOOK_S):
                self.look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def finish(self, runs: list[Run]) -> list[str]:
        """Write the files about all runs, with the page that stays, and return their names."""
        names = write_comparison(self.folder, runs)
        self.is_shown = False
        return names

    def close(self) -> None:
        """Remove what the jobs have noted, and write the last page if the one that is there still loads itself again."""
        self._forget()
        if self.is_shown:
            with suppress(UsageError):
                self.finish(read_runs([self.folder], damaged_fail=True))

    def _forget(self) -> None:
        with suppress(OSError):
            (self.folder / ENDED).unlink(missing_ok=True)
