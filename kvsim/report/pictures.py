"""The pictures of a run, as Plotly figures."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvsim.report.result import RunRecord
from kvsim.report.summary import clock
from kvsim.report.timeline import middles

if TYPE_CHECKING:
    import plotly.graph_objects as go

TIER_COLOURS = {"gpu": "#3d8fd1", "cpu": "#e69f00", "disk": "#0a9e74"}
LINK_COLOURS = ("#cc79a7", "#56b4e9", "#d55e00", "#8c7ae6", "#7f8c3b", "#a0785a")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart, and three more; all are visible on white and black."""
ENGINE_COLOURS = (*TIER_COLOURS.values(), *LINK_COLOURS)
MOST_LINES = 8
"""Most engines that are drawn as lines; more make a heat map."""


def pictures_of(result: RunRecord) -> "list[tuple[str, go.Figure | None, str]]":
    """Return (title, figure, what to say if there is none) of each picture of a run."""
    pictures = [
        ("Hit rate by tier", _hit_figure(result), "No request was served."),
        ("Time to first token", _ttft_figure(result), "No data: no request has a time. A replay has no clock."),
        ("Link use", _link_figure(result), "No data: no transfer took any time. A replay has no clock."),
    ]
    more = [("Free pages by tier", _free_figure(result)), *_engine_figures(result)]
    return [*pictures, *[(title, figure, "") for title, figure in more if figure is not None]]


def figures(result: RunRecord) -> "Iterator[tuple[str, go.Figure]]":
    """Return the pictures of a run that have data, with their titles."""
    return ((title, figure) for title, figure, _ in pictures_of(result) if figure is not None)


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


def _engine_figures(result: RunRecord) -> "list[tuple[str, go.Figure | None]]":
    """Draw requests and hit rates by engine over time, for a run with several."""
    series = result["timeline"].get("engines")
    if not series:
        return []
    load, hits = series["load"], series["hits"]
    return [
        (
            "Requests by engine",
            _by_engine(result, load["edges_s"], load["requests"], f"{clock(result)} (s)", "waiting or running", ".0f"),
        ),
        (
            "Hit rate by engine",
            _by_engine(result, hits["edges_s"], hits["hit_rate"], "arrival (s)", "hit tokens / prompt tokens", ".0%"),
        ),
    ]


def _by_engine(
    result: RunRecord, edges: list[float], series: dict[str, list[float | None]], x_title: str, y_title: str, y_format: str
) -> "go.Figure | None":
    """Draw one line per engine, or a heat map of many; those that only decode are dashed."""
    import plotly.graph_objects as go

    if not edges or not series:
        return None
    if len(series) > MOST_LINES:
        return _heat_map(edges, series, x_title, y_title, y_format)
    figure = go.Figure()
    roles = {str(engine["engine"]): engine["role"] for engine in result["engines"]}
    for number, values in series.items():
        role = roles[number]
        line = {
            "color": ENGINE_COLOURS[int(number) % len(ENGINE_COLOURS)],
            "width": 1.5,
            "dash": "dash" if role == "decode" else "solid",
        }
        name = f"engine {number}" if role == "both" else f"{role} engine {number}"
        figure.add_scatter(x=middles(edges), y=values, name=name, mode="lines", connectgaps=True, line=line)
    return laid_out(figure, x_title, y_title, y_format)


def _heat_map(
    edges: list[float], series: dict[str, list[float | None]], x_title: str, y_title: str, y_format: str
) -> "go.Figure":
    import plotly.graph_objects as go

    figure = go.Figure()
    bar = {"title": {"text": y_title, "side": "right"}, "tickformat": y_format, "thickness": 12}
    figure.add_heatmap(
        x=middles(edges), y=[int(number) for number in series], z=list(series.values()), colorscale="Viridis", zmin=0,
        colorbar=bar,
        hovertemplate=f"engine %{{y}}, %{{x:.4g}} s: %{{z:{y_format}}}<extra></extra>",
    )  # fmt: skip
    laid_out(figure, x_title, "engine", "d")
    figure.update_layout(hovermode="closest")
    figure.update_yaxes(rangemode="normal", showgrid=False, autorange="reversed")
    figure.update_xaxes(showgrid=False)
    return figure


def laid_out(figure: "go.Figure", x_title: str, y_title: str, y_format: str = ".0%") -> "go.Figure":
    """Apply the common style to a figure: readable on light and dark backgrounds, with the y-axis from 0, in percent."""
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
    figure.update_yaxes(title=y_title, rangemode="tozero", tickformat=y_format)
    return figure
