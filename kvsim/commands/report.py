"""``kvsim report``: writes one HTML page about any number of runs."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from kvsim.errors import UsageError

USAGE = """usage: kvsim report DIR... [output=FILE.html|DIR]

Writes a self-contained HTML page that compares runs. Each DIR is the folder of a run, or of a sweep with all its jobs.
For a single run, the page is the one that the run itself writes.
The page is DIR/report.html if there is one DIR, otherwise report.html in the current folder; output= chooses another
file or folder. DIR/report.html of a sweep is the page that the sweep leaves, with plotly.min.js beside it.
Missing bounds (Belady and the unlimited cache) are computed if the trace can be read."""


def main(arguments: Sequence[str]) -> None:
    """Read the folders, compute missing bounds, write the page, print the table."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    folders = [Path(word) for word in arguments if not word.startswith("output=")]
    chosen = [word.removeprefix("output=") for word in arguments if word.startswith("output=")]
    if not folders:
        raise UsageError("name the folders to report on: kvsim report DIR...")
    report(folders, Path(chosen[-1]) if chosen else folders[0] if len(folders) == 1 else Path(), arguments)


def report(folders: Sequence[Path], place: Path, arguments: Sequence[str]) -> None:
    """Write the page about the runs in ``folders`` to a file or a folder. Raises UsageError if none of them has a result."""
    from rich.console import Console

    from kvsim.report.comparison.compare import print_comparison
    from kvsim.report.folder import prepare_folder
    from kvsim.report.ghosts import ghosts
    from kvsim.report.shown_paths import shown_place
    from kvsim.report.table import print_result
    from kvsim.sweeps.bounds import add_bounds
    from kvsim.sweeps.reporting import is_of_sweep, page_in, runs_in, single, write_page

    runs, target = runs_in(folders), page_in(place)
    prepare_folder(target.parent)  # before the bounds, which may take long
    add_bounds(runs)
    is_kept = is_of_sweep(folders, target)
    write_page(runs, target, shlex.join(["kvsim", "report", *arguments]), is_of_sweep=is_kept)
    console = Console()
    if (alone := single(runs, is_of_sweep=is_kept)) is not None:
        print_result(alone, console)
        if lines := [f"{one.name} {one.share}" for one in ghosts(runs[0].bounds)]:
            console.print(f"\n{', '.join(lines)}", highlight=False)
    else:
        print_comparison(runs, console)
    console.print(f"\n{shown_place(target)}", highlight=False)
