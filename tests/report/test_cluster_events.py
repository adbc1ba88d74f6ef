"""The timeline and the event log of a run with several engines."""

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.cli import main
from kvsim.engine.recorder import Recorder
from kvsim.report.timeline import free_pages

SETTINGS = [
    "trace.sessions=40",
    "trace.rate=3",
    "tiers.gpu.capacity=2500pages",
    "tiers.cpu.capacity=6000pages",
    "placement=write_back",
]
CLUSTERS = {
    "four": ["cluster.engines=4", "engine.links=shared"],
    "hosts": ["cluster.engines=4", "cluster.engines_per_host=2", "tiers.disk.capacity=30000pages", "prefetch=threshold",
              "cluster.failures=[{engine: 1, at_s: 20, back_after_s: 0.001}, {engine: 2, at_s: 30}]"],
    "apart": ["cluster.prefill=2", "cluster.decode=2", "tiers.cpu.scope=engine"],
}  # fmt: skip


@pytest.fixture(scope="module", params=list(CLUSTERS))
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """The record of a run, its timeline, and its event log."""
    folder = tmp_path_factory.mktemp("cluster")
    assert main(["simulate", *SETTINGS, *CLUSTERS[request.param], "timeline=true", "events=true", f"output={folder}"]) == 0
    record = json.loads((folder / "result.json").read_text())
    timeline = json.loads(gzip.decompress((folder / "timeline.json.gz").read_bytes()))["traceEvents"]
    events = [json.loads(line) for line in gzip.decompress((folder / "events.jsonl.gz").read_bytes()).splitlines()]
    return record, timeline, events


def names_of(timeline: list[dict[str, Any]], kind: str) -> dict[Any, str]:
    keys = ("pid",) if kind == "process_name" else ("pid", "tid")
    return {tuple(e[key] for key in keys): e["args"]["name"] for e in timeline if e["name"] == kind}


def test_every_engine_is_a_process(recorded: tuple[Any, Any, Any]) -> None:
    record, timeline, _ = recorded
    names = list(names_of(timeline, "process_name").values())
    engines = [
        f"engine {engine['engine']}" + ("" if engine["role"] == "both" else f" ({engine['role']})")
        for engine in record["engines"]
    ]
    assert names == ["requests", *engines, "links", "tiers"]


def test_what_an_engine_does_does_not_overlap(recorded: tuple[Any, Any, Any]) -> None:
    record, timeline, _ = recorded
    lanes = defaultdict(list)
    for event in timeline:
        if event["ph"] == "X" and 2 <= event["pid"] <= 1 + len(record["engines"]):
            lanes[event["pid"]].append(event)
    assert len(lanes) == len(record["engines"])
    for pid, own in lanes.items():
        own.sort(key=lambda event: (event["ts"], event["dur"]))
        for one, other in pairwise(own):
            assert other["ts"] >= one["ts"] + one["dur"] - 0.01
        busy_s = sum(event["dur"] for event in own if event["name"] != "down") / 1e6
        down_s = sum(event["dur"] for event in own if event["name"] == "down") / 1e6
        engine = record["engines"][pid - 2]
        assert down_s == pytest.approx(engine["down_s"], abs=1e-5)
        if not engine["failures"]:
            assert busy_s == pytest.approx(engine["busy_share"] * record["simulated_s"], rel=1e-6)


def test_lanes_of_links_add_up_to_the_links(recorded: tuple[Any, Any, Any]) -> None:
    record, timeline, _ = recorded
    names = names_of(timeline, "thread_name")
    links = max(pid for (pid,) in names_of(timeline, "process_name")) - 1
    moved: Counter[str] = Counter()
    for event in timeline:
        if event["pid"] == links and event["ph"] in "Xb":
            moved[names[links, event["tid"]]] += event["args"]["bytes"]
    assert len(moved) == len({name for (pid, _), name in names.items() if pid == links})
    total: Counter[str] = Counter()
    for name, n_bytes in moved.items():
        total[name.split()[0]] += n_bytes
    assert total == {name: pytest.approx(link["bytes"], abs=1000) for name, link in record["links"].items()}
    for engine in record["engines"]:
        for name, link in engine["links"].items():
            own = [f"{name} of engine {engine['engine']}"]
            if name == "gpu-gpu":
                ends = [(int(words[3]), int(words[5])) for words in (lane.split() for lane in moved if lane.startswith(name))]
                own = [f"{name} from engine {one} to {two}" for one, two in ends if engine["engine"] in (one, two)]
            assert sum(moved[lane] for lane in own) == pytest.approx(link["bytes"], abs=1000)


