"""Reads the JSON files of runs and sweeps. Each may be damaged, or written by hand; what is read is what kvsim writes."""

import csv
import gzip
import shlex
import zlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec
import numpy as np

from kvsim.errors import UsageError
from kvsim.files.writing import settle
from kvsim.hardware.tier_kinds import ALWAYS
from kvsim.results.fields import FIELDS, SCHEMA
from kvsim.results.frame import request_columns
from kvsim.results.result import RunRecord
from kvsim.results.schema import SATURATION, Bound, Failure, SweepFile, shape_of

LONGEST_BYTES = 1 << 30
"""A longer file is none of kvsim's."""
LONGEST_ROW = 1 << 20
"""Characters of a line of ``requests.csv.gz`` that is none of kvsim's."""


class Damaged(UsageError):
    """A file cannot be read, or is not what kvsim writes."""


def read_result(folder: Path) -> RunRecord:
    """Read the ``result.json`` of a run. Raises Damaged."""
    settle(folder)
    path = folder / "result.json"
    record = _read(path, Any)
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise Damaged(f"{path}: not a result of schema {SCHEMA}: repeat the run with this version of kvsim")
    if "choices" not in record:
        raise Damaged(f"{path}: of an earlier version of kvsim, without the names of its policies: repeat the run")
    _check(path, record, shape_of(tuple(FIELDS)))
    try:
        _check_whole(record)
    except ValueError as error:
        raise Damaged(f"{path}: not a valid result: {error}: repeat the run") from None
    return record


def read_requests(folder: Path, record: RunRecord, is_read: Callable[[str], bool] = lambda name: True) -> dict[str, np.ndarray]:
    """Read the columns of the ``requests.csv.gz`` of a run with this record, or those that are asked for. Raises Damaged."""
    path = folder / "requests.csv.gz"
    try:
        _check_file(path)
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            lines = iter(partial(_next_line, cast(TextIO, file)), "")
            rows = rows_of(record)
            columns = request_columns(lines, list(record["hit_pages"]), is_read, most_rows=rows + 1)
        if len(columns["prompt_tokens"]) != rows:
            raise ValueError(f"it has {len(columns['request'])} rows")
    except (OSError, EOFError, zlib.error, csv.Error, ValueError, OverflowError, KeyError) as error:
        raise Damaged(f"{path}: not the requests of the run beside it: {error}: repeat the run") from error
    return columns


def rows_of(record: RunRecord) -> int:
    """Return how many requests a run has recorded: all of its trace, or those of its samples."""
    return int(record["sample"]["requests"] if "sample" in record else record["requests"] + record["warmup_requests"])


def _next_line(file: TextIO) -> str:
    """Return the next line, "" at the end. Raises ValueError for one that is longer than all cells of a request."""
    line = file.readline(LONGEST_ROW)
    if len(line) == LONGEST_ROW:
        raise ValueError(f"a line has {LONGEST_ROW} characters or more")
    return line


def read_bound(folder: Path, name: str) -> dict[str, Any] | None:
    """Read a bound of a sweep from its folder ``bounds``; None if there is none, or a damaged one, which counts as missing."""
    path = folder / f"{name}.json"
    try:
        bound: dict[str, Any] | None = _read(path, Bound) if path.is_file() else None
    except Damaged:
        return None
    return bound


def read_failure(folder: Path) -> dict[str, Any]:
    """Read the ``error.json`` of a failed job; of a damaged one, the record says just that."""
    try:
        record: dict[str, Any] = _read(folder / "error.json", Failure)
    except Damaged as error:
        return {"error": f"what failed cannot be read: {error}", "is_crash": False, "overrides": []}
    return record


def read_sweep(folder: Path) -> dict[str, Any]:
    """Read the ``sweep.json`` of a sweep's folder. Raises Damaged."""
    record: dict[str, Any] = _read(folder / "sweep.json", SweepFile)
    return record


def read_saturation(folder: Path) -> RunRecord:
    """Read the ``saturate.json`` of a job. Raises Damaged."""
    settle(folder)
    path = folder / "saturate.json"
    record: RunRecord = _read(path, Any)
    _check(path, record, SATURATION)
    return record


def _read(path: Path, kind: Any) -> Any:
    """Read a file of JSON, with the fields of ``kind``; of ``Any``, with all its fields. Raises Damaged."""
    try:
        _check_file(path)
        if path.stat().st_size > LONGEST_BYTES:
            raise ValueError("the file is too long")
        return _decoder(kind).decode(path.read_bytes())
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: not a valid result: {error}: repeat the run") from error


def _check_file(path: Path) -> None:
    """Raise ValueError for what a program could read for ever, such as a pipe."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")


def _check(path: Path, record: Any, kind: Any) -> None:
    """Raise Damaged unless a record has the fields of ``kind``."""
    try:
        msgspec.convert(record, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: not a valid result: {error}: repeat the run") from error


@cache
def _decoder(kind: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)


def _check_whole(record: RunRecord) -> None:
    """Raise ValueError where the parts of a result do not fit together."""
    shlex.split(record.get("command_line", ""))
    for name in ("hit_tokens", "hit_pages"):
        if not record[name].keys() >= {*ALWAYS, *record["tiers"]}:
            raise ValueError(f"{name} of too few tiers")
    if sum(record["hit_tokens"].values()) > record["prompt_tokens"]:
        raise ValueError("more hit tokens than prompt tokens")
    if not all("busy" in measures for measures in record.get("imbalance", {}).values()):
        raise ValueError("imbalance without busy")
    times, tiers = record["timeline"], record["tiers"]
    hits, links, free = times["hits"], times["links"], times.get("free_pages", {"edges_s": [], "mean": {}})
    known = {"known_rate": hits["known_rate"]} if "known_rate" in hits else {}
    _check_series(hits["edges"], hits["hit_rate"] | {"prompt_tokens": hits["prompt_tokens"]} | known)
    if hits["edges"] and not hits["hit_rate"].keys() >= tiers.keys():
        raise ValueError("timeline: no hit rate of a tier")
    if len(record["ttft_quantiles_s"]) not in (0, 101):
        raise ValueError(f"{len(record['ttft_quantiles_s'])} percentiles in place of 101")
    _check_series(links["edges_s"], links["utilization"])
    _check_series(free["edges_s"], free["mean"])
    if any(tier not in tiers or not tiers[tier]["capacity_pages"] for tier in free["mean"]):
        raise ValueError("free pages of a tier without a capacity")
    if engines := times.get("engines"):
        numbers = {str(engine["engine"]) for engine in record.get("engines", ())}
        for edges_s, series in (
            (engines["load"]["edges_s"], engines["load"]["requests"]),
            (engines["hits"]["edges_s"], engines["hits"]["hit_rate"]),
            (engines["hits"]["edges_s"], engines["hits"]["prompt_tokens"]),
        ):
            _check_series(edges_s, series)
            if not numbers.issuperset(series):
                raise ValueError("a timeline of an engine that there is not")


def _check_series(edges: list[float], series: Mapping[str, list[Any]]) -> None:
    """Raise ValueError unless each of ``series`` has a value for each bin between the edges."""
    for name, values in series.items():
        if len(values) != max(0, len(edges) - 1):
            raise ValueError(f"timeline: {len(values)} values of {name} for {max(0, len(edges) - 1)} bins")
