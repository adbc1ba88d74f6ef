"""``kvsim report``: writes one HTML page about any number of run folders."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from kvsim.errors import UsageError

USAGE = """usage: kvsim report DIR... [output=FILE.html|DIR]

Writes a self-contained HTML page that compares runs. Each DIR is the folder of a run, or of a sweep with all its jobs.
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
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: there is no such folder" if not folder.exists() else f"{folder}: not a folder")
    if not folders:
        raise UsageError("name the folders to report on: kvsim report DIR...")
    target = Path(chosen[-1]) if chosen else folders[0] if len(folders) == 1 else Path()
    if target.suffix != ".html":
        target /= "report.html"
    write_report(folders, target, shlex.join(["kvsim", "report", *arguments]))


def write_report(folders: list[Path], target: Path, command_line: str) -> None:
    """Write the page about the runs in ``folders`` to ``target``. Raises UsageError if none of them has a result."""
    from rich.console import Console

    from kvsim.files.writing import replacing
    from kvsim.report.comparison.compare import print_comparison
    from kvsim.report.comparison.html import render_comparison
    from kvsim.report.folder import prepare_folder, write_shared_script
    from kvsim.report.shown_paths import shortest, shown_place
    from kvsim.results.runs import read_runs
    from kvsim.sweeps.bounds import add_bounds
    from kvsim.sweeps.folder import sweep_page

    runs = read_runs(folders)
    if not any(run.result for run in runs):
        raise UsageError(f"{', '.join(map(str, folders))}: no result.json there or one folder below")
    names = shortest(run.name for run in runs)
    for run in runs:
        run.name = names[run.name]
    prepare_folder(target.parent)
    add_bounds(runs)
    if is_of_sweep(folders, target):
        write_shared_script(target.parent)
        page = sweep_page(target.parent, runs)
    else:
        page = render_comparison(runs, command_line, folder=target.parent)
    with replacing(target) as file:
        file.write(page.encode())
    console = Console()
    print_comparison(runs, console)
    console.print(f"\n{shown_place(target)}", highlight=False)


def is_of_sweep(folders: Sequence[Path], target: Path) -> bool:
    """Whether a page about these folders is the one that a sweep keeps in its own."""
    from kvsim.results.records import Damaged, read_sweep

    if len(folders) != 1 or target != folders[0] / "report.html":
        return False
    try:
        read_sweep(target.parent)
    except Damaged:  # or there is none
        return False
    return True
