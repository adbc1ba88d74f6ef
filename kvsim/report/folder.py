"""The folder of a run: ``requests.csv.gz``, ``report.html``, on demand ``timeline.json.gz`` and ``events.jsonl.gz`` and, last,
``result.json``."""

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    cells: list[str] = []
    varied: list[tuple[Column, np.ndarray]] = []
    for column in COLUMNS:
        if column.exists is None or column.exists(outcome):
            values = np.asarray(outcome.columns[column.name] if column.of is None else column.of(outcome))
            headings += column.headings(outcome.tier_names)
            for one in values.T if column.is_by_tier else [values]:
                same = _same_cell(column, one)
                cells.append("%s" if same is None else same)
                varied += [(column, one)] if same is None else []
    return chain([",".join(headings)], _rows(",".join(cells), varied, len(outcome.requests)))


def _rows(template: str, varied: Sequence[tuple[Column, np.ndarray]], requests: int) -> Iterator[str]:
    """Yield rows by a template, which lacks the cells of these columns; only the next few are in memory as text."""
    for start in range(0, requests, ROWS_AT_ONCE):
        cells = [_cells(column, values[start : start + ROWS_AT_ONCE]) for column, values in varied]
        yield from map(template.__mod__, zip(*cells, strict=True))


def _write_lines(file: BinaryIO, lines: Iterable[str]) -> None:
    """Write lines of text, gzipped; the same lines give the same bytes."""
    left = iter(lines)
    with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0) as packed:
        while some := list(islice(left, ROWS_AT_ONCE)):
            packed.write(("\n".join(some) + "\n").encode())


def _same_cell(column: Column, values: np.ndarray) -> str | None:
    """Return the cell of a column where all of several rows are equal, for a template; None where they are not."""
    is_missing = _is_missing(column, values)
    if len(values) > 1 and (is_missing.all() or not is_missing.any() and (values == values[0]).all()):
        return "" if is_missing[0] else _text(values[:1].tolist()[0]).replace("%", "%%")
    return None


def _is_missing(column: Column, values: np.ndarray) -> np.ndarray:
    """Tell which values of a column are written as an empty cell."""
    if not column.has_gaps:
        return np.zeros(len(values), bool)
    return np.asarray(np.isnan(values) if values.dtype.kind == "f" else values == column.missing)


def _cells(column: Column, values: np.ndarray) -> list[Any]:
    """Return the cells of some rows of a column."""
    if column.is_of_trace and values.dtype != object:
        return _cells_of_trace(column, values.dtype.str, values.tobytes())
    is_missing = _is_missing(column, values)
    texts = list(map(_text, values.tolist())) if values.dtype.kind == "U" else values.tolist()
    return ["" if gap else cell for gap, cell in zip(is_missing.tolist(), texts, strict=True)] if is_missing.any() else texts


@lru_cache(maxsize=128)
def _cells_of_trace(column: Column, kind: str, values: bytes) -> list[str]:
    """Return the cells of a column that all runs over a trace share, as text; cached, for traces of up to 80,000 requests."""
    return list(map(str, _cells(replace(column, is_of_trace=False), np.frombuffer(values, kind))))


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
