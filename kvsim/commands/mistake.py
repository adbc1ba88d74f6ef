"""Carries what a user did wrong past Hydra."""

from kvsim.errors import UsageError


class Mistake(BaseException):
    """Holds a UsageError. Hydra would print a line of its own about any Exception of a job."""

    def __init__(self, error: UsageError) -> None:
        super().__init__(error)
        self.error = error
