"""Logarithmic axes whose ticks say their values in full, and lie so far apart that no label covers another."""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

SETS = (range(10, 100), (*range(10, 20), *range(20, 50, 5), *range(50, 100, 10)), range(10, 100, 10), (10, 20, 50), (10,))
"""Tenths of the digits at which ticks may lie in each power of ten, the densest set first."""
BETWEEN = (10, 12, 14, 16, 18, 20, 25, 30, 40, 50, 60, 80)
"""Tenths for the axes on which the others leave less than three ticks."""
MOST_GAPS = 14
"""An axis is at least this many times as long as the smallest distance between two ticks."""
ROOM = 0.03
"""What is left free at each end, as a share of the axis."""


def seconds_text(seconds: float) -> str:
    """Format seconds: ``50 us``, ``20 ms``, ``0.5 s``, ``8,000 s``."""
    if seconds <= 0 or seconds >= 0.1:
        return f"{number_text(seconds)} s"
    return f"{number_text(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{number_text(seconds * 1e6)} us"


def number_text(value: float) -> str:
    """Format a number without an exponent: ``0.02``, ``8,000``."""
    text = f"{value:,.10f}" if abs(value) < 1 else f"{value:,.6f}"
    return text.rstrip("0").rstrip(".") if float(text.replace(",", "")) else f"{value:g}"


def log_axis(values: Iterable[float], text: Callable[[float], str] = number_text) -> dict[str, Any]:
    """Return a logarithmic axis over positive values, with round numbers as ticks and ``text`` at them."""
    places = [math.log10(value) for value in values]
    low, high = min(places), max(places)
    margin = (high - low) * ROOM or 0.05
    low, high = low - margin, high + margin
    ticks = _ticks(low, high)
    if len(ticks) < 2:  # the values are too close to each other for round numbers
        ticks = sorted({float(f"{10**place:.4g}") for place in (min(places), max(places))})
    return {
        "type": "log", "range": [low, high], "rangemode": "normal", "tickvals": ticks, "ticktext": [text(tick) for tick in ticks],
    }  # fmt: skip


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two powers of ten: of the densest set in which ticks are far enough apart."""
    few = list[float]()
    for digits in (*SETS, BETWEEN):
        inside = _inside(digits, low, high)
        places = [math.log10(tick) for tick in inside]
        if all((other - one) * MOST_GAPS >= high - low for one, other in pairwise(places)):
            if len(inside) >= 3:
                return inside
            few = max(few, inside, key=len)
    return few or _inside(SETS[-1], low, high)[:: math.ceil((high - low) / MOST_GAPS)]


def _inside(digits: Iterable[int], low: float, high: float) -> list[float]:
    powers = range(math.floor(low), math.floor(high) + 1)
    ticks = [float(f"{digit}e{power - 1}") for power in powers for digit in digits]
    return [tick for tick in ticks if low <= math.log10(tick) <= high]
