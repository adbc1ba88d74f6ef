"""Where the events of a timeline are drawn: processes, threads, and lanes for what overlaps."""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from kvsim.engine.outcome import FINISHED, SHED, Outcome

Event = dict[str, Any]


class Place(NamedTuple):
    """A thread, which is one line of the picture."""

    pid: int
    tid: int


class Processes(NamedTuple):
    """The numbers of the processes, which are the groups of lines; the lists have one entry per engine."""

    engines: list[int]
    running: list[int]
    waiting: list[int]
    links: int
    tiers: int
    rejected: int

    @classmethod
    def of(cls, outcome: Outcome) -> "Processes":
        """Number the processes of a run."""
        engines = range(max(1, len(outcome.engines)))
        last = 3 * len(engines)
        own, running, waiting = ([3 * engine + number for engine in engines] for number in (1, 2, 3))
        return cls(own, running, waiting, last + 1, last + 2, last + 3)

    def names(self, outcome: Outcome, used: set[int]) -> Iterator[Event]:
        """Yield the names of the processes, in order; groups of waiting requests that are not among ``used`` are left out."""
        named: dict[int, str] = {}
        for engine, (pid, running, waiting) in enumerate(zip(self.engines, self.running, self.waiting, strict=True)):
            role = outcome.engines[engine].role if outcome.engines else "both"
            name = f"engine {engine}" if outcome.engines else "engine"
            named[pid] = name if role == "both" else f"{name} ({role})"
            named[running] = f"{named[pid]}: running requests"
            if waiting in used:
                named[waiting] = f"{named[pid]}: waiting requests"
        named |= {self.links: "links", self.tiers: "tiers"}
        if (outcome.status != FINISHED).any():
            named[self.rejected] = "refused requests" if (outcome.status == SHED).any() else "rejected requests"
        for pid, name in named.items():
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}


def lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return a lane (0, 1, ...) for each span (start, end) so that those on the same lane do not overlap.

    Spans are in order of start. Each gets the lowest free lane, so there are as many lanes as spans at once.
    """
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    chosen = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        heappush(busy, (max(end, start + 1), lane))  # also where nothing is drawn: what comes next at this time would be on it
        chosen.append(lane)
    return chosen


def thread_name(place: Place, name: str) -> Event:
    """Return the event that names a line."""
    return {"ph": "M", "pid": place.pid, "tid": place.tid, "name": "thread_name", "args": {"name": name}}


def slice_of(place: Place, name: str, start_s: float, end_s: float, arguments: Event) -> Event:
    """Return a complete event."""
    start = microseconds(start_s)
    return {"ph": "X", "pid": place.pid, "tid": place.tid, "ts": start, "dur": microseconds(end_s) - start, "name": name,
            "args": arguments}  # fmt: skip


def microseconds(seconds: float) -> int:
    """Return a time in whole microseconds."""
    return round(float(seconds) * 1e6)
