"""The page of a shadow: one small file without a script, which the browser loads again every few seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvsim.files.writing import replacing
from kvsim.report.refreshing import Refreshing, clock_time
from kvsim.report.shadow.drawing import HEIGHT, WIDTH, Line, draw
from kvsim.report.summary import Table
from kvsim.report.template import render_page
from kvsim.report.tier_looks import look_of

TITLE = "kvsim shadow"
OVERDUE_AFTER = 3
"""After how many refreshes without news a page says so."""
OVERDUE = "Nothing new has come since then: kvsim shadow has stopped, or cannot write this page."


class Occupancy(NamedTuple):
    """How full a tier is."""

    cache: str
    tier: str
    pages: int
    capacity_pages: int | None
    """None: unlimited."""


class LivePage(NamedTuple):
    """Everything that the page shows."""

    headlines: Sequence[tuple[str, str]]
    """What a ghost would gain, and its settings, best first."""
    facts: Sequence[tuple[str, str]]
    warnings: Sequence[str]
    tables: Sequence[Table]
    lines: Sequence[Line]
    """Recent hit rates over time."""
    occupancy: Sequence[Occupancy]
    command: str
    at_s: float
    """When it was made, in Unix time."""
    every_s: float | None
    """Seconds to the next one; None: there is no next one."""


def write_page(path: Path, page: LivePage) -> None:
    """Put a page in the place of the one before. Raises UsageError."""
    text = render(page)
    with replacing(path) as file:
        file.write(text.encode())


def render(page: LivePage) -> str:
    """Return a page as text."""
    return render_page(
        "shadow.html",
        _title(page),
        page=page,
        made=clock_time(page.at_s),
        refreshing=None
        if page.every_s is None
        else Refreshing(page.at_s, page.every_s, OVERDUE_AFTER * page.every_s + 5, OVERDUE),
        picture=draw(page.lines),
        box=f"0 0 {WIDTH:g} {HEIGHT:g}",
        bars=[_bar(one) for one in page.occupancy],
    )


def _title(page: LivePage) -> str:
    """Return the title, with the ghost that gains most."""
    gain, what = page.headlines[0] if page.headlines else ("", "")
    return f"{TITLE}: {gain} with {what.partition(':')[0]}" if gain.startswith("+") else TITLE


def _bar(one: Occupancy) -> dict[str, str]:
    """Return a tier's bar for the template."""
    capacity = one.capacity_pages
    share = "" if not capacity else f"{min(1.0, one.pages / capacity):.1%}"
    of = "unlimited" if capacity is None else f"{capacity:,}"
    return {
        "cache": one.cache,
        "tier": one.tier,
        "colour": look_of(one.tier).colour,
        "share": share,
        "text": f"{one.pages:,} of {of}",
    }
