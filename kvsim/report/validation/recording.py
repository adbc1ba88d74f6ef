"""A run as a validation compares it: its record and its requests, just made or read from its folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from kvsim.engine.columns import COLUMNS, SAME
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.report.folder import request_lines
from kvsim.results.frame import request_columns
from kvsim.results.records import read_requests, read_result
from kvsim.results.result import RunRecord


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """A run. Arrays have one entry per request, without those of the warm-up."""

    name: str
    """Its folder, or what it is called in messages."""
    record: RunRecord
    """The content of ``result.json``."""
    columns: Mapping[str, np.ndarray]
    """Those of ``requests.csv.gz``, with all requests."""

    @property
    def skipped(self) -> int:
        """Number of requests that the warm-up leaves out."""
        return int(self.record["warmup_requests"])

    @cached_property
    def prompts(self) -> np.ndarray:
        """The sizes of all requests, a row each: what tells that two runs served the same ones, besides their configurations."""
        sizes = [column.name for column in COLUMNS if column.compared == SAME and column.kind is not str]
        return np.stack([self.columns[name] for name in sizes], axis=1)

    @cached_property
    def rejected(self) -> np.ndarray:
        """Of all requests, whether each was rejected or shed."""
        return np.asarray(self.columns["status"] != "finished")

    @cached_property
    def served(self) -> np.ndarray:
        """Of the counted requests, whether each was served."""
        return ~self.rejected[self.skipped :]

    @cached_property
    def hit_pages(self) -> np.ndarray:
        """One column per tier."""
        return np.stack([self.columns[f"hit_pages_{tier}"] for tier in self.record["hit_pages"]], axis=1)[self.skipped :]

    @cached_property
    def ttft_s(self) -> np.ndarray:
        return np.asarray(self.columns["ttft_s"][self.skipped :], dtype=float)

    @cached_property
    def tpot_s(self) -> np.ndarray:
        return np.asarray(self.columns["tpot_s"][self.skipped :], dtype=float)


def recorded(name: str, record: RunRecord, outcome: Outcome) -> Recording:
    """Return a run that has just ended."""
    return Recording(name=name, record=record, columns=request_columns(request_lines(outcome), list(record["hit_pages"])))


def read_recording(folder: Path) -> Recording:
    """Read a run from its folder. Raises Damaged for a folder without a complete run."""
    record = read_result(folder)
    return Recording(name=str(folder), record=record, columns=read_requests(folder, record))


def read_measured(folders: list[str]) -> list[Recording]:
    """Read all runs with ``substrate=hardware`` in and below these folders, in order of their paths.

    Raises UsageError for a folder without one.
    """
    found: dict[Path, Recording] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UsageError(f"validate.measured: there is no folder {folder}")
        runs = {path.parent.resolve(): path.parent for path in sorted(folder.rglob("result.json"), key=_numbered)}
        some = {place: read_recording(path) for place, path in runs.items()}
        some = {place: run for place, run in some.items() if run.record["config"].get("substrate") == "hardware"}
        if not some:
            raise UsageError(
                f"validate.measured: {folder} has no run on hardware: name a folder that kvsim validate, or kvsim simulate with "
                "substrate=hardware, has written"
            )
        found |= some
    return list(found.values())


def _numbered(path: Path) -> list[tuple[int, str]]:
    """Sort key: numbers by their size."""
    return [(int(part) if part.isdigit() else -1, part) for part in path.parts]
