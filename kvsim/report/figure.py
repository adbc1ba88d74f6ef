"""Figures as plain data for plotly.js: colours, dashes, axes and the common layout.

A figure is ``{"data": [trace, ...], "layout": {...}}``, as plotly.js takes it. ``plotly.graph_objects.Figure(figure)`` makes an
object of it for tools that want one; building it as one would take a hundred times as long.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Trace = dict[str, Any]
Figure = dict[str, Any]

COLOURS = ("#3d8fd1", "#d55e00", "#0a9e74", "#cc79a7", "#e69f00", "#8c7ae6", "#56b4e9", "#7f8c3b")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart, and two more; all are visible on white and black."""
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")
GREY = "#888"
NEUTRAL = "#6b7f93"
"""Of lines and points whose colour says nothing."""
RAMP = ("#4f6070", "#7f92a4", "#a9b8c5", "#c9d3dc", "#64748b", "#94a3b8")
"""Of bars beside lines whose colours are policies."""
FIXED = ("lru", "slru", "lfu", "arc", "fifo", "s3_fifo", "sieve", "random", "gdsf", "w_tinylfu", "two_q", "lru_k", "mru")
"""Policies with the same style on every page; other names take the styles that are left, in order."""
TICKS = {"ticks": "outside", "ticklen": 4, "tickcolor": "rgba(0,0,0,0)"}
"""Keeps labels off the axis, and those of two axes off each other where they meet."""
LOG_FROM = 3.0
"""Values that span at least this factor are drawn on a logarithmic axis."""


class Picture(NamedTuple):
    """A picture with its title; ``figure`` is None where there is no data, and ``note`` says why, or how to read it."""

    title: str
    figure: Figure | None
    note: str = ""


class Styles:
    """A colour, dash and symbol for each name, so that lines differ in more than their colour."""

    def __init__(self, names: Iterable[str]) -> None:
        unique = list(dict.fromkeys(names))
        taken = {name: FIXED.index(name) for name in unique if name in FIXED}
        free = (number for number in range(10**6) if number not in taken.values())
        self.numbers = {name: taken[name] if name in taken else next(free) for name in unique}

    def colour(self, name: str) -> str:
        return COLOURS[self.numbers[name] % len(COLOURS)]

    def line(self, name: str, width: float = 1.75) -> dict[str, Any]:
        number = self.numbers[name]
        return {"color": self.colour(name), "width": width, "dash": DASHES[(number + number // len(COLOURS)) % len(DASHES)]}

    def marker(self, name: str, size: int = 8) -> dict[str, Any]:
        number = self.numbers[name]
        symbol = SYMBOLS[(number + number // len(COLOURS)) % len(SYMBOLS)]
        return {"color": self.colour(name), "size": size, "symbol": symbol}


def laid_out(
    traces: Sequence[Trace],
    x_title: str,
    y_title: str,
    y_format: str = ".0%",
    *,
    x_axis: dict[str, Any] | None = None,
    y_axis: dict[str, Any] | None = None,
    height: int = 340,
    **more: Any,
) -> Figure:
    """Return a figure in the common style: readable on light and dark backgrounds, y from 0 and in percent by default."""
    axis = {"gridcolor": "#ccc", "zerolinecolor": "#ccc", "automargin": True, **TICKS}
    layout = {
        "height": height,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 60, "r": 20, "t": 12, "b": 0},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "#2a2f35", "font": {"color": "#fff"}, "namelength": -1},
        "showlegend": sum(trace.get("showlegend", True) for trace in traces) > 1,
        "legend": {"orientation": "h", "traceorder": "normal", "x": 0},
        "xaxis": {"title": {"text": x_title, "standoff": 8}, "zeroline": False} | axis | (x_axis or {}),
        "yaxis": {"title": {"text": y_title}, "rangemode": "tozero", "tickformat": y_format} | axis | (y_axis or {}),
    }
    return {"data": list(traces), "layout": layout | more}


def rounded(values: Iterable[float | None], digits: int = 4) -> list[float | None]:
    """Round to significant digits, to keep pages small."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]


def is_wide(values: Iterable[float]) -> bool:
    """Return whether positive values span so much that they need a logarithmic axis."""
    known = list(values)
    return bool(known) and min(known) > 0 and max(known) >= LOG_FROM * min(known)


DIGITS, STEPS = 3, 6
"""Significant digits of an axis's labels, and how many of the last digit an axis spans at least."""


def fitted_range(values: Sequence[float], bounds: Sequence[float] = (), *, room: float = 0.08) -> tuple[list[float], bool]:
    """Return an axis range around the values, and whether it contains the bounds.

    The bounds widen the range only while the values still fill a third of it: beyond, differences between the values
    would vanish. Equal values get a range of a tenth of their size around them, and values that differ in the last of
    ``DIGITS`` only a range of ``STEPS`` such digits: ticks any closer would be labelled alike.
    """
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    least = STEPS * 10.0 ** (math.floor(math.log10(largest)) - DIGITS + 1) if largest and low < high else 0.0
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    span = high - low
    all_values = [*values, *bounds]
    wide = max(all_values) - min(all_values)
    has_bounds = bool(bounds) and (span >= wide / 3)
    if has_bounds:
        low, high, span = min(all_values), max(all_values), wide
    margin = span * room if span else abs(high) * 0.1 or 0.01
    return [low - margin if low - margin > 0 or low < 0 else min(low, 0.0), high + margin], has_bounds


def value_axis(places: Iterable[float], text: Callable[[float], str]) -> dict[str, Any]:
    """Return an axis over values: logarithmic if they span much, with ticks and ``text`` at them, as far as they fit."""
    values = sorted(set(places))
    is_log = is_wide(values)  # not with a size of 0, which has no place on a logarithmic axis
    at = [math.log10(value) if is_log else value for value in values]
    spacing = (at[-1] - at[0]) / 9 if len(at) > 1 else 0.0
    ticks: list[int] = []
    for number, place in enumerate(at):
        if not ticks or place - at[ticks[-1]] >= spacing:
            ticks.append(number)
    axis = {"type": "log" if is_log else "linear"}
    return axis | {
        "tickvals": [values[number] for number in ticks],
        "ticktext": [text(values[number]) if values[number] else "0" for number in ticks],
    }


def level(y: float, name: str) -> dict[str, Any]:
    """Return layout settings for a dotted line across the figure with its name and height, a share."""
    return across(y, f"{name} {y:.2%}", side="left")


def across(y: float | None, name: str, *, is_log: bool = False, side: str = "right", is_below: bool = False) -> dict[str, Any]:
    """Return layout settings for a dotted line across the figure at a height; none without a height.

    Its name is at one ``side`` of it, above it or below. ``is_log`` says that the axis of heights is logarithmic, on which plotly
    places texts, unlike lines, by the exponent.
    """
    if y is None:
        return {}
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": {"color": GREY, "dash": "dot"}}
    text = {
        "xref": "paper",
        "x": 0 if side == "left" else 1,
        "y": math.log10(y) if is_log else y,
        "xanchor": side,
        "yanchor": "top" if is_below else "bottom",
        "showarrow": False,
        "text": name,
    }
    return {"shapes": [line], "annotations": [text]}
