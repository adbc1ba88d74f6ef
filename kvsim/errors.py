"""What a user did wrong, said in one line."""


class UsageError(Exception):
    """A mistake in the user's input: a command prints its one line and exits with code 2.

    The message says what is wrong, where (file and line, or the configuration key) and what to do.
    """

    exit_code = 2


class TraceError(UsageError):
    """A trace file that cannot be used; ``where`` names the file and, if there is one, the line."""

    def __init__(self, path: object, line: int | None, problem: str) -> None:
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {problem}")


class WrongResult(UsageError):
    """A run that has ended, and whose result, which is written, must not be trusted: no mistake of the user's."""

    exit_code = 1
