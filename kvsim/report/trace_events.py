"""Writes the timeline of a run in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open."""

import gzip
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from kvsim.core.pool import UNLIMITED
from kvsim.engine.outcome import REJECTED, LinkUse, Outcome

REQUESTS = 1
"""The process of the requests; after it come one process per engine, that of the links, and that of the tiers."""
Event = dict[str, Any]


def write_timeline(file: BinaryIO, outcome: Outcome) -> None:
    """Write the events of a recorded run, gzipped; the same run gives the same bytes. Times are in microseconds."""
    with gzip.GzipFile(filename="", mode="wb", compresslevel=4, fileobj=file, mtime=0) as packed:
        packed.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(events(outcome)):
            packed.write((b",\n" if number else b"") + json.dumps(event, separators=(",", ":")).encode())
        packed.write(b"\n]}\n")


def processes(outcome: Outcome) -> dict[str, int]:
    """Return the numbers of the processes by name; each process is one lane or a group of lanes."""
    names = ["requests"]
    for use in outcome.engines:
        names.append(f"engine {use.engine}" if use.role == "both" else f"engine {use.engine} ({use.role})")
    names += ["links", "tiers"] if outcome.engines else ["engine", "links", "tiers"]
    return {name: pid for pid, name in enumerate(names, REQUESTS)}


def events(outcome: Outcome) -> Iterator[Event]:
    """Yield lane names, then requests, batches and outages by engine, transfers by link, and evictions, pages in use and free
    pages by tier."""
    pids = processes(outcome)
    for name, pid in pids.items():
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    yield from _requests(outcome)
    yield from _batches(outcome)
    disks = {link.owner for link in outcome.link_lanes if not link.is_of_engine}
    for lane, link in enumerate(outcome.link_lanes, 1):
        name = _link_name(link, has_engines=bool(outcome.engines), has_disks=len(disks) > 1)
        yield {"ph": "M", "pid": pids["links"], "tid": lane, "name": "thread_name", "args": {"name": name}}
        yield from _transfers(pids["links"], lane, name, link)
    yield from _tiers(outcome, pids["tiers"])


def _link_name(link: LinkUse, *, has_engines: bool, has_disks: bool) -> str:
    """Return the name of a link, with the number of its engine or disk where there are several."""
    if not link.is_of_engine:
        return f"{link.name} of disk {link.owner}" if has_disks else link.name
    if link.receiver >= 0:
        return f"{link.name} from engine {link.owner} to {link.receiver}"
    return f"{link.name} of engine {link.owner}" if has_engines else link.name


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
        if outcome.engines and outcome.engine is not None and outcome.decoder is not None:
            arguments |= {"engine": int(outcome.engine[index]), "decoder": int(outcome.decoder[index])}
        yield from _span(REQUESTS, 0, "request", index, f"request {index}", arrival_s, end_s, arguments)
        yield from _span(REQUESTS, 0, "request", index, "to first token", arrival_s, first_s, {})
        yield from _span(REQUESTS, 0, "request", index, "decode", first_s, end_s, {})


def _batches(outcome: Outcome) -> Iterator[Event]:
    """Yield the steps of each engine; one that a failure has interrupted ends there."""
    assert outcome.timeline is not None
    for engine in range(max(1, len(outcome.engines))):
        yield {"ph": "M", "pid": REQUESTS + 1 + engine, "tid": 1, "name": "thread_name", "args": {"name": "batches"}}
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
        failed_s = [start_s for start_s, _ in outcome.outages.get(batch.engine, []) if batch.start_s <= start_s < batch.end_s]
        end_s = min([batch.end_s, *failed_s])
        yield _slice(REQUESTS + 1 + batch.engine, 1, name, batch.start_s, end_s, arguments)
    for engine, times_s in outcome.outages.items():
        for start_s, end_s in times_s:
            yield _slice(REQUESTS + 1 + engine, 1, "down", start_s, min(end_s, max(start_s, outcome.simulated_s)), {})


def _transfers(pid: int, lane: int, name: str, link: LinkUse) -> Iterator[Event]:
    """Yield slices in the link's lane, or spans, which may overlap, if transfers share the link."""
    rows = link.intervals
    overlap = len(rows) > 1 and bool(np.any(rows[1:, 0] < rows[:-1, 1]))
    for number, (start_s, end_s, n_bytes) in enumerate(rows.tolist()):
        arguments = {"bytes": round(n_bytes)}
        if overlap:
            yield from _span(pid, lane, name, number, name, start_s, end_s, arguments)
        else:
            yield _slice(pid, lane, name, start_s, end_s, arguments)


def _tiers(outcome: Outcome, pid: int) -> Iterator[Event]:
    """Yield evictions, pages in use and, where the capacity is limited, free pages of each tier."""
    recorder = outcome.timeline
    assert recorder is not None
    capacities = {label: tier.pool.capacity for label, tier in zip(recorder.labels, recorder.tiers, strict=True)}
    lanes = {label: lane for lane, label in enumerate(recorder.labels, 1)}
    for label, lane in lanes.items():
        yield {"ph": "M", "pid": pid, "tid": lane, "name": "thread_name", "args": {"name": f"{label} evictions"}}
    for time_s, label, pages in recorder.evictions:
        yield {"ph": "i", "s": "t", "pid": pid, "tid": lanes[label], "ts": _us(time_s), "cat": "eviction",
               "name": f"{label} evicts", "args": {"pages": pages}}  # fmt: skip
    for time_s, label, pages in recorder.usage:
        yield _counter(pid, time_s, f"{label} pages in use", pages)
    for label, capacity in capacities.items():
        if capacity < UNLIMITED:
            yield _counter(pid, 0.0, f"{label} free pages", capacity)
    for time_s, label, pages in recorder.usage:
        if capacities[label] < UNLIMITED:
            yield _counter(pid, time_s, f"{label} free pages", capacities[label] - pages)


def _counter(pid: int, time_s: float, name: str, pages: int) -> Event:
    return {"ph": "C", "pid": pid, "ts": _us(time_s), "name": name, "args": {"pages": pages}}


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
