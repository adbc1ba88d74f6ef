"""HTML pages from the templates in ``kvsim/report/templates``: tables that need no JavaScript, and pictures that do.

A page is self-contained, plotly.js included, unless it is given the address of a shared script: the pages of a sweep load
``plotly.min.js`` from the sweep's folder. No page fetches anything from another server.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.report.figure import Figure, Picture, Trace
from kvsim.report.refreshing import Refreshing
from kvsim.report.shown_paths import SHORTENED, setting_without_folders, shown_command, without_folders
from kvsim.report.summary import Table, settings

if TYPE_CHECKING:
    from jinja2 import Environment

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'{}; img-src data: blob:"
"""Content security policy of a page: the browser requests at most the shared script, from where the page is."""
SHARED_SCRIPT = "plotly.min.js"
"""Name of the script in the folder of a sweep."""
LONGEST_NAME = 60
"""Most characters of a name in a picture."""
SHARED = ("x", "width")
"""What traces of a picture often have in common; it is on the page once."""
NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)? ?(%|[KMGT]?i?B)?( ± .*)?|-|unlimited|")
"""Cells of a column that is aligned to the right."""


class Foot(NamedTuple):
    """How to reproduce a page: the command, folded texts by title, and the versions used."""

    command: str
    """Empty if no command repeats what a program has done."""
    details: list[tuple[str, str]]
    versions: str
    note: str = ""


def render_page(
    template: str,
    title: str,
    pictures: Sequence[Picture] = (),
    *,
    shared_script: str | None = None,
    width: str = "1100px",
    is_sortable: bool = False,
    refreshing: Refreshing | None = None,
    **values: Any,
) -> str:
    """Return a page as text. The same arguments give the same page.

    ``shared_script`` is the relative address of plotly.js; without it, the page contains plotly.js if it has a figure.
    ``width`` is the largest width of the page, ``values`` are those of the template. A page that is ``refreshing`` is loaded
    again and again.
    """
    from markupsafe import Markup

    figures = [picture.figure for picture in pictures if picture.figure is not None]
    numbers = iter(range(len(figures)))
    drawn = [
        picture._asdict()
        | ({} if picture.figure is None else {"number": next(numbers), "height": picture.figure["layout"]["height"]})
        for picture in pictures
    ]
    return (
        _templates()
        .get_template(template)
        .render(
            title=title,
            width=width,
            is_sortable=is_sortable,
            refreshing=refreshing,
            policy=Markup(POLICY.format(" 'self' file:" if shared_script else "")),
            pictures=drawn,
            figures=Markup(in_script([compact(figure) for figure in figures])) if figures else "",
            shared_script=shared_script,
            plotly=Markup(plotly_script()) if figures and not shared_script else "",
            **values,
        )
    )


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["numeric"] = numeric_columns
    return environment


def _finalized(value: Any) -> Any:
    """Return what stands on the page for a value of a template: no text that is not markup shows where a file lies."""
    return without_folders(value) if type(value) is str else value


def compact(figure: Figure) -> Figure:
    """Return a figure as ``page.js`` expects it.

    Its traces name the earlier trace with the same places (``x_of``) or widths (``width_of``), long names are shortened, and no
    text of theirs is markup: plotly.js would draw ``<b>`` in the name of a policy in bold.
    """
    traces: list[Trace] = []
    for trace in map(_plain, figure["data"]):
        for key in SHARED:
            same = [number for number, other in enumerate(traces) if key in other and other[key] == trace.get(key)]
            if same:
                trace = {name: value for name, value in trace.items() if name != key} | {f"{key}_of": same[0]}
        traces.append(trace)
    return figure | {"data": traces}


def _plain(trace: Trace) -> Trace:
    texts = {key: trace[key] for key in ("name", "text", "hovertext", "x", "y") if key in trace}
    return trace | {
        key: [_as_text(each) for each in value] if isinstance(value, list) else _as_text(value) for key, value in texts.items()
    }


def _as_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    short = value if len(value) <= LONGEST_NAME else f"{value[: LONGEST_NAME - 20]}…{value[-19:]}"
    return without_folders(short).replace("&", "&amp;").replace("<", "&lt;")


def in_script(value: Any) -> str:
    """Return JSON that can stand in a script element: nothing in it ends the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")


@cache
def plotly_script() -> str:
    """Return plotly.js, which the plotly package contains, without importing the package."""
    found = find_spec("plotly")
    assert found is not None and found.origin is not None, "plotly is a dependency"
    return (Path(found.origin).parent / "package_data" / SHARED_SCRIPT).read_text()


def numeric_columns(table: Table) -> set[int]:
    """Return the columns that hold numbers: aligned to the right, unlike texts. The first column holds names."""
    return {
        column
        for column in range(1, len(table.columns))
        if all(NUMBER.fullmatch(row[column]) for row in table.rows) and any(row[column] for row in table.rows)
    }


def foot(record: Mapping[str, Any]) -> Foot:
    """Return how to reproduce one run, curve or validation."""
    command = record.get("command_line") or ""
    lines = [setting_without_folders(line) for line in settings(record["config"])]
    seed = f"Seed {record['seed']}. {versions(record)}."
    return Foot(shown_command(command), [("All settings", "\n".join(lines))], seed, path_note(command))


def path_note(command: str) -> str:
    """Return that paths are shortened, if those of the command are."""
    return "" if shown_command(command) == command else SHORTENED


def versions(record: Mapping[str, Any]) -> str:
    """Return the versions that a record was made with, in one line."""
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items())
