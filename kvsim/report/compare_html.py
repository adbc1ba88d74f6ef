"""Draws any number of runs on one self-contained HTML page."""

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import xxhash

from kvsim.report.compare import Comparison, heading, memory_bytes
from kvsim.report.html import document, draw_table, picture
from kvsim.report.pictures import LINK_COLOURS, TIER_COLOURS, laid_out
from kvsim.report.result import RunRecord
from kvsim.report.runs import Run
from kvsim.report.summary import Table, count, digits, percent, settings
from kvsim.report.timeline import middles

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLOURS = {
    "lru": "#3d8fd1", "lfu": "#e69f00", "fifo": "#8c7ae6", "arc": "#0a9e74", "slru": "#d55e00", "s3_fifo": "#cc79a7",
    "sieve": "#7f8c3b", "random": "#a0785a", "gdsf": "#2bb5c0", "w_tinylfu": "#c94f6d", "two_q": "#5f9e3f", "mru": "#b59d2a",
}  # fmt: skip
"""Colours of the most common policies. Every other name gets a colour from its hash, the same on every page."""
MOST_LINES = 24
"""Most runs in one line chart; of more runs, those with the highest hit rates are drawn."""
GIB = 2**30


def render_comparison(runs: Sequence[Run], command_line: str) -> str:
    """Return the page as text. The same runs give the same page."""
    told = Comparison(runs)
    parts = [
        f'<p class="soft">{escape(_heading(told))}</p>',
        *(f'<p class="soft">{escape(line)}</p>' for line in told.notes()),
        _main_table(told),
        *(draw_table(table) for table in (_failures(told), _measured(told), _outcomes(told)) if table.rows),
        "<noscript><p>The pictures below need JavaScript; the tables above do not.</p></noscript>",
        *_pictures(told),
        _foot(told, command_line),
    ]
    return document(f"kvsim: {len(told.runs)} run{'s' * (len(told.runs) != 1)}", parts, width="1500px")


def colour_of(name: str) -> str:
    """Return the colour of a policy or a combination of policies."""
    if name in COLOURS:
        return COLOURS[name]
    number = xxhash.xxh3_64_intdigest(name.encode())
    return f"hsl({number % 360}, {55 + number // 360 % 3 * 12}%, {46 + number // 1080 % 3 * 7}%)"


def _heading(told: Comparison) -> str:
    first = told.results[0]
    requests = sorted({result["requests"] for result in told.results})
    counted = count(requests[0]) if len(requests) == 1 else f"{count(requests[0])} to {count(requests[-1])}"
    kinds = ", ".join(sorted({f"kvsim {result['command']}" for result in told.results}))
    alike = [key for key in ("trace", "model", "hardware", "page_tokens") if key not in told.keys]
    shared = [f"{key}={told.settings[0][key]}" for key in alike if key in told.settings[0]]
    name = first["config"].get("trace", {}).get("path") or ""
    return " · ".join(
        [kinds, f"{counted} requests counted", *shared, *([name] if name and "trace.path" not in told.keys else [])]
    )


def _main_table(told: Comparison) -> str:
    best = told.best()
    head = "".join(
        f"<th>{escape(text)}</th>" for text in ("run", *map(heading, told.keys), *(measure.title for measure in told.measures))
    )
    lines = []
    for place, row in enumerate(told.rows(), -1):
        cells = [f"<td>{escape(row.name)}</td>", *(f"<td>{escape(text)}</td>" for text in row.settings)]
        for column, cell in enumerate(row.cells):
            text = f"<b>{escape(cell)}</b>" if (place, column) in best else escape(cell)
            cells.append(f"<td>{text}</td>")
        kind = ' class="bound"' if row.is_bound else ""
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    return f'<h2>Comparison</h2><div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _failures(told: Comparison) -> Table:
    rows: list[tuple[str, ...]] = [(run.name, " ".join(run.overrides), run.error or "") for run in told.failed]
    return Table("Failed jobs", ("job", "overrides", "error"), rows)


