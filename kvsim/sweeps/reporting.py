"""One page about any number of runs: what ``kvsim report`` and the Python API read, and what they write."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvsim.errors import UsageError
from kvsim.files.writing import replacing
from kvsim.report.comparison.html import render_comparison
from kvsim.report.folder import prepare_folder, write_shared_script
from kvsim.report.html import render
from kvsim.report.shown_paths import shortest
from kvsim.results.records import Damaged, read_sweep
from kvsim.results.result import RunRecord
from kvsim.results.runs import Run, read_runs
from kvsim.sweeps.bounds import add_bounds
from kvsim.sweeps.folder import sweep_page
from kvsim.sweeps.kept_folder import KeptFolder
from kvsim.sweeps.sweep_result import ComparedRuns

PAGE = "report.html"


def runs_in(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in folders, each that of a run or of a sweep, under the shortest names that tell them apart.

    Raises UsageError for a folder that is not there, and if none of them has a result.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: there is no such folder" if not folder.exists() else f"{folder}: not a folder")
    runs = read_runs(folders)
    if not any(run.result for run in runs):
        raise UsageError(f"{', '.join(map(str, folders))}: no result.json there or one folder below")
    names = shortest(run.name for run in runs)
    for run in runs:
        run.name = names[run.name]
    return runs


def page_in(place: Path) -> Path:
    """Return the file of a page, given a file or the folder that it goes to."""
    return place if place.suffix == ".html" else place / PAGE


def is_of_sweep(folders: Sequence[Path], target: Path) -> bool:
    """Whether a page about these folders is the one that a sweep keeps in its own."""
    if len(folders) != 1 or target != folders[0] / PAGE:
        return False
    try:
        read_sweep(target.parent)
    except Damaged:  # or there is none
        return False
    return True


def single(runs: Sequence[Run], *, is_of_sweep: bool) -> RunRecord | None:
    """Return the result that is reported by itself, as the run itself does; None if several are compared, or the run failed."""
    return runs[0].result if len(runs) == 1 and not is_of_sweep else None


def write_page(runs: list[Run], target: Path, command_line: str, *, is_of_sweep: bool = False, has_links: bool = True) -> None:
    """Write a page, which has links to those of the runs, or that of the sweep in its folder; about one run, its own page. Raises
    UsageError if it cannot be written."""
    prepare_folder(target.parent)
    if is_of_sweep:
        write_shared_script(target.parent)
        page = sweep_page(target.parent, runs)
    elif (alone := single(runs, is_of_sweep=is_of_sweep)) is not None:
        page = render(alone, bounds=runs[0].bounds)
    else:
        page = render_comparison(runs, command_line, folder=target.parent if has_links else None)
    with replacing(target) as file:
        file.write(page.encode())


class Report(ComparedRuns, KeptFolder):
    """Runs side by side, with their bounds."""

    def __init__(self, folders: Iterable[Path], *, kept: Path | None = None, others: Sequence[object] = ()) -> None:
        """``kept`` is a temporary folder in which some of the runs are, which have no other; ``others`` keep those of others.

        Raises UsageError.
        """
        self._folders, self._others = list(folders), others
        if kept is not None:
            self.keep(kept, is_temporary=True)
        runs = runs_in(self._folders)
        add_bounds(runs)
        super().__init__(runs, (self.kept, *others))

    def write(self, file: str | Path) -> Path:
        """Write the page to a file, or to ``report.html`` in a folder, and return the file. Raises UsageError."""
        target = page_in(Path(file))
        is_kept = is_of_sweep(self._folders, target)
        write_page(self._runs, target, "kvsim report", is_of_sweep=is_kept, has_links=self.kept is None)
        return target
