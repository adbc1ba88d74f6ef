"""A strict reader of timelines in the Chrome trace event format, written from the format's description.

It accepts whole microseconds, complete events that nest or follow one another on their thread, flows whose points lie in slices,
instant events, counters and names; anything else fails. It is no part of kvsim.
"""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIELDS = {
    "M": {"pid", "tid", "name", "args"},
    "X": {"pid", "tid", "ts", "dur", "name", "args"},
    "i": {"pid", "tid", "ts", "s", "name", "args"},
    "C": {"pid", "ts", "name", "args"},
    "s": {"pid", "tid", "ts", "cat", "name", "id"},
    "t": {"pid", "tid", "ts", "cat", "name", "id"},
    "f": {"pid", "tid", "ts", "cat", "name", "id", "bp"},
}


@dataclass(eq=False)
class Slice:
    process: str
    thread: str
    name: str
    start: int
    end: int
    args: dict[str, Any]
    parent: "Slice | None" = None
    children: "list[Slice]" = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e6


class Timeline:
    """What a viewer shows: slices by process and thread, counters, instants, and the slices that each flow passes."""

    def __init__(self, path: Path) -> None:
        document = json.loads(gzip.decompress(path.read_bytes()))
        assert document.keys() == {"traceEvents"}
        self.events: list[dict[str, Any]] = document["traceEvents"]
        self.processes: dict[int, str] = {}
        self.threads: dict[tuple[int, int], str] = {}
        self.slices: list[Slice] = []
        self.instants: list[dict[str, Any]] = []
        self.counters: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
        self.flows: dict[int, list[Slice]] = defaultdict(list)
        for event in self.events:
            self._check(event)
        tracks = defaultdict(list)
        for event in self.events:
            if event["ph"] in "Xi":
                assert event["pid"] in self.processes and (event["ph"] == "i" or (event["pid"], event["tid"]) in self.threads)
            if event["ph"] in "Xstf":
                tracks[event["pid"], event["tid"]].append(event)
        self.places = {id(event): place for place, event in enumerate(self.events)}
        points: dict[int, list[tuple[int, int, str, Slice]]] = defaultdict(list)
        for (pid, tid), own in tracks.items():
            self._read_track(self.processes[pid], self.threads[pid, tid], own, points)
        for number, passed in points.items():
            passed.sort(key=lambda point: point[:2])
            kinds = [kind for _, _, kind, _ in passed]
            assert kinds == ["s", *["t"] * (len(kinds) - 2), "f"], (number, kinds)
            self.flows[number] = [one for _, _, _, one in passed]

    def _check(self, event: dict[str, Any]) -> None:
        assert event.keys() - {"ph"} == FIELDS[event["ph"]], event
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "dur") if key in event), event
        if event["ph"] == "M" and event["name"] == "process_name":
            assert event["pid"] not in self.processes
            self.processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in self.threads, event
            self.threads[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "C":
            for series, value in event["args"].items():
                line = self.counters[self.processes[event["pid"]], event["name"], series]
                assert value >= 0 and (not line or line[-1][0] < event["ts"]), event
                line.append((event["ts"], value))
        elif event["ph"] == "i":
            self.instants.append(event)
        assert event["ph"] != "f" or event["bp"] == "e"

    def _read_track(self, process: str, thread: str, events: list[dict[str, Any]], points: dict[int, list[Any]]) -> None:
        """Nest the slices of one thread. A point of a flow belongs to the innermost slice at its time, as in Perfetto."""
        open_slices: list[Slice] = []
        for event in sorted(events, key=lambda event: event["ts"]):  # stable: events at one time stay in the file's order
            while open_slices and open_slices[-1].end <= event["ts"] and (event["ph"] == "X" or len(open_slices) > 1):
                if event["ph"] != "X" and open_slices[-1].start == event["ts"]:
                    break
                open_slices.pop()
            inner = open_slices[-1] if open_slices else None
            if event["ph"] == "X":
                one = Slice(process, thread, event["name"], event["ts"], event["ts"] + event["dur"], event["args"], inner)
                if inner is not None:
                    assert one.end <= inner.end, f"{one} overlaps {inner}"
                    inner.children.append(one)
                open_slices.append(one)
                self.slices.append(one)
            else:
                assert inner is not None and inner.start <= event["ts"] <= inner.end, event
                points[event["id"]].append((event["ts"], self.places[id(event)], event["ph"], inner))

    def of(self, process: str, *, depth: int | None = None) -> list[Slice]:
        """The slices of a process, in order of start; ``depth`` 0: those in no other."""
        own = [one for one in self.slices if one.process == process]
        if depth is not None:
            own = [one for one in own if (one.parent is not None) == depth]
        return sorted(own, key=lambda one: (one.start, one.end))
