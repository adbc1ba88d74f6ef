"""The contract of loggers, which send results to places other than the run's folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvsim.report.result import RunRecord


@dataclass(kw_only=True)
class Logger:
    """Keeps results in the run's folder only. Subclasses also send them elsewhere; if that fails, the run must not."""

    wants_page: ClassVar[bool] = False
    """Whether each job of a sweep needs its own page, to be logged."""

    def log(self, folder: Path, result: RunRecord, group: str | None) -> None:
        """Log a run whose files are complete in ``folder``; ``group`` names its sweep, if any."""

    def log_failure(self, folder: Path, config: dict[str, Any], error: str, group: str | None) -> None:
        """Log a failed run."""
