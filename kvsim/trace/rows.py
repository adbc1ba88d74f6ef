"""Rows of CSV files, as text in columns."""

import csv
import re
from collections.abc import Iterator
from itertools import chain

from kvsim.errors import TraceError

COLUMNS = re.compile(rb'(?:[\w .()-]++|"[^"\r\n]*+")(?:,(?:[\w .()-]++|"[^"\r\n]*+"))++\s*+')
"""The first line of a CSV file: names of columns."""

Cells = dict[str, str | None]
"""The cells of a row by the names of their columns; an empty one is None."""


class _Texts:
    """Yields the text of lines, and knows the number of the last one."""

    def __init__(self, path: str, lines: Iterator[tuple[int, bytes]]) -> None:
        self._path = path
        self._lines = lines
        self.line = 0

    def __iter__(self) -> Iterator[str]:
        for line, text in self._lines:
            self.line = line
            try:
                yield text.decode()
            except UnicodeDecodeError:
                raise TraceError(self._path, line, "not UTF-8 text") from None


def read_rows(path: str, first: tuple[int, bytes], lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, Cells]]:
    """Yield the number of the line where each row ends, and its cells. ``first`` is the line with the names of the columns.

    Cells may be quoted. Raises TraceError for a row that is no CSV or does not fit the columns.
    """
    texts = _Texts(path, chain([first], lines))
    rows = csv.reader(texts, strict=True)
    try:
        columns = [name.strip() for name in next(rows)]
        for name in columns:
            if columns.count(name) > 1:
                raise TraceError(path, first[0], f"the column {name} is there {columns.count(name)} times: rename all but one")
        for cells in rows:
            if len(cells) != len(columns):
                raise TraceError(path, texts.line, f"has {len(cells)} cells, but there are {len(columns)} columns")
            yield texts.line, {name: cell.strip() or None for name, cell in zip(columns, cells, strict=True)}
    except csv.Error as error:
        raise TraceError(path, texts.line, f"not CSV: {error}") from None
