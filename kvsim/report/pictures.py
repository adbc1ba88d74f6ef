"""The pictures of a run."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvsim.report.axes import log_axis, seconds_text
from kvsim.report.figure import GREY, NEUTRAL, Figure, Picture, Trace, laid_out, rounded
from kvsim.report.summary import clock, shed_requests
from kvsim.report.tier_looks import look_of
from kvsim.results.result import RunRecord
from kvsim.results.timeline import middles

if TYPE_CHECKING:
    import plotly.graph_objects as go

PHASE_COLOURS = {"queue": "#9c5a3c", "load": "#d3a06a", "prefill": "#b5ab98"}
ENGINE_COLOURS = ("#d55e00", "#56b4e9", "#cc79a7", "#7f8c3b", "#c2556b", "#2aa5a5", "#b58900", "#888888")
"""Unlike the colours of tiers and of phases: on the page of a run, a colour means one thing."""
FEW, PALE = 20, 0.35
"""Requests below which a hit rate is drawn pale, because it says little."""
SCALING_COLOURS = {"up": "#8c8c8c", "starting": "#c2b280", "draining": "#5f5f5f"}
MOST_LINES = 8
"""Most engines that are drawn as lines; more make a heat map."""
SHARE = ".3~p"
"""Format of shares that may be small: three significant digits."""
FEW_NOTE = f"Each step is of at least {FEW} requests; a paler one is of fewer."
PERCENTILES = [share / 100 for share in range(101)]


def pictures_of(result: RunRecord) -> list[Picture]:
    """Return the pictures of a run; those without data say why."""
    without_clock = "a replay has no clock" if result["command"] == "replay" else ""
    pictures = [
        Picture(
            "Hit rate by tier", _hit_figure(result), FEW_NOTE if result["timeline"]["hits"]["edges"] else "No request was served."
        ),
        _or_note("Time to first token", _ttft_figure(result), f"No data: {without_clock or 'no request has a time'}."),
        _or_note("Link use", _link_figure(result), f"No data: {without_clock or 'no transfer took any time'}."),
    ]
    more = [("Free pages by tier", _free_figure(result)), ("Engines", _scaling_figure(result)), *_engine_figures(result)]
    return [*pictures, *[Picture(title, figure) for title, figure in more if figure is not None]]


def figures(result: RunRecord) -> "Iterator[tuple[str, go.Figure]]":
    """Return the pictures of a run that have data, with their titles, as plotly's objects."""
    import plotly.graph_objects as go

    return ((picture.title, go.Figure(picture.figure)) for picture in pictures_of(result) if picture.figure is not None)


def _or_note(title: str, figure: Figure | None, note: str) -> Picture:
    return Picture(title, figure, "" if figure else note)


def line(x: list[Any], y: list[Any], name: str, colour: str, **style: Any) -> Trace:
    """Return a line; ``style`` are further settings of it, such as ``dash``."""
    return {
        "type": "scatter", "mode": "lines", "x": x, "y": rounded(y), "name": name, "line": {"color": colour, "width": 1.5} | style
    }  # fmt: skip


def places(edges: list[float]) -> list[float | None]:
    """Return the middles of bins, with as many digits as a picture shows."""
    return rounded(middles(edges), 6)


def _hit_figure(result: RunRecord) -> Figure | None:
    hits = result["timeline"]["hits"]
    if not hits["edges"]:
        return None
    served = result["requests"] + result["warmup_requests"] - result["rejected"] - shed_requests(result)
    bins = merged(hits["edges"], served)
    known = {tier: summed(rates, hits["prompt_tokens"], bins) for tier, rates in hits["hit_rate"].items()}
    edges = [hits["edges"][start] for start, _, _ in bins] + [hits["edges"][bins[-1][1]]]
    x, widths = places(edges), rounded(end - start for start, end in pairwise(edges))
    is_thin = [number < FEW for *_, number in bins]
    pale = {"opacity": [PALE if thin else 1 for thin in is_thin]} if any(is_thin) else {}
    traces: list[Trace] = [
        {
            "type": "bar", "name": tier, "x": x, "y": rounded(known[tier]), "width": widths,
            "marker": {"color": look_of(tier).colour, "line": {"width": 0}, **pale},
        }
        for tier in result["tiers"]
    ]  # fmt: skip
    if "known_rate" in hits:
        traces.append(
            line(
                x,
                summed(hits["known_rate"], hits["prompt_tokens"], bins),
                "KV in memory, with or without a state",
                "#d55e00",
                dash="dot",
            )
        )
    place = hits["counted_from"]
    marks = {} if place is None else upright({"warm-up ends": place})
    x_title = "arrival (s)" if hits["axis"] == "arrival_s" else "request"
    return laid_out(traces, x_title, "hit tokens / prompt tokens", barmode="stack", bargap=0, **marks)


