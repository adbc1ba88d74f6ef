"""What a comparison finds, in sentences."""

from kvsim.report.comparison.compare import NEAR, Comparison, shown
from kvsim.report.comparison.pivot import gap_to_belady
from kvsim.results.fields import BY_KEY
from kvsim.results.measures import Measure

ASKED = (
    ("hit_rate", "Highest hit rate", ""),
    ("goodput_requests_per_s", "Highest goodput", " requests/s"),
    ("ttft_s_p99", "Lowest TTFT p99", " s"),
)
"""Measures, what their best value is called, and their units."""
MOST_NAMED = 4


def answers(comparison: Comparison) -> list[str]:
    """Return which cases are best, by how much, and which ones cannot be told from them; nothing about a single case."""
    if len(comparison.cases) < 2:
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
    if near:
        return f"{text}; not distinguishable from that: {_named(comparison, near)}."
    is_clear = len(first) == 1 and all(len(case.runs) > 1 for case in comparison.cases)
    return f"{text}; the differences from all others exceed chance (95 %, by seed)." if is_clear else f"{text}."


def _named(comparison: Comparison, places: list[int]) -> str:
    names = [comparison.label(place) for place in places[:MOST_NAMED]]
    more = len(places) - MOST_NAMED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