def _outcomes(told: Comparison) -> Table:
    """Return the table of what happened to prefetched pages and saved states."""
    columns: dict[tuple[str, str], str] = {}
    for result in told.results:
        for kind, title in (("prefetch", "prefetch"), ("checkpoints", "checkpoints")):
            columns |= {(kind, name): f"{title}: {name.replace('_', ' ')}" for name, value in result[kind].items() if value}
    rows = [
        (run.name, *(count(result[kind].get(name)) for kind, name in columns))
        for run, result in zip(told.runs, told.results, strict=True)
        if columns
    ]
    return Table("Prefetch and checkpoint outcomes", ("run", *columns.values()), rows)


def _measured(told: Comparison) -> Table:
    """Return the table that compares simulated and hardware runs of the same configuration."""
    pairs: dict[str, dict[str, int]] = {}
    for place, result in enumerate(told.results):
        rest = [line for line in settings(result["config"]) if not line.startswith(("substrate=", "logger.", "timeline="))]
        pairs.setdefault("\n".join(rest), {})[str(result["config"].get("substrate"))] = place
    names: dict[str, Callable[[RunRecord], Any]] = {
        "hit rate": lambda result: result["hit_rate"],
        "TTFT mean (s)": lambda result: result["ttft_s"]["mean"],
        "TTFT p99 (s)": lambda result: result["ttft_s"]["p99"],
        "TPOT mean (s)": lambda result: result["tpot_s"]["mean"],
        "prompt tokens/s": lambda result: result["throughput"]["prompt_tokens_per_s"],
    }
    rows: list[tuple[str, ...]] = []
    for pair in pairs.values():
        if not {"simulated", "hardware"} <= pair.keys():
            continue
        simulated, measured = (told.results[pair[name]] for name in ("simulated", "hardware"))
        for name, read in names.items():
            one, other = read(simulated), read(measured)
            error = "-" if not other or one is None else f"{(one - other) / other:+.1%}"
            both = f"{told.runs[pair['simulated']].name}, {told.runs[pair['hardware']].name}"
            rows.append((f"{both}: {name}", digits(one), digits(other), error))
    return Table("Simulated and measured", ("runs", "simulated", "measured", "simulation error"), rows)


def _pictures(told: Comparison) -> list[str]:
    """Return the pictures that have data."""
    drawings: tuple[tuple[str, Callable[[Comparison], go.Figure | dict[str, Any] | None]], ...] = (
        ("Miss ratio by capacity", _miss_figure),
        ("Hit rate by tier over the run", _time_figure),
        ("Time to first token", _ttft_figure),
        ("Time to first token by total capacity", _pareto_figure),
        ("Tier occupancy", _occupancy_figure),
        ("Link use", _link_figure),
    )
    parts: list[str] = []
    number = 0
    for title, draw in drawings:
        figure = draw(told)
        if figure is not None:
            parts += [f"<h2>{title}</h2>", picture(figure, number, with_script=not number, height="380px")]
            number += 1
    return parts


def _miss_figure(told: Comparison) -> "go.Figure | None":
    """Draw miss ratio against total capacity: a line for each combination of policies, and the bounds."""
    import plotly.graph_objects as go

    lines: dict[str, list[tuple[float, float]]] = {}
    for place, result in enumerate(told.results):
        memory = memory_bytes(result)
        if memory and result["hit_rate"] is not None:
            lines.setdefault(told.series(place), []).append((memory / GIB, 1 - result["hit_rate"]))
    if len({memory for points in lines.values() for memory, _ in points}) < 2:
        return None
    figure = go.Figure()
    for name, points in lines.items():
        _add_line(figure, name, sorted(points), colour_of(name), "solid")
    bounds = []
    for places in told.framed("belady").values():
        memory = memory_bytes(told.results[places[0]])
        rate = told.runs[places[0]].bounds["belady"]["hit_rate"]
        if memory and rate is not None:
            bounds.append((memory / GIB, 1 - rate))
    if bounds:
        _add_line(figure, "belady", sorted(set(bounds)), "#888", "dash")
    for places in told.framed("unlimited").values():
        rate = told.runs[places[0]].bounds["unlimited"]["hit_rate"]
        if rate is not None:
            figure.add_hline(1 - rate, line={"color": "#888", "dash": "dot"}, annotation_text=f"unlimited {percent(1 - rate)}")
    figure.update_xaxes(type="log")
    return laid_out(figure, "total capacity of all tiers (GiB)", "computed tokens / prompt tokens")