def merged(edges: list[float], served: int) -> list[tuple[int, int, float]]:
    """Return bins of a timeline of at least ``FEW`` requests and some width, as far as there are so many: the first and the last
    edge of each, and about how many requests it holds."""
    each = served / (len(edges) - 1)
    found, start = list[tuple[int, int, float]](), 0
    for end in range(1, len(edges)):
        is_enough = (end - start) * each >= FEW and edges[end] > edges[start]
        if is_enough or end == len(edges) - 1:
            found.append((start, end, (end - start) * each))
            start = end
    if len(found) > 1 and edges[found[-1][1]] == edges[found[-1][0]]:  # without a width it could not be seen
        (first, _, some), (_, last, more) = found[-2:]
        found[-2:] = [(first, last, some + more)]
    return found


def summed(rates: list[float], tokens: list[int], bins: list[tuple[int, int, float]]) -> list[float | None]:
    """Return the rates of merged bins: hit tokens over prompt tokens."""
    sums: list[float | None] = []
    for start, end, _ in bins:
        total = sum(tokens[start:end])
        reused = sum(rate * number for rate, number in zip(rates[start:end], tokens[start:end], strict=True))
        sums.append(reused / total if total else 0.0)
    return sums


def _ttft_figure(result: RunRecord) -> Figure | None:
    times = result["ttft_quantiles_s"]
    if not times:
        return None
    is_log = times[0] > 0 and times[-1] > 20 * times[0]
    marks = {name: result["ttft_s"][name] for name in ("p50", "p99")}
    marks["objective"] = (result.get("slo") or {}).get("ttft_s")
    known = {name: at for name, at in marks.items() if at}
    axis = log_axis([times[0], times[-1], *known.values()], seconds_text) if is_log else {"ticksuffix": " s"}
    trace = line(rounded(times), PERCENTILES, "requests", NEUTRAL, width=2)
    return laid_out([trace], "time to first token", "requests at or below", x_axis=axis, **upright(known, is_log))


def upright(marks: dict[str, float], is_log: bool = False) -> dict[str, Any]:
    """Return layout settings for dotted lines upright at these places, each with its name, at different heights."""
    shapes, annotations = [], []
    for number, (name, at) in enumerate(sorted(marks.items(), key=lambda mark: mark[1])):
        dotted = {"color": GREY, "dash": "dot"}
        shapes.append({"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": dotted})
        place = {"x": math.log10(at) if is_log else at, "y": 1 - 0.08 * number, "yref": "paper", "yanchor": "top"}
        annotations.append(place | {"xanchor": "right", "showarrow": False, "text": name})
    return {"shapes": shapes, "annotations": annotations}


def _link_figure(result: RunRecord) -> Figure | None:
    links = result["timeline"]["links"]
    if not any(any(use) for use in links["utilization"].values()):
        return None
    x, use = places(links["edges_s"]), links["utilization"]
    traces = [
        line(x, shares, name, NEUTRAL) | {"yaxis": axis_name("y", number)} for number, (name, shares) in enumerate(use.items())
    ]
    return _rows(traces, f"{clock(result)} (s)", SHARE, max(map(max, use.values())))


def axis_name(letter: str, number: int) -> str:
    """Return plotly's name of the axis of a row: ``y``, ``y2`` and so on."""
    return letter if number == 0 else f"{letter}{number + 1}"


def _rows(traces: list[Trace], x_title: str, y_format: str, highest: float) -> Figure:
    """Return a figure with a row for each line, below its name, all of the same height and scale."""
    each = 1 / len(traces)
    figure = laid_out(traces, x_title, "", y_format, height=60 + 85 * len(traces), showlegend=False)
    common = figure["layout"].pop("yaxis") | {"range": [0, highest * 1.05], "nticks": 4}
    names = []
    for number, trace in enumerate(traces):
        top = 1 - number * each
        figure["layout"][axis_name("yaxis", number)] = common | {"domain": [max(0.0, top - 0.9 * each), top - 0.22 * each]}
        place = {"xref": "paper", "x": 0, "yref": "paper", "y": top - 0.22 * each, "xanchor": "left", "yanchor": "bottom"}
        names.append(place | {"showarrow": False, "text": trace["name"]})
    figure["layout"]["xaxis"] |= {"anchor": axis_name("y", len(traces) - 1)}
    return figure | {"layout": figure["layout"] | {"annotations": names}}


