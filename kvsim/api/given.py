"""What the functions of the API share: the trace that they are given, and the folder that they write."""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from kvsim.errors import UsageError
from kvsim.plans.arguments import Arguments
from kvsim.plans.build import build_trace
from kvsim.plans.from_python import OF_THE_TRACE, composed
from kvsim.plans.plan import Plan
from kvsim.run.execute import own_folder
from kvsim.settings.bare_file import is_path
from kvsim.settings.configuration import compose, quoted
from kvsim.trace.base import Trace
from kvsim.trace.formats import load_source
from kvsim.trace.memory import as_it_is, source_of


def loaded(trace: Trace | str | Path, arguments: Arguments) -> tuple[Trace, Arguments]:
    """Return the trace, loaded if it is a file or a choice of ``trace``, and the arguments that are left of the run's.

    A trace that was changed since it was loaded counts as one that the program has made. Raises UsageError.
    """
    if isinstance(trace, Trace):
        return as_it_is(trace), arguments
    _check_kind(trace)
    own = [line for line in arguments.overrides if line.partition("=")[0].partition(".")[0] in OF_THE_TRACE]
    first = [f"trace.path={quoted(trace)}"]
    if not any(line.startswith("trace=") for line in own):
        choice = _choice(trace)
        first = [f"trace={choice}"] if choice else ["trace=auto", *first]
    origin = (*first, *(line for line in own if not line.startswith("page_tokens=")))
    source, pages = build_trace(compose([*origin, *(line for line in own if line.startswith("page_tokens="))]))
    loaded = load_source(source, pages)
    loaded.origin = origin
    return loaded, arguments._replace(overrides=[line for line in arguments.overrides if line not in own])


def _check_kind(trace: object) -> None:
    """Raise UsageError for what is no file and no name of a trace."""
    if not isinstance(trace, str | Path):
        given = "a Trace (load_trace, trace_from_tokens), a file or a name such as 'synthetic'"
        raise UsageError(f"trace: give {given}, not a {type(trace).__name__}")


def _choice(trace: str | Path) -> str:
    """Return the choice that a word without a file names, such as "synthetic" or "trace=synthetic"; "" for a file."""
    word = str(trace).removeprefix("trace=")
    return "" if isinstance(trace, Path) or is_path(word) or Path(trace).exists() else word


def line_of(command: str, trace: Trace, arguments: Arguments) -> str | None:
    """Return the command line that does the same; None if policies are objects, or requests are in the program alone."""
    return (
        None if arguments.objects or source_of(trace) is not None else shlex.join(["kvsim", command, *composed(trace, arguments)])
    )


@contextmanager
def in_folder(command: str, plan: Plan, arguments: Arguments) -> Iterator[tuple[Plan, bool]]:
    """Lock the folder of a plan during the block: the one that is given, or a temporary one, which goes if the block fails."""
    is_given = any(line.startswith("output=") for line in arguments.overrides)
    with folder_for(command, not is_given) as temporary:
        plan = plan if temporary is None else replace(plan, output=temporary)
        with own_folder(plan, command):
            yield plan, temporary is not None


@contextmanager
def folder_for(command: str, is_temporary: bool) -> Iterator[Path | None]:
    """Make a temporary folder if one is needed, and remove it if the block fails."""
    folder = Path(mkdtemp(prefix=f"kvsim-{command}-")) if is_temporary else None
    try:
        yield folder
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def listed(values: Any) -> list[Any] | None:
    """Return values as a list; a single one counts as a list of it."""
    return [values] if isinstance(values, int | float | str) else None if values is None else list(values)
