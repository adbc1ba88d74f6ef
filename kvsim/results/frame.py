"""Tables with one row per request or run, in whatever library for tables is installed."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np

from kvsim.engine.columns import COLUMNS
from kvsim.results.cells import from_text

TEXTS = ("status", "error", "job")
"""Columns of a sweep's table that are text even where all cells are empty or look like numbers."""


LONGEST_REASON = 200
"""Characters of what is said of a cell, which may be of any length."""


def frame(columns: Mapping[str, np.ndarray]) -> Any:
    """Return columns of equal length as a table: a pandas DataFrame if pandas is installed, else a polars DataFrame if polars is,
    else a NumPy structured array with the same columns."""
    for library in ("pandas", "polars"):
        try:
            return import_module(library).DataFrame(dict(columns))
        except ImportError:
            continue
    rows = len(next(iter(columns.values()), ()))
    table = np.empty(rows, dtype=[(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        table[name] = column
    return table


def request_columns(
    lines: Iterable[str],
    tiers: Sequence[str],
    is_read: Callable[[str], bool] = lambda name: True,
    *,
    most_rows: int | None = None,
) -> dict[str, np.ndarray]:
    """Read ``requests.csv`` of a run with these tiers, and check it by the table of columns.

    ``is_read`` says by its name whether a column is read. Whole numbers become int64, or float64 with nan for gaps; times become
    float64; everything else is text. No more than ``most_rows`` are read. Raises ValueError for a column that is missing, or has
    cells of another type.
    """
    cells = _read(lines, most_rows)
    kinds = {heading: column.kind for column in COLUMNS for heading in column.headings(tiers)}
    always = [heading for column in COLUMNS if column.exists is None for heading in column.headings(tiers)]
    if missing := [heading for heading in always if heading not in cells]:
        raise ValueError(f"the column {missing[0]} is missing")
    found = {}
    for name, column in cells.items():
        if not is_read(name):
            continue
        try:
            found[name] = _guessed(name, column) if name not in kinds else _typed(kinds[name], column)
        except ValueError as error:
            raise ValueError(f"{name}: {str(error)[:LONGEST_REASON]}") from error
    return found


def columns_of(lines: Iterable[str]) -> dict[str, np.ndarray]:
    """Read CSV with a header, as kvsim writes it for a sweep.

    Whole numbers become int64. Other numbers, every column in seconds (``..._s``), and numbers with gaps become float64, in which
    a gap is nan. Everything else is text.
    """
    return {name: _guessed(name, cells) for name, cells in _read(lines).items()}


def _read(lines: Iterable[str], most_rows: int | None = None) -> dict[str, list[str]]:
    header, *rows = islice(csv.reader(lines), None if most_rows is None else most_rows + 1)
    cells = list(zip(*rows, strict=True)) or [()] * len(header)
    return {name: list(column) for name, column in zip(header, cells, strict=True)}


def _typed(kind: type, cells: list[str]) -> np.ndarray:
    """Return cells as an array of a type; a gap in numbers is nan."""
    if kind is str:
        return np.array([from_text(cell) for cell in cells], dtype=str)
    if kind is int and "" not in cells:
        return np.array([int(cell) for cell in cells], dtype=np.int64)
    return np.array([kind(cell) if cell else np.nan for cell in cells], dtype=np.float64)


def _guessed(name: str, cells: list[str]) -> np.ndarray:
    for kind in (str,) if name in TEXTS else (float, str) if name.endswith("_s") else (int, float, str):
        try:
            return _typed(kind, cells)
        except ValueError:
            continue
    raise AssertionError("text is always text")
