"""``kvsim trace fetch``: gets a published trace."""

import shlex
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvsim.errors import UsageError
from kvsim.suggest import closest
from kvsim.trace.published import TRACES, cache_folder, fetch

USAGE = """\
usage: kvsim trace fetch [NAME]

Downloads a published trace and checks it; without NAME, lists what there is. Files are kept in the folder that the environment
variable KVSIM_CACHE names, or in the user's cache folder, and downloaded once."""


def run(arguments: Sequence[str]) -> None:
    """Fetch one trace, or list all. Raises UsageError."""
    if not arguments:
        _list()
        return
    name = arguments[0]
    if len(arguments) > 1 or name not in TRACES:
        hint = closest(name, TRACES) or "; kvsim trace fetch lists the names"
        raise UsageError(f"kvsim trace fetch: there is no trace {' '.join(arguments)!r}{hint}")
    trace = TRACES[name]
    path, checked = fetch(name, trace)
    print(f"{path}: {trace.about}, {trace.licence}; {checked}")
    settings = f" {trace.settings}" if trace.settings else ""
    print(f"Replay it with: kvsim replay {shlex.quote(f'trace.path={path}')}{settings}")


def _list() -> None:
    table = Table(title="Published traces", title_justify="left", box=SIMPLE_HEAD)
    for column in ("name", "about", "licence"):
        table.add_column(column)
    table.add_column("MB", justify="right")
    for name, trace in TRACES.items():
        table.add_row(name, trace.about, trace.licence, "-" if trace.megabytes is None else f"{trace.megabytes:,}")
    console = Console()
    console.print(table)
    console.print(f"kvsim trace fetch NAME stores a trace in {cache_folder()}", highlight=False, soft_wrap=True)
