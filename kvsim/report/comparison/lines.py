"""How the lines of cases look where each case is one: colour by policy, dashes by capacity, and which ones show at first."""

from collections.abc import Sequence
from typing import Any

from kvsim.report.comparison.axis import axis_key, in_order
from kvsim.report.comparison.compare import Comparison
from kvsim.report.figure import Styles, Trace
from kvsim.results.measures import Measure

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MOST_SHOWN = 4
"""Most lines that all show at first; of more, only the best, the worst and LRU's do."""
LRU = "lru"
AT_FIRST = "At first, the best, the worst and LRU are drawn; choose others below the picture."


class LineStyles:
    """Styles of cases: what differs besides the axis has a colour, and the value on the axis, usually a capacity, a dash."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.key = axis_key(comparison)
        self.values = [] if self.key is None else in_order(comparison, self.key)
        self.colours = Styles(self._name(place) for place in range(len(comparison.cases)))

    def _name(self, place: int) -> str:
        return self.comparison.label(place) if self.key is None else self.comparison.name_without(place, (self.key, "seed"))

    def line(self, place: int) -> dict[str, Any]:
        """Return the style of a case's line."""
        style = self.colours.line(self._name(place), 1.5)
        if self.key is None:
            return style
        value = self.comparison.cases[place].settings.get(self.key, "")
        return style | {"dash": DASHES[self.values.index(value) % len(DASHES)]}


def shown_first(comparison: Comparison, places: Sequence[int], measure: Measure) -> set[int]:
    """Return which of many cases show at first: the best and the worst by a measure, and LRU where only the policy differs
    from the best, or the best of LRU's."""
    means = {place: mean.mean * measure.better for place in places if (mean := comparison.cases[place].mean(measure)) is not None}
    if len(places) <= MOST_SHOWN or not means:
        return set(places)
    best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    of_lru = [place for place in means if comparison.cases[place].settings.get("eviction") == LRU]
    near = [place for place in of_lru if _rest(comparison, place) == _rest(comparison, best)]
    return {best, worst, *(near or sorted(of_lru, key=lambda place: -means[place]))[:1]}


def _rest(comparison: Comparison, place: int) -> str:
    return comparison.name_without(place, ("eviction", "seed"))


def choosable(traces: Sequence[Trace], is_shown: Sequence[bool]) -> list[Trace]:
    """Return lines of which some are hidden until the reader chooses them."""
    return [trace if first else trace | {"visible": False} for trace, first in zip(traces, is_shown, strict=True)]