def _add_line(figure: "go.Figure", name: str, points: list[tuple[float, float]], colour: str, dash: str) -> None:
    figure.add_scatter(
        x=[x for x, _ in points], y=[y for _, y in points], name=name, mode="lines+markers",
        line={"color": colour, "width": 1.75, "dash": dash},
    )  # fmt: skip


def _time_figure(told: Comparison) -> dict[str, Any] | None:
    """Draw stacked hits by tier of the run selected from a list.

    Returns JSON, because plotly's own figures copy the list four times.
    """
    import plotly.graph_objects as go

    places = [place for place, result in enumerate(told.results) if result["timeline"]["hits"]["edges"]]
    if not places:
        return None
    tiers = [tier for tier in TIER_COLOURS if any(tier in told.results[place]["tiers"] for place in places)]
    figure = go.Figure()
    for tier in tiers:
        x, y = _tier_line(told.results[places[0]], tier)
        figure.add_scatter(
            x=x, y=y, name=tier, stackgroup="tiers", mode="lines", line={"color": TIER_COLOURS[tier], "width": 1},
            fillcolor=TIER_COLOURS[tier],
        )  # fmt: skip
    laid_out(figure, _axis(told, places), "hit tokens / prompt tokens")
    figure.update_layout(showlegend=True)
    if len(places) > 1:
        figure.update_layout(margin={"t": 90})
    drawn: dict[str, Any] = figure.to_dict()
    if len(places) > 1:
        buttons = [{"label": told.label(place)[:60], "method": "restyle", "args": [_lines(told.results[place], tiers)]}
                   for place in places]  # fmt: skip
        menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.12, "yanchor": "bottom", "bgcolor": "#8a939c",
                "font": {"color": "#111", "size": 12}, "pad": {"b": 4}}  # fmt: skip
        drawn["layout"]["updatemenus"] = [menu]
    return drawn


def _axis(told: Comparison, places: list[int]) -> str:
    axes = {told.results[place]["timeline"]["hits"]["axis"] for place in places}
    return {("arrival_s",): "arrival (s)", ("request",): "request"}.get(tuple(axes), "arrival (s), or request without a clock")


def _tier_line(result: RunRecord, tier: str) -> tuple[list[float], list[float]]:
    hits = result["timeline"]["hits"]
    x = [round(middle, 3) for middle in middles(hits["edges"])]
    return x, [round(rate, 4) for rate in hits["hit_rate"].get(tier, [0.0] * len(x))]


def _lines(result: RunRecord, tiers: list[str]) -> dict[str, list[Any]]:
    lines = [_tier_line(result, tier) for tier in tiers]
    return {"x": [x for x, _ in lines], "y": [y for _, y in lines]}


def _ttft_figure(told: Comparison) -> "go.Figure | None":
    import plotly.graph_objects as go

    places = [place for place, result in enumerate(told.results) if result["ttft_quantiles_s"]]
    if not places:
        return None
    places = sorted(sorted(places, key=lambda place: -(told.results[place]["hit_rate"] or 0.0))[:MOST_LINES])
    figure = go.Figure()
    shares_below = [share / 100 for share in range(101)]
    for place in places:
        times = [float(f"{time:.4g}") for time in told.results[place]["ttft_quantiles_s"]]
        name = told.label(place)
        figure.add_scatter(
            x=times, y=shares_below, name=name, mode="lines", line={"color": colour_of(told.series(place)), "width": 1.5}
        )
    figure.update_xaxes(type="log")
    laid_out(figure, "time to first token (s)", "requests at or below")
    return figure.update_layout(hovermode="closest", showlegend=1 < len(places) <= 8)


