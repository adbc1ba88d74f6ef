"""One picture of many runs: a measure against a setting, a line for each value of another."""

from typing import TYPE_CHECKING, Any

from kvsim.errors import UsageError
from kvsim.report.comparison.axis import axis_values, is_capacity
from kvsim.report.comparison.compare import Comparison
from kvsim.report.comparison.differing import heading
from kvsim.report.figure import GREY, Styles, Trace, laid_out
from kvsim.results.rates import percent
from kvsim.results.statistics import mean_of
from kvsim.suggest import closest

if TYPE_CHECKING:
    import plotly.graph_objects as go

GIB = 2**30
Place = float | str


def sweep_figure(comparison: Comparison, x: str | None, y: str, color: str | None) -> "go.Figure":
    """Draw the measure ``y`` against the setting ``x``, a line for each value of the setting ``color``. Raises UsageError.

    Runs that differ in the seed only are one point, their mean, with its 95 % interval.
    """
    import plotly.graph_objects as go

    x = _checked("x", x or _default_x(comparison), comparison.keys)
    known = {measure.key: measure for measure in comparison.known}
    measure = known[_checked("y", y, list(known))]
    others = [_checked("color", color, comparison.keys)] if color else [key for key in comparison.keys if key != x]
    places = _places(comparison, x)
    lines: dict[str, list[tuple[Place, float, float]]] = {}
    for case, at in zip(comparison.cases, places, strict=True):
        if (mean := case.mean(measure)) is not None:
            name = " ".join(case.settings.get(key, "") for key in others).strip() or "runs"
            lines.setdefault(name, []).append((at, mean.mean, mean.half_width or 0.0))
    styles = Styles(lines)
    traces = [_line(name, points) | {"line": styles.line(name), "marker": styles.marker(name)} for name, points in lines.items()]
    if y in ("hit_rate", "page_hit_rate"):
        traces += _bound(comparison, places, y)
    is_ordered = all(isinstance(at, float) for at in places)
    title = f"{heading(x)} (GiB)" if is_capacity(x) and is_ordered else heading(x)
    axis = {"type": "linear" if is_ordered else "category"}
    margin = {"l": 60, "r": 20, "t": 12, "b": 100}
    return go.Figure(
        laid_out(traces, title, measure.title, ".0%" if measure.text is percent else "", x_axis=axis, height=420, margin=margin)
    )


def _line(name: str, points: list[tuple[Any, float, float]]) -> Trace:
    ordered = sorted(points) if all(isinstance(at, float) for at, *_ in points) else points
    trace: Trace = {"type": "scatter", "mode": "lines+markers", "name": name}
    trace |= {"x": [at for at, *_ in ordered], "y": [value for _, value, _ in ordered]}
    if any(half for *_, half in points):
        trace["error_y"] = {"type": "data", "array": [half for *_, half in ordered]}
    return trace


def _bound(comparison: Comparison, places: list[Place], y: str) -> list[Trace]:
    """Return a line for Belady's bound, where the runs at a place share one; empty if there is none."""
    found: dict[Place, set[float]] = {}
    for case, at in zip(comparison.cases, places, strict=True):
        if mean := mean_of(list(case.bound("belady", y).values())):
            found.setdefault(at, set()).add(mean.mean)
    points = [(at, values.pop(), 0.0) for at, values in found.items() if len(values) == 1]
    grey = {"line": {"color": GREY, "dash": "dash"}, "marker": {"color": GREY}}
    return [_line("belady", points) | grey] if points else []


def _default_x(comparison: Comparison) -> str:
    if not comparison.keys:
        raise UsageError("plot: the runs do not differ in any setting, so there is nothing to draw them against")
    return next((key for key in comparison.keys if is_capacity(key)), comparison.keys[0])


def _checked(argument: str, name: str, known: list[str]) -> str:
    """Return a name if it is known. Raises UsageError."""
    if name in known:
        return name
    hint = closest(name, known) or f"; choose from {', '.join(known)}"
    raise UsageError(f"plot: {argument}={name!r}: the runs have no such {'measure' if argument == 'y' else 'setting'}{hint}")


def _places(comparison: Comparison, key: str) -> list[Place]:
    """Return where each case is on the x axis: a capacity in GiB, a number, or the setting's text."""
    texts = [case.settings.get(key, "") for case in comparison.cases]
    unit = GIB if is_capacity(key) else 1
    return [text if value is None else value / unit for text, value in zip(texts, axis_values(comparison, key), strict=True)]
