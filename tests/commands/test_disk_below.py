"""A disk directly below the GPU, beside a CPU tier or without one: from the command line to the report."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main
from tests.workloads import long_conversations, write_trace

PAGES = "tiers.gpu.capacity=6000pages"
BELOW_GPU = ("tiers.disk.capacity=60000pages", "tiers.disk.below=gpu")
CPU = "tiers.cpu.capacity=3000pages"
TO_DISK = ("placement@tiers.cpu.placement=write_through_selective", "placement@tiers.disk.placement=write_back")
"""Beside a disk that takes what is evicted, the CPU tier takes what has been used twice."""


def run(command: str, *overrides: str) -> dict[str, Any]:
    assert main([command, *overrides, "output=run"]) == 0
    result: dict[str, Any] = json.loads(Path("run/result.json").read_text())
    return result


def rows_of(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def moved_pages(result: dict[str, Any], *links: str) -> float:
    return sum([result["links"].get(link, {"bytes": 0})["bytes"] for link in links]) / result["page_bytes"]


def check_links(result: dict[str, Any]) -> None:
    """Bytes are those of the pages that were moved, over the links that there are."""
    assert result["hit_pages"]["disk"] > 0
    assert moved_pages(result, "gpu-cpu", "gpu-disk") == result["placement"]["written_pages"] > 0
    assert moved_pages(result, "cpu-gpu", "disk-gpu") == result["placement"]["loaded_pages"] >= result["hit_pages"]["disk"]
    assert moved_pages(result, "disk-gpu") >= result["hit_pages"]["disk"]
    assert result["placement"]["fetched_pages"] == 0
    assert not {"disk-cpu", "cpu-disk"} & set(result["links"])
    assert all(link["busy_s"] > 0 and 0 < link["utilization"] <= 1 for link in result["links"].values())


@pytest.mark.parametrize(("placement", "links"), [("write_through", "fifo"), ("write_back", "shared"), ("exclusive", "fifo")])
def test_without_a_cpu_tier_pages_go_straight(placement: str, links: str) -> None:
    result = run("simulate", "trace.sessions=40", PAGES, *BELOW_GPU, f"placement={placement}", f"engine.links={links}")
    check_links(result)
    assert list(result["tiers"]) == ["gpu", "disk"]
    assert set(result["links"]) == {"gpu-disk", "disk-gpu"}
    assert result["hit_pages"]["cpu"] == 0


@pytest.mark.parametrize("placements", [("placement=write_through",), TO_DISK], ids=["both get everything", "one each"])
def test_beside_a_cpu_tier_both_are_used(placements: tuple[str, ...]) -> None:
    result = run("simulate", "trace.sessions=40", PAGES, CPU, *BELOW_GPU, *placements)
    check_links(result)
    assert list(result["tiers"]) == ["gpu", "cpu", "disk"]
    assert set(result["links"]) == {"gpu-cpu", "cpu-gpu", "gpu-disk", "disk-gpu"}
    assert result["hit_pages"]["cpu"] > 0


@pytest.mark.parametrize(
    ("hardware", "tiers"), [("h200_measured", ()), ("h200", ("tiers.cpu.capacity=2000pages", *TO_DISK))], ids=["disk", "both"]
)
def test_a_trace_of_long_conversations_is_served(tiers: tuple[str, ...], hardware: str, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "conversations.jsonl.gz", long_conversations(requests=300))
    trace = ("trace=mooncake", f"trace.path='{path}'", "page_tokens=512")
    machine = (f"hardware={hardware}", "tiers.gpu.capacity=1000pages", *BELOW_GPU)
    check_links(run("simulate", *trace, *machine, *tiers, "placement=write_back" if not tiers else "warmup=0"))


def test_the_straight_link_is_in_every_report(capsys: pytest.CaptureFixture[str]) -> None:
    result = run("simulate", "trace.sessions=40", PAGES, *BELOW_GPU, "timeline=true")
    shown = capsys.readouterr().out
    page = Path("run/report.html").read_text()
    with gzip.open("run/timeline.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    lanes = {event["args"]["name"]: (event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for name in ("gpu-disk", "disk-gpu"):
        assert name in shown
        assert name in page
        assert name in lanes
        assert any(0 < share <= 1 for share in result["timeline"]["links"]["utilization"][name])
        moved = [event["args"]["bytes"] for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == lanes[name]]
        assert sum(moved) == result["links"][name]["bytes"]


MISTAKES = [
    (["tiers.disk.below=nowhere"], "tiers.disk.below must be cpu or gpu, not nowhere"),
    (["tiers.disk.below=gpu"], "tiers.disk.below has no effect without that tier: set tiers.disk.capacity"),
    (["tiers.disk.below=cpu", *BELOW_GPU[:1]], "tiers.disk needs a CPU tier above it: set tiers.cpu"),
    ([*BELOW_GPU, "prefetch=adaptive"], "prefetch: AdaptivePrefetch reads ahead into the CPU tier, which is not above the disk"),
    ([*BELOW_GPU, CPU, "prefetch=break_even"], "prefetch: BreakEvenPrefetch reads ahead into the CPU tier, which is not above"),
    (
        ["preset=sglang_hicache", "tiers.disk.below=gpu", "tiers.disk.capacity=1TiB"],
        "prefetch: AdaptivePrefetch reads ahead into the CPU tier",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), MISTAKES, ids=[" ".join(overrides) for overrides, _ in MISTAKES])
def test_what_cannot_be_ends_with_one_line(
    overrides: list[str], expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([("replay", "simulate")[len(overrides) % 2], *overrides]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith(f"kvsim: {expected}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not list(folder.iterdir())


def test_a_sweep_over_both_places_of_the_disk_is_framed_by_bounds(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    tiers = (PAGES, CPU, "tiers.disk.capacity=9000pages", "tiers.disk.below=cpu,gpu")
    assert main(["replay", "-m", "trace.sessions=40", *tiers, "placement=write_through,write_back", "output=sweep"]) == 0
    shown = capsys.readouterr().out
    rows = rows_of(folder / "sweep")
    assert [(row["tiers.disk.below"], row["placement"], row["status"]) for row in rows] == [
        ("cpu", "write_through", "finished"),
        ("cpu", "write_back", "finished"),
        ("gpu", "write_through", "finished"),
        ("gpu", "write_back", "finished"),
    ]
    assert len({row["belady_hit_rate"] for row in rows}) == len({row["unlimited_hit_rate"] for row in rows}) == 1
    for row in rows:
        assert 0 < float(row["hit_rate"]) <= float(row["belady_hit_rate"]) <= float(row["unlimited_hit_rate"])
        parts = [float(row[f"hit_rate_{tier}"]) for tier in ("gpu", "cpu", "disk")]
        assert sum(parts) == pytest.approx(float(row["hit_rate"]))
    assert "belady" in shown and "unlimited" in shown and "disk below" in shown
    page = (folder / "sweep" / "report.html").read_text()
    assert "disk below" in page and "from disk" in page
