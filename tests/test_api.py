"""kvsim from Python does what the commands do."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvsim
from kvsim.errors import UsageError
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.placement.write_back import WriteBack
from kvsim.trace.base import Trace

SMALL = ("tiers.gpu.capacity=8000pages", "tiers.cpu.capacity=20000pages")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return kvsim.load_trace("synthetic", sessions=60, page_tokens=16)


def test_public_names() -> None:
    assert sorted(kvsim.__all__) == ["Result", "curve", "load_trace", "replay", "simulate"]
    assert all(hasattr(kvsim, name) for name in kvsim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvsim.nothing


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_a_run_gives_what_the_command_writes(trace: Trace, command: str, tmp_path: Path) -> None:
    result = getattr(kvsim, command)(trace, *SMALL, "eviction=slru", "placement=write_back")
    code = f"import sys; from kvsim.cli import main; sys.exit(main({command!r}.split() + sys.argv[1:]))"
    settings = ["trace=synthetic", "trace.sessions=60", *SMALL, "eviction=slru", "placement=write_back", f"output={tmp_path}"]
    subprocess.run([sys.executable, "-c", code, *settings], check=True, capture_output=True)
    written = json.loads((tmp_path / "result.json").read_text())
    times = {"load_s", "wall_s", "requests_per_s", "versions", "command_line"}
    assert {k: v for k, v in written.items() if k not in times} == {k: v for k, v in result.record.items() if k not in times}
    assert result.hit_rate == written["hit_rate"] > 0
    assert result.hit_pages[:, 0].sum() == written["hit_pages"]["gpu"]
    assert result.page_hit_rate == written["page_hit_rate"]


def test_a_policy_may_be_an_object(trace: Trace) -> None:
    named = kvsim.replay(trace, *SMALL, "eviction=slru", "eviction.protected_hits=3", "placement=write_back")
    passed = kvsim.replay(trace, *SMALL, eviction=SegmentedLRU(protected_hits=3), placement=WriteBack())
    assert (named.hit_pages == passed.hit_pages).all()
    assert "protected_hits=3" in passed.record["config"]["eviction"]


def test_a_tier_keeps_the_policy_that_was_chosen_for_it(trace: Trace) -> None:
    mixed = kvsim.replay(trace, *SMALL, "eviction@tiers.cpu.eviction=fifo", "placement=write_back", eviction=LRU())
    named = kvsim.replay(trace, *SMALL, "eviction=lru", "eviction@tiers.cpu.eviction=fifo", "placement=write_back")
    assert (mixed.hit_pages == named.hit_pages).all()


def test_runs_do_not_share_a_policy_object(trace: Trace) -> None:
    policy = SegmentedLRU()
    first, second = (kvsim.replay(trace, *SMALL, eviction=policy) for _ in range(2))
    assert (first.hit_pages == second.hit_pages).all()
    assert not hasattr(policy, "heap")


def test_a_run_can_be_written(trace: Trace, tmp_path: Path) -> None:
    result = kvsim.replay(trace, *SMALL)
    result.write(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result.record
    assert (tmp_path / "run" / "requests.csv.gz").exists() and (tmp_path / "run" / "report.html").exists()


def test_a_curve_is_drawn_from_python(trace: Trace) -> None:
    drawn = kvsim.curve(trace, capacities=[2000, "64000tokens"], policies=["fifo"])
    assert [(point.policy, point.capacity_pages) for point in drawn.points] == [
        (policy, pages) for policy in ("lru", "fifo", "belady") for pages in (2000, 4000)
    ]
    replayed = kvsim.replay(trace, "tiers.gpu.capacity=4000pages", "eviction=fifo", "replay.hold_output=false")
    assert drawn.points[3].hit_rate == replayed.hit_rate
    importlib.import_module("kvsim.bounds.curves")
    assert callable(kvsim.curve), "the module of curves does not hide the function"
    with pytest.raises(UsageError, match=r"curve\.fraction|fraction must be"):
        kvsim.curve(trace, fraction=0)
    with pytest.raises(UsageError, match=r"tiers\.gpu\.capacity has no effect on kvsim curve"):
        kvsim.curve(trace, "tiers.gpu.capacity=3000pages")


def test_mistakes_are_usage_errors(trace: Trace) -> None:
    with pytest.raises(UsageError, match="the trace is already loaded"):
        kvsim.replay(trace, "trace.limit=3")
    with pytest.raises(UsageError, match="no such choice"):
        kvsim.replay(trace, "eviction=lruu")
    with pytest.raises(UsageError, match=r"trace\.sesions: there is no such setting"):
        kvsim.load_trace("synthetic", sesions=3)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        kvsim.load_trace("mooncake", path="no such file.jsonl")
