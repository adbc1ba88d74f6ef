"""The ``kvsim`` command: dispatches to a subcommand and reports a user's mistake in one line."""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from kvsim.commands.listing import COMMANDS, usage
from kvsim.errors import UsageError
from kvsim.links import check_links
from kvsim.sources import set_up

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full disk answers, which does not name the file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 success, 1 an untrustworthy result or a bug (with a traceback), 2 a user's mistake, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:
        return _fail("standard output is closed", 1)
    try:
        _run(arguments)
    except UsageError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
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
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), flush=True)
        return
    command, *rest = arguments
    if command in ("--complete", "--install-completion", "--show-completion"):
        _complete(command, rest)
        return
    if command == "--version":
        from importlib.metadata import version

        from kvsim.compiled import build_name

        print(f"kvsim {version('kvsim')}, {build_name()}")
        return
    if command not in COMMANDS:
        from kvsim.suggest import closest

        hint = closest(command, COMMANDS) or f"; choose from {', '.join(COMMANDS)}"
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
    print(f"kvsim: {' '.join(message.split())}", file=sys.stderr)
    return code
