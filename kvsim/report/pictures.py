"""The pictures of a run."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvsim.hardware.tier_kinds import ALWAYS
from kvsim.report.axes import log_axis, seconds_text
from kvsim.report.figure import GREY, Figure, Picture, Trace, laid_out, rounded
from kvsim.report.summary import clock
from kvsim.report.tier_looks import look_of
from kvsim.results.result import RunRecord
from kvsim.results.timeline import middles

if TYPE_CHECKING:
    import plotly.graph_objects as go

LINK_COLOURS = ("#cc79a7", "#56b4e9", "#d55e00", "#8c7ae6", "#7f8c3b", "#a0785a")
PHASE_COLOURS = {"queue": "#cc79a7", "load": "#e69f00", "prefill": "#3d8fd1"}
ENGINE_COLOURS = (*(look_of(tier).colour for tier in ALWAYS), *LINK_COLOURS)
MOST_LINES = 8
"""Most engines that are drawn as lines; more make a heat map."""
SHARE = ".3~p"
"""Format of shares that may be small: three significant digits."""
PERCENTILES = [share / 100 for share in range(101)]


def pictures_of(result: RunRecord) -> list[Picture]:
    """Return the pictures of a run; those without data say why."""
    pictures = [
        Picture("Hit rate by tier", _hit_figure(result), "" if result["timeline"]["hits"]["edges"] else "No request was served."),
        _or_note("Time to first token", _ttft_figure(result), "No data: no request has a time. A replay has no clock."),
        _or_note("Link use", _link_figure(result), "No data: no transfer took any time. A replay has no clock."),
    ]
    more = [("Free pages by tier", _free_figure(result)), *_engine_figures(result)]
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
    x = places(hits["edges"])
    traces = []
    for tier in result["tiers"]:
        colour = look_of(tier).colour
        stacked = {"stackgroup": "tiers", "fillcolor": colour}
        traces.append(line(x, hits["hit_rate"][tier], tier, colour, width=1) | stacked)
    if "known_rate" in hits:
        traces.append(line(x, hits["known_rate"], "KV in memory, with or without a state", "#d55e00", dash="dot"))
    place = hits["counted_from"]
    marks = {} if place is None else upright({"warm-up ends": place})
    x_title = "arrival (s)" if hits["axis"] == "arrival_s" else "request"
    return laid_out(traces, x_title, "hit tokens / prompt tokens", **marks)


def _ttft_figure(result: RunRecord) -> Figure | None:
    times = result["ttft_quantiles_s"]
    if not times:
        return None
    is_log = times[0] > 0 and times[-1] > 20 * times[0]
    marks = {name: result["ttft_s"][name] for name in ("p50", "p99")}
    marks["objective"] = (result.get("slo") or {}).get("ttft_s")
    known = {name: at for name, at in marks.items() if at}
    axis = log_axis([times[0], times[-1], *known.values()], seconds_text) if is_log else {"ticksuffix": " s"}
    trace = line(rounded(times), PERCENTILES, "requests", "#8c7ae6", width=2)
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
    x = places(links["edges_s"])
    traces = [
        line(x, use, name, LINK_COLOURS[number % len(LINK_COLOURS)])
        for number, (name, use) in enumerate(links["utilization"].items())
    ]
    return laid_out(traces, f"{clock(result)} (s)", "busy time / total time", SHARE)


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


def phase_figure(names: list[str], phases: list[dict[str, float | None]]) -> Figure | None:
    """Draw the mean time to first token of runs by phase, as stacked bars: waiting, loading, computing the prompt.

    ``phases`` holds the mean seconds of each phase of each run. None where no run has phases, or no time passed.
    """
    kinds = [kind for kind in PHASE_COLOURS if any(each.get(kind) for each in phases)]
    if not kinds:
        return None
    traces = [
        {
            "type": "bar", "orientation": "h", "y": names, "x": rounded(each.get(kind) for each in phases), "name": kind,
            "marker": {"color": PHASE_COLOURS[kind]},
        }
        for kind in kinds
    ]  # fmt: skip
    axis = {"type": "category", "autorange": "reversed", "rangemode": "normal"}
    height = 110 + 24 * len(names)
    return laid_out(
        traces, "mean time to first token (s)", "", "", y_axis=axis, height=height, barmode="stack", hovermode="y unified"
    )
