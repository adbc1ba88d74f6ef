"""Sweeps over choices that do not have the same settings."""

import json
from pathlib import Path

import pytest

from kvsim.cli import main

TRACE = ["trace.sessions=5", "tiers.gpu.capacity=6000pages", "output=sweep"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "sweep"


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """What a dry run prints."""
    assert main(["replay", "-m", *TRACE, *arguments, "sweep.dry_run=true"]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_job_leaves_out_what_its_choice_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, "eviction=lru,slru", "eviction.protected_hits=2,3") == [
        "4 combinations, 3 make sense: eviction.protected_hits does not exist for eviction=lru",
        "job 0  eviction=lru",
        "job 1  eviction=slru eviction.protected_hits=2",
        "job 2  eviction=slru eviction.protected_hits=3",
        "3 jobs in sweep, 0 finished before",
    ]


def test_a_tier_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(
        capsys, "tiers.cpu.capacity=1GiB", "eviction@tiers.cpu.eviction=lru,slru", "tiers.cpu.eviction.protected_hits=2,3"
    )
    assert [line.split("  ")[1] for line in lines[1:4]] == [
        "eviction@tiers.cpu.eviction=lru",
        "eviction@tiers.cpu.eviction=slru tiers.cpu.eviction.protected_hits=2",
        "eviction@tiers.cpu.eviction=slru tiers.cpu.eviction.protected_hits=3",
    ]


def test_a_setting_that_no_choice_has_stays_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(capsys, "eviction=lru,slru", "eviction.protected_hit=2,3")
    assert len([line for line in lines if "cannot work: eviction.protected_hit: there is no such setting" in line]) == 4
    assert main(["replay", "-m", *TRACE, "eviction=lru", "eviction.protected_hits=2,3"]) == 2
    assert "eviction.protected_hits: there is no such setting" in capsys.readouterr().err


def test_the_jobs_run_and_are_not_repeated(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = ["replay", "-m", *TRACE, "eviction=lru,slru", "eviction.protected_hits=2,3"]
    for word in ("hit rate", "finished before"):
        assert main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("4 combinations, 3 make sense")
        assert all(word in line for line in lines if line.startswith("job ") and line[4].isdigit())
    evictions = [json.loads((folder / str(job) / "result.json").read_text())["config"]["eviction"] for job in range(3)]
    assert [eviction.get("protected_hits") for eviction in evictions] == [None, 2, 3]
    assert not (folder / "3").exists()
