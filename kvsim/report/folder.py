"""The folder of a run: ``requests.csv.gz``, ``report.html``, on demand ``timeline.json.gz`` and ``events.jsonl.gz`` and, last,
``result.json``."""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np

from kvsim.core.request import Request
from kvsim.engine.outcome import PHASES, REJECTED, Outcome
from kvsim.errors import UsageError
from kvsim.files.writing import FileSet, replacing
from kvsim.report.html import render
from kvsim.report.perfetto.trace_events import write_timeline
from kvsim.report.template import SHARED_SCRIPT, plotly_script
from kvsim.results.result import RunRecord, hit_tokens, prompt_tokens, to_json

FILES = ("result.json", "requests.csv.gz", "report.html", "timeline.json.gz", "events.jsonl.gz")
HEADER = (
    "request,prompt_pages,hit_pages_gpu,hit_pages_cpu,hit_pages_disk,prompt_tokens,output_tokens,"
    "hit_tokens_gpu,hit_tokens_cpu,hit_tokens_disk,arrival_s,ttft_s,tpot_s,e2e_s,"
    "first_token_s,last_token_s,cpu_load_s,disk_load_s,retractions,status"
)
ORIGIN = "session,turn,type"
PHASE_COLUMNS = ",".join(f"{name}_s" for name in PHASES)
ROWS_AT_ONCE = 4096


def prepare_folder(folder: Path) -> None:
    """Create ``folder`` and check that files can be written there, without leaving or replacing any. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"output: cannot write to {folder}: {error.strerror}; choose another folder with output=DIR") from error


def write_run(folder: Path, result: RunRecord, outcome: Outcome, *, shared_script: str | None = None) -> list[str]:
    """Write the files of a run, all or none, and return their names. The same run gives the same bytes.

    ``shared_script`` is the address of the script that the pages of a sweep share, relative to the folder; without it,
    ``report.html`` is self-contained. Raises UsageError if the folder cannot be written, or another process writes it; an earlier
    run's files are then all still there.
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
        files.write("report.html", render(result, shared_script))
        if outcome.timeline is not None:
            with files.open("timeline.json.gz") as file:
                write_timeline(file, outcome)
        files.write("result.json", to_json(result))
        for name in FILES:
            if name not in files.names:
                files.remove(name)
    return [name for name in FILES if name in files.names]


def request_lines(outcome: Outcome) -> Iterator[str]:
    """Yield the lines of ``requests.csv.gz``: a header, then one row per request, including the warm-up.

    Rejected requests have ``hit_pages_gpu=-1``; unknown times are empty.
    """
    of_engines = _engine_columns(outcome)
    origin, phases = _origins(outcome.requests), _phase_columns(outcome)
    columns = [*_columns(outcome), *of_engines.values(), origin, *phases]
    template = ",".join(column if isinstance(column, str) else "%s" for column in columns)
    lines = map(template.__mod__, zip(*(column for column in columns if not isinstance(column, str)), strict=True))
    return chain([",".join([HEADER, *of_engines, ORIGIN, PHASE_COLUMNS])], lines)


def _write_lines(file: BinaryIO, lines: Iterable[str]) -> None:
    """Write lines of text, gzipped; the same lines give the same bytes."""
    left = iter(lines)
    with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0) as packed:
        while some := list(islice(left, ROWS_AT_ONCE)):
            packed.write(("\n".join(some) + "\n").encode())


