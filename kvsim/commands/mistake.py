"""Carries what ends a command past Hydra's error handling."""

from kvsim.errors import UsageError


class Mistake(BaseException):
    """Wraps a UsageError. Not an Exception, because Hydra prints a line of its own about any Exception of a job."""

    def __init__(self, error: UsageError) -> None:
        super().__init__(error)
        self.error = error


class Listed(BaseException):
    """Ends the command after ``sweep.dry_run`` has listed the jobs."""
