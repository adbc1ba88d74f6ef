"""Lines over time as SVG in a few kilobytes, for a page that is written anew every few seconds.

Marks are drawn in a box of ``WIDTH`` by ``HEIGHT`` that stretches with the page; numbers are text of the page beside it, so that
they stay readable on a phone.
"""

from collections.abc import Sequence
from datetime import datetime
from math import ceil
from typing import NamedTuple

from kvsim.report.figure import COLOURS, DASHES

WIDTH, HEIGHT = 1000.0, 300.0
STROKES = {"solid": "", "dash": "9 5", "dot": "2 4", "dashdot": "9 4 2 4"}
UNIX_S = 1e8
"""From here on, a time is one of Unix; below, it is counted from the beginning of something."""
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25)


class Line(NamedTuple):
    """A line with its name; points are a time in seconds and a share, None where there is none."""

    name: str
    points: Sequence[tuple[float, float | None]]


class Drawn(NamedTuple):
    """A picture for the template."""

    lines: list[dict[str, str]]
    """Name, colour, dashes, and the path of each."""
    grid: list[tuple[str, str]]
    """Height in the box, and label, from the top."""
    times: list[str]
    """Labels below, from left to right."""


def draw(lines: Sequence[Line]) -> Drawn | None:
    """Return a picture of lines from 0 to a round share above all of them; None if there are not two moments to join."""
    times = sorted({at_s for line in lines for at_s, share in line.points if share is not None})
    if len(times) < 2:
        return None
    top, step = _scale(max(share for line in lines for _, share in line.points if share is not None))
    begin_s, end_s = times[0], times[-1]
    drawn = [
        {
            "name": line.name,
            "colour": COLOURS[number % len(COLOURS)],
            "dashes": STROKES[DASHES[(number + number // len(COLOURS)) % len(DASHES)]],
            "path": _path(line.points, begin_s, end_s, top),
        }
        for number, line in enumerate(lines)
    ]
    grid = [(f"{HEIGHT * (1 - number * step / top):.1f}", f"{number * step:.0%}") for number in range(round(top / step), -1, -1)]
    return Drawn(drawn, grid, [_time(begin_s + part * (end_s - begin_s) / 4, end_s - begin_s) for part in range(5)])


def _scale(most: float) -> tuple[float, float]:
    """Return the top of the axis and the distance of its marks, at most five of them above 0."""
    step = next((step for step in STEPS if most <= 5 * step), 0.25)
    return max(step, ceil(round(most / step, 9)) * step), step


def _path(points: Sequence[tuple[float, float | None]], begin_s: float, end_s: float, top: float) -> str:
    """Return a line's path, with a new beginning after each gap."""
    parts, command = [], "M"
    for at_s, share in points:
        if share is None:
            command = "M"
            continue
        x, y = WIDTH * (at_s - begin_s) / (end_s - begin_s), HEIGHT * (1 - share / top)
        parts.append(f"{command}{x:.1f} {y:.1f}")
        command = "L"
    return "".join(parts)


def _time(at_s: float, span_s: float) -> str:
    """Return a moment as the clock shows it here or, of a source with a clock of its own, in seconds."""
    if at_s < UNIX_S:
        return f"{at_s:,.0f} s"
    form = "%H:%M:%S" if span_s < 600 else "%H:%M" if span_s < 86400 else "%a %H:%M"
    return datetime.fromtimestamp(at_s).strftime(form)
