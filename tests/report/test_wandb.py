"""Weights & Biases, offline: what is logged, that nothing lies elsewhere, and that no run is lost by it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kvsim.cli import main
from kvsim.report.wandb import logger as wandb_logger
from kvsim.report.wandb.content import request_rows, run_name, series
from kvsim.results.result import RunRecord

needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
SMALL = ("trace.sessions=20", "tiers.gpu.capacity=3000pages", "logger=wandb")
FILES = ["requests.csv.gz", "result.json"]


def run_alone(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process and a home folder of its own: W&B starts a service and leaves settings behind."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, sys.path))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    code = "import sys; from kvsim.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**clean, "HOME": str(home), "PYTHONPATH": path, **environment},
    )  # fmt: skip


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """The offline runs below a folder by W&B's own records: how each was called, its configuration, summary, series and files."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for log in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run: dict[str, Any] = {"config": {}, "summary": {}, "series": [], "metrics": {}, "files": []}
        for data in entries(log.read_bytes()):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                for name in ("display_name", "project", "entity", "run_group", "job_type"):
                    run[name] = getattr(record.run, name)
                run["tags"] = list(record.run.tags)
                run["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "summary":
                run["summary"] |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
            elif kind == "history":
                items = [(item.key or ".".join(item.nested_key), json.loads(item.value_json)) for item in record.history.item]
                run["series"].append({key.removesuffix(".path"): value for key, value in items if not key.startswith("_")})
            elif kind == "metric":
                run["metrics"][record.metric.glob_name or record.metric.name] = record.metric
            elif kind == "artifact":
                run["files"] += [entry.path for entry in record.artifact.manifest.contents]
            elif kind == "exit":
                run["exit_code"] = record.exit.exit_code
        found.append(run)
    return found


def entries(log: bytes) -> Iterator[bytes]:
    """The entries of a file of W&B's transaction log: blocks of 32 KiB after a header of 7 bytes, with entries in fragments, each
    behind its checksum (4 bytes), length (2) and whether it is whole (1), the first (2), a middle (3) or the last (4)."""
    at, entry = 7, b""
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        entry = log[at + 7 : at + 7 + length] if kind in (1, 2) else entry + log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield entry


@needs_wandb
def test_a_sweep_is_a_group_of_runs_and_a_comparison(tmp_path: Path):
    line = '{{"timestamp": {}, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}}\n'
    for name, repeats in (("one", 1), ("two", 2)):
        (tmp_path / name).write_text("".join(line.format(60_000 * at) for at in range(1 + repeats)))
    settings = (*SMALL[1:], "trace=mooncake", "trace.path=one,two,none", "output=sweep")
    ran = run_alone(tmp_path, "simulate", "-m", *settings)
    assert ran.returncode == 2 and "warning" not in ran.stderr, ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "one", "sweep", "two"]
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert sorted(path.name for path in (tmp_path / "sweep" / "0").iterdir()) == ["report.html", *FILES]
    runs = sorted(runs_of(tmp_path / "sweep"), key=lambda run: (run["job_type"] == "comparison", "error" in run["summary"]))
    *finished, failed, comparison = runs
    assert {run["display_name"] for run in finished} == {"path=one", "path=two"}
    assert [run["display_name"] for run in (failed, comparison)] == ["path=none", "sweep: comparison"]
    assert {(run["run_group"], run["project"]) for run in runs} == {("sweep", "kvsim")}
    assert all(run["config"]["eviction"] == "lru" and run["exit_code"] == 0 for run in finished)
    assert failed["summary"]["status"] == "failed" and failed["exit_code"] == 1
    assert "none: cannot be read" in failed["summary"]["error"]
    assert {"sweep.csv", "report.html"} <= set(comparison["files"])
    assert comparison["summary"]["finished"] == 2 and comparison["summary"]["best_hit_rate"] > 0
    assert {"jobs", "hit rate"} <= comparison["series"][0].keys()


