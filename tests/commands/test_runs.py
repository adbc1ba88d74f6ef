"""Runs from the command line to their folders."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main

SMALL = ("trace.sessions=20", "tiers.gpu.capacity=6000pages", "tiers.cpu.capacity=3000pages", "tiers.disk.capacity=9000pages")
FILES = ["report.html", "requests.csv.gz", "result.json"]
MEASURED = ("versions", "load_s", "wall_s", "requests_per_s")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def result(folder: Path) -> dict[str, Any]:
    return {key: value for key, value in json.loads((folder / "result.json").read_text()).items() if key not in MEASURED}


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_a_run_writes_its_folder_and_nothing_else(command: str, folder: Path) -> None:
    assert main([command, *SMALL, "output=runs/first"]) == 0
    assert names(folder) == ["runs"]
    assert names(folder / "runs" / "first") == FILES
    assert result(folder / "runs" / "first")["command"] == command


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_the_same_command_gives_the_same_result(command: str, folder: Path) -> None:
    results = []
    for _ in range(2):
        assert main([command, *SMALL, "eviction=random", "placement=write_back", "seed=3", "output=run"]) == 0
        results.append(result(folder / "run"))
    assert results[0] == results[1]


def test_a_multirun_has_a_numbered_folder_for_each_job(folder: Path) -> None:
    assert main(["replay", *SMALL, "-m", "eviction=lru,fifo", "output=sweep"]) == 0
    assert names(folder) == ["sweep"]
    assert {"0", "1", "sweep.csv", "report.html"} <= set(names(folder / "sweep"))
    for job, policy in (("0", "lru.LRU"), ("1", "fifo.FIFO")):
        assert names(folder / "sweep" / job) == FILES
        assert result(folder / "sweep" / job)["config"]["eviction"]["_target_"].endswith(policy)


def test_a_run_again_replaces_its_folder_s_files(folder: Path) -> None:
    for seed in (1, 2):
        assert main(["replay", *SMALL, f"seed={seed}", "output=run"]) == 0
    assert names(folder / "run") == FILES
    assert result(folder / "run")["seed"] == 2


def test_a_multirun_goes_on_after_a_job_that_cannot_work(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = [setting for setting in SMALL if not setting.startswith("tiers.gpu")]
    assert main(["replay", *small, "-m", "tiers.gpu.capacity=40,6000pages", "output=sweep"]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        "kvsim: 1 of 2 jobs failed; the first is job 0: tiers.gpu.capacity: 40 has no unit; use 40pages, 40tokens or 40GiB"
    )
    assert "result.json" not in names(folder / "sweep" / "0")
    assert names(folder / "sweep" / "1") == FILES
