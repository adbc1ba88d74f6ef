"""Plain text on a terminal: paragraphs and two columns that wrap at words and never break one."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator

MOST_COLUMNS = 110
"""Widest text that is easy to read."""
MOST_NAME = 34
"""Widest name that its description stands beside; below a wider one it begins on the next line."""


def text_width() -> int:
    """The columns that text may take: those of the terminal, at most ``MOST_COLUMNS``."""
    return max(min(shutil.get_terminal_size().columns, MOST_COLUMNS), 20)


def wrapped(text: str, *, indent: int = 0) -> Iterator[str]:
    """Yield the lines of a text, whose paragraphs are separated by empty lines; lines that are indented stay as they are."""
    for number, paragraph in enumerate(text.strip("\n").split("\n\n")):
        if number:
            yield ""
        if any(line.startswith(" ") for line in paragraph.splitlines()[1:]) or "  " in paragraph.strip():
            yield from (" " * indent + line for line in paragraph.splitlines())
        else:
            yield from _fill(" ".join(paragraph.split()), " " * indent)


def columns(rows: Iterable[tuple[str, str]], *, is_short: bool = False) -> Iterator[str]:
    """Yield the lines of names, each with its description in a second column; if short, only with the first line of it."""
    rows = list(rows)
    widest = min(MOST_NAME, text_width() // 2)
    start = max((len(name) for name, _ in rows if len(name) <= widest), default=0) + 4
    for name, text in rows:
        lines = _fill(text, " " * start) or [""]
        if is_short and len(lines) > 1:
            lines = [f"{_fill(text, ' ' * (start + 4))[0][4:]} ..."]
        if len(name) <= widest:
            yield f"  {name:<{start - 4}}  {lines[0].strip()}".rstrip()
        else:
            yield f"  {name}"
            yield lines[0]
        yield from lines[1:]


def _fill(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, text_width(), initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
