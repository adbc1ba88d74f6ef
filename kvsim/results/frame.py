"""Tables with one row per request or run, in whatever library for tables is installed."""

import csv
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

TEXTS = ("status", "type", "error", "job", "tenant")
"""Columns that are text even where all cells are empty or look like numbers."""


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


def columns_of(lines: Iterable[str]) -> dict[str, np.ndarray]:
    """Read CSV with a header, as kvsim writes it.

    Whole numbers become int64. Other numbers, every column in seconds (``..._s``), and numbers with gaps become float64, in which
    a gap is nan. Everything else is text.
    """
    header, *rows = csv.reader(lines)
    cells = list(zip(*rows, strict=True)) or [()] * len(header)
    return {name: _column(name, list(column)) for name, column in zip(header, cells, strict=True)}


def _column(name: str, cells: list[str]) -> np.ndarray:
    if name in TEXTS:
        return np.array(cells, dtype=str)
    try:
        if not name.endswith("_s"):
            return np.array([int(cell) for cell in cells], dtype=np.int64)
    except ValueError:
        pass
    try:
        return np.array([float(cell) if cell else np.nan for cell in cells], dtype=np.float64)
    except ValueError:
        return np.array(cells, dtype=str)
