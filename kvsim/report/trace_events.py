"""Writes the timeline of a run in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open."""

import gzip
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from kvsim.engine.outcome import REJECTED, LinkUse, Outcome
from kvsim.report.timeline import free_pages

REQUESTS, ENGINE, LINKS, TIERS = 1, 2, 3, 4
"""The processes of the timeline; each is one lane or a group of lanes."""
NAMES = {REQUESTS: "requests", ENGINE: "engine", LINKS: "links", TIERS: "tiers"}
Event = dict[str, Any]


def write_timeline(file: BinaryIO, outcome: Outcome) -> None:
    """Write the events of a recorded run, gzipped; the same run gives the same bytes. Times are in microseconds."""
    with gzip.GzipFile(filename="", mode="wb", compresslevel=4, fileobj=file, mtime=0) as packed:
        packed.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(events(outcome)):
            packed.write((b",\n" if number else b"") + json.dumps(event, separators=(",", ":")).encode())
        packed.write(b"\n]}\n")


def events(outcome: Outcome) -> Iterator[Event]:
    """Yield lane names, then requests, batches, transfers by link, and evictions, pages in use and free pages by tier."""
    for pid, name in NAMES.items():
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    yield from _requests(outcome)
    yield from _batches(outcome)
    for lane, (name, link) in enumerate(outcome.links.items(), 1):
        yield {"ph": "M", "pid": LINKS, "tid": lane, "name": "thread_name", "args": {"name": name}}
        yield from _transfers(lane, name, link)
    yield from _tiers(outcome)


def _requests(outcome: Outcome) -> Iterator[Event]:
    """Yield a span for each request, with its hits as arguments, split into the time to first token and decode."""
    for request in outcome.requests:
        index = request.index
        if outcome.status[index] == REJECTED:
            yield {"ph": "i", "s": "p", "pid": REQUESTS, "tid": 0, "ts": _us(outcome.arrival_s[index]), "cat": "request",
                   "name": f"request {index} rejected", "args": {"prompt_tokens": request.prompt_tokens}}  # fmt: skip
            continue
        arrival_s = outcome.arrival_s[index]
        first_s, end_s = arrival_s + outcome.ttft_s[index], arrival_s + outcome.e2e_s[index]
        hits = dict(zip(("hit_pages_gpu", "hit_pages_cpu", "hit_pages_disk"), outcome.hit_pages[index].tolist(), strict=True))
        arguments = {"prompt_tokens": request.prompt_tokens, "output_tokens": request.output_tokens, **hits}
        yield from _span(REQUESTS, 0, "request", index, f"request {index}", arrival_s, end_s, arguments)
        yield from _span(REQUESTS, 0, "request", index, "to first token", arrival_s, first_s, {})
        yield from _span(REQUESTS, 0, "request", index, "decode", first_s, end_s, {})


def _batches(outcome: Outcome) -> Iterator[Event]:
    assert outcome.timeline is not None
    yield {"ph": "M", "pid": ENGINE, "tid": 1, "name": "thread_name", "args": {"name": "batches"}}
    for batch in outcome.timeline.batches:
        name = (
            "prefill and decode"
            if batch.prefill_tokens and batch.decode_requests
            else "prefill"
            if batch.prefill_tokens
            else "decode"
        )
        arguments = {
            "prefill_requests": batch.prefill_requests, "prefill_tokens": batch.prefill_tokens,
            "decode_requests": batch.decode_requests, "steps": batch.steps,
        }  # fmt: skip
        yield _slice(ENGINE, 1, name, batch.start_s, batch.end_s, arguments)


def _transfers(lane: int, name: str, link: LinkUse) -> Iterator[Event]:
    """Yield slices in the link's lane, or spans, which may overlap, if transfers share the link."""
    rows = link.intervals
    overlap = len(rows) > 1 and bool(np.any(rows[1:, 0] < rows[:-1, 1]))
    for number, (start_s, end_s, n_bytes) in enumerate(rows.tolist()):
        arguments = {"bytes": round(n_bytes)}
        if overlap:
            yield from _span(LINKS, lane, name, number, name, start_s, end_s, arguments)
        else:
            yield _slice(LINKS, lane, name, start_s, end_s, arguments)


def _tiers(outcome: Outcome) -> Iterator[Event]:
    assert outcome.timeline is not None
    lanes = {name: lane for lane, name in enumerate(outcome.tiers, 1)}
    for name, lane in lanes.items():
        yield {"ph": "M", "pid": TIERS, "tid": lane, "name": "thread_name", "args": {"name": f"{name} evictions"}}
    for time_s, tier, pages in outcome.timeline.evictions:
        yield {"ph": "i", "s": "t", "pid": TIERS, "tid": lanes[tier], "ts": _us(time_s), "cat": "eviction",
               "name": f"{tier} evicts", "args": {"pages": pages}}  # fmt: skip
    for time_s, tier, pages in outcome.timeline.usage:
        yield {"ph": "C", "pid": TIERS, "ts": _us(time_s), "name": f"{tier} pages in use", "args": {"pages": pages}}
    for tier, (times_s, free) in free_pages(outcome).items():
        for time_s, pages in zip(times_s.tolist(), free.tolist(), strict=True):
            yield {"ph": "C", "pid": TIERS, "ts": _us(time_s), "name": f"{tier} free pages", "args": {"pages": pages}}


def _slice(pid: int, tid: int, name: str, start_s: float, end_s: float, arguments: Event) -> Event:
    start, end = _us(start_s), _us(end_s)
    return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": round(end - start, 3), "name": name, "args": arguments}


def _span(
    pid: int, tid: int, category: str, number: int, name: str, start_s: float, end_s: float, arguments: Event
) -> Iterator[Event]:
    """Yield the begin and end events of a span that may overlap others."""
    shared = {"pid": pid, "tid": tid, "cat": category, "id": number, "name": name}
    yield {"ph": "b", "ts": _us(start_s), **shared, "args": arguments}
    yield {"ph": "e", "ts": _us(end_s), **shared}


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)
