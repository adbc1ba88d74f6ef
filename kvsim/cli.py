"""The command ``kvsim``: finds the subcommand, and says in one line what a user did wrong."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from kvsim.errors import UsageError
from kvsim.links import check_links

COMMANDS = {
    "simulate": "serve a trace in simulated time: hits, waiting times, link use",
    "replay": "play a trace without a clock: hit rates at full speed",
    "curve": "hit rate against capacity: LRU exactly in one pass, other policies beside it",
    "calibrate": "measure this machine: conf/hardware/NAME.yaml",
    "validate": "the same run simulated and on this machine's GPU, side by side",
    "report": "one HTML page over any number of runs",
    "policies": "list the policies and their settings",
    "new": "write a policy to start from, with its settings and its test",
    "trace": "describe a trace",
}
"""What ``kvsim --help`` lists; each is a module of ``kvsim.commands`` with a function ``main(arguments)``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 a bug (with its traceback), 2 a user's mistake, 130 interrupted."""
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

        hint = closest(command, COMMANDS) or f"; there is {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {command!r}{hint}")
    import_module(f"kvsim.commands.{command}").main(rest)
    sys.stdout.flush()


def _usage() -> str:
    commands = [f"  {name:<10} {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvsim COMMAND ...",
            "",
            "KV cache policies of LLM servers on real traces.",
            "",
            "commands:",
            *commands,
            "",
            "kvsim COMMAND --help says more about one of them.",
        ]
    )


def _fail(message: str, code: int = 2) -> int:
    print(f"kvsim: {' '.join(message.split())}", file=sys.stderr)
    return code
