"""Draws one result as a self-contained HTML page: no network access, and JavaScript only for the pictures."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from kvsim.report.result import RunRecord, hit_definition
from kvsim.report.summary import Table, capacity, clock, facts, percent, scope, settings, shares, tables
from kvsim.report.timeline import middles

if TYPE_CHECKING:
    import plotly.graph_objects as go

TIER_COLOURS = {"gpu": "#3d8fd1", "cpu": "#e69f00", "disk": "#0a9e74"}
LINK_COLOURS = ("#cc79a7", "#56b4e9", "#d55e00", "#8c7ae6", "#7f8c3b", "#a0785a")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart, and three more; all are visible on white and black."""

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
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<h2>{escape(table.title)}</h2><div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


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
    pictures = [
        ("Hit rate by tier", _hit_figure(result), "No request was served."),
        ("Time to first token", _ttft_figure(result), "No data: no request has a time. A replay has no clock."),
        ("Link use", _link_figure(result), "No data: no transfer took any time. A replay has no clock."),
    ]
    if (free := _free_figure(result)) is not None:
        pictures.append(("Free pages by tier", free, ""))
    parts, drawn = [], 0
    for number, (title, figure, otherwise) in enumerate(pictures):
        parts.append(f"<h2>{title}</h2>")
        if figure is None:
            parts.append(f'<p class="soft">{otherwise}</p>')
            continue
        parts.append(picture(figure, number, with_script=not drawn))
        drawn += 1
    return parts


def figures(result: RunRecord) -> "Iterator[tuple[str, go.Figure]]":
    """Return the pictures of a run that have data, with their titles."""
    drawn = {
        "Hit rate by tier": _hit_figure(result),
        "Time to first token": _ttft_figure(result),
        "Link use": _link_figure(result),
        "Free pages by tier": _free_figure(result),
    }
    return ((title, figure) for title, figure in drawn.items() if figure is not None)


def picture(figure: "go.Figure | dict[str, Any]", number: int, *, with_script: bool, height: str = "340px") -> str:
    """Return a figure, given as an object or as JSON, as HTML; ``with_script`` includes plotly.js, needed once per page."""
    import plotly.io as pio

    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    div = pio.to_html(
        figure, config, include_plotlyjs=with_script, full_html=False, default_height=height, div_id=f"picture{number}",
        validate=not isinstance(figure, dict),
    )  # fmt: skip
    return f"<figure>{div}</figure>"


def _hit_figure(result: RunRecord) -> "go.Figure | None":
    import plotly.graph_objects as go

    hits = result["timeline"]["hits"]
    if not hits["edges"]:
        return None
    figure = go.Figure()
    for tier in result["tiers"]:
        colour = TIER_COLOURS[tier]
        figure.add_scatter(
            x=middles(hits["edges"]), y=hits["hit_rate"][tier], name=tier, stackgroup="tiers", mode="lines",
            line={"color": colour, "width": 1}, fillcolor=colour,
        )  # fmt: skip
    if "known_rate" in hits:
        figure.add_scatter(
            x=middles(hits["edges"]), y=hits["known_rate"], name="KV in memory, with or without a state", mode="lines",
            line={"color": "#d55e00", "width": 1.5, "dash": "dot"},
        )  # fmt: skip
    if hits["counted_from"] is not None:
        figure.add_vline(hits["counted_from"], line={"color": "#888", "dash": "dot"}, annotation_text="warm-up ends")
    x_title = "arrival (s)" if hits["axis"] == "arrival_s" else "request"
    return laid_out(figure, x_title, "hit tokens / prompt tokens")


def _ttft_figure(result: RunRecord) -> "go.Figure | None":
    import plotly.graph_objects as go

    times = result["ttft_quantiles_s"]
    if not times:
        return None
    figure = go.Figure()
    shares_below = [share / 100 for share in range(101)]
    figure.add_scatter(x=times, y=shares_below, name="requests", mode="lines", line={"color": "#8c7ae6", "width": 2})
    figure.update_xaxes(type="log" if times[0] > 0 and times[-1] > 20 * times[0] else "linear")
    return laid_out(figure, "time to first token (s)", "requests at or below")


def _link_figure(result: RunRecord) -> "go.Figure | None":
    import plotly.graph_objects as go

    links = result["timeline"]["links"]
    if not any(any(use) for use in links["utilization"].values()):
        return None
    figure = go.Figure()
    for number, (name, use) in enumerate(links["utilization"].items()):
        colour = LINK_COLOURS[number % len(LINK_COLOURS)]
        figure.add_scatter(x=middles(links["edges_s"]), y=use, name=name, mode="lines", line={"color": colour, "width": 1.5})
    return laid_out(figure, f"{clock(result)} (s)", "busy time / total time")


def _free_figure(result: RunRecord) -> "go.Figure | None":
    """Draw the free pages of each tier as a share of its capacity, for a run with a timeline."""
    import plotly.graph_objects as go

    free = result["timeline"].get("free_pages")
    if not free or not free["mean"]:
        return None
    figure = go.Figure()
    for tier, pages in free["mean"].items():
        shares = [mean / result["tiers"][tier]["capacity_pages"] for mean in pages]
        figure.add_scatter(
            x=middles(free["edges_s"]), y=shares, name=tier, mode="lines", line={"color": TIER_COLOURS[tier], "width": 1.5}
        )
    return laid_out(figure, f"{clock(result)} (s)", "free pages / capacity")


def laid_out(figure: "go.Figure", x_title: str, y_title: str) -> "go.Figure":
    """Apply the common style to a figure: readable on light and dark backgrounds, with the y-axis in percent from 0."""
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        margin={"l": 60, "r": 15, "t": 30, "b": 45},
        hovermode="x unified",
        hoverlabel={"bgcolor": "#2a2f35", "font": {"color": "#fff"}},
        showlegend=len(figure.data) > 1,
        legend={"orientation": "h", "traceorder": "normal", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )
    figure.update_xaxes(title=x_title)
    figure.update_yaxes(title=y_title, rangemode="tozero", tickformat=".0%")
    return figure
