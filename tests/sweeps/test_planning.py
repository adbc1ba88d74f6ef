"""Jobs are planned before the first one runs: what has no effect in some of them, and what cannot run."""

import csv
import json
from html import escape
from pathlib import Path

import pytest

import kvsim
from kvsim.cli import main
from kvsim.errors import NoEffect, UsageError
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.sweeps.planning import Way, planned, refusals
from tests.composing import plan as composed

SMALL = ("trace.sessions=5", "tiers.gpu.capacity=3000pages")
WITH_DISK = ("tiers.disk.capacity=0,20000pages", "tiers.cpu.capacity=4000pages", "prefetch=threshold")


def way(needs: dict[str, str], impossible: str = "") -> Way[list[str]]:
    """Jobs of words, in which a setting has an effect only beside another one."""

    def plan(job: list[str]) -> None:
        for key, other in needs.items():
            if any(line.startswith(key) for line in job) and other not in job:
                raise NoEffect(key, f"without {other}")
        if impossible in job:
            raise UsageError(f"{impossible} is too large")

    return Way(lines=list, without=lambda job, lines: [line for line in job if line not in lines], plan=plan)


def test_a_setting_without_effect_in_some_jobs_is_left_out_there_and_told() -> None:
    found = planned([["disk=0", "read=4"], ["disk=1", "read=4"]], way({"read": "disk=1"}))
    assert found.jobs == [["disk=0"], ["disk=1", "read=4"]]
    assert found.notes == ["read=4 is left out in 1 of 2 jobs, where it has no effect without disk=1"]
    assert not found.refused and not refusals(found)


def test_one_without_effect_in_every_job_that_has_it_is_an_error() -> None:
    with pytest.raises(NoEffect, match="read has no effect without disk=1: leave it out"):
        planned([["disk=0", "read=4"], ["disk=1"], ["disk=2", "read=4"]], way({"read": "disk=1"}))


def test_what_is_below_a_choice_goes_with_it_and_jobs_that_are_left_alike_run_once() -> None:
    grid = [[disk, "read=4", f"read.from={number}"] for disk in ("disk=0", "disk=1") for number in (1, 2)]
    found = planned(grid, way({"read": "disk=1"}))
    assert found.jobs == [["disk=0"], ["disk=1", "read=4", "read.from=1"], ["disk=1", "read=4", "read.from=2"]]


def test_jobs_that_cannot_run_are_told_at_once_by_reason() -> None:
    found = planned([["a"], ["b"], ["c", "b"], ["d"]], way({}, impossible="b"))
    assert list(found.refused) == [1, 2]
    assert refusals(found) == ["2 of 4 jobs cannot run; the others do:", "  jobs 1, 2: b is too large"]


def test_an_objection_that_no_line_can_meet_is_the_jobs_error() -> None:
    def plan(job: list[str]) -> None:
        raise NoEffect("elsewhere", "at all")

    found = planned([["a"]], Way(lines=list, without=lambda job, lines: job, plan=plan))
    assert "elsewhere has no effect at all" in str(found.refused[0])


def test_a_sweep_asks_what_a_disk_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "-m", *SMALL, *WITH_DISK, "output=sweep"]) == 0
    note = "prefetch=threshold is left out in 1 of 2 jobs, where it has no effect without a disk tier"
    assert capfd.readouterr().out.count(note) == 1
    assert note in Path("sweep/report.html").read_text()
    records = [json.loads(Path(f"sweep/{job}/result.json").read_text()) for job in (0, 1)]
    assert [record["choices"]["prefetch"] for record in records] == ["none", "threshold"]
    assert "prefetch" not in records[0]["command_line"], "the line that repeats the job alone works"
    assert main(["simulate", *SMALL, "output=alone", "tiers.cpu.capacity=4000pages"]) == 0
    assert json.loads(Path("alone/result.json").read_text())["hit_rate"] == records[0]["hit_rate"]


def test_without_effect_in_all_jobs_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "-m", *SMALL, "eviction=lru,fifo", "placement=write_back", "output=sweep"]) == 2
    assert capfd.readouterr().err == "kvsim: placement has no effect without a lower tier: set tiers.cpu.capacity\n"
    assert not Path("sweep").exists()


def test_jobs_that_do_not_fit_are_told_before_any_work_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = "tiers.gpu.capacity=3000pages,200GiB,4000pages"
    assert main(["simulate", "-m", "trace.sessions=5", sizes, "output=sweep"]) == 2
    said = capfd.readouterr()
    first, second, last = said.err.splitlines()
    assert first == "kvsim: 1 of 3 jobs cannot run; the others do:"
    assert second.startswith("  job 1: tiers.gpu.capacity: 200.0 GiB of KV and")
    assert last.startswith("kvsim: 1 of 3 jobs failed; the first is job 1: tiers.gpu.capacity: 200.0 GiB")
    with open("sweep/sweep.csv") as file:
        assert [(row["job"], row["status"]) for row in csv.DictReader(file)] == [
            ("0", "finished"), ("1", "failed"), ("2", "finished"),
        ]  # fmt: skip
    assert main(["simulate", "-m", "trace.sessions=5", sizes, "output=other", "sweep.fail_fast=true"]) == 2
    assert "1 of 3 jobs cannot run, and none was started" in capfd.readouterr().err
    assert not Path("other").exists()


def test_python_does_the_same_with_names_and_objects() -> None:
    trace = kvsim.load_trace("synthetic", sessions=5)
    for prefetch in ("threshold", ThresholdPrefetch()):
        swept = kvsim.sweep(
            trace, {"tiers.disk.capacity": ["0", "20000pages"]}, *SMALL[1:], "tiers.cpu.capacity=4000pages", prefetch=prefetch
        )
        assert swept[0].settings["prefetch"] == "none"
        (note,) = swept.notes
        assert note.endswith("is left out in 1 of 2 jobs, where it has no effect without a disk tier")
        assert escape(note) in swept._repr_html_()
    with pytest.raises(UsageError, match="placement has no effect without a lower tier"):
        kvsim.sweep(trace, {"eviction": ["lru", "fifo"]}, *SMALL[1:], placement="write_back")
    swept = kvsim.sweep(trace, {"tiers.gpu.capacity": ["3000pages", "300GiB"]}, command="simulate")
    assert list(swept.errors) == ["1"] and "do not fit" in swept.errors["1"] and [run.name for run in swept] == ["0"]


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (
            ("tiers.disk.capacity=0,20000pages", "tiers.cpu.capacity=4000pages", "drive=pm9a3"),
            "drive=pm9a3 is left out in 1 of 2 jobs, where it has no effect without a disk tier",
        ),
        (
            ("hardware.gpus=1,8", "hardware.allreduce_latency_s=0"),
            "hardware.allreduce_latency_s=0 is left out in 1 of 2 jobs, where it has no effect with one GPU",
        ),
    ],
)
def test_a_sweep_asks_what_a_device_changes(
    words: tuple[str, ...], note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "-m", *SMALL, *words, "output=sweep"]) == 0
    assert capfd.readouterr().out.count(note) == 1


@pytest.mark.parametrize("words", [("network=connectx7",), ("hardware.gpus=2", "hardware.allreduce_latency_s=0")])
def test_a_device_that_a_single_run_has_no_use_for_is_told_as_such(words: tuple[str, ...]) -> None:
    with pytest.raises(NoEffect, match=words[-1].partition("=")[0]):
        composed(*words, "hardware.allreduce_bytes_per_s=null" if len(words) > 1 else "seed=0", command="simulate")
