"""Writes the timeline of a run in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

The format is described in "Trace Event Format" (Google, 2016). Used of it: complete events (X), flows (s, t, f), instant events
(i), counters (C) and metadata (M). Times are whole microseconds, so that what follows one another never overlaps. There is no
``displayTimeUnit``: Perfetto up to version 20 at least takes it for the unit of all times.
"""

import gzip
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO

import msgspec

from kvsim.core.pool import UNLIMITED
from kvsim.core.tier import GPU, Tier
from kvsim.engine.collector import without_garbage_collector
from kvsim.engine.link_use import LinkUse
from kvsim.engine.outcome import FINISHED, SHED, Outcome
from kvsim.engine.recorder import Batch, Recorder
from kvsim.report.perfetto.trace_lanes import Event, Place, Processes, lanes, microseconds, slice_of, thread_name
from kvsim.report.perfetto.trace_requests import BATCHES, Read, counters, flows, request_slices, thread_of, visits_of

EVENTS_AT_ONCE = 4096


@without_garbage_collector()
def write_timeline(file: BinaryIO, outcome: Outcome) -> None:
    """Write the events of a recorded run, gzipped; the same run gives the same bytes."""
    encode = msgspec.json.Encoder().encode
    found = events(outcome)
    with gzip.GzipFile(filename="", mode="wb", compresslevel=4, fileobj=file, mtime=0) as packed:
        packed.write(b'{"traceEvents":[\n' + encode(next(found)))
        while some := list(islice(found, EVENTS_AT_ONCE)):
            packed.write(b"".join([b",\n" + encode(event) for event in some]))
        packed.write(b"\n]}\n")


def events(outcome: Outcome) -> Iterator[Event]:
    """Yield the events: names; requests, batches and outages by engine; transfers by link; what tiers hold and evict; flows."""
    recorder = outcome.timeline
    assert recorder is not None
    pids = Processes.of(outcome)
    visits = visits_of(outcome, recorder.admissions, pids)
    yield from pids.names(outcome, {visit.wait_lane.pid for visit in visits if visit.wait_lane})
    yield from request_slices(outcome, visits)
    yield from _rejected(outcome, pids)
    yield from _batches(outcome, recorder.batches, pids)
    reads: list[Read] = []
    yield from _links(outcome, pids.links, reads)
    yield from counters(outcome, visits, pids)
    yield from _tiers(recorder, pids)
    yield from flows(visits, reads)


def _rejected(outcome: Outcome, pids: Processes) -> Iterator[Event]:
    for request in outcome.requests:
        status = outcome.status[request.index]
        if status != FINISHED:
            what = "shed" if status == SHED else "rejected"
            yield {"ph": "i", "s": "p", "pid": pids.rejected, "tid": 1, "ts": microseconds(outcome.arrival_s[request.index]),
                   "name": f"request {request.index} {what}", "args": {"prompt_tokens": request.prompt_tokens}}  # fmt: skip


def _batches(outcome: Outcome, batches: list[Batch], pids: Processes) -> Iterator[Event]:
    """Yield the steps of each engine; one that a failure has interrupted ends there."""
    for pid in pids.engines:
        yield thread_name(Place(pid, BATCHES), "batches")
    for engine, lane in sorted({(batch.engine, batch.lane) for batch in batches if batch.lane}):
        yield thread_name(Place(pids.engines[engine], thread_of(lane)), f"batches, lane {lane + 1}")
    for batch in batches:
        kind = ("prefill" if batch.prefill_tokens else "", "decode" if batch.decode_requests else "")
        arguments: Event = {
            "prefill_requests": batch.prefill_requests, "prefill_tokens": batch.prefill_tokens,
            "decode_requests": batch.decode_requests, "steps": batch.steps,
        }  # fmt: skip
        if batch.requests:
            arguments["requests"] = list(batch.requests)
        if batch.stalled_s:
            arguments["stalled_s"] = round(batch.stalled_s, 6)
        failed_s = [start_s for start_s, _ in outcome.outages.get(batch.engine, []) if batch.start_s <= start_s < batch.end_s]
        place = Place(pids.engines[batch.engine], thread_of(batch.lane))
        yield slice_of(place, " and ".join(filter(None, kind)), batch.start_s, min([batch.end_s, *failed_s]), arguments)
    for engine, times_s in outcome.outages.items():
        for start_s, end_s in times_s:
            last_s = min(end_s, max(start_s, outcome.simulated_s))
            yield slice_of(Place(pids.engines[engine], BATCHES), "down", start_s, last_s, {})


