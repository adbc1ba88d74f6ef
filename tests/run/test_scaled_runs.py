"""Whole runs whose engines a policy starts and stops: records, pictures, events, and engines' own rules."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.cli import main
from kvsim.engine.outcome import FINISHED
from kvsim.report.pictures import pictures_of
from kvsim.report.summary import facts
from kvsim.trace.base import Trace

SCALED = (
    "cluster.engines=4", "tiers.gpu.capacity=4000pages", "routing=least_loaded", "autoscaling=target_utilization",
    "autoscaling.target=4", "autoscaling.interval_s=2", "autoscaling.scale_down_window_s=10", "cluster.start_s=3",
)  # fmt: skip
RULES: dict[str, tuple[str, ...]] = {
    "vllm": ("preset=vllm",),
    "sglang": ("preset=sglang",),
    "vllm_offload": ("preset=vllm_offload", "tiers.cpu.capacity=6000pages", "tiers.cpu.scope=engine"),
    "sglang_hicache": ("preset=sglang_hicache", "tiers.cpu.capacity=6000pages", "tiers.cpu.scope=engine"),
    "lightllm": ("preset=lightllm", "tiers.cpu.capacity=6000pages", "tiers.cpu.scope=engine"),
    "fastdeploy": ("preset=fastdeploy", "tiers.cpu.capacity=20000pages", "tiers.cpu.scope=engine"),
    "hybrid": ("model=nemotron_h_8b", "tiers.gpu.capacity=8GiB", "tiers.cpu.capacity=8GiB", "tiers.cpu.scope=engine"),
    "host": ("tiers.cpu.capacity=6000pages", "placement=write_back"),
    "disk": ("tiers.cpu.capacity=6000pages", "tiers.disk.capacity=20000pages", "tiers.disk.scope=cluster", "prefetch=threshold"),
}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return kvsim.load_trace("synthetic", sessions=40, rate=3)


@pytest.mark.parametrize("name", RULES)
def test_every_request_is_served_whatever_the_rules(name: str, trace: Trace) -> None:
    result = kvsim.simulate(trace, *SCALED, *RULES[name])
    outcome = result.outcome
    assert (outcome.status == FINISHED).all() and not np.isnan(outcome.e2e_s).any()
    assert result.scaling["starts"] and result.scaling["stops"], "the load grows and falls"
    assert len(set(outcome.engine.tolist())) > 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaled")
    assert main(["simulate", "trace.sessions=40", "trace.rate=3", *SCALED, "events=true", f"output={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def record(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


def test_the_record_adds_up(record: Any) -> None:
    scaling, until_s = record["scaling"], record["simulated_s"]
    times_s = [change[0] for change in scaling["changes"]] + [until_s]
    engine_s = sum(sum(change[1:]) * (end_s - change[0]) for change, end_s in zip(scaling["changes"], times_s[1:], strict=True))
    assert scaling["engine_s"] == pytest.approx(engine_s) and scaling["gpu_s"] == scaling["engine_s"]
    assert scaling["mean_engines"] == pytest.approx(engine_s / until_s) and scaling["start_s"] == 3.0
    assert scaling["of_all"] == pytest.approx(engine_s / until_s / 4)
    assert scaling["most_engines"] == max(sum(change[1:]) for change in scaling["changes"]) <= 4
    assert scaling["changes"][0] == [0.0, 1, 0, 0]


def test_gpus_of_an_engine_are_paid_for_together(trace: Trace) -> None:
    scaling = kvsim.simulate(trace, *SCALED, "hardware.gpus=2").scaling
    assert scaling["gpu_s"] == 2 * scaling["engine_s"]


def test_gpus_are_busy_for_a_share_of_the_time_that_they_are_there(record: Any) -> None:
    busy_s = sum(engine["busy_share"] for engine in record["engines"]) * record["simulated_s"]
    assert record["diagnosis"]["busy"]["gpu"] == pytest.approx(busy_s / record["scaling"]["engine_s"])


def test_events_say_when_engines_come_and_go(folder: Path, record: Any) -> None:
    """Each start is followed by up 3 s later; an engine that drains is matched to no request until it is up again."""
    events = [json.loads(line) for line in gzip.decompress((folder / "events.jsonl.gz").read_bytes()).splitlines()]
    state = {0: "up", 1: "stop", 2: "stop", 3: "stop"}
    arrived: set[int] = set()
    began_s: dict[int, float] = {}
    counts = dict.fromkeys(("start", "up", "drain", "stop"), 0)
    for event in events:
        kind, engine = event["event"], event.get("engine")
        if kind in counts:
            counts[kind] += 1
            allowed = {"start": ("stop",), "up": ("start",), "drain": ("up",), "stop": ("drain", "start")}[kind]
            assert state[engine] in allowed
            if kind == "start":
                began_s[engine] = event["time_s"]
            if kind == "up":
                assert event["time_s"] == pytest.approx(began_s[engine] + 3.0)
            state[engine] = kind
        elif kind == "match":
            assert state[engine] in ("up", "drain")
            arrived.add(event["request"])
    assert counts["start"] == record["scaling"]["starts"] and counts["stop"] == record["scaling"]["stops"]
    assert len(arrived) == record["requests"]


def test_the_page_draws_engines_over_time_and_says_what_they_cost(record: Any) -> None:
    (picture,) = [picture for picture in pictures_of(record) if picture.title == "Engines"]
    assert picture.figure is not None
    up, starting, draining = picture.figure["data"]
    changes = record["scaling"]["changes"]
    assert [trace["name"] for trace in (up, starting, draining)] == ["up", "starting", "draining"]
    assert up["y"][:-1] == [change[1] for change in changes] and starting["y"][:-1] == [change[2] for change in changes]
    text = dict(facts(record))["autoscaling"]
    assert "s of engines" in text and f"{record['scaling']['starts']} starts of 3.00 s" in text


def test_a_run_without_autoscaling_has_no_such_record(trace: Trace) -> None:
    result = kvsim.simulate(trace, "cluster.engines=2", "autoscaling=none")
    assert result.scaling is None and not [picture for picture in pictures_of(result.record) if picture.title == "Engines"]


def test_measures_of_engines_are_compared(trace: Trace) -> None:
    swept = kvsim.sweep(
        trace, {"autoscaling.target": [2, 8]}, *[word for word in SCALED if "target=" not in word], command="simulate"
    )
    few, many = (run.scaling["engine_s"] for run in sorted(swept.runs, key=lambda run: -run.config["autoscaling"]["target"]))
    assert few < many
