"""Draws one result as an HTML page: what ran, what it gave, and pictures."""

from typing import Any, NamedTuple

from kvsim.report.about import about_run
from kvsim.report.figure import Picture
from kvsim.report.ghosts import NO_BOUNDS, Bounds, bounds_note, ghosts, share_of_belady
from kvsim.report.headline import tiles, title_of, verdict
from kvsim.report.pictures import phase_figure, pictures_of
from kvsim.report.summary import MOST_ENGINES, engine_table, facts, hit_note, shares, tables
from kvsim.report.template import foot, render_page
from kvsim.report.tier_looks import look_of
from kvsim.results.counters import COUNTERS
from kvsim.results.rates import count, percent
from kvsim.results.result import RunRecord

BESIDE = ("prefetch", "placement", "checkpoints", "warning")
"""Facts that the page shows elsewhere: as a table, and above the facts."""


def render(result: RunRecord, shared_script: str | None = None, bounds: Bounds = NO_BOUNDS) -> str:
    """Return the page as text. The same result and bounds give the same page.

    ``shared_script`` is the relative address of plotly.js; without it, the page contains plotly.js. ``bounds`` are hit rates of
    Belady's bound and an unlimited cache on the same requests, as far as they are known.
    """
    engines = engine_table(result)
    return render_page(
        "run.html",
        title_of(result),
        _pictures(result),
        shared_script=shared_script,
        verdict=verdict(result),
        tiles=tiles(result, share_of_belady(result, bounds)),
        about=[("command", f"kvsim {result['command']}"), *about_run(result)],
        warnings=result.get("warnings") or [],
        facts=[(name, text) for name, text in facts(result) if name not in BESIDE],
        shares=[(name, percent(share), look_of(name).colour) for name, share in shares(result)],
        ghosts=ghosts(bounds),
        notes=[hit_note(result), *filter(None, [bounds_note(result, bounds)])],
        tables=tables(result),
        counters=_counters(result),
        all_engines=engines if len(engines.rows) > MOST_ENGINES else None,
        foot=foot(result),
    )


class Counter(NamedTuple):
    """A row of the table of counters."""

    kind: str
    what: str
    number: str
    meaning: str


def _counters(result: RunRecord) -> list[Counter]:
    """Return what the policies did, without zeros."""
    rows = []
    for kind, meanings in COUNTERS.items():
        is_idle = kind == "placement" and len(result["tiers"]) < 2
        for name, value in ({} if is_idle else result.get(kind, {})).items():
            if value and isinstance(value, int):
                rows.append(Counter(kind, name.replace("_", " "), count(value), meanings.get(name, "")))
    return rows


def _pictures(result: RunRecord) -> list[Picture]:
    pictures = pictures_of(result)
    phases: dict[str, Any] = result.get("phases_s") or {}
    figure = phase_figure([""], [{name: spread["mean"] for name, spread in phases.items()}])
    return [*pictures, *([Picture("Where the time to first token goes", figure)] if figure else [])]
