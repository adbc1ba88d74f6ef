"""What a comparison finds, in sentences."""

from kvsim.report.comparison.compare import DRAWN, NEAR, Comparison, shown
from kvsim.report.comparison.pivot import gap_to_belady
from kvsim.results.fields import BY_KEY
from kvsim.results.measures import Measure
from kvsim.results.resampling import Difference

ASKED = (
    ("hit_rate", "Highest hit rate", ""),
    ("goodput_requests_per_s", "Highest goodput", " requests/s"),
    ("ttft_s_p99", "Lowest TTFT p99", " s"),
)
"""Measures, what their best value is called, and their units."""
MOST_NAMED = 4


def answers(comparison: Comparison) -> list[str]:
    """Return which cases are best, by how much, and which ones cannot be told from them; nothing about a single case."""
    if len(comparison.cases) < 2 or comparison.is_mixed:
        return []
    known = {measure.key for measure in comparison.measures}
    lines = [_answer(comparison, BY_KEY[key], title, unit) for key, title, unit in ASKED if key in known]
    return [line for line in lines if line]


def _answer(comparison: Comparison, measure: Measure, title: str, unit: str) -> str:
    stands = comparison.standing(measure)
    if not stands:
        values = {shown(measure, case.mean(measure)) for case in comparison.cases}
        return f"{title}: all are equal, at {values.pop()}{unit}." if len(values) == 1 else ""
    first = [place for place, how in stands.items() if how != NEAR]
    near = [place for place, how in stands.items() if how == NEAR]
    text = f"{title}: {_named(comparison, first)} with {shown(measure, comparison.cases[first[0]].mean(measure))}{unit}"
    if len(first) > 1:
        text += " each (a tie)"
    if measure.key == "hit_rate" and (gap := gap_to_belady(comparison, first[0])) is not None:
        points = f"{abs(100 * gap):.2f}"
        text += ", at" if points == "0.00" else f", {points} points {'below' if gap < 0 else 'above'}"
        text += " Belady's bound"
    if len(first) > 1:
        return f"{text}; not distinguishable from that: {_named(comparison, near)}." if near else f"{text}."
    others = [place for place in comparison.competing() if place != first[0]]
    known = comparison.against(measure, first[0], [place for place in others if place not in first])
    if known:
        text += f"; {_difference(measure, known[0].difference, unit)} against {comparison.label(known[0].place)}"
        text += f" (95 %, resampling {DRAWN[known[0].drawn]})" if known[0].drawn != "seeds" else " (95 %, by seed)"
    if near:
        return f"{text}; not distinguishable from the best: {_named(comparison, near)}."
    return f"{text}; the differences from all others exceed chance." if len(known) == len(others) else f"{text}."


def _difference(measure: Measure, found: Difference, unit: str) -> str:
    """Format a difference and its interval, rates in points: ``+0.03 points [-0.10, +0.20]``."""
    is_share = measure.text(0.0).endswith("%")
    texts = [f"{100 * value:+.2f}" if is_share else f"{value:+.3g}" for value in found]
    return f"{texts[0]}{' points' if is_share else unit} [{texts[1]}, {texts[2]}]"


def _named(comparison: Comparison, places: list[int]) -> str:
    names = [comparison.label(place) for place in places[:MOST_NAMED]]
    more = len(places) - MOST_NAMED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
