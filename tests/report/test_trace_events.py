"""The timeline of a simulated run, event by event."""

import csv
import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvsim.cli import main
from kvsim.report.perfetto.trace_lanes import lanes
from tests.report import perfetto
from tests.report.timeline_reader import Slice, Timeline

SETTINGS = ["trace.sessions=30", "tiers.gpu.capacity=4000pages", "tiers.cpu.capacity=6000pages", "tiers.disk.capacity=30000pages",
            "placement=write_back", "prefetch=threshold"]  # fmt: skip
STAGES = "hardware.pipeline_parallel=2 engine.max_batch_tokens=2048"
RUNNING, WAITING = "engine: running requests", "engine: waiting requests"


class Recorded(NamedTuple):
    record: dict[str, Any]
    timeline: Timeline
    other: dict[str, Any]
    """The record of the same run without a timeline."""
    rows: list[dict[str, str]]
    path: Path


@pytest.fixture(scope="module", params=["engine.links=shared", "engine.overlap=none", STAGES])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("timeline")
    chosen = request.param.split()
    assert main(["simulate", *SETTINGS, *chosen, "timeline=true", f"output={folder / 'with'}"]) == 0
    assert main(["simulate", *SETTINGS, *chosen, f"output={folder / 'without'}"]) == 0
    assert not (folder / "without" / "timeline.json.gz").exists()
    records = [json.loads((folder / name / "result.json").read_text()) for name in ("with", "without")]
    with gzip.open(folder / "with" / "requests.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    path = folder / "with" / "timeline.json.gz"
    return Recorded(records[0], Timeline(path), records[1], rows, path)


def of_request(slices: list[Slice]) -> dict[int, list[Slice]]:
    found = defaultdict(list)
    for one in slices:
        found[one.args["request"]].append(one)
    return found


def test_recording_changes_nothing(recorded: Recorded):
    for name in ("hit_pages", "ttft_s", "e2e_s", "phases_s", "links", "tiers", "prefetch", "simulated_s", "retractions"):
        assert recorded.record[name] == recorded.other[name]


def test_a_request_waits_and_runs_from_its_arrival_to_its_end(recorded: Recorded):
    timeline = recorded.timeline
    admissions, waits = of_request(timeline.of(RUNNING, depth=0)), of_request(timeline.of(WAITING))
    served = [row for row in recorded.rows if row["status"] != "rejected"]
    assert admissions.keys() == {int(row["request"]) for row in served}
    for row in served:
        own, queued = admissions[int(row["request"])], waits[int(row["request"])]
        begin = min(one.start for one in [*own, *queued]) / 1e6
        assert begin == pytest.approx(float(row["arrival_s"]), abs=2e-6)
        assert sum(one.seconds for one in [*own, *queued]) == pytest.approx(float(row["e2e_s"]), abs=1e-5)
        assert [one.args["end"] for one in own] == ["retracted"] * (len(own) - 1) + ["finished"]


def test_its_phases_are_those_of_the_results(recorded: Recorded):
    """A single admission: its queue, load and prefill are those of ``requests.csv.gz``, but for what steps waited for loads."""
    timeline = recorded.timeline
    admissions, waits = of_request(timeline.of(RUNNING, depth=0)), of_request(timeline.of(WAITING))
    loaded = 0
    for row in recorded.rows:
        own = admissions[int(row["request"])]
        if len(own) != 1:
            continue
        (admission,) = own
        seconds: Counter[str] = Counter()
        for one in admission.children:
            seconds[one.name] += one.seconds  # type: ignore[assignment]
        queued_s = sum(one.seconds for one in waits[int(row["request"])])
        assert queued_s == pytest.approx(float(row["queue_s"]), abs=1e-5)
        assert queued_s == pytest.approx(admission.args["queue_s"], abs=1e-5)
        assert seconds["load"] <= float(row["load_s"]) + 1e-5
        assert queued_s + seconds["load"] + seconds["prefill"] == pytest.approx(float(row["ttft_s"]), abs=1e-5)
        assert seconds["load"] + seconds["prefill"] + seconds["decode"] == pytest.approx(admission.seconds, abs=1e-5)
        loaded += seconds["load"] > 0
    assert loaded or recorded.record["config"]["engine"]["overlap"] == "layerwise"


def test_batches_follow_one_another_and_compute_every_missing_token(recorded: Recorded):
    batches = recorded.timeline.of("engine", depth=0)
    by_thread = defaultdict(list)
    for batch in batches:
        by_thread[batch.thread].append(batch)
    for own in by_thread.values():
        assert all(batch.start >= before.end for before, batch in pairwise(own))
    stages = recorded.record["config"]["hardware"]["pipeline_parallel"]
    assert list(by_thread) == ["batches", "batches, lane 2"][:stages]
    computed = sum(batch.args["prefill_tokens"] for batch in batches)
    assert computed >= recorded.record["prompt_tokens"] - sum(recorded.record["hit_tokens"].values())


def test_a_flow_leads_from_the_queue_through_transfers_and_batches_to_the_answer(recorded: Recorded):
    timeline = recorded.timeline
    computes, reads = defaultdict(set), defaultdict(set)
    for batch in timeline.of("engine"):
        for request in batch.args.get("requests", ()):
            computes[request].add(batch)
    for one in timeline.of("links"):
        if "request" in one.args and one.thread.split(",")[0] in ("cpu-gpu", "disk-cpu"):
            reads[one.args["request"]].add(one)
    passed = defaultdict(set)
    for points in timeline.flows.values():
        first, last = points[0], points[-1]
        assert first.process in (WAITING, RUNNING)
        assert last.name in ("decode", "prefill") or last.name.startswith("request ")
        passed[(first.parent or first).args["request"]] |= set(points)
    assert passed.keys() == of_request(timeline.of(RUNNING, depth=0)).keys()
    for request, points in passed.items():
        assert computes[request] <= points and reads[request] <= points
    assert sum(map(len, reads.values())) > 20


def test_transfers_are_those_of_the_links(recorded: Recorded):
    moved: Counter[str] = Counter()
    for one in recorded.timeline.of("links"):
        moved[one.thread.split(",")[0]] += one.args["bytes"]
    assert moved == {name: link["bytes"] for name, link in recorded.record["links"].items()}


def test_evictions_add_up_and_usage_reaches_the_peak(recorded: Recorded):
    evicted: Counter[str] = Counter()
    for event in recorded.timeline.instants:
        evicted[event["name"].removesuffix(" evicts")] += event["args"]["pages"]
    tiers = recorded.record["tiers"]
    assert evicted == {name: tier["evicted_pages"] for name, tier in tiers.items() if tier["evicted_pages"]}
    for name, tier in tiers.items():
        assert 0 < max(pages for _, pages in line(recorded.timeline, name, "in use")) <= tier["peak_pages"]


def line(timeline: Timeline, tier: str, series: str) -> list[tuple[int, int]]:
    return timeline.counters["engine" if tier == "gpu" else "tiers", f"{tier} pages", series]


def test_free_pages_and_pages_in_use_add_up_to_the_capacity(recorded: Recorded):
    for name, tier in recorded.record["tiers"].items():
        used, free = (line(recorded.timeline, name, series) for series in ("in use", "free"))
        assert used[0][0] == 0
        assert free == [(ts, tier["capacity_pages"] - pages) for ts, pages in used]


def test_the_record_of_a_run_with_a_timeline_has_the_mean_free_pages_of_each_bin(recorded: Recorded):
    assert "free_pages" not in recorded.other["timeline"]
    free, end_s = recorded.record["timeline"]["free_pages"], recorded.record["simulated_s"]
    for name in recorded.record["tiers"]:
        changes = [(ts / 1e6, pages) for ts, pages in line(recorded.timeline, name, "free")]
        ends_s = [time_s for time_s, _ in changes[1:]] + [end_s]
        total = sum(
            pages * max(0.0, min(after_s, end_s) - time_s) for (time_s, pages), after_s in zip(changes, ends_s, strict=True)
        )
        assert len(free["mean"][name]) == len(free["edges_s"]) - 1 == 200
        assert sum(free["mean"][name]) / 200 == pytest.approx(total / end_s, rel=1e-3)
        assert min(free["mean"][name]) >= 0


def test_a_lane_is_used_again_when_it_is_free():
    assert lanes([(0, 10), (2, 4), (3, 8), (4, 5), (9, 12), (10, 11)]) == [0, 1, 2, 1, 1, 0]
    assert lanes([(0, 0), (0, 0), (1, 1)]) == [0, 1, 0]


@pytest.mark.skipif(bool(perfetto.MISSING), reason=perfetto.MISSING)
def test_perfetto_reads_the_same(recorded: Recorded):
    timeline = recorded.timeline
    edges = sum(len(points) - 1 for points in timeline.flows.values())
    joined = "from flow join slice a on a.id = slice_out join slice b on b.id = slice_in"
    trouble, slices, flows, names, counted, peak, ends = perfetto.query(
        gzip.decompress(recorded.path.read_bytes()),
        "select name, value from stats where severity != 'info' and value > 0",
        "select count(1) as n, sum(dur) as ns from slice where dur > 0",
        "select count(1) as n from flow",
        "select name from process where name is not null order by pid",
        "select name as track from counter_track order by name",
        "select max(value) as most from counter join counter_track t on t.id = track_id where t.name = 'gpu pages in use'",
        f"select a.name as source, b.name as target, count(1) as n {joined} where b.name = 'decode' group by 1, 2",
    )
    assert trouble == []
    lasting = [one for one in timeline.slices if one.end > one.start]
    assert slices == [(len(lasting), sum(one.end - one.start for one in lasting) * 1000)]
    assert flows == [(edges,)]
    assert names == [("engine",), (RUNNING,), (WAITING,), ("links",), ("tiers",)]
    assert [track for (track,) in counted] == sorted(
        [f"{tier} pages {series}" for tier in ("gpu", "cpu", "disk") for series in ("free", "in use")]
        + ["requests running", "requests waiting"]
    )
    assert peak == [(max(pages for _, pages in line(timeline, "gpu", "in use")),)]
    answered = Counter(points[-2].name for points in timeline.flows.values() if points[-1].name == "decode")
    assert {source: n for source, _, n in ends} == answered


def test_a_replay_has_no_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", "trace.sessions=20", "timeline=true", f"output={tmp_path}"]) == 2
    assert capsys.readouterr().err == "kvsim: timeline has no effect on kvsim replay: leave it out\n"
