"""Reads runs from any number of folders, for reports about them."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsim.results.records import Damaged, read_bound, read_failure, read_result
from kvsim.results.result import RunRecord


@dataclass(kw_only=True)
class Run:
    """A recorded run, or a failed job of a sweep."""

    name: str
    """Name of the folder; its path if runs of several folders are read."""
    folder: Path
    result: RunRecord | None = None
    error: str | None = None
    """Error of a failed job; None for a recorded run."""
    is_crash: bool = False
    overrides: list[str] = field(default_factory=list)
    """Overrides of a failed job, which has no result to hold its configuration."""
    bounds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Known hit rates of ``belady`` and ``unlimited`` on the same trace."""

    @property
    def bounds_folder(self) -> Path:
        """The folder in which a sweep stores the bounds of its jobs."""
        return self.folder.parent / "bounds"


def read_runs(folders: Iterable[Path], *, damaged_fail: bool = False) -> list[Run]:
    """Read the runs in folders, those of a sweep in order of job number.

    Raises Damaged for a file that is not a result; with ``damaged_fail``, it counts as a failed job instead.
    """
    folders = list(folders)
    runs: list[Run] = []
    for folder in folders:
        found = list(_runs_in(folder, damaged_fail))
        if len(folders) > 1:
            for run in found:
                run.name = str(folder if run.folder == folder else run.folder)
        runs += found
    return runs


def _runs_in(folder: Path, damaged_fail: bool) -> Iterator[Run]:
    if os.path.lexists(folder / "result.json"):
        yield _read(folder, damaged_fail)
        return
    for job in sorted((path for path in folder.iterdir() if path.is_dir()), key=_place):
        if os.path.lexists(job / "result.json"):
            yield _read(job, damaged_fail)
        elif os.path.lexists(job / "error.json"):
            yield failed(job, read_failure(job))


def failed(job: Path, record: Mapping[str, Any]) -> Run:
    """Return a failed job of a sweep from its folder and its ``error.json``."""
    return Run(name=job.name, folder=job, error=record["error"], is_crash=record["is_crash"], overrides=record["overrides"])


def _place(job: Path) -> tuple[bool, int, str]:
    """Sort key: numbered jobs first, in order of their numbers."""
    number = re.match(r"\d+", job.name)
    return not number, int(number[0]) if number else 0, job.name


def _read(folder: Path, damaged_fail: bool) -> Run:
    try:
        result = read_result(folder)
    except Damaged as error:
        if not damaged_fail:
            raise
        return Run(name=folder.name, folder=folder, error=str(error))
    run = Run(name=folder.name, folder=folder, result=result)
    for kind, name in (result.get("bounds") or {}).items():
        if (bound := read_bound(run.bounds_folder, name)) is not None:
            run.bounds[kind] = bound
    return run
