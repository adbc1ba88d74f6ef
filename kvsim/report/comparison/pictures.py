"""The pictures of a comparison."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvsim.engine.outcome import tiers_listed
from kvsim.report.axes import log_axis, number_text, seconds_text
from kvsim.report.comparison.axis import axis_key, axis_values, is_capacity
from kvsim.report.comparison.compare import Comparison, by_hit_rate
from kvsim.report.comparison.differing import heading
from kvsim.report.comparison.lines import AT_FIRST, LineStyles, choosable, shown_first
from kvsim.report.figure import GREY, NEUTRAL, RAMP, Picture, Styles, Trace, fitted_range, laid_out, rounded, value_axis
from kvsim.report.pictures import PERCENTILES, SHARE, phase_figure
from kvsim.results.fields import BY_KEY
from kvsim.results.measures import Measure, memory_bytes, moved_bytes
from kvsim.results.rates import size
from kvsim.results.result import RunRecord

MOST_LINES = 24
"""Most cases in one line chart; of more, those with the highest hit rates are drawn."""
MOST_BARS = 40
MOST_LABELS = 12
"""Most points with their names beside them."""
MARKED = "#d1495b"
"""Colour of what no other beats, as in the Pareto set of a sweep."""
BINS = 50
PERCENT = ".3~p"
NUMBER = ",.3~r"
"""Format of three digits without an exponent: ``8,000``."""
VERY_WIDE = 20.0
"""Measures that span at least this factor are drawn on a logarithmic axis."""


def pictures_of(comparison: Comparison) -> list[Picture]:
    """Return the pictures that show a difference."""
    styles = LineStyles(comparison)
    pictures = [
        *_along_axis(comparison),
        *_dots(comparison),
        _time(comparison, styles),
        _ttft(comparison, styles),
        _phases(comparison),
        _pareto(comparison, "total capacity of all tiers", memory_bytes),
        _pareto(comparison, "bytes moved over all links", moved_bytes),
        _occupancy(comparison),
        _links(comparison),
    ]
    return [picture for picture in pictures if picture is not None]


def _best(comparison: Comparison, most: int) -> list[int]:
    """Return the cases to draw: all, or those with the highest hit rates, in their order."""
    return sorted(by_hit_rate(comparison)[:most])


def _click(places: Sequence[int], shown: set[int]) -> str:
    if len(shown) < len(places):
        return f" {AT_FIRST}"
    return " Click a name to hide its line, double-click to see it alone." if len(places) > 1 else ""


def _chosen(places: Sequence[int], shown: set[int], traces: Sequence[Trace]) -> list[Trace]:
    return choosable(traces, [place in shown for place in places])


def of_case(place: int) -> Trace:
    """Return what tells the page which case a line shows, so that it can be filtered."""
    return {"meta": {"case": place}}


def of_cases(places: Iterable[int]) -> Trace:
    """Return what tells the page which case each point or bar shows."""
    return {"meta": {"cases": list(places)}}


def _size(n_bytes: float) -> str:
    return size(int(n_bytes))


def _left_out(comparison: Comparison, places: Sequence[int]) -> str:
    missing = len(comparison.cases) - len(places)
    return f"{missing} with lower hit rates are not drawn." if missing > 0 else ""


# --- measures along an axis ----------------------------------------------------------------------------------------------


def _along_axis(comparison: Comparison) -> list[Picture]:
    """Draw hit rate, goodput and TTFT against the axis: a line for each combination of the other settings."""
    key = axis_key(comparison)
    if key is None:
        return []
    drawn = [("hit_rate", PERCENT), ("goodput_requests_per_s", ".3~s"), ("ttft_s_p99", NUMBER)]
    known = {measure.key for measure in comparison.measures}
    measures = [(BY_KEY[measure], text) for measure, text in drawn if measure in known]
    return [_against(comparison, key, measure, text) for measure, text in measures if _differs(comparison, measure)]


def _differs(comparison: Comparison, measure: Measure) -> bool:
    """Whether a measure has several values as shown: a picture of equal ones would only show what is not there."""
    return len({measure.text(mean.mean) for case in comparison.cases if (mean := case.mean(measure)) is not None}) > 1


def _against(comparison: Comparison, key: str, measure: Measure, y_format: str) -> Picture:
    lines = _lines(comparison, key, measure)
    styles = Styles(lines)
    traces = [_line(name, points, styles) for name, points in list(lines.items())[:MOST_LINES]]
    shown = [end for points in list(lines.values())[:MOST_LINES] for _, y, half, _ in points for end in (y - half, y + half)]
    x_values = [x for points in lines.values() for x, *_ in points]
    bounds = _bound_lines(comparison, key) if measure.key == "hit_rate" else []
    height = {y for trace in bounds for y in trace["y"]}
    y_range, has_bounds = fitted_range(shown, sorted(height)) if shown else ([0, 1], False)
    note = ""
    if bounds and has_bounds:
        traces += bounds
    elif bounds:
        low, high = min(height), max(height)
        rates = f"{low:.2%}" if low == high else f"{low:.2%} to {high:.2%}"
        note = f"The bounds, at {rates}, lie outside of the picture: with them, differences between the lines could not be seen."
    if len(lines) > MOST_LINES:
        note += f" {len(lines) - MOST_LINES} lines are not drawn."
    x_axis = value_axis(x_values, _size if is_capacity(key) else number_text)
    title = f"{measure.title[0].upper()}{measure.title[1:]} by {heading(key)}"
    y_axis: dict[str, Any] = {"range": y_range, "rangemode": "normal"}
    if shown and 0 < VERY_WIDE * min(shown) <= max(shown):
        y_axis = log_axis(shown, seconds_text if measure.title.endswith("(s)") else number_text)
    return Picture(title, laid_out(traces, heading(key), measure.title, y_format, x_axis=x_axis, y_axis=y_axis, height=400), note)


def _lines(comparison: Comparison, key: str, measure: Measure) -> dict[str, list[tuple[float, float, float, int]]]:
    """Return the points (x, mean, half-width, case) of each line, by its name, in order of x."""
    lines: dict[str, list[tuple[float, float, float, int]]] = {}
    for place, x in enumerate(axis_values(comparison, key)):
        mean = comparison.cases[place].mean(measure)
        if x is not None and mean is not None:
            lines.setdefault(comparison.name_without(place, (key,)), []).append((x, mean.mean, mean.half_width or 0.0, place))
    return {name: sorted(points) for name, points in lines.items()}


def _line(name: str, points: list[tuple[float, float, float, int]], styles: Styles) -> Trace:
    trace: Trace = {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": [x for x, *_ in points],
        "y": rounded((y for _, y, _, _ in points), 5), "line": styles.line(name), "marker": styles.marker(name),
        **of_cases(place for *_, place in points),
    }  # fmt: skip
    if any(half for _, _, half, _ in points):
        widths = rounded((half for _, _, half, _ in points), 3)
        trace |= {"error_y": {"type": "data", "array": widths, "thickness": 1.2, "width": 4}, "opacity": 0.85}
    return trace


def _bound_lines(comparison: Comparison, key: str) -> list[Trace]:
    """Return lines for Belady's bound and an unlimited cache, by the mean over the seeds."""
    traces = []
    for kind, dash in (("belady", "dash"), ("unlimited", "dot")):
        points = set()
        for places in comparison.framed(kind).values():
            for place in places:
                x, rates = axis_values(comparison, key)[place], list(comparison.cases[place].bound(kind).values())
                if rates and x is not None:
                    points.add((x, sum(rates) / len(rates)))
        ordered = sorted(points)
        if ordered and len({x for x, _ in ordered}) == len(ordered) and not comparison.is_mixed:
            traces.append(
                {
                    "type": "scatter", "mode": "lines+markers" if kind == "belady" else "lines", "name": kind,
                    "x": [x for x, _ in ordered], "y": rounded((y for _, y in ordered), 5),
                    "line": {"color": GREY, "width": 1.5, "dash": dash}, "marker": {"color": GREY, "size": 5},
                }
            )  # fmt: skip
    return traces


