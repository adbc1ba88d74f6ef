"""Tables on a terminal of any width: text wraps between words, and columns without room are left out with a note."""

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP, RULED_GAP, FRAME = 1, 3, 4
"""Blanks between columns, without and with a rule below the headings, and what a rule takes at the edges."""
PIECE = re.compile(r"\s*(?:[^\s/,]+[/,]*|[/,]+)")
"""What stays on one line: a word, a part of a path, an entry of a list."""
Cell = str | Text


def width_of(console: Console) -> int:
    """The number of columns of the terminal; 120 for a file or a pipe."""
    return console.width if console.is_terminal else 120


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    width: int,
    *,
    words: Collection[int] = (),
    left: Collection[int] = (0,),
    drop: Sequence[int] | None = None,
    title: str | None = None,
) -> None:
    """Print a table at most ``width`` columns wide, and a note about the columns left out.

    Cells of the columns ``words`` wrap; names and numbers in all others stay whole. ``left`` columns are aligned to the left.
    ``drop`` are the columns that may be left out, in that order; by default all but the first, from the last one on.
    With a ``title``, a rule is drawn below the headings.
    """
    gap, frame = (GAP, 0) if title is None else (RULED_GAP, FRAME)
    rows = [list(row) for row in rows]
    droppable = list(range(len(headings) - 1, 0, -1)) if drop is None else list(drop)
    kept = list(range(len(headings)))
    while _least(headings, rows, kept, words, gap) + frame > width and droppable:
        kept.remove(droppable.pop(0))
    widths = _widths(headings, rows, kept, words, width - frame - gap * (len(kept) - 1))
    drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    if title is not None:
        console.print(Text("\n".join(textwrap.wrap(title, width, break_long_words=False)), "bold"), width=max(width, len(title)))
        drawn = Table(box=SIMPLE_HEAD)
    for column in kept:
        drawn.add_column(
            _wrap(headings[column], widths[column]),
            justify="left" if column in left else "right",
            header_style="bold",
            width=widths[column],
            no_wrap=True,
            vertical="top",
        )
    for row in rows:
        drawn.add_row(*(_cell(row[column], widths[column], column in words) for column in kept))
    _print_whole(console, drawn, max(width, sum(widths.values()) + gap * len(kept) + frame))
    if missing := [heading for column, heading in enumerate(headings) if column not in kept]:
        console.print(Text(f"No room for: {', '.join(missing)}. A wider terminal shows more.", "dim"), width=width)


def _print_whole(console: Console, table: Table, width: int) -> None:
    """Print a table of this width, which may be more than that of the console: rich would cut its cells."""
    before = console.width
    console.width = max(before, width)
    try:
        console.print(table, width=width, crop=False)
    finally:
        console.width = before


def _cell(cell: Cell, width: int, is_wrapped: bool) -> Text:
    if isinstance(cell, Text):
        return cell
    return Text(_wrap(cell, width) if is_wrapped else cell)


def _wrap(text: str, width: int) -> str:
    """Break a text into lines between its pieces."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for piece in PIECE.findall(paragraph):
            if line and len(line) + len(piece) > width:
                lines.append(line)
                piece = piece.lstrip()
            else:
                piece = line + piece
            line = piece
        lines.append(line)
    return "\n".join(lines)


def _least(headings: Sequence[str], rows: Sequence[Sequence[Cell]], kept: Sequence[int], words: Collection[int], gap: int) -> int:
    """The narrowest width at which nothing is broken."""
    return sum(_narrowest(headings, rows, column, words) + gap for column in kept) - gap


def _narrowest(headings: Sequence[str], rows: Sequence[Sequence[Cell]], column: int, words: Collection[int]) -> int:
    heading = max((len(piece.strip()) for piece in PIECE.findall(headings[column])), default=0)
    cells = (str(row[column]) for row in rows)
    parts = (part for cell in cells for part in (PIECE.findall(cell) if column in words else cell.split("\n")))
    return max(heading, max((len(part.strip()) for part in parts), default=0))


def _widths(
    headings: Sequence[str], rows: Sequence[Sequence[Cell]], kept: Sequence[int], words: Collection[int], width: int
) -> dict[int, int]:
    """The width of each column: what it needs for one line, less if all together exceed ``width``; the widest give way first."""
    least = {column: _narrowest(headings, rows, column, words) for column in kept}
    widths = {
        column: max(len(line) for cell in (headings[column], *(row[column] for row in rows)) for line in str(cell).split("\n"))
        for column in kept
    }
    excess = sum(widths.values()) - width
    while excess > 0 and (wide := [column for column in kept if widths[column] > least[column]]):
        widest = max(wide, key=lambda column: (widths[column] - least[column], column))
        widths[widest] -= 1
        excess -= 1
    return widths
