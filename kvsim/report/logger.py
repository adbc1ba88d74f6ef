"""The contract of loggers: where results go besides the run's folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvsim.report.result import RunRecord


@dataclass(kw_only=True)
class Logger:
    """Keeps results in the run's folder, and nowhere else. Others send them somewhere, and never lose a run by it."""

    wants_page: ClassVar[bool] = False
    """Whether a job of a sweep, which needs no page of its own, is to have one to log."""

    def log(self, folder: Path, result: RunRecord, group: str | None) -> None:
        """A run is complete in ``folder``; ``group`` names the sweep that it belongs to."""

    def log_failure(self, folder: Path, config: dict[str, Any], error: str, group: str | None) -> None:
        """The run of a configuration has failed."""
