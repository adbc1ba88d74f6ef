"""The folder of a run: ``requests.csv.gz``, ``report.html``, on demand ``timeline.json.gz`` and ``events.jsonl.gz`` and, last,
``result.json``."""

import gzip
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np

from kvsim.engine.columns import COLUMNS, Column
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.files.writing import FileSet, replacing
from kvsim.report.ghosts import NO_BOUNDS
from kvsim.report.html import render
from kvsim.report.perfetto.trace_events import write_timeline
from kvsim.report.template import SHARED_SCRIPT, plotly_script
from kvsim.results.cells import as_text
from kvsim.results.result import RunRecord, to_json

FILES = ("result.json", "requests.csv.gz", "report.html", "timeline.json.gz", "events.jsonl.gz")
ROWS_AT_ONCE = 4096


def prepare_folder(folder: Path) -> None:
    """Create ``folder`` and check that files can be written there, without leaving or replacing any. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"output: cannot write to {folder}: {error.strerror}; choose another folder with output=DIR") from error


def write_run(
    folder: Path,
    result: RunRecord,
    outcome: Outcome,
    *,
    shared_script: str | None = None,
    bounds: Mapping[str, Mapping[str, Any]] = NO_BOUNDS,
) -> list[str]:
    """Write the files of a run, all or none, and return their names. The same run gives the same bytes.

    ``shared_script`` is the address of the script that the pages of a sweep share, relative to the folder; without it,
    ``report.html`` is self-contained. ``bounds`` are hit rates by kind, which the page shows beside those of the run. Raises
    UsageError if the folder cannot be written, or another process writes it; an earlier run's files are then all still there.
    """
    texts = {
        "requests.csv.gz": request_lines(outcome),
        "events.jsonl.gz": None if outcome.events is None else outcome.events.lines,
    }
    with FileSet(folder) as files:
        for name, lines in texts.items():
            if lines is not None:
                with files.open(name) as file:
                    _write_lines(file, lines)
        files.write("report.html", render(result, shared_script, bounds))
        if outcome.timeline is not None:
            with files.open("timeline.json.gz") as file:
                write_timeline(file, outcome)
        files.write("result.json", to_json(result))
        for name in FILES:
            if name not in files.names:
                files.remove(name)
    return [name for name in FILES if name in files.names]


def request_lines(outcome: Outcome) -> Iterator[str]:
    """Yield the lines of ``requests.csv.gz``: a header, then one row per request, including the warm-up."""
    headings: list[str] = []
    cells: list[str | list[Any]] = []
    for column in COLUMNS:
        if column.exists is None or column.exists(outcome):
            values = np.asarray(outcome.columns[column.name] if column.of is None else column.of(outcome))
            headings += column.headings(outcome.tier_names)
            cells += [_cells(column, one) for one in (values.T if column.is_by_tier else [values])]
    template = ",".join(column if isinstance(column, str) else "%s" for column in cells)
    lines = map(template.__mod__, zip(*(column for column in cells if not isinstance(column, str)), strict=True))
    return chain([",".join(headings)], lines)


def _write_lines(file: BinaryIO, lines: Iterable[str]) -> None:
    """Write lines of text, gzipped; the same lines give the same bytes."""
    left = iter(lines)
    with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0) as packed:
        while some := list(islice(left, ROWS_AT_ONCE)):
            packed.write(("\n".join(some) + "\n").encode())


def _cells(column: Column, values: np.ndarray) -> str | list[Any]:
    """Return the cells of a column; a single text where all of several rows are equal."""
    if column.is_of_trace and values.dtype != object:
        return _cells_of_trace(column, values.dtype.str, values.tobytes())
    if not column.has_gaps:
        is_missing = np.zeros(len(values), bool)
    else:
        is_missing = np.isnan(values) if values.dtype.kind == "f" else values == column.missing
    if len(values) > 1 and (is_missing.all() or not is_missing.any() and (values == values[0]).all()):
        return "" if is_missing[0] else _text(values[:1].tolist()[0]).replace("%", "%%")
    texts = list(map(_text, values.tolist())) if values.dtype.kind == "U" else values.tolist()
    return ["" if gap else cell for gap, cell in zip(is_missing.tolist(), texts, strict=True)] if is_missing.any() else texts


@lru_cache(maxsize=16)
def _cells_of_trace(column: Column, kind: str, values: bytes) -> str | list[Any]:
    """Return the cells of a column that all runs over a trace share, as text; cached."""
    cells = _cells(replace(column, is_of_trace=False), np.frombuffer(values, kind))
    return cells if isinstance(cells, str) else list(map(str, cells))


def _text(cell: Any) -> str:
    """Return a value as a cell of CSV."""
    text = str(as_text(cell))
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text


def write_shared_script(folder: Path) -> None:
    """Write the script that the pages of a sweep load, unless it is there. Raises UsageError if the folder cannot be written."""
    path, script = folder / SHARED_SCRIPT, plotly_script().encode()
    if not path.is_file() or path.stat().st_size != len(script):
        with replacing(path) as file:
            file.write(script)
