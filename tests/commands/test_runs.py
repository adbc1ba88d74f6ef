"""Runs from the command line to their folders."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main

SMALL = ("trace.sessions=20", "tiers.gpu.capacity=6000pages", "tiers.cpu.capacity=3000pages", "tiers.disk.capacity=9000pages")
FILES = ["report.html", "requests.csv.gz", "result.json"]
MEASURED = ("versions", "load_s", "wall_s", "requests_per_s")


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