def _dots(comparison: Comparison) -> list[Picture]:
    """Draw hit rates as dots, best first, where there is no axis to draw them along."""
    places = _best(comparison, MOST_BARS)
    means = {place: mean for place in places if (mean := comparison.cases[place].mean(BY_KEY["hit_rate"])) is not None}
    if axis_key(comparison) is not None or not _differs(comparison, BY_KEY["hit_rate"]):
        return []
    ordered = sorted(means, key=lambda place: -means[place].mean)
    trace: Trace = {
        "type": "scatter", "mode": "markers", "x": rounded((means[place].mean for place in ordered), 5),
        "y": [comparison.label(place) for place in ordered], "marker": {"color": NEUTRAL, "size": 9}, "name": "hit rate",
        **of_cases(ordered),
        "error_x": {"type": "data", "array": rounded((means[place].half_width or 0.0 for place in ordered), 3), "thickness": 1.2},
    }  # fmt: skip
    x_range, _ = fitted_range([mean.mean for mean in means.values()])
    figure = laid_out(
        [trace], "hit rate", "", "", x_axis={"range": x_range, "tickformat": PERCENT},
        y_axis={"type": "category", "autorange": "reversed", "rangemode": "normal"}, height=100 + 24 * len(ordered),
        hovermode="closest",
    )  # fmt: skip
    return [Picture("Hit rate", figure, _left_out(comparison, places))]


