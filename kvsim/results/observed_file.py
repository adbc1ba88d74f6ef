"""Files of observed runs, written and read back."""

from pathlib import Path

from kvsim.results.observed import ObservedRun


def write_observed(path: Path, run: ObservedRun) -> None:
    """Write a run to a file (``.jsonl.gz``). Raises UsageError if it cannot be written."""
    raise NotImplementedError


def read_observed(path: Path) -> ObservedRun:
    """Read a run. Raises UsageError for a file that is no such run, is damaged or is of another version."""
    raise NotImplementedError