def _free_figure(result: RunRecord) -> Figure | None:
    """Draw the free pages of each tier as a share of its capacity, for a run with a timeline."""
    free = result["timeline"].get("free_pages")
    if not free or not free["mean"]:
        return None
    traces = []
    for tier, pages in free["mean"].items():
        shares = [mean / result["tiers"][tier]["capacity_pages"] for mean in pages]
        traces.append(line(places(free["edges_s"]), shares, tier, look_of(tier).colour))
    return laid_out(traces, f"{clock(result)} (s)", "free pages / capacity")


def _scaling_figure(result: RunRecord) -> Figure | None:
    """Draw how many engines are up, start and drain over time, on top of each other, for a run in which a policy says so."""
    scaling = result.get("scaling")
    if scaling is None:
        return None
    changes = scaling["changes"]
    times_s = [*[change[0] for change in changes], result["simulated_s"]]
    traces = []
    for at, (state, colour) in enumerate(SCALING_COLOURS.items(), start=1):
        engines = [change[at] for change in changes]
        area = {"stackgroup": "engines", "fillcolor": colour} if any(engines) else {"visible": False}
        traces.append(line(rounded(times_s, 6), [*engines, engines[-1]], state, colour, shape="hv", width=0.5) | area)
    return laid_out(traces, f"{clock(result)} (s)", "engines", "")


def _engine_figures(result: RunRecord) -> list[tuple[str, Figure | None]]:
    """Draw requests and hit rates by engine over time, for a run with several."""
    series = result["timeline"].get("engines")
    if not series:
        return []
    load, hits = series["load"], series["hits"]
    titles = f"{clock(result)} (s)", "waiting or running", ".0f"
    return [
        ("Requests by engine", _by_engine(result, load["edges_s"], load["requests"], *titles)),
        (
            "Hit rate by engine",
            _by_engine(result, hits["edges_s"], hits["hit_rate"], "arrival (s)", "hit tokens / prompt tokens", ".0%"),
        ),
    ]


def _by_engine(
    result: RunRecord, edges: list[float], series: dict[str, list[float | None]], x_title: str, y_title: str, y_format: str
) -> Figure | None:
    """Draw one line per engine, or a heat map of many; those that only decode are dashed."""
    if not edges or not series:
        return None
    if len(series) > MOST_LINES:
        return _heat_map(edges, series, x_title, y_title, y_format)
    traces = []
    roles = {str(engine["engine"]): engine["role"] for engine in result["engines"]}
    for number, values in series.items():
        role = roles[number]
        colour = ENGINE_COLOURS[int(number) % len(ENGINE_COLOURS)]
        name = f"engine {number}" if role == "both" else f"{role} engine {number}"
        trace = line(places(edges), values, name, colour, dash="dash" if role == "decode" else "solid")
        traces.append(trace | {"connectgaps": True})
    return laid_out(traces, x_title, y_title, y_format)


def _heat_map(edges: list[float], series: dict[str, list[float | None]], x_title: str, y_title: str, y_format: str) -> Figure:
    trace = {
        "type": "heatmap", "x": places(edges), "y": [int(number) for number in series], "z": list(map(rounded, series.values())),
        "colorscale": "Viridis", "zmin": 0,
        "colorbar": {"title": {"text": y_title, "side": "right"}, "tickformat": y_format, "thickness": 12},
        "hovertemplate": f"engine %{{y}}, %{{x:.4g}} s: %{{z:{y_format}}}<extra></extra>",
    }  # fmt: skip
    axis = {"rangemode": "normal", "showgrid": False, "autorange": "reversed"}
    return laid_out([trace], x_title, "engine", "d", x_axis={"showgrid": False}, y_axis=axis, hovermode="closest")


def phase_figure(names: list[str], phases: list[dict[str, float | None]], **more: Any) -> Figure | None:
    """Draw the mean time to first token of runs by phase, as stacked bars: waiting, loading, computing the prompt.

    ``phases`` holds the mean seconds of each phase of each run. None where no run has phases, or no time passed. ``more`` are
    further settings of the bars of each phase.
    """
    kinds = [kind for kind in PHASE_COLOURS if any(each.get(kind) for each in phases)]
    if not kinds:
        return None
    traces = [
        {
            "type": "bar", "orientation": "h", "y": names, "x": rounded(each.get(kind) for each in phases), "name": kind,
            "marker": {"color": PHASE_COLOURS[kind]}, **more,
        }
        for kind in kinds
    ]  # fmt: skip
    axis = {"type": "category", "autorange": "reversed", "rangemode": "normal"}
    height = 110 + 24 * len(names)
    return laid_out(
        traces, "mean time to first token (s)", "", "", y_axis=axis, height=height, barmode="stack", hovermode="y unified"
    )