# --- over the run and over the requests ----------------------------------------------------------------------------------


def _time(comparison: Comparison, styles: LineStyles) -> Picture | None:
    """Draw the hit rates of all cases over the run, each case by its first seed."""
    places = [place for place in _best(comparison, MOST_LINES) if comparison.cases[place].first["timeline"]["hits"]["edges"]]
    if not places or len(comparison.cases) - len(comparison.identical()) < 1:
        return None
    traces: list[Trace] = []
    rates: list[float] = []
    for place in places:
        x, y = binned(comparison.cases[place].first["timeline"]["hits"])
        name = comparison.label(place)
        rates += y
        traces.append(
            {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": styles.line(place), **of_case(place)}
        )
    axes = {comparison.cases[place].first["timeline"]["hits"]["axis"] for place in places}
    x_title = {("arrival_s",): "arrival (s)", ("request",): "request"}.get(tuple(axes), "arrival (s), or request without a clock")
    y_range, _ = fitted_range(rates)
    first = shown_first(comparison, places, BY_KEY["hit_rate"])
    figure = laid_out(
        _chosen(places, first, traces), x_title, "hit tokens / prompt tokens", PERCENT,
        y_axis={"range": [max(0.0, y_range[0]), min(1.0, y_range[1])]}, height=400, hovermode="closest",
    )  # fmt: skip
    seed = "Each configuration by its first seed. " if comparison.has_seeds else ""
    note = (
        f"Equal numbers of requests in each of up to {BINS} steps. {seed}{_left_out(comparison, places)}{_click(places, first)}"
    )
    return Picture("Hit rate over the run", figure, note)


def binned(hits: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Merge the bins of a timeline into at most ``BINS``: middles, and hit tokens over prompt tokens of all tiers."""
    edges, tokens = hits["edges"], hits["prompt_tokens"]
    rates = [sum(each) for each in zip(*hits["hit_rate"].values(), strict=True)]
    step = -(-len(tokens) // BINS)
    x, y = [], []
    for start in range(0, len(tokens), step):
        end = min(start + step, len(tokens))
        total = sum(tokens[start:end])
        reused = sum(rate * number for rate, number in zip(rates[start:end], tokens[start:end], strict=True))
        x.append(float(f"{(edges[start] + edges[end]) / 2:.6g}"))
        y.append(float(f"{reused / total if total else 0.0:.4g}"))
    return x, y


def _ttft(comparison: Comparison, styles: LineStyles) -> Picture | None:
    places = [place for place in _best(comparison, MOST_LINES) if comparison.cases[place].first["ttft_quantiles_s"]]
    if not places:
        return None
    traces = [
        {
            "type": "scatter", "mode": "lines", "name": comparison.label(place), "y": PERCENTILES,
            "x": rounded(comparison.cases[place].first["ttft_quantiles_s"]), "line": styles.line(place), **of_case(place),
        }
        for place in places
    ]  # fmt: skip
    quantiles = [comparison.cases[place].first["ttft_quantiles_s"] for place in places]
    times = [time for each in quantiles for time in (each[0], each[-1])]
    x_axis = log_axis(times, seconds_text) if min(times) > 0 else {"ticksuffix": " s"}
    first = shown_first(comparison, places, BY_KEY["ttft_s_p99"])
    drawn = _chosen(places, first, traces)
    figure = laid_out(drawn, "time to first token", "requests at or below", x_axis=x_axis, height=400, hovermode="closest")
    seed = "Each configuration by its first seed. " if comparison.has_seeds else ""
    return Picture("Time to first token", figure, f"{seed}{_left_out(comparison, places)}{_click(places, first)}".strip())


def _phases(comparison: Comparison) -> Picture | None:
    places = _best(comparison, MOST_BARS)
    kinds = ("queue", "load", "prefill")
    phases = []
    for place in places:
        means = {kind: comparison.cases[place].mean(BY_KEY[f"{kind}_s_mean"]) for kind in kinds}
        phases.append({kind: None if mean is None else mean.mean for kind, mean in means.items()})
    figure = phase_figure([comparison.label(place) for place in places], phases, **of_cases(places))
    return None if figure is None else Picture("Where the time to first token goes", figure, _left_out(comparison, places))


# --- trade-offs ----------------------------------------------------------------------------------------------------------


def _pareto(comparison: Comparison, title: str, read: Any) -> Picture | None:
    """Draw TTFT p99, or for runs without a clock the hit rate, against a cost; the cases that no other beats are joined.

    None where the cost is the same for all, where runs served different requests, or where a run without a clock is drawn along
    a capacity already.
    """
    if comparison.is_mixed:
        return None
    has_clock = any(measure.key == "ttft_s_p99" for measure in comparison.measures)
    measure = BY_KEY["ttft_s_p99" if has_clock else "hit_rate"]
    axis = axis_key(comparison)
    if not has_clock and axis is not None and is_capacity(axis) and sum(is_capacity(key) for key in comparison.keys) == 1:
        return None
    points = []
    for place, case in enumerate(comparison.cases):
        costs, mean = list(case.by_seed(read).values()), case.mean(measure)
        if costs and mean is not None and sum(costs):
            points.append((sum(costs) / len(costs), mean.mean, place))
    if len(points) < 3 or len({x for x, *_ in points}) < 2 or len({y for _, y, _ in points}) < 2:
        return None
    front = pareto([(x, -measure.better * y) for x, y, _ in points])
    optimal = {(x, -measure.better * y) for x, y in front}
    best = [point for point in points if point[:2] in optimal]
    others = [point for point in points if point[:2] not in optimal]
    figure = laid_out(
        [_front(sorted(optimal)), _labelled(others, comparison, "beaten", GREY, {}),
         _labelled(best, comparison, "not beaten", MARKED, _named(best, comparison))],
        title, measure.title, NUMBER if has_clock else PERCENT, x_axis=value_axis((x for x, *_ in points), _size),
        y_axis={"range": fitted_range([y for _, y, _ in points], room=0.15)[0], "rangemode": "normal"}, height=420,
        hovermode="closest",
    )  # fmt: skip
    note = "Named: the points that no other beats, being as good in both and better in one. Point at others to see their names."
    return Picture(f"{measure.title} by {title}", figure, note)


def _front(points: list[tuple[float, float]]) -> Trace:
    return {
        "type": "scatter", "mode": "lines", "x": [x for x, _ in points], "y": rounded(y for _, y in points), "hoverinfo": "skip",
        "showlegend": False, "line": {"color": GREY, "dash": "dot", "shape": "hv"}, "name": "front", "meta": {"of_all": True},
    }  # fmt: skip


def _labelled(
    points: Sequence[tuple[float, float, int]], comparison: Comparison, name: str, colour: str, labels: dict[int, tuple[str, str]]
) -> Trace:
    """Return points; those of cases with ``labels``, texts and where they stand, are named, others where one points at them."""
    texts = [labels.get(place, ("", "top right")) for *_, place in points]
    return {
        "type": "scatter", "mode": "markers+text" if labels else "markers", "name": name, "x": [x for x, *_ in points],
        "y": rounded(y for _, y, _ in points), "text": [text for text, _ in texts],
        "textposition": [side for _, side in texts], "textfont": {"size": 11}, "cliponaxis": False, "hoverinfo": "text+x+y",
        "hovertext": [comparison.label(place) for *_, place in points], "marker": {"color": colour, "size": 8},
        "showlegend": bool(points), **of_cases(place for *_, place in points),
    }  # fmt: skip


def _named(points: Sequence[tuple[float, float, int]], comparison: Comparison) -> dict[int, tuple[str, str]]:
    """Return the text of cases and where it stands beside their points: one for those that share a point.

    Texts begin at points of the left half and end at those of the right half, so that they stay inside of the picture, in turns
    above and below, so that they stay off their neighbours'.
    """
    shared: dict[tuple[float, float], list[int]] = {}
    for x, y, place in points:
        shared.setdefault((x, y), []).append(place)
    middle = (min(points)[0] * max(points)[0]) ** 0.5
    found = {}
    for number, ((x, _), places) in enumerate(sorted(shared.items())[:MOST_LABELS]):
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        side = f"{'bottom' if number % 2 else 'top'} {'right' if x <= middle else 'left'}"
        found[places[0]] = comparison.name_without(places[0], ("seed",)) + more, side
    return found


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front from left to right: points that no other point matches or undercuts in both coordinates."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


# --- tiers and links -----------------------------------------------------------------------------------------------------


def _occupancy(comparison: Comparison) -> Picture | None:
    """Draw the peak use of each tier as a share of its capacity; unlimited tiers are left out."""
    tiers = tiers_listed(tier for case in comparison.cases for tier in case.first["tiers"])
    shares = {tier: [_peak_share(case.first, tier) for case in comparison.cases] for tier in tiers}
    return _bars(comparison, "Peak use of tiers", shares, "peak use / capacity")


def _peak_share(result: RunRecord, tier: str) -> float | None:
    use = result["tiers"].get(tier)
    return use["peak_pages"] / use["capacity_pages"] if use and use["capacity_pages"] else None


def _links(comparison: Comparison) -> Picture | None:
    names = dict.fromkeys(name for case in comparison.cases for name in case.first["links"])
    use = {name: [(case.first["links"].get(name) or {}).get("utilization") for case in comparison.cases] for name in names}
    return _bars(comparison, "Link use", use, "busy time / total time")


def _bars(comparison: Comparison, title: str, shares: dict[str, list[float | None]], y_title: str) -> Picture | None:
    """Draw bars for each case; None where all bars are equal, or all are 0."""
    drawn = {name: values for name, values in shares.items() if any(values)}
    if not drawn or all(len({value for value in values if value is not None}) < 2 for values in drawn.values()):
        return None
    places = _best(comparison, MOST_BARS)
    names = [comparison.cases[place].name for place in places]
    traces = [
        {
            "type": "bar", "name": name, "x": names, "y": rounded(values[place] for place in places),
            "marker": {"color": RAMP[number % len(RAMP)]}, "hovertext": [comparison.label(place) for place in places],
            **of_cases(places),
        }
        for number, (name, values) in enumerate(drawn.items())
    ]  # fmt: skip
    figure = laid_out(
        traces,
        "configurations, by jobs" if comparison.has_seeds else "run",
        y_title,
        SHARE,
        x_axis={"type": "category"},
        showlegend=True,
    )
    return Picture(title, figure, _left_out(comparison, places))
