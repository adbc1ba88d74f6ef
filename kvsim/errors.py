"""Errors that a command reports in one line."""

import re


class UsageError(Exception):
    """A mistake in the user's input: the command prints the message in one line and exits with code 2.

    The message says what is wrong, where (file and line, or configuration key) and what to do about it.
    """

    exit_code = 2


class TraceError(UsageError):
    """A trace file cannot be used; the message starts with the file's path and, if known, the line."""

    def __init__(self, path: object, line: int | None, problem: str) -> None:
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {problem}")


class WrongResult(UsageError):
    """A run finished and wrote its result, but the result must not be trusted. This is not the user's mistake: exit code 1."""

    exit_code = 1


def first_line(error: Exception) -> str:
    """Return the first line of an error message of OmegaConf; a reference to a setting that does not exist in kvsim's words."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    reference = re.fullmatch(r"Interpolation key '(.*)' not found", line)
    return f"${{{reference[1]}}} refers to a setting that does not exist" if reference else line
