"""The ``kvsim`` command: dispatches to a subcommand and reports a user's mistake in one line."""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from kvsim.commands.listing import COMMANDS, OTHER_NAMES, usage
from kvsim.errors import PolicyFailed, Terminated, UsageError, unusable
from kvsim.installation import check_links
from kvsim.run.interrupts import remembered
from kvsim.settings.sources import set_up

TRACEBACK = "--traceback"
"""Shows where an error was raised, before its line."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full disk answers, which does not name the file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 success, 1 an untrustworthy result or a bug (with a traceback), 2 a user's mistake, 130 interrupted, 143 terminated.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:
        return _fail("standard output is closed", 1)
    shows_traceback = TRACEBACK in arguments
    try:
        with remembered():
            _run([word for word in arguments if word != TRACEBACK])
    except UsageError as error:
        if shows_traceback:
            traceback.print_exc()
        hint = f"; {TRACEBACK} shows the calls" if isinstance(error, PolicyFailed) and not shows_traceback else ""
        return _fail(f"{error}{hint}", error.exit_code)
    except Terminated:
        return _fail("terminated", 143)
    except KeyboardInterrupt as interrupt:
        return _fail(f"interrupted{interrupt}", 130)
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        if error.filename is not None:
            return _fail(f"{error.filename}: {error.strerror}")
        if not _is_of_output():
            if error.errno in FULL:
                return _fail(f"cannot write a file: {error.strerror}")
            raise
        _drop_output()
        return _fail(f"standard output: {error.strerror}", 1)
    return 0


def _run(arguments: list[str]) -> None:
    check_links()
    for word in arguments:
        if problem := unusable(word):
            raise UsageError(f"the argument {word!r} {problem}")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), flush=True)
        return
    command, *rest = arguments
    if command in ("--complete", "--install-completion", "--show-completion"):
        _complete(command, rest)
        return
    if command == "--version":
        from importlib.metadata import version

        from kvsim.installation import build_name

        print(f"kvsim {version('kvsim')}, {build_name()}")
        return
    if command not in COMMANDS:
        from kvsim.suggest import closest

        hint = f": use {OTHER_NAMES[command]}" if command in OTHER_NAMES else closest(command, COMMANDS)
        hint = hint or f"; choose from {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {command!r}{hint}")
    import_module(f"kvsim.commands.{command}").main(set_up(rest))
    sys.stdout.flush()


def _complete(flag: str, rest: list[str]) -> None:
    """Answer a shell's question, or set a shell up to ask."""
    from kvsim.commands import completion

    if len(rest) > 1 or any(word.startswith("-") for word in rest):
        raise UsageError(f"{flag} takes the name of a shell: {', '.join(completion.SCRIPTS)}")
    word = rest[0] if rest else ""
    if flag == "--complete":
        print("\n".join("\t".join(filter(None, candidate)) for candidate in completion.complete(word)))
    else:
        print(completion.install(word) if flag == "--install-completion" else completion.script(word or "bash"), end="\n")


def _is_of_output() -> bool:
    """Whether standard output cannot be written to: it refuses one more line."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Send what is still to be written nowhere, or Python would complain about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int = 2) -> int:
    if sys.stderr is not None:
        with suppress(OSError):  # a standard error that is full or closed leaves the exit code
            print(f"kvsim: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code
