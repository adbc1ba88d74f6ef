"""The timeline and the event log of a run with several engines."""

import gzip
import json
from collections import Counter
from typing import Any

import pytest

import kvsim
from kvsim.cli import main
from kvsim.engine.recorder import Recorder
from kvsim.results.timeline import free_pages
from tests.report.timeline_reader import Timeline

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
              "cluster.failures=[{engine: 1, at_s: 12, back_after_s: 0.001}, {engine: 2, at_s: 30}]"],
    "apart": ["cluster.prefill=2", "cluster.decode=2", "tiers.cpu.scope=engine"],
}  # fmt: skip


@pytest.fixture(scope="module", params=list(CLUSTERS))
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Timeline, Any]:
    """The record of a run, its timeline, and its event log."""
    folder = tmp_path_factory.mktemp("cluster")
    assert main(["simulate", *SETTINGS, *CLUSTERS[request.param], "timeline=true", "events=true", f"output={folder}"]) == 0
    record = json.loads((folder / "result.json").read_text())
    events = [json.loads(line) for line in gzip.decompress((folder / "events.jsonl.gz").read_bytes()).splitlines()]
    return record, Timeline(folder / "timeline.json.gz"), events


def name_of(engine: dict[str, Any]) -> str:
    return f"engine {engine['engine']}" + ("" if engine["role"] == "both" else f" ({engine['role']})")


def test_every_engine_is_a_process(recorded: tuple[Any, Timeline, Any]) -> None:
    record, timeline, _ = recorded
    names = [name for name in timeline.processes.values() if not name.endswith(("running requests", "waiting requests"))]
    assert names == [*map(name_of, record["engines"]), "links", "tiers", *["rejected requests"] * (record["rejected"] > 0)]
    for engine in record["engines"]:
        assert {f"{name_of(engine)}: running requests"} <= set(timeline.processes.values())
        if engine["role"] == "decode":
            assert f"{name_of(engine)}: waiting requests" not in timeline.processes.values()


def test_what_an_engine_does_does_not_overlap(recorded: tuple[Any, Timeline, Any]) -> None:
    record, timeline, _ = recorded
    for engine in record["engines"]:
        own = timeline.of(name_of(engine))
        assert own and all(one.parent is None and one.thread == "batches" for one in own)
        busy_s = sum(one.seconds for one in own if one.name != "down")
        assert sum(one.seconds for one in own if one.name == "down") == pytest.approx(engine["down_s"], abs=1e-5)
        if not engine["failures"]:
            assert busy_s == pytest.approx(engine["busy_share"] * record["simulated_s"], rel=1e-5)


def test_every_request_ends_once_and_its_stays_say_how_the_others_ended(recorded: tuple[Any, Timeline, Any]) -> None:
    record, timeline, _ = recorded
    ends: Counter[str] = Counter()
    finished: Counter[int] = Counter()
    for one in timeline.slices:
        if one.process.endswith("running requests") and one.parent is None:
            ends[one.args["end"]] += 1
            finished[one.args["request"]] += one.args["end"] == "finished"
    assert set(finished.values()) == {1} and len(finished) == record["requests"] - record["rejected"]
    if record["engines"][0]["role"] == "prefill":
        assert ends["handed over"] > 0
    assert (ends["lost"] > 0) == any(engine["failures"] for engine in record["engines"])


def test_a_flow_follows_a_request_to_the_engine_that_decodes(recorded: tuple[Any, Timeline, Any]) -> None:
    record, timeline, _ = recorded
    if record["engines"][0]["role"] != "prefill":
        pytest.skip("prefill and decode are together")
    decoded = 0
    for points in timeline.flows.values():
        names = [one.process.split(":")[0] for one in points]
        if points[-1].name == "decode":
            decoded += 1
            assert names[-1].endswith("(decode)") and names[0].endswith("(prefill)")
            assert any(one.thread.startswith("gpu-gpu ") for one in points)
            siblings = [one.name for one in (points[-1].parent or points[-1]).children]
            assert siblings == ["receive", "decode"]
    assert decoded > record["requests"] / 2


def test_lanes_of_links_add_up_to_the_links(recorded: tuple[Any, Timeline, Any]) -> None:
    record, timeline, _ = recorded
    moved: Counter[str] = Counter()
    for one in timeline.of("links"):
        moved[one.thread.split(",")[0]] += one.args["bytes"]
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


def test_tiers_are_told_apart_and_add_up(recorded: tuple[Any, Timeline, Any]) -> None:
    record, timeline, _ = recorded
    last = {key: line[-1][1] for key, line in timeline.counters.items() if key[2] == "free"}
    for engine in record["engines"]:
        assert (name_of(engine), "gpu pages", "free") in last
    assert record["timeline"]["free_pages"]["mean"].keys() == record["tiers"].keys()
    for name, tier in record["tiers"].items():
        assert min(record["timeline"]["free_pages"]["mean"][name]) >= 0
        assert sum(pages for (_, label, _), pages in last.items() if label.split()[0] == name) <= tier["capacity_pages"]


def test_every_event_tells_where_it_happened(recorded: tuple[Any, Timeline, Any]) -> None:
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
