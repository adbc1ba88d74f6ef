"""The contract of loggers, which send results to places other than the run's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsim.results.result import RunRecord
from kvsim.results.runs import Run


@dataclass(kw_only=True)
class Logger:
    """Keeps results in the run's folder only. Subclasses also send them elsewhere; if that fails, the run must not.

    The folder of a job of a sweep is one below the sweep's; ``group`` is the sweep's name, None for a single run.
    """

    @property
    def wants_page(self) -> bool:
        """Whether each job of a sweep needs its own page, to be logged."""
        return False

    def log(self, folder: Path, result: RunRecord, group: str | None) -> None:
        """Log a run whose files are complete in ``folder``."""

    def log_failure(self, folder: Path, begun: RunRecord, error: str, group: str | None) -> None:
        """Log a failed run; ``begun`` has the fields of its result that were known before: command, config, choices, seed."""

    def log_watched(
        self, folder: Path, begun: RunRecord, points: Sequence[Mapping[str, float]], last: Mapping[str, float]
    ) -> None:
        """Log what was seen of live engines: numbers over time, each point with ``shadow/at_s``, and those of the end.

        ``begun`` describes the engines' own configuration, as in ``log_failure``.
        """

    def log_sweep(self, folder: Path, runs: Sequence[Run]) -> None:
        """Log a finished sweep as a whole, after ``sweep.csv`` and ``report.html`` were written to its folder."""
