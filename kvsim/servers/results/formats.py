"""Reads the results of clients: the one table of their formats. A new one is a file here, and a row of the table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.results.observed import ObservedRun, ServerFacts
from kvsim.results.observed_file import read_observed
from kvsim.servers.results import aiperf, guidellm, sglang_bench, vllm_bench
from kvsim.servers.results.rows import check_count, other_lengths

GZIP = b"\x1f\x8b"
"""How kvsim's own files begin."""
Documents = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Format:
    """The file of a client."""

    client: str
    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether the first document of a file is one of the format."""
    read: Callable[[Path, Documents, Sequence[Request]], list[ObservedRun]]
    """Returns the runs of a file. Raises UsageError, and msgspec's errors for a document that is not of the format."""
    facts: Callable[[Mapping[str, Any]], ServerFacts | None] = lambda document: None
    """Returns what the first document has of what the server says of itself."""


FORMATS = (
    Format("aiperf", aiperf.recognises, aiperf.read),
    Format("guidellm", guidellm.recognises, guidellm.read),
    Format("vllm bench", vllm_bench.recognises, vllm_bench.read),
    Format("sglang bench", sglang_bench.recognises, sglang_bench.read, sglang_bench.facts),
)
KNOWN = (
    "a run that kvsim has saved, AIPerf's profile_export.jsonl, vllm bench serve's JSON (--save-result --save-detailed), SGLang "
    "bench_serving's JSONL (--output-details) and GuideLLM's JSON"
)


def result_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files that paths stand for; a folder stands for the runs saved there. Raises UsageError if there are none."""
    found = []
    for path in paths:
        saved = sorted(path.glob("*.jsonl.gz")) if path.is_dir() else [path]
        if not saved:
            raise UsageError(f"results: {path} has no runs (*.jsonl.gz): name a folder that kvsim has saved runs in, or files")
        found += saved
    return found


def facts_of(path: Path) -> ServerFacts | None:
    """Return what the server of a file's runs says of itself, as far as the file has it. Raises UsageError."""
    content = _content(path)
    if content.startswith(GZIP):
        return read_observed(path).facts
    first = _documents(path, content)[0]
    return _format_of(path, first).facts(first)


def read_results(paths: Sequence[Path], requests: Sequence[Request]) -> list[ObservedRun]:
    """Return the runs of some files, each of the requests of the trace. Raises UsageError."""
    return [run for path in paths for run in read_file(path, requests)]


def read_file(path: Path, requests: Sequence[Request]) -> list[ObservedRun]:
    """Return the runs of one file. Raises UsageError for a file that is of no known format, or of other requests."""
    content = _content(path)
    if content.startswith(GZIP):
        run = read_observed(path)
        check_count(path, len(run.sent_s), len(requests))
        return [replace(run, notes=[*run.notes, *other_lengths(run.prompt_tokens, run.errors, requests)])]
    documents = _documents(path, content)
    known = _format_of(path, documents[0])
    try:
        return known.read(path, documents, requests)
    except msgspec.ValidationError as error:
        raise UsageError(f"results: {path} is not as {known.client} writes it: {error}") from None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"results: {path} cannot be read: {error.strerror or error}") from None


def _format_of(path: Path, document: Mapping[str, Any]) -> Format:
    known = next((one for one in FORMATS if one.recognises(document)), None)
    if known is None:
        raise UsageError(f"results: {path} is of no known format: kvsim reads {KNOWN}")
    return known


def _documents(path: Path, content: bytes) -> Documents:
    """Return the JSON objects of a file: one, or one a line. Raises UsageError."""
    try:
        found = [msgspec.json.decode(content)]
    except (ValueError, RecursionError):  # msgspec's are ValueErrors
        found = [_line(path, number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not found or not all(isinstance(one, dict) for one in found):
        raise UsageError(f"results: {path} has no results: kvsim reads {KNOWN}")
    return found


def _line(path: Path, number: int, line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"results: {path}:{number}: not JSON: {error}") from None
