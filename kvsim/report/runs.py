"""Reads runs from any number of folders, for reports about them."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsim.errors import UsageError
from kvsim.report.result import SCHEMA, RunRecord


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


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read the runs in folders, those of a sweep in order of job number. Raises UsageError for a file that is not a result."""
    folders = list(folders)
    runs: list[Run] = []
    for folder in folders:
        found = list(_runs_in(folder))
        if len(folders) > 1:
            for run in found:
                run.name = str(folder if run.folder == folder else run.folder)
        runs += found
    return runs


def _runs_in(folder: Path) -> Iterator[Run]:
    if (folder / "result.json").exists():
        yield _read(folder)
        return
    for job in sorted((path for path in folder.iterdir() if path.is_dir()), key=_place):
        if (job / "result.json").exists():
            yield _read(job)
        elif (job / "error.json").exists():
            record = json.loads((job / "error.json").read_text())
            yield Run(
                name=job.name, folder=job, error=record["error"], is_crash=record["is_crash"], overrides=record["overrides"]
            )


def _place(job: Path) -> tuple[bool, int, str]:
    """Sort key: numbered jobs first, in order of their numbers."""
    number = re.match(r"\d+", job.name)
    return not number, int(number[0]) if number else 0, job.name


def _read(folder: Path) -> Run:
    path = folder / "result.json"
    try:
        result = json.loads(path.read_text())
        if not isinstance(result, dict) or result["schema"] != SCHEMA:
            raise UsageError(f"{path}: not a result of schema {SCHEMA}: repeat the run with this version of kvsim")
        if "choices" not in result:
            raise UsageError(f"{path}: of an earlier version of kvsim, without the names of its policies: repeat the run")
    except (ValueError, KeyError) as error:
        raise UsageError(f"{path}: not a valid result: {error}") from error
    run = Run(name=folder.name, folder=folder, result=result)
    for kind, name in (result.get("bounds") or {}).items():
        bound = run.bounds_folder / f"{name}.json"
        if bound.exists():
            run.bounds[kind] = json.loads(bound.read_text())
    return run
