"""The file of ``vllm bench serve --save-result --save-detailed``: a JSON object, or with ``--append-result`` one a line.

Its lists have the requests in the client's order, which is the trace's. It has no cached tokens.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from kvsim.core.request import Request
from kvsim.results.observed import ObservedRun
from kvsim.servers.results.lists import Lists, read_lists
from kvsim.servers.results.rows import Row


class Run(Lists):
    """The fields that are read besides. Newer versions have the last three."""

    start_times: Sequence[float] = ()
    latencies: Sequence[float] = ()
    queue_times: Sequence[float | None] = ()
    server_ttfts: Sequence[float | None] = ()
    """From its admission, as the server says."""


def recognises(document: Mapping[str, Any]) -> bool:
    return "endpoint_type" in document and "completed" in document


def read(path: Path, documents: Sequence[Mapping[str, Any]], requests: Sequence[Request]) -> list[ObservedRun]:
    """Return the run of each object. Raises UsageError for a file without details."""
    return read_lists(
        path, documents, requests, kind=Run, row_of=_row, client="vllm bench", details="vllm bench serve with --save-detailed"
    )


def _row(run: Run, number: int) -> Row:
    ttft_s, gaps_s = run.ttfts[number], run.itls[number]
    return Row(
        sent_s=run.start_times[number] if run.start_times else nan,
        ttft_s=ttft_s,
        e2e_s=run.latencies[number] if run.latencies else ttft_s + sum(gaps_s),
        gaps_s=gaps_s,
        prompt_tokens=run.input_lens[number],
        output_tokens=run.output_lens[number],
        queued_s=_told(run.queue_times, number),
        prefill_s=_told(run.server_ttfts, number),
        error=run.errors[number] or None,
    )


def _told(times_s: Sequence[float | None], number: int) -> float:
    """Return what a list says of a request; NaN if there is no list, or nothing in it."""
    told = times_s[number] if times_s else None
    return nan if told is None else told