def _links(outcome: Outcome, pid: int, reads: list[Read]) -> Iterator[Event]:
    """Yield the transfers of each link, on as many lanes as there are at once, and add those that bring pages to ``reads``."""
    stores = {link.owner for link in outcome.link_lanes if not link.is_of_engine}
    first = 1
    for link in outcome.link_lanes:
        rows = [
            (microseconds(start_s), microseconds(end_s), round(n), int(who)) for start_s, end_s, n, who in link.intervals.tolist()
        ]
        places = lanes([(start, end) for start, end, _, _ in rows])
        source, target = (outcome.tier_names.index(tier) for tier in link.name.split("-"))
        lower = outcome.tier_names[max(source, target)]
        name = _link_name(link, lower, has_engines=bool(outcome.engines), has_stores=len(stores) > 1)
        most = max(places, default=0) + 1
        for lane in range(most):
            yield thread_name(Place(pid, first + lane), name if most == 1 else f"{name}, lane {lane + 1}")
        for (start, end, n_bytes, request), lane in zip(rows, places, strict=True):
            place = Place(pid, first + lane)
            arguments = {"bytes": n_bytes} if request < 0 else {"bytes": n_bytes, "request": request}
            what = f"request {request}" if request >= 0 else "write down" if source < target else "read"
            yield {"ph": "X", "pid": pid, "tid": place.tid, "ts": start, "dur": end - start, "name": what, "args": arguments}
            if request >= 0 and source >= target:
                reads.append(Read(request, start, place))
        first += most


def _link_name(link: LinkUse, lower: str, *, has_engines: bool, has_stores: bool) -> str:
    """Return the name of a link, with the number of its engine, or of its ``lower`` tier, where there are several."""
    if not link.is_of_engine:
        return f"{link.name} of {lower} {link.owner}" if has_stores else link.name
    if link.receiver >= 0:
        return f"{link.name} from engine {link.owner} to {link.receiver}"
    return f"{link.name} of engine {link.owner}" if has_engines else link.name


def _tiers(recorder: Recorder, pids: Processes) -> Iterator[Event]:
    """Yield evictions, pages in use and, where the capacity is limited, free pages of each tier, a GPU's with its engine.

    Of several changes at one time, only the last is shown: a counter has one value at a time.
    """
    places: dict[str, tuple[Place, str, Tier]] = {}
    for number, (label, tier) in enumerate(zip(recorder.labels, recorder.tiers, strict=True), 1):
        is_gpu = tier.level == GPU
        place = Place(pids.engines[tier.owner], BATCHES + 1) if is_gpu else Place(pids.tiers, number)
        places[label] = place, "gpu" if is_gpu else label, tier
        yield thread_name(place, f"{places[label][1]} evictions")
    for time_s, label, pages in recorder.evictions:
        place, name, _ = places[label]
        yield {"ph": "i", "s": "t", "pid": place.pid, "tid": place.tid, "ts": microseconds(time_s), "name": f"{name} evicts",
               "args": {"pages": pages}}  # fmt: skip
    last = {(0, label): 0 for label in places}
    for time_s, label, pages in recorder.usage:
        last[microseconds(time_s), label] = pages
    for (ts, label), pages in last.items():
        place, name, tier = places[label]
        free = {} if tier.pool.capacity >= UNLIMITED else {"free": tier.pool.capacity - pages}
        yield {"ph": "C", "pid": place.pid, "ts": ts, "name": f"{name} pages", "args": {**free, "in use": pages}}
