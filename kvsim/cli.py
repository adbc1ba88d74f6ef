"""The ``kvsim`` command: dispatches to a subcommand and reports a user's mistake in one line."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from kvsim.errors import UsageError
from kvsim.links import check_links

COMMANDS = {
    "simulate": "serve a trace in simulated time: hit rates, latencies, link use",
    "replay": "replay a trace without a clock: hit rates at full speed",
    "curve": "plot hit rate against capacity: LRU exactly and in one pass, other policies by replay",
    "calibrate": "measure this machine and write conf/hardware/NAME.yaml",
    "validate": "compare a simulated run with the same run on this machine's GPU",
    "report": "write one HTML page about any number of runs",
    "policies": "list the policies and their settings",
    "new": "create a working policy to start from, with settings and a test",
    "trace": "describe a trace",
}
"""The commands that ``kvsim --help`` lists; each is a module of ``kvsim.commands`` with a function ``main(arguments)``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 success, 1 an untrustworthy result or a bug (with a traceback), 2 a user's mistake, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _run(arguments)
    except UsageError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}")
    return 0


def _run(arguments: list[str]) -> None:
    check_links()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return
    command, *rest = arguments
    if command == "--version":
        from importlib.metadata import version

        from kvsim.compiled import build_name

        print(f"kvsim {version('kvsim')}, {build_name()}")
        return
    if command not in COMMANDS:
        from kvsim.suggest import closest

        hint = closest(command, COMMANDS) or f"; choose from {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {command!r}{hint}")
    import_module(f"kvsim.commands.{command}").main(rest)
    sys.stdout.flush()


def _usage() -> str:
    commands = [f"  {name:<10} {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvsim COMMAND ...",
            "",
            "Test KV cache policies for LLM servers on real traces.",
            "",
            "commands:",
            *commands,
            "",
            "Run kvsim COMMAND --help for details.",
        ]
    )


def _fail(message: str, code: int = 2) -> int:
    print(f"kvsim: {' '.join(message.split())}", file=sys.stderr)
    return code
