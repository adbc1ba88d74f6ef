"""Carries what ends a command past Hydra's error handling."""


class Mistake(BaseException):
    """Wraps an error. Not an Exception, because Hydra prints a line of its own about any Exception of a job or callback."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Listed(BaseException):
    """Ends the command after ``sweep.dry_run`` has listed the jobs."""
