"""Weights & Biases, offline: what is logged, that nothing lies elsewhere, and that no run is lost by it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main
from kvsim.report.result import RunRecord
from kvsim.report.wandb_logger import MOST_POINTS, WandbLogger, timeline_points

needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
SMALL = ("trace.sessions=20", "tiers.gpu.capacity=3000pages", "logger=wandb")
FILES = ["report.html", "requests.csv.gz", "result.json"]


def run_alone(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process and a home folder of its own: W&B starts a service and leaves settings behind."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join([*environment.pop("first", "").split(), *filter(None, sys.path)])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    code = "import sys; from kvsim.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**clean, "HOME": str(home), "PYTHONPATH": path, **environment},
    )  # fmt: skip


@needs_wandb
def test_a_sweep_is_a_group_and_lies_in_its_folder(tmp_path: Path):
    ran = run_alone(tmp_path, "simulate", "-m", *SMALL, "eviction=lru,arc", "output=sweep")
    assert ran.returncode == 0, ran.stderr
    assert "warning" not in ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "sweep"]
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    for job in ("0", "1"):
        assert sorted(path.name for path in (tmp_path / "sweep" / job).iterdir()) == [*FILES, "wandb"]
        (log,) = (tmp_path / "sweep" / job / "wandb").glob("offline-run-*/*.wandb")
        content = log.read_bytes()
        assert b"sweep" in content and b"hit_rate" in content and b"report.html" in content


@needs_wandb
def test_a_job_that_crashes_is_marked_as_failed(tmp_path: Path):
    ran = run_alone(tmp_path, "replay", "-m", "trace=mooncake", "trace.path=none", "logger=wandb", "output=sweep")
    assert ran.returncode == 2
    (log,) = (tmp_path / "sweep" / "0" / "wandb").glob("offline-run-*/*.wandb")
    assert b"failed" in log.read_bytes() and b"none: cannot be read" in log.read_bytes()


def broken(folder: Path, text: str) -> str:
    """A folder with a package ``wandb`` of this text."""
    (folder / "fake").mkdir()
    (folder / "fake" / "wandb.py").write_text(text)
    return str(folder / "fake")


@pytest.mark.parametrize(
    "text", ["raise ImportError('not there')", "def init(**settings): raise RuntimeError('down')\nSettings = dict"]
)
def test_without_wandb_the_run_is_complete(text: str, tmp_path: Path):
    ran = run_alone(tmp_path, "replay", *SMALL, "output=run", first=broken(tmp_path, text))
    assert ran.returncode == 0
    (warning,) = ran.stderr.splitlines()
    assert warning.startswith("kvsim: warning: not logged to Weights & Biases:")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == FILES


def test_a_timeline_has_few_points():
    edges = [float(edge) for edge in range(5001)]
    hits = {"axis": "request", "edges": edges, "hit_rate": {"gpu": [0.5] * 5000}}
    result: RunRecord = {"timeline": {"hits": hits}, "tiers": {"gpu": {}}}
    points: list[dict[str, Any]] = list(timeline_points(result))
    assert len(points) == MOST_POINTS
    assert points[1] == {"timeline/request": 5.5, "timeline/hit_rate_gpu": 0.5}


def test_settings_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert WandbLogger().mode == "offline"
    assert main(["replay", *SMALL, "logger.mode=sometimes", f"output={tmp_path}"]) == 2
    assert capsys.readouterr().err == "kvsim: logger.mode must be one of offline, online, not sometimes\n"


def test_the_logger_is_no_part_of_what_decides_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, words in (("a", ["logger=none"]), ("b", ["logger=none", "seed=1"]), ("c", [])):
        assert main(["replay", "trace.sessions=20", "tiers.gpu.capacity=3000pages", *words, f"output={name}"]) == 0
    hashes = {name: json.loads(Path(name, "result.json").read_text())["config_hash"] for name in "abc"}
    assert hashes["a"] == hashes["c"] != hashes["b"]