def _columns(outcome: Outcome) -> list[str | list[Any]]:
    """Return the cells of each column or group of columns; a single text where all rows are equal."""
    requests = outcome.requests
    rejected = outcome.status == REJECTED
    pages = outcome.hit_pages.astype(np.int64)
    pages[rejected] = (-1, 0, 0)
    prompts = prompt_tokens(outcome)
    tokens = np.where(rejected[:, None], 0, hit_tokens(outcome, prompts))
    prompt_pages = np.array([request.prompt_pages for request in requests], np.int64)
    output_tokens = np.array([request.output_tokens for request in requests], np.int64)
    first, lengths = _sizes(prompt_pages.tobytes(), prompts.tobytes(), output_tokens.tobytes())
    return [
        first,
        *(column.tolist() if column.any() else "0" for column in pages.T),
        lengths,
        *(column.tolist() if column.any() else "0" for column in tokens.T),
        _arrivals(outcome.arrival_s.astype(float).tobytes()),
        *(_cells(times) for times in (outcome.ttft_s, outcome.tpot_s, outcome.e2e_s)),
        *(_cells(outcome.arrival_s + times) for times in (outcome.ttft_s, outcome.e2e_s)),
        *(_load_cells(None if outcome.load_s is None else outcome.load_s[:, column], rejected) for column in (0, 1)),
        "" if outcome.request_retractions is None else outcome.request_retractions.tolist(),
        np.where(rejected, "rejected", "finished").tolist() if rejected.any() else "finished",
    ]


def _engine_columns(outcome: Outcome) -> dict[str, str | list[Any]]:
    """Return the cells of the columns that say which engines served a request, by heading."""
    if outcome.engine is None or outcome.decoder is None:
        return {"engine": ""}
    columns = {"engine": outcome.engine} | ({"decoder": outcome.decoder} if outcome.is_disaggregated else {})
    rejected = outcome.status == REJECTED
    return {
        name: ["" if number < 0 else number for number in np.where(rejected, -1, numbers).tolist()]
        for name, numbers in columns.items()
    }


def _origins(requests: Sequence[Request]) -> str | list[str]:
    """Return ``session,turn,type``: what the trace says of the requests. Without sessions, turns are unknown, too."""
    if not any(request.session >= 0 or request.kind for request in requests):
        return ",,"
    return [
        f"{request.session},{request.turn},{_quoted(request.kind)}" if request.session >= 0 else f",,{_quoted(request.kind)}"
        for request in requests
    ]


def _quoted(text: str) -> str:
    """Return a text as a cell of CSV."""
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text


def _phase_columns(outcome: Outcome) -> list[str | list[Any]]:
    """Return the cells of the parts of the time to first token."""
    return ["" for _ in PHASES] if outcome.phases_s is None else [_cells(times) for times in outcome.phases_s.T]


@lru_cache(maxsize=1)
def _sizes(pages: bytes, prompts: bytes, outputs: bytes) -> tuple[list[Any], list[Any]]:
    """Return ``request,prompt_pages`` and ``prompt_tokens,output_tokens``; cached, as all runs of a trace share them."""
    of_pages, of_prompts, of_outputs = (np.frombuffer(column, np.int64).tolist() for column in (pages, prompts, outputs))
    lengths = [f"{prompt},{output}" for prompt, output in zip(of_prompts, of_outputs, strict=True)]
    return [f"{row},{number}" for row, number in enumerate(of_pages)], lengths


@lru_cache(maxsize=1)
def _arrivals(times: bytes) -> str | list[Any]:
    """Return the arrival times; cached, as all replays of a trace share them."""
    cells = _cells(np.frombuffer(times))
    return cells if isinstance(cells, str) else list(map(str, cells))


def _cells(times: np.ndarray) -> str | list[Any]:
    return "" if np.isnan(times).all() else ["" if time != time else time for time in times.tolist()]


def _load_cells(times: np.ndarray | None, rejected: np.ndarray) -> str | list[Any]:
    return "" if times is None else _cells(np.where(rejected, np.nan, times))


def write_shared_script(folder: Path) -> None:
    """Write the script that the pages of a sweep load, unless it is there. Raises UsageError if the folder cannot be written."""
    path, script = folder / SHARED_SCRIPT, plotly_script().encode()
    if not path.is_file() or path.stat().st_size != len(script):
        with replacing(path) as file:
            file.write(script)
