"""The timeline of a simulated run, event by event."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.cli import main

SETTINGS = ["trace.sessions=30", "tiers.gpu.capacity=4000pages", "tiers.cpu.capacity=6000pages", "tiers.disk.capacity=30000pages",
            "placement=write_back", "prefetch=threshold"]  # fmt: skip


@pytest.fixture(scope="module", params=["fifo", "shared"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """The record and the events of one run with a timeline, and the record of the same without."""
    folder = tmp_path_factory.mktemp("timeline")
    links = f"engine.links={request.param}"
    assert main(["simulate", *SETTINGS, links, "timeline=true", f"output={folder / 'with'}"]) == 0
    assert main(["simulate", *SETTINGS, links, f"output={folder / 'without'}"]) == 0
    assert not (folder / "without" / "timeline.json.gz").exists()
    events = json.loads(gzip.decompress((folder / "with" / "timeline.json.gz").read_bytes()))["traceEvents"]
    records = [json.loads((folder / name / "result.json").read_text()) for name in ("with", "without")]
    return records[0], events, records[1]


def test_recording_changes_nothing(recorded: tuple[Any, Any, Any]):
    record, _, other = recorded
    for name in ("hit_pages", "ttft_s", "e2e_s", "links", "tiers", "prefetch", "simulated_s", "retractions"):
        assert record[name] == other[name]


def test_every_request_begins_and_ends(recorded: tuple[Any, Any, Any]):
    record, events, _ = recorded
    spans = [event for event in events if event["pid"] == 1 and event["ph"] in "be" and event["name"].startswith("request ")]
    served = record["requests"] - record["rejected"]
    assert Counter(event["ph"] for event in spans) == {"b": served, "e": served}
    begun = {event["id"]: event["ts"] for event in spans if event["ph"] == "b"}
    ended = {event["id"]: event["ts"] for event in spans if event["ph"] == "e"}
    times_s = np.array([(ended[index] - begun[index]) / 1e6 for index in begun])
    assert times_s.mean() == pytest.approx(record["e2e_s"]["mean"], abs=1e-5)


def test_batches_follow_one_another_and_compute_every_missing_token(recorded: tuple[Any, Any, Any]):
    record, events, _ = recorded
    batches = [event for event in events if event["pid"] == 2 and event["ph"] == "X"]
    ends = [event["ts"] + event["dur"] for event in batches]
    assert all(batch["ts"] >= end - 0.01 for batch, end in zip(batches[1:], ends, strict=False))
    computed = sum(event["args"]["prefill_tokens"] for event in batches)
    assert computed >= record["prompt_tokens"] - sum(record["hit_tokens"].values())


def test_transfers_are_those_of_the_links(recorded: tuple[Any, Any, Any]):
    record, events, _ = recorded
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["pid"] == 3 and event["name"] == "thread_name"}
    moved: Counter[str] = Counter()
    for event in events:
        if event["pid"] == 3 and event["ph"] in "Xb":
            moved[lanes[event["tid"]]] += event["args"]["bytes"]
    assert moved == {name: link["bytes"] for name, link in record["links"].items()}


def test_evictions_add_up_and_usage_reaches_the_peak(recorded: tuple[Any, Any, Any]):
    record, events, _ = recorded
    evicted: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for event in events:
        if event["pid"] == 4 and event["ph"] == "i":
            evicted[event["name"].split()[0]] += event["args"]["pages"]
        elif event["pid"] == 4 and event["ph"] == "C" and event["name"].endswith(" pages in use"):
            tier = event["name"].split()[0]
            most[tier] = max(most[tier], event["args"]["pages"])
    assert evicted == {name: tier["evicted_pages"] for name, tier in record["tiers"].items() if tier["evicted_pages"]}
    assert all(0 < most[name] <= tier["peak_pages"] for name, tier in record["tiers"].items())


def test_free_pages_and_pages_in_use_add_up_to_the_capacity(recorded: tuple[Any, Any, Any]):
    record, events, _ = recorded
    for name, tier in record["tiers"].items():
        used, free = (
            [event["args"]["pages"] for event in events if event["name"] == f"{name} {what}"]
            for what in ("pages in use", "free pages")
        )
        assert free == [tier["capacity_pages"], *(tier["capacity_pages"] - pages for pages in used)]


def test_the_record_of_a_run_with_a_timeline_has_the_mean_free_pages_of_each_bin(recorded: tuple[Any, Any, Any]):
    record, events, other = recorded
    assert "free_pages" not in other["timeline"]
    free = record["timeline"]["free_pages"]
    end_s = record["simulated_s"]
    for name in record["tiers"]:
        changes = [(event["ts"] / 1e6, event["args"]["pages"]) for event in events if event["name"] == f"{name} free pages"]
        ends_s = [time_s for time_s, _ in changes[1:]] + [end_s]
        total = sum(
            pages * max(0.0, min(after_s, end_s) - time_s) for (time_s, pages), after_s in zip(changes, ends_s, strict=True)
        )
        assert len(free["mean"][name]) == len(free["edges_s"]) - 1 == 200
        assert sum(free["mean"][name]) / 200 == pytest.approx(total / end_s, rel=1e-3)
        assert min(free["mean"][name]) >= 0


def test_a_replay_has_no_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", "trace.sessions=20", "timeline=true", f"output={tmp_path}"]) == 2
    assert capsys.readouterr().err == "kvsim: timeline has no effect on kvsim replay: leave it out\n"
