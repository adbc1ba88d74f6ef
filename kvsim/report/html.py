"""Draws one result as a self-contained HTML page: no network access, and JavaScript only for the pictures."""

from html import escape
from typing import TYPE_CHECKING, Any

from kvsim.report.pictures import TIER_COLOURS, pictures_of
from kvsim.report.result import RunRecord, hit_definition
from kvsim.report.summary import MOST_ENGINES, Table, capacity, engine_table, facts, percent, scope, settings, shares, tables

if TYPE_CHECKING:
    import plotly.graph_objects as go

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy of the page: the browser makes no requests."""

CSS = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5c6670; --line: #d9dee3; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #a2abb4; --line: #3a4149; --paper: #15181b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1100px; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 1.75rem 0 .4rem; }
p { margin: 0 0 .4rem; overflow-wrap: anywhere; }
dd, figure { margin: 0; }
.soft, dt, th { color: var(--soft); font-weight: normal; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .75rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.bound td { color: var(--soft); font-style: italic; }
.bar { display: flex; height: 1.1rem; margin: .75rem 0 .3rem; background: var(--line); }
.key { margin-right: 1rem; white-space: nowrap; } .key i, .bar i { display: block; background: var(--line); }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
@media (max-width: 600px) { table { font-size: 11px; } th, td { padding-right: .3rem; } th { white-space: normal; } }
pre, code { font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.main-svg .cartesianlayer text, .main-svg .infolayer text { fill: var(--ink) !important; }
.main-svg .gridlayer path, .main-svg .zerolinelayer path { stroke: var(--line) !important; }
"""


def render(result: RunRecord) -> str:
    """Return the page as text. The same result gives the same page."""
    parts = [
        f'<p class="soft">{escape(_heading(result))}</p>',
        _facts(result),
        _bar(result),
        f'<p class="soft">{escape(hit_definition(result["config"]))} {escape(scope(result))}</p>',
        *(draw_table(table) for table in tables(result)),
        *_all_engines(result),
        "<noscript><p>The pictures below need JavaScript; the tables above do not.</p></noscript>",
        *_pictures(result),
        foot(result),
    ]
    return document(f"kvsim {result['command']}", parts)


def document(title: str, parts: list[str], *, width: str = "1100px") -> str:
    """Return a complete page of at most ``width`` with these parts below its title."""
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body style='max-width:{width}'>",
        f"<h1>{escape(title)}</h1>",
    ]
    return "\n".join([*head, *parts, "</body></html>\n"])


def _heading(result: RunRecord) -> str:
    """Return the most informative settings of the run in one line."""
    wanted = ("preset", "trace.path", "trace.name", "page_tokens", "eviction.name", "seed")
    lines = dict(line.split("=", 1) for line in settings(result["config"]))
    said = [f"{key}={lines[key]}" for key in wanted if lines.get(key) not in (None, "null", "")]
    return " · ".join([*said, *(f"{name} {capacity(tier)} pages" for name, tier in result["tiers"].items())])


def _facts(result: RunRecord) -> str:
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(result))
    return f"<dl>{''.join(rows)}</dl>"


def _bar(result: RunRecord) -> str:
    """Draw a bar of prompt tokens by where they came from, to scale, with a legend."""
    bar, legend = [], []
    for name, share in shares(result):
        colour = f";background:{TIER_COLOURS[name]}" if name in TIER_COLOURS else ""
        bar.append(f'<i style="width:{share:.4%}{colour}"></i>')
        legend.append(f'<span class="key"><i style="{colour[1:]}"></i>{name} {percent(share)}</span>')
    return f'<div class="bar">{"".join(bar)}</div><p>{"".join(legend)}</p>'


def draw_table(table: Table) -> str:
    """Return a table as HTML, with its title as a heading."""
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    return f"<h2>{escape(table.title)}</h2>{_rows(table)}{note}"


def _all_engines(result: RunRecord) -> list[str]:
    """Return the table of all engines, folded, if there are too many for the table of a summary."""
    table = engine_table(result)
    if len(table.rows) <= MOST_ENGINES:
        return []
    return [f"<details><summary>All {len(table.rows)} engines</summary>{_rows(table)}</details>"]


def _rows(table: Table) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def foot(result: RunRecord) -> str:
    """Return the section on how to reproduce the run: its command, settings and versions."""
    lines = "\n".join(settings(result["config"]))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    command = result.get("command_line") or f"kvsim {result['command']}"
    return (
        f"<h2>Reproduce</h2><pre>{escape(command)}</pre>"
        f"<details><summary>All settings</summary><pre>{escape(lines)}</pre></details>"
        f'<p class="soft">Seed {result["seed"]}. {escape(versions)}.</p>'
    )


def _pictures(result: RunRecord) -> list[str]:
    """Return the pictures, or a sentence for those without data; the first picture drawn includes plotly.js."""
    parts, drawn = [], 0
    for number, (title, figure, otherwise) in enumerate(pictures_of(result)):
        parts.append(f"<h2>{title}</h2>")
        if figure is None:
            parts.append(f'<p class="soft">{otherwise}</p>')
            continue
        parts.append(picture(figure, number, with_script=not drawn))
        drawn += 1
    return parts


def picture(figure: "go.Figure | dict[str, Any]", number: int, *, with_script: bool, height: str = "340px") -> str:
    """Return a figure, given as an object or as JSON, as HTML; ``with_script`` includes plotly.js, needed once per page."""
    import plotly.io as pio

    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    div = pio.to_html(
        figure, config, include_plotlyjs=with_script, full_html=False, default_height=height, div_id=f"picture{number}",
        validate=not isinstance(figure, dict),
    )  # fmt: skip
    return f"<figure>{div}</figure>"
