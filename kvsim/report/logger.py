"""The contract of loggers: where results go besides the run's folder."""

from dataclasses import dataclass
from pathlib import Path

from kvsim.report.result import Result


@dataclass(kw_only=True)
class Logger:
    """Keeps results in the run's folder, and nowhere else. Others send them somewhere, and never lose a run by it."""

    def log(self, folder: Path, result: Result, group: str | None) -> None:
        """A run is complete in ``folder``; ``group`` names the sweep that it belongs to."""

    def log_failure(self, folder: Path, name: str, error: str, group: str | None) -> None:
        """A job that was called ``name`` has failed."""