@needs_wandb
def test_a_run_has_its_totals_and_its_course_over_simulated_time(tmp_path: Path):
    ran = run_alone(tmp_path, "simulate", *SMALL, "tiers.cpu.capacity=1GiB", "output=run")
    assert ran.returncode == 0 and "warning" not in ran.stderr, ran.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted([*FILES, "report.html", "wandb"])
    (run,) = runs_of(tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert run["display_name"] == "synthetic lru" and run["job_type"] == "simulate" and not run["run_group"]
    assert run["config"]["capacity_bytes"] == {"gpu": 3000 * result["page_bytes"], "cpu": 2**30}
    assert run["config"]["settings"]["page_tokens"] == 16 and run["config"]["eviction"] == "lru"
    assert run["summary"]["hit_rate"] == result["hit_rate"] and run["summary"]["ttft_s"] == result["ttft_s"]
    assert not [name for name in run["summary"] if name.startswith("timeline/")], "totals, not the last bin"
    assert run["metrics"]["timeline/*"].step_metric == "timeline/time_s"
    points = [point for point in run["series"] if "timeline/time_s" in point]
    assert {"timeline/hit_rate_gpu", "timeline/hit_rate_cpu", "timeline/ttft_s", "timeline/waiting_requests"} <= points[5].keys()
    assert len(points) == len(result["timeline"]["hits"]["edges"]) - 1
    assert "result.json" in run["files"] and "report.html" not in run["files"]
    (place,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert sum(path.stat().st_size for path in place.rglob("*")) < 500_000
    (table,) = place.glob("files/media/table/requests*.json")
    rows = json.loads(table.read_text())
    assert len(rows["data"]) == result["requests"] and rows["columns"][0] == "request"


@needs_wandb
def test_variables_of_wandb_hold_unless_a_setting_says_otherwise(tmp_path: Path):
    """Of the entity, the name and the folder, no setting says anything."""
    given = {"WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_NAME": "mine", "WANDB_TAGS": "a,b", "WANDB_RUN_GROUP": "g"}
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    own = ("logger.project=ours", "logger.tags=[c]", "logger.group=h", "logger.mode=offline", "logger.request_rows=0")
    ran = run_alone(tmp_path, "replay", *SMALL, *own, "output=run", WANDB_MODE="disabled", WANDB_DIR=str(folder), **given)
    assert ran.returncode == 0 and not runs_of(tmp_path / "run")
    (run,) = runs_of(folder)
    names = ("project", "entity", "run_group", "tags", "display_name")
    assert [run[name] for name in names] == ["ours", "team", "h", ["c"], "mine"]
    assert "requests" not in run["series"][0]


@needs_wandb
@pytest.mark.long
def test_all_variables_and_all_settings_of_wandb_hold(tmp_path: Path):
    given = {
        "WANDB_PROJECT": "theirs",
        "WANDB_ENTITY": "team",
        "WANDB_MODE": "offline",
        "WANDB_TAGS": "a,b",
        "WANDB_RUN_GROUP": "g",
    }
    for own, expected in (
        (("logger.entity=me",), ["theirs", "me", "g", ["a", "b"]]),
        (("logger.project=ours",), ["ours", "team", "g", ["a", "b"]]),
    ):
        output = f"output={own[0].partition('=')[2]}"
        assert run_alone(tmp_path, "replay", *SMALL, *own, output, **given).returncode == 0
        (run,) = runs_of(tmp_path / output.partition("=")[2])
        assert [run[name] for name in ("project", "entity", "run_group", "tags")] == expected


@needs_wandb
def test_an_agent_of_wandb_runs_the_command_of_the_guide(tmp_path: Path):
    """The command line is the one that W&B's agent makes of the guide's file; W&B itself is off, so that nothing is logged."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    guide = Path(__file__).resolve().parents[2] / "docs" / "guides" / "wandb.md"
    text = re.search(r"```yaml title=\"sweep\.yaml\"\n(.*?)```", guide.read_text(), re.DOTALL)
    assert text
    sweep = yaml.safe_load(text[1])
    values = {name: {"value": parameter["values"][0]} for name, parameter in sweep["parameters"].items()}
    macros = utils.create_sweep_command_args({"args": values})
    words: list[str] = []
    for word in utils.create_sweep_command(list(sweep["command"])):
        words += macros.get(word[2:-1], []) if word.startswith("${") else [word]
    assert words[:2] == ["kvsim", "simulate"]
    ran = run_alone(tmp_path, *words[1:], "trace.sessions=5", WANDB_DISABLED="true", WANDB_RUN_ID="abc", WANDB_SWEEP_ID="s")
    assert ran.returncode == 0, ran.stderr
    assert not list(tmp_path.rglob("wandb"))
    result = json.loads((tmp_path / "outputs" / "agent" / "abc" / "result.json").read_text())
    metric = sweep["metric"]["name"].split(".")
    assert isinstance(result[metric[0]][metric[1]] if metric[1:] else result[metric[0]], float)


@pytest.mark.parametrize(
    "text", ["raise ImportError('not there')", "def init(**settings): raise RuntimeError('down')\nSettings = dict"]
)
def test_without_wandb_the_run_is_complete(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "fake")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert main(["replay", *SMALL, f"output={tmp_path / 'run'}"]) == 0
    sys.modules.pop("wandb", None)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("kvsim: warning: not logged to Weights & Biases:")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["report.html", *FILES]


def test_series_count_who_waits_and_for_how_long():
    hits = {"axis": "arrival_s", "edges": [0.0, 10.0, 20.0], "hit_rate": {"gpu": [0.5, 1.0]}}
    result: RunRecord = {"timeline": {"hits": hits}, "tiers": {"gpu": {}}}
    requests = {"arrival_s": np.array([0.0, 4.0, 11.0, 12.0]), "ttft_s": np.array([2.0, 8.0, 1.0, np.nan])}
    assert series(result, requests) == [
        {"timeline/time_s": 5.0, "timeline/hit_rate_gpu": 0.5, "timeline/ttft_s": 5.0, "timeline/waiting_requests": 1},
        {"timeline/time_s": 15.0, "timeline/hit_rate_gpu": 1.0, "timeline/ttft_s": 1.0, "timeline/waiting_requests": 0},
    ]
    columns, rows = request_rows({"request": np.arange(11)} | {"ttft_s": np.full(11, np.nan)}, ("gpu",), 3)
    assert (columns, rows) == (["request", "ttft_s"], [[0, None], [5, None], [10, None]])


def test_runs_are_named_after_what_was_swept():
    config = {"eviction": {"_target_": "a.B", "protected_hits": 3}, "tiers": {"gpu": {"capacity": "40GiB"}}, "seed": 1}
    record: RunRecord = {
        "config": config,
        "choices": {"trace": "mooncake", "eviction": "slru", "eviction@tiers.cpu.eviction": "arc"},
    }
    assert run_name(record, []) == "mooncake slru"
    swept = ["eviction", "tiers.gpu.capacity", "eviction@tiers.cpu.eviction", "eviction.protected_hits", "seed"]
    assert run_name(record, swept) == "eviction=slru gpu=40GiB cpu eviction=arc protected_hits=3 seed=1"


def test_settings_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert main(["replay", *SMALL, "logger.mode=sometimes", f"output={tmp_path}"]) == 2
    assert capsys.readouterr().err == "kvsim: logger.mode must be one of offline, online, disabled, not sometimes\n"
    monkeypatch.setattr(wandb_logger, "find_spec", lambda name: None)
    line = "kvsim: logger: Weights & Biases is not installed: pip install kvsim[wandb], or leave out logger=wandb\n"
    for words in ((), ("-m", "seed=0,1")):
        assert main(["replay", *words, *SMALL, f"output={tmp_path / 'none'}"]) == 2
        assert capsys.readouterr().err == line
    assert not (tmp_path / "none").exists(), "the line comes before the run"


def test_the_logger_is_no_part_of_what_decides_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, words in (("a", ["logger=none"]), ("b", ["logger=none", "seed=1"]), ("c", [])):
        assert main(["replay", "trace.sessions=20", "tiers.gpu.capacity=3000pages", *words, f"output={name}"]) == 0
    hashes = {name: json.loads(Path(name, "result.json").read_text())["config_hash"] for name in "abc"}
    assert hashes["a"] == hashes["c"] != hashes["b"]


@needs_wandb
@pytest.mark.long  # W&B starts a service
def test_a_shadow_logs_rates_over_time_and_no_request(tmp_path: Path) -> None:
    lines = [{"timestamp": 100 * at, "token_ids": [at % 2] * 64 + [7_654_321], "output_length": 1} for at in range(20)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("log=log.jsonl", "shadow.follow=false", "model=tiny", "tiers.gpu.capacity=5pages", "logger=wandb", "output=out")
    done = run_alone(tmp_path, "shadow", *words)
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = runs_of(tmp_path / "out")
    assert run["job_type"] == "shadow" and run["summary"]["requests"] == 20
    assert run["summary"]["hit_rate.gpu_2x"] > run["summary"]["hit_rate.as_configured"]
    assert run["series"][-1].keys() >= {"shadow/at_s", "shadow/as_configured", "shadow/gpu_2x"}
    assert b"7654321" not in b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
