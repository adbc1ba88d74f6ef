"""The requests of a timeline: lanes with their phases, flows through transfers and batches, and counters."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan, nan
from typing import NamedTuple

from kvsim.engine.outcome import Outcome
from kvsim.engine.recorder import Admission
from kvsim.report.perfetto.trace_lanes import Event, Place, Processes, lanes, microseconds, slice_of, thread_name

BATCHES = 1
"""The thread of an engine's batches. The next one has the evictions from its GPU tier; after it come further lanes of batches, if
several are in flight."""
NOWHERE = Place(0, 0)


def thread_of(lane: int) -> int:
    """Return the thread of a lane of an engine's batches."""
    return BATCHES + lane + (lane > 0)


class Read(NamedTuple):
    """A transfer that brings pages of a request."""

    request: int
    start: int
    """In microseconds."""
    place: Place


@dataclass(kw_only=True, eq=False)
class Visit:
    """A stay on an engine, the wait for it, and where both are drawn. Times in seconds."""

    admission: Admission
    is_first: bool
    """Whether it is the request's first, which the hits are counted from."""
    waits_from_s: float
    """When the wait for it began; nan if it did not wait here, since another engine computes the prompt."""
    until_s: float
    """End of the admission."""
    lane: Place = NOWHERE
    wait_lane: Place | None = None
    batches: int = 0
    """The process of the engine's batches."""
    decoded: "Visit | None" = None
    """The stay on another engine that decodes what this one has computed."""

    @property
    def name(self) -> str:
        """The name of the request."""
        return f"request {self.admission.request.index}"

    @property
    def decodes_from_s(self) -> float:
        """When its answer begins here; nan if it never does."""
        admission = self.admission
        return nan if admission.end == "handed over" else admission.computed_s


def visits_of(outcome: Outcome, admissions: Sequence[Admission], pids: Processes) -> list[Visit]:
    """Return the admissions of requests that had their pages, in order of their begin, each with a lane while it lasts."""
    by_request: dict[tuple[int, int], list[Admission]] = defaultdict(list)
    for admission in admissions:
        if not isnan(admission.claimed_s):
            by_request[admission.request.index, admission.request.sample].append(admission)
    visits: list[Visit] = []
    for (index, sample), own in by_request.items():
        asked_s = float(outcome.arrival_s[index])
        if sample:
            asked_s = min((one.computed_s for one in by_request[index, 0] if not isnan(one.computed_s)), default=asked_s)
        visits += _visits(own, asked_s, outcome.simulated_s)
    visits.sort(key=lambda visit: (visit.admission.claimed_s, visit.admission.request.index, visit.admission.request.sample))
    for engine, batches in enumerate(pids.engines):
        here = [visit for visit in visits if visit.admission.engine == engine]
        for visit in here:
            visit.batches = batches
        _place(here, pids.running[engine], pids.waiting[engine])
    return visits


def _visits(admissions: Sequence[Admission], asked_s: float, last_s: float) -> list[Visit]:
    """Return the visits of one request, asked for at ``asked_s``; an admission that never ended lasts until ``last_s``."""
    visits: list[Visit] = []
    free_s = asked_s
    for admission in sorted(admissions, key=lambda admission: (admission.is_for_decode, admission.claimed_s)):
        until_s = max(admission.claimed_s, last_s) if isnan(admission.released_s) else admission.released_s
        ended = [visit.until_s for visit in visits if visit.until_s <= admission.claimed_s]
        since_s = nan if admission.is_for_decode else max([free_s, *ended])
        visits.append(Visit(admission=admission, is_first=not visits, waits_from_s=since_s, until_s=until_s))
    for visit in visits:
        if visit.admission.end == "handed over":
            later = [
                one for one in visits if one.admission.is_for_decode and one.admission.computed_s >= visit.admission.computed_s
            ]
            visit.decoded = min(later, key=lambda one: one.admission.computed_s, default=None)
    return visits


def _place(visits: list[Visit], running: int, waiting: int) -> None:
    """Give each visit of one engine a lane, and each wait."""
    spans = [(microseconds(visit.admission.claimed_s), microseconds(visit.until_s)) for visit in visits]
    for visit, lane in zip(visits, lanes(spans), strict=True):
        visit.lane = Place(running, lane + 1)
    waited = [visit for visit in visits if visit.waits_from_s < visit.admission.claimed_s]
    waited.sort(key=lambda visit: (visit.waits_from_s, visit.admission.request.index))
    spans = [(microseconds(visit.waits_from_s), microseconds(visit.admission.claimed_s)) for visit in waited]
    for visit, lane in zip(waited, lanes(spans), strict=True):
        visit.wait_lane = Place(waiting, lane + 1)


# --- slices ----------------------------------------------------------------------------------------------------------


def request_slices(outcome: Outcome, visits: Sequence[Visit]) -> Iterator[Event]:
    """Yield a slice for each admission with its phases below it, and one for each wait."""
    for what in ("lane", "wait_lane"):
        for place in sorted({place for visit in visits if (place := getattr(visit, what))}):
            yield thread_name(place, f"{'running' if what == 'lane' else 'waiting'} {place.tid}")
    for visit in visits:
        admission = visit.admission
        if visit.wait_lane:
            shown = {"request": admission.request.index, "then": admission.engine}
            yield slice_of(visit.wait_lane, f"{visit.name} queue", visit.waits_from_s, admission.claimed_s, shown)
        yield slice_of(visit.lane, visit.name, admission.claimed_s, visit.until_s, _arguments(outcome, visit))
        for name, start_s, end_s in phases(visit):
            if microseconds(end_s) > microseconds(start_s):
                yield slice_of(visit.lane, name, start_s, end_s, {})


