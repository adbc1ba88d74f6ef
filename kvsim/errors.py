"""Errors that a command reports in one line."""

import re

APPENDIX = re.compile(r"\n    (full_key|reference_type|object_type)[:=].*", re.DOTALL)
"""Lines in which OmegaConf repeats where an error was."""

KINDS = {"Float": "a number", "Integer": "a whole number", "float": "a number", "int": "a whole number", "bool": "true or false"}
OF_KIND = (
    re.compile(r"Value (?P<value>'.*') of type '\w+' could not be converted to (?P<kind>Float|Integer)"),
    re.compile(r"Value (?P<value>'.*') is not a valid (?P<kind>bool) \(type \w+\)"),
    re.compile(r"Incompatible value 'None' for field of type '(?P<kind>float|int|bool)'"),
)
"""How OmegaConf says that a value is of the wrong kind."""


def one_line(text: str) -> str:
    """Return a text as one line of printable characters: what files contain never reaches a terminal as it is."""
    if text.isprintable():
        return text
    line = " ".join(text.split())
    return "".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in line)


class UsageError(Exception):
    """A mistake in the user's input: the command prints the message in one line and exits with code 2.

    The message says what is wrong, where (file and line, or configuration key) and what to do about it.
    """

    exit_code = 2

    def __str__(self) -> str:
        return one_line(super().__str__())


class NoEffect(UsageError):
    """A setting that the user gave changes nothing in this run. In a sweep, it may change something in another job."""

    def __init__(self, key: str, why: str, remedy: str = "leave it out", *, subject: str = "") -> None:
        super().__init__(f"{subject or key} has no effect {why}: {remedy}")
        self.key = key
        """The setting, or the group."""
        self.why = why


class IdleSetting(ValueError):
    """The field ``name`` of a class changes nothing in this run; the message begins with it."""

    def __init__(self, name: str, why: str, remedy: str = "leave it out", *, subject: str = "") -> None:
        self.name, self.why, self.remedy, self.subject = name, why, remedy, subject or name
        super().__init__(f"{self.subject} has no effect {why}: {remedy}")


class TraceError(UsageError):
    """A trace file cannot be used; the message starts with the file's path and, if known, the line."""

    def __init__(self, path: object, line: int | None, problem: str) -> None:
        super().__init__(path, line, problem)

    def __str__(self) -> str:
        path, line, problem = self.args
        where = f"{path}:{line}" if line is not None else f"{path}"
        return one_line(f"{where}: {problem}")


class PolicyFailed(UsageError):
    """A policy of the user's own raised an error. The message names the class and the line; ``__cause__`` has the traceback."""


class WrongResult(UsageError):
    """A run finished and wrote its result, but the result must not be trusted. This is not the user's mistake: exit code 1."""

    exit_code = 1


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM). It is handled like Ctrl+C."""


def unusable(text: str) -> str:
    """Return why a text can neither name a file nor be written to one; empty if it can."""
    if "\0" in text:
        return "contains a NUL character: leave it out"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not UTF-8: rename the file, or leave the character out"
    return ""


def first_line(error: Exception) -> str:
    """Return an error message of OmegaConf without its appendix; one about a missing setting or a number in kvsim's words."""
    line = " ".join(APPENDIX.sub("", str(error)).split()) or type(error).__name__
    if wrong := next(filter(None, (pattern.fullmatch(line) for pattern in OF_KIND)), None):
        return f"{wrong.groupdict().get('value', 'null')} is not {KINDS[wrong['kind']]}"
    reference = re.fullmatch(r"Interpolation key '(.*)' not found", line)
    return f"${{{reference[1]}}} refers to a setting that does not exist" if reference else line