def test_spans_that_overlap_have_numbers_of_their_own(recorded: tuple[Any, Any, Any]) -> None:
    _, timeline, _ = recorded
    begun = Counter((event["cat"], event["id"], event["name"]) for event in timeline if event["ph"] == "b")
    assert max(begun.values()) == 1
    assert begun == Counter((event["cat"], event["id"], event["name"]) for event in timeline if event["ph"] == "e")


def test_tiers_are_told_apart_and_add_up(recorded: tuple[Any, Any, Any]) -> None:
    record, timeline, _ = recorded
    last: dict[str, int] = {}
    for event in timeline:
        if event["ph"] == "C" and event["name"].endswith("free pages"):
            last[event["name"].removesuffix(" free pages")] = event["args"]["pages"]
    assert sum(label.startswith("gpu ") for label in last) == len(record["engines"])
    assert record["timeline"]["free_pages"]["mean"].keys() == record["tiers"].keys()
    for name, tier in record["tiers"].items():
        assert min(record["timeline"]["free_pages"]["mean"][name]) >= 0
        assert sum(pages for label, pages in last.items() if label.split()[0] == name) <= tier["capacity_pages"]


def test_every_event_tells_where_it_happened(recorded: tuple[Any, Any, Any]) -> None:
    record, _, events = recorded
    for event in events:
        below = event.get("tier") in ("cpu", "disk") or {event.get("from"), event.get("to")} == {"cpu", "disk"}
        assert ("owner" in event) == below and ("engine" in event) != below, event
    begun = [event["transfer"] for event in events if event["event"] == "swap_begin"]
    assert len(begun) == len(set(begun))
    finished = Counter(event["engine"] for event in events if event["event"] == "finish")
    computed = "decoded" if "decoded" in record["engines"][0] else "requests"
    if not any(engine["failures"] for engine in record["engines"]):
        assert finished == {e["engine"]: e[computed] for e in record["engines"] if e[computed]}
    freed = Counter()  # type: ignore[var-annotated]
    for event in events:
        if event["event"] == "free" and event["tier"] == "gpu":
            freed[event["engine"]] += event["pages"]
    for engine in record["engines"]:
        assert freed[engine["engine"]] <= engine["evicted_pages"]


def test_free_pages_of_a_kind_are_those_of_its_tiers_together() -> None:
    """Two GPU tiers of 4,000 pages each: 10 used in one from 1 s, 5 in the other from 2 s, then 12 in the first."""
    trace = kvsim.load_trace("synthetic", sessions=2)
    outcome = kvsim.simulate(trace, "tiers.gpu.capacity=4000pages", "cluster.engines=2", "timeline=true").outcome
    assert isinstance(outcome.timeline, Recorder) and outcome.timeline.labels == ["gpu 0", "gpu 1"]
    outcome.timeline.usage = [(1.0, "gpu 0", 10), (2.0, "gpu 1", 5), (3.0, "gpu 0", 12)]
    times_s, free = free_pages(outcome)["gpu"]
    assert (times_s.tolist(), free.tolist()) == ([0.0, 1.0, 2.0, 3.0], [8000, 7990, 7985, 7983])


def test_a_reset_names_the_engines_whose_pages_it_drops() -> None:
    trace = kvsim.load_trace("synthetic", sessions=3)
    settings = [
        "cluster.engines=4",
        "cluster.engines_per_host=2",
        "tiers.cpu.capacity=1GiB",
        "engine.reset_at_s=[1]",
        "events=true",
    ]
    log = kvsim.simulate(trace, *settings).outcome.events
    assert log is not None
    resets = [event for event in map(json.loads, log.lines) if event["event"] == "reset"]
    assert [event["engines"] for event in resets] == [[0, 1], [2, 3]]


def test_recording_a_cluster_changes_nothing(tmp_path: Path) -> None:
    trace = kvsim.load_trace("synthetic", sessions=10)
    plain = ["tiers.gpu.capacity=3000pages", "tiers.cpu.capacity=3000pages", "cluster.engines=2"]
    one, other = (kvsim.simulate(trace, *plain, *more).outcome for more in ([], ["timeline=true", "events=true"]))
    assert np.array_equal(one.e2e_s, other.e2e_s, equal_nan=True) and np.array_equal(one.hit_pages, other.hit_pages)