def phases(visit: Visit) -> list[tuple[str, float, float]]:
    """Return what a request does during an admission, as (name, start, end) in order: ``load``, ``prefill`` and ``decode``.

    load and prefill as in ``Outcome.phases_s``, but for the waits within steps; where prefill and decode are apart, ``send`` on
    the engine that computes, and ``receive`` on the other until the KV has arrived.
    """
    admission = visit.admission
    computed_s = visit.until_s if isnan(admission.computed_s) else admission.computed_s
    if admission.is_for_decode:
        return [("receive", admission.claimed_s, computed_s), ("decode", computed_s, visit.until_s)]
    found, at_s = [], admission.claimed_s
    for start_s, end_s in admission.loads:
        found += [("prefill", at_s, start_s), ("load", start_s, end_s)]
        at_s = end_s
    last = "send" if admission.end == "handed over" else "decode"
    return [*found, ("prefill", at_s, computed_s), (last, computed_s, visit.until_s)]


def _arguments(outcome: Outcome, visit: Visit) -> Event:
    """Return what a click on a request shows: hits by tier of the first admission, reused pages of others."""
    admission, request = visit.admission, visit.admission.request
    shown: Event = {"request": request.index, "prompt_tokens": request.prompt_tokens, "output_tokens": request.output_tokens}
    if request.session >= 0:
        shown |= {"session": request.session, "turn": request.turn}
    shown |= {"type": request.kind} if request.kind else {}
    shown |= {"sample": request.sample} if request.sample else {}
    is_counted = visit.is_first and not request.sample
    pages = outcome.hit_pages[request.index].tolist() if is_counted else admission.reused_pages
    what = "hit_pages" if is_counted else "reused_pages"
    if not admission.is_for_decode:
        shown |= {f"{what}_{tier}": n for tier, n in zip(outcome.tier_names, pages, strict=False) if n or tier in outcome.tiers}
    if visit.waits_from_s <= admission.claimed_s:
        shown["queue_s"] = round(admission.claimed_s - visit.waits_from_s, 6)
    return shown | {"end": admission.end or "running"}


# --- flows and counters ----------------------------------------------------------------------------------------------


def flows(visits: Sequence[Visit], reads: Sequence[Read]) -> Iterator[Event]:
    """Yield a flow for each admission: from the wait for it to the request, its transfers, its batches, and its answer."""
    by_request: dict[int, list[Read]] = defaultdict(list)
    for read in reads:
        by_request[read.request].append(read)
    for number, visit in enumerate(visits, 1):
        if visit.admission.is_for_decode:
            continue
        points = _way(visit, by_request[visit.admission.request.index])
        for place, (ts, (pid, tid)) in enumerate(points):
            phase = "s" if not place else "f" if place == len(points) - 1 else "t"
            event = {"ph": phase, "pid": pid, "tid": tid, "ts": ts, "cat": "request", "name": "request", "id": number}
            yield event | {"bp": "e"} if phase == "f" else event


def _way(visit: Visit, reads: Sequence[Read]) -> list[tuple[int, Place]]:
    """Return the times in microseconds and the places that a flow passes, in order; those at one time as cause and effect."""
    admission = visit.admission
    points = [(microseconds(visit.waits_from_s), visit.wait_lane)] if visit.wait_lane else []
    begin, claimed = microseconds(visit.waits_from_s), microseconds(admission.claimed_s)
    answer = visit.decoded or visit
    end = microseconds(answer.until_s if isnan(answer.admission.computed_s) else answer.admission.computed_s)
    points.append((claimed, visit.lane))
    points += [(read.start, read.place) for read in reads if begin <= read.start < max(end, begin + 1)]
    steps = zip(admission.steps, admission.lanes, strict=True)
    points += [(microseconds(start_s), Place(visit.batches, thread_of(lane))) for start_s, lane in steps]
    points.sort(key=lambda point: point[0])
    if answer.until_s > answer.admission.computed_s and microseconds(answer.until_s) > end:
        points.append((end, answer.lane))
    return points if len(points) > 1 else []


def counters(outcome: Outcome, visits: Sequence[Visit], pids: Processes) -> Iterator[Event]:
    """Yield the number of waiting and of running requests of each engine whenever one of them changes."""
    for engine, pid in enumerate(pids.engines):
        changes: list[tuple[int, int, int]] = []
        for visit in visits:
            if visit.admission.engine == engine:
                claimed = microseconds(visit.admission.claimed_s)
                changes += [(claimed, 0, 1), (microseconds(visit.until_s), 0, -1)]
                if visit.wait_lane:
                    changes += [(microseconds(visit.waits_from_s), 1, 0), (claimed, -1, 0)]
        waiting = running = 0
        if all(ts for ts, _, _ in changes):
            yield _count(pid, 0, 0, 0)
        for ts, together in groupby(sorted(changes), key=lambda change: change[0]):
            before = waiting, running
            for _, waits, runs in together:
                waiting, running = waiting + waits, running + runs
            if (waiting, running) != before:
                yield _count(pid, ts, waiting, running)


def _count(pid: int, ts: int, waiting: int, running: int) -> Event:
    return {"ph": "C", "pid": pid, "ts": ts, "name": "requests", "args": {"running": running, "waiting": waiting}}
