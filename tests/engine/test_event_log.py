"""The event log: what it says of a run, and that it changes nothing."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.cli import main
from kvsim.cluster.cluster import Cluster
from kvsim.engine.engine import Engine
from kvsim.engine.event_log import CacheLog, EventLog
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.run.execute import Result
from tests.engine.small import SmallEngine, ask, make_requests, same_outcome, small_engine

TIERS = ["tiers.gpu.capacity=2500pages", "tiers.cpu.capacity=3000pages", "tiers.disk.capacity=15000pages"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "replay": ("replay", [*TIERS, "placement=write_back", "prefetch=threshold", "replay.in_flight=4"]),
    "simulation": ("simulate", [*TIERS, "placement=write_back", "prefetch=threshold"]),
    "one tier": ("replay", TIERS[:1]),
    "retractions": ("simulate", ["tiers.gpu.capacity=4100pages", "trace.rate=50"]),
    "states": ("simulate", [*TIERS[:2], "model=qwen3_next_80b", "hardware.gpus=2", "checkpoint=last", "page_tokens=64"]),
    "states apart": (
        "replay",
        [*TIERS[:2], "model=qwen3_next_80b", "checkpoint=last", "tiers.gpu.states=40states", "tiers.cpu.states=60states"],
    ),
    "sglang": ("replay", [*TIERS[:2], "rules=sglang", "placement=write_back", "replay.in_flight=4"]),
    "vllm": ("replay", [*TIERS[:2], "rules=vllm", "placement=store_threshold", "replay.in_flight=4"]),
    "fastdeploy": ("replay", [*TIERS[:2], "rules=fastdeploy", "placement=exclusive", "replay.in_flight=4"]),
    "lightllm": ("replay", [*TIERS[:2], "rules=lightllm", "placement=by_length", "replay.in_flight=4"]),
}

KINDS = {("disk", "cpu"): "fetched", ("cpu", "gpu"): "loaded", ("disk", "gpu"): "loaded"}


def events_of(log: EventLog) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.lines]


@pytest.fixture(scope="module", params=list(RUNS))
def logged(request: pytest.FixtureRequest) -> tuple[Result, list[dict[str, Any]], Result]:
    """A run with its events, and the same run without."""
    command, settings = RUNS[request.param]
    page_tokens = [setting.split("=")[1] for setting in settings if setting.startswith("page_tokens=")]
    rate = [setting.split("=")[1] for setting in settings if setting.startswith("trace.rate=")]
    trace = kvsim.load_trace(
        "synthetic", sessions=8, page_tokens=int(page_tokens[0]) if page_tokens else 16, rate=float(rate[0]) if rate else 1.0
    )
    overrides = [setting for setting in settings if not setting.startswith(("page_tokens=", "trace."))]
    run = getattr(kvsim, command)
    result = run(trace, *overrides, "events=true")
    assert result.outcome.events is not None
    return result, events_of(result.outcome.events), run(trace, *overrides)


def test_logging_changes_nothing(logged: tuple[Result, list[dict[str, Any]], Result]) -> None:
    result, _, other = logged
    assert other.outcome.events is None
    assert same_outcome(result.outcome, other.outcome)


def test_every_served_request_is_admitted_and_finishes(logged: tuple[Result, list[dict[str, Any]], Result]) -> None:
    result, events, _ = logged
    count = Counter((event["event"], event["request"]) for event in events if event["event"] in ("admit", "finish", "release"))
    for request in result.outcome.requests:
        served = int(result.outcome.status[request.index] == 0)
        assert count["finish", request.index] == served
        assert count["admit", request.index] - count["release", request.index] == served


def test_frees_add_up_to_the_evictions_of_each_tier(logged: tuple[Result, list[dict[str, Any]], Result]) -> None:
    result, events, _ = logged
    freed: Counter[str] = Counter()
    for event in events:
        if event["event"] == "free":
            assert event["pages"] > 0
            freed[event["tier"]] += event["pages"]
    assert freed == {name: tier.evicted_pages for name, tier in result.outcome.tiers.items() if tier.evicted_pages}


def test_swaps_begin_before_they_end_and_add_up_to_the_pages_moved(logged: tuple[Result, list[dict[str, Any]], Result]) -> None:
    result, events, _ = logged
    begun: dict[int, dict[str, Any]] = {}
    moved: Counter[str] = Counter()
    for event in events:
        if event["event"] == "swap_begin":
            assert event["transfer"] not in begun
            begun[event["transfer"]] = event
        elif event["event"] == "swap_end":
            first = begun[event["transfer"]]
            assert (first["from"], first["to"]) == (event["from"], event["to"])
            kind = (
                "fetched" if event["from"] == "disk" and event["to"] == "cpu" else "loaded" if event["to"] == "gpu" else "written"
            )
            moved[kind] += event.get("pages", 0)
    ended = [event["transfer"] for event in events if event["event"] == "swap_end"]
    assert sorted(ended) == list(range(len(begun)))
    counts = result.outcome.placement
    assert moved == {kind: counts.get(f"{kind}_pages", 0) for kind in moved}


def test_the_first_admission_follows_a_match_that_explains_the_hits(logged: tuple[Result, list[dict[str, Any]], Result]) -> None:
    result, events, _ = logged
    found: dict[int, dict[str, Any]] = {}
    explained: set[int] = set()
    for event in events:
        if event["event"] == "match":
            found[event["request"]] = event
        elif event["event"] == "admit" and event["request"] not in explained:
            explained.add(event["request"])
            match, hits = found[event["request"]], result.outcome.hit_pages[event["request"]]
            assert match["gpu_pages"] + event["load_pages"] >= hits.sum()
            assert match["gpu_pages"] <= hits[0] or not event["load_pages"]


def test_only_a_simulation_has_times_and_they_do_not_decrease(logged: tuple[Result, list[dict[str, Any]], Result]) -> None:
    result, events, _ = logged
    if np.isnan(result.outcome.e2e_s).all():
        assert not any("time_s" in event for event in events)
    else:
        times = [event["time_s"] for event in events]
        assert times == sorted(times) and times[0] >= 0


def test_a_small_run_event_by_event() -> None:
    """See small.py for the round numbers: a page takes 4 s to compute and 1 s on the host link."""
    engine = small_engine(gpu=5, cpu=20)
    log = EventLog(engine.cache.tiers, lambda: float(engine.env.now))
    requests = make_requests([ask("ab"), ask("wxyz", 100), ask("ab", 200)])
    engine.cache.watch(CacheLog(log, engine.cache.tiers))
    Cluster([Engine(engine.substrate, engine.cache, engine.prefetching, engine.settings, FCFS())]).run(requests)
    found = {"gpu_pages": 0, "cpu_pages": 0, "disk_pages": 0}
    down, up = {"from": "gpu", "to": "cpu"}, {"from": "cpu", "to": "gpu"}
    lines = [{name: value for name, value in event.items() if name != "time_s"} for event in events_of(log)]
    assert lines == [
        {"event": "match", "request": 0, "prompt_pages": 2, **found},
        {"event": "admit", "request": 0, "pages": 3, "load_pages": 0},
        {"event": "swap_begin", "transfer": 0, **down, "pages": 2},
        {"event": "finish", "request": 0},
        {"event": "swap_end", "transfer": 0, **down, "pages": 2},
        {"event": "match", "request": 1, "prompt_pages": 4, **found},
        {"event": "free", "tier": "gpu", "pages": 2},
        {"event": "admit", "request": 1, "pages": 5, "load_pages": 0},
        {"event": "swap_begin", "transfer": 1, **down, "pages": 4},
        {"event": "finish", "request": 1},
        {"event": "swap_end", "transfer": 1, **down, "pages": 4},
        {"event": "match", "request": 2, "prompt_pages": 2, **(found | {"cpu_pages": 2})},
        {"event": "free", "tier": "gpu", "pages": 2},
        {"event": "admit", "request": 2, "pages": 3, "load_pages": 2},
        {"event": "swap_begin", "transfer": 2, **up, "pages": 2, "request": 2},
        {"event": "swap_end", "transfer": 2, **up, "pages": 2, "request": 2},
        {"event": "finish", "request": 2},
    ]
    assert [round(event["time_s"]) for event in events_of(log)] == [
        0, 0, 9, 9, 11, 100, 100, 100, 117, 117, 121, 200, 200, 200, 200, 202, 202,
    ]  # fmt: skip


def test_a_reset_is_an_event_after_the_pages_that_it_drops() -> None:
    engine: SmallEngine = small_engine(gpu=5)
    log = EventLog(engine.cache.tiers)
    engine.serve(ask("ab"))
    engine.cache.watch(CacheLog(log, engine.cache.tiers))
    engine.cache.reset()
    assert events_of(log) == [{"event": "free", "tier": "gpu", "pages": 2}, {"event": "reset"}]


def test_the_file_has_the_events_and_goes_with_the_next_run_without_them(tmp_path: Path) -> None:
    settings = ["trace.sessions=5", f"output={tmp_path}"]
    assert main(["replay", *settings, "events=true"]) == 0
    lines = gzip.decompress((tmp_path / "events.jsonl.gz").read_bytes()).decode().splitlines()
    assert {json.loads(line)["event"] for line in lines} == {"match", "admit", "finish"}
    assert main(["replay", *settings]) == 0
    assert not (tmp_path / "events.jsonl.gz").exists()


@pytest.mark.parametrize("command", ["curve", "validate"])
def test_commands_without_events_say_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "events=true"]) == 2
    assert capsys.readouterr().err == f"kvsim: events has no effect on kvsim {command}: leave it out\n"