def _pareto_figure(told: Comparison) -> "go.Figure | None":
    """Draw TTFT p99 against total capacity; a line joins the Pareto-optimal runs."""
    import plotly.graph_objects as go

    points = []
    for place, result in enumerate(told.results):
        memory, p99 = memory_bytes(result), result["ttft_s"]["p99"]
        if memory and p99 is not None:
            points.append((memory / GIB, p99, place))
    if len(points) < 2:
        return None
    figure = go.Figure()
    for name in dict.fromkeys(told.series(place) for *_, place in points):
        mine = [point for point in points if told.series(point[2]) == name]
        figure.add_scatter(
            x=[x for x, *_ in mine], y=[y for _, y, _ in mine], text=[told.label(place) for *_, place in mine], name=name,
            mode="markers", marker={"color": colour_of(name), "size": 9},
        )  # fmt: skip
    front = pareto([(x, y) for x, y, _ in points])
    figure.add_scatter(
        x=[x for x, _ in front], y=[y for _, y in front], name="Pareto front", mode="lines",
        line={"color": "#888", "dash": "dot", "shape": "hv"}, hoverinfo="skip",
    )  # fmt: skip
    laid_out(figure, "total capacity of all tiers (GiB)", "time to first token, p99 (s)")
    figure.update_layout(hovermode="closest")
    return figure.update_yaxes(tickformat=".3g")


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front from left to right: points that no other point matches or undercuts in both coordinates."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _occupancy_figure(told: Comparison) -> "go.Figure | None":
    """Draw the peak use of each tier as a share of its capacity; unlimited tiers are left out."""
    shares = {
        tier: [_peak_share(result, tier) for result in told.results] for tier in TIER_COLOURS
    }  # fmt: skip
    return _bars(told, {tier: values for tier, values in shares.items() if any(values)}, TIER_COLOURS, "peak use / capacity")


def _peak_share(result: RunRecord, tier: str) -> float | None:
    use = result["tiers"].get(tier)
    return use["peak_pages"] / use["capacity_pages"] if use and use["capacity_pages"] else None


def _link_figure(told: Comparison) -> "go.Figure | None":
    names = dict.fromkeys(name for result in told.results for name in result["links"])
    use = {name: [(result["links"].get(name) or {}).get("utilization") for result in told.results] for name in names}
    return _bars(told, use, dict(zip(names, LINK_COLOURS * len(names), strict=False)), "busy time / total time")


def _bars(told: Comparison, shares: dict[str, list[float | None]], colours: dict[str, str], y_title: str) -> "go.Figure | None":
    import plotly.graph_objects as go

    if not shares:
        return None
    figure = go.Figure()
    for name, values in shares.items():
        figure.add_bar(
            x=[run.name for run in told.runs], y=values, name=name, marker={"color": colours[name]},
            text=[told.label(place) for place in range(len(told.runs))], textposition="none",
        )  # fmt: skip
    figure.update_xaxes(type="category")
    laid_out(figure, "run", y_title)
    return figure.update_layout(showlegend=True)


def _foot(told: Comparison, command_line: str) -> str:
    """Return the section on how to reproduce the runs: this command, each run's command, and the shared settings."""
    flat = [settings(result["config"]) for result in told.results]
    shared = [line for line in flat[0] if all(line in lines for lines in map(set, flat))]
    each = [f"{run.name}: {result.get('command_line', '')}" for run, result in zip(told.runs, told.results, strict=True)]
    versions = ", ".join(f"{name} {version}" for name, version in told.results[0]["versions"].items())
    return (
        f"<h2>Reproduce</h2><pre>{escape(command_line)}</pre>"
        f"<details><summary>Command of each run</summary><pre>{escape(chr(10).join(each))}</pre></details>"
        f"<details><summary>Settings shared by all runs</summary><pre>{escape(chr(10).join(shared))}</pre></details>"
        f'<p class="soft">{escape(versions)}.</p>'
    )
