"""The file of ``vllm bench serve --save-result --save-detailed``: a JSON object, or with ``--append-result`` one a line.

Its lists have the requests in the client's order, which is the trace's. It has no cached tokens.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import msgspec

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.results.observed import ObservedRun
from kvsim.servers.results.rows import Row, observed


class Run(msgspec.Struct):
    """The fields that are read; times in seconds. Newer versions have the last two."""

    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    errors: list[str]
    start_times: list[float] = []
    latencies: list[float] = []
    queue_times: list[float | None] = []


def recognises(document: Mapping[str, Any]) -> bool:
    return "endpoint_type" in document and "completed" in document


def read(path: Path, documents: Sequence[Mapping[str, Any]], requests: Sequence[Request]) -> list[ObservedRun]:
    """Return the run of each object. Raises UsageError for a file without details."""
    runs = []
    for document in documents:
        if "ttfts" not in document:
            raise UsageError(f"results: {path} has no details of requests: repeat vllm bench serve with --save-detailed")
        run = msgspec.convert(document, Run)
        rows = [_row(run, number) for number in range(len(run.input_lens))]
        runs.append(observed(path, "vllm bench", rows, requests))
    return runs


def _row(run: Run, number: int) -> Row:
    try:
        ttft_s, gaps_s = run.ttfts[number], run.itls[number]
        queued_s = run.queue_times[number] if run.queue_times else None
        return Row(
            sent_s=run.start_times[number] if run.start_times else nan,
            ttft_s=ttft_s,
            e2e_s=run.latencies[number] if run.latencies else ttft_s + sum(gaps_s),
            gaps_s=gaps_s,
            prompt_tokens=run.input_lens[number],
            output_tokens=run.output_lens[number],
            queued_s=nan if queued_s is None else queued_s,
            error=run.errors[number] or None,
        )
    except IndexError:
        raise msgspec.ValidationError(f"its lists are not of the same length (request {number})") from None
