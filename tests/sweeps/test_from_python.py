"""kvsim.sweep does what a multirun of the command does, and what a script gets from it."""

import csv
import gzip
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.cli import main
from kvsim.errors import UsageError
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.results import frame as frames
from kvsim.trace.base import Trace

MEASURED = ("versions", "load_s", "wall_s", "requests_per_s", "command_line")
SWEPT = {"eviction": ["lru", "arc"], "tiers.gpu.capacity": ["3000pages", "6000pages"]}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return kvsim.load_trace("synthetic", sessions=5)


def records(folder: Path) -> dict[str, dict[str, Any]]:
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))}
    return {name: {key: value for key, value in record.items() if key not in MEASURED} for name, record in found.items()}


def test_the_results_are_those_of_the_command(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["trace.sessions=5", *(f"{key}={','.join(values)}" for key, values in SWEPT.items())]
    assert main(["replay", "-m", *settings, f"output={tmp_path / 'command'}"]) == 0
    swept = kvsim.sweep(trace, SWEPT, output=tmp_path / "python")
    assert records(tmp_path / "command") == records(tmp_path / "python") == {
        run.name: {key: value for key, value in run.record.items() if key not in MEASURED} for run in swept
    }  # fmt: skip
    rows = [csv.DictReader((tmp_path / name / "sweep.csv").read_text().splitlines()) for name in ("command", "python")]
    of_command, of_python = ([{k: v for k, v in row.items() if k not in MEASURED} for row in table] for table in rows)
    assert of_command == of_python
    assert swept.table["belady_hit_rate"].tolist() == [float(row["belady_hit_rate"]) for row in of_command]
    for name in records(tmp_path / "command"):
        one, other = (gzip.decompress((tmp_path / way / name / "requests.csv.gz").read_bytes()) for way in ("command", "python"))
        assert one == other
    capsys.readouterr()
    assert main(["report", str(tmp_path / "python")]) == 0
    assert "belady" in capsys.readouterr().out


@pytest.mark.long
def test_workers_give_the_same(trace: Trace, tmp_path: Path) -> None:
    policies = {"eviction": ["lru", SegmentedLRU(protected_hits=3)]}
    alone = kvsim.sweep(trace, policies, "tiers.gpu.capacity=3000pages", output=tmp_path / "alone")
    kvsim.sweep(trace, policies, "tiers.gpu.capacity=3000pages", output=tmp_path / "spread", workers=2)
    assert records(tmp_path / "alone") == records(tmp_path / "spread")
    assert [run.settings["eviction"] for run in alone] == ["lru", "SegmentedLRU"]
    assert alone[1].record["config"]["eviction"]["protected_hits"] == 3
    assert list(alone.table["belady_hit_rate"]) == [alone.table["belady_hit_rate"][0]] * 2


def test_a_job_that_has_finished_is_not_run_again(trace: Trace, tmp_path: Path) -> None:
    kvsim.sweep(trace, SWEPT, output=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    again = kvsim.sweep(trace, {"eviction": ["lru", LRU()]} | {"tiers.gpu.capacity": "3000pages"}, output=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")} == before
    assert {run.name for run in again} == {"0"}, "an object of the class with the same settings is the same run"


def test_a_failed_job_is_reported_and_the_others_go_on(trace: Trace) -> None:
    swept = kvsim.sweep(trace, {"tiers.gpu.capacity": ["3000pages", 40, "6000pages"]}, eviction="fifo")
    assert list(swept.errors) == ["1"] and "40 has no unit" in swept.errors["1"]
    assert [run.name for run in swept] == ["0", "2"] and len(swept) == 2 and swept[-1].name == "2"
    assert swept.table["status"].tolist() == ["finished", "failed", "finished"]
    assert "1 failed" in repr(swept) and "40 has no unit" in swept._repr_html_()
    with pytest.raises(UsageError, match=r"all 1 jobs failed; the first is job 0: tiers\.gpu\.capacity: 40 has no unit"):
        kvsim.sweep(trace, {"tiers.gpu.capacity": 40})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": {"eviction": ["lru", "lruu"]}}, "eviction=lruu: there is no such choice; did you mean lru?"),
        ({"settings": {"eviction": []}}, "eviction: the sweep has no values for it"),
        ({"settings": {"eviction": SegmentedLRU}}, r"pass an object, SegmentedLRU\(\.\.\.\)"),
        ({"settings": {"placement": [LRU()]}}, "LRU is a policy of the family eviction"),
        ({"settings": {"trace.limit": [1, 2]}}, "the trace is already loaded"),
        ({"settings": {"seed": [0]}, "command": "curve"}, "command must be one of replay, simulate"),
        ({"settings": {"seed": [0]}, "workers": 0}, "workers must be at least 1"),
    ],
)
def test_mistakes_end_it_before_any_job(trace: Trace, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        kvsim.sweep(trace, **arguments, output=tmp_path / "sweep")
    assert not list(tmp_path.glob("sweep/*/result.json"))


def script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_a_script_without_a_guard_ends_with_a_clear_line(tmp_path: Path) -> None:
    code = 'import kvsim\ntrace = kvsim.load_trace("synthetic", sessions=2)\nkvsim.sweep(trace, {"seed": [0, 1]}, workers=2)\n'
    ran = script(tmp_path, code)
    assert ran.returncode == 1
    line = "UsageError: kvsim.sweep: the worker processes import the script that starts them: put the call under `if __name__"
    assert line in ran.stderr.splitlines()[-1]


def test_a_policy_of_the_script_itself_reaches_the_workers(tmp_path: Path) -> None:
    code = """
import kvsim
from dataclasses import dataclass
from kvsim.policies.eviction.lru import LRU

@dataclass(kw_only=True, eq=False)
class Mine(LRU):
    depth: int = 1

if __name__ == "__main__":
    trace = kvsim.load_trace("synthetic", sessions=5)
    swept = kvsim.sweep(trace, {"eviction": ["lru", Mine(depth=2)], "tiers.gpu.capacity": "2000pages"}, workers=2)
    assert swept[0].hit_rate == swept[1].hit_rate, swept
    print(swept[1].record["config"]["eviction"]["depth"], swept[1].record.get("config_hash"))
"""
    ran = script(tmp_path, code)
    assert ran.stdout == "2 None\n", ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-c", "{code}"], "eviction=Mine() cannot reach a worker process: its class is defined in a notebook or at a prompt"),
        pytest.param(["-"], "kvsim.sweep: a program on standard input has no worker processes", marks=pytest.mark.long),
    ],
)
def test_a_policy_that_workers_cannot_import_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    code = """
import kvsim
from kvsim.policies.eviction.lru import LRU

class Mine(LRU):
    pass

kvsim.sweep(kvsim.load_trace("synthetic", sessions=2), {"eviction": ["lru", Mine()]}, workers=2)
"""
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, *(word.format(code=code) if "{" in word else word for word in words)], cwd=tmp_path, input=code,
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert message in ran.stderr.splitlines()[-1]


def test_a_temporary_folder_lives_as_long_as_the_sweep(trace: Trace, tmp_path: Path) -> None:
    swept = kvsim.sweep(trace, {"eviction": ["lru"]})
    folder = swept.folder
    assert len(swept[0].requests) == swept[0].record["requests"]
    swept.save(tmp_path / "kept")
    assert (tmp_path / "kept" / "sweep.csv").exists() and (tmp_path / "kept" / "0" / "result.json").exists()
    del swept
    assert not folder.exists()


def test_a_picture_has_a_line_for_each_value_and_the_bound(trace: Trace) -> None:
    swept = kvsim.sweep(trace, SWEPT)
    figure = swept.plot(x="tiers.gpu.capacity", color="eviction")
    assert [line.name for line in figure.data] == ["lru", "arc", "belady"]
    assert figure.data[0].x == (3000 * 2 / 1024, 6000 * 2 / 1024), "GiB, at 2 MiB a page"
    assert figure.data[0].y == tuple(run.hit_rate for run in swept[:2])
    assert swept.plot(x="eviction", y="rejected").data[0].x == ("lru", "arc")
    for arguments, message in (
        ({"x": "evction"}, "did you mean eviction"),
        ({"y": "hit_rat"}, "no such measure; did you"),
    ):
        with pytest.raises(UsageError, match=message):
            swept.plot(**arguments)


def test_a_table_is_made_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["request,arrival_s,engine,status", "0,1,,finished", "1,2.5,3,rejected"]
    columns = frames.columns_of(lines)
    assert {name: column.dtype.kind for name, column in columns.items()} == {
        "request": "i", "arrival_s": "f", "engine": "f", "status": "U",
    }  # fmt: skip

    @dataclass
    class Polars:
        DataFrame: type = dict

    def only(library: str) -> Any:
        def find(name: str) -> Any:
            if name != library:
                raise ImportError(name)
            return Polars()

        return find

    monkeypatch.setattr(frames, "import_module", only("polars"))
    assert list(frames.frame(columns)) == ["request", "arrival_s", "engine", "status"]
    monkeypatch.setattr(frames, "import_module", only("none"))
    table = frames.frame(columns)
    assert isinstance(table, np.ndarray) and table["status"].tolist() == ["finished", "rejected"]
    assert np.isnan(table["engine"][0]) and table["engine"][1] == 3


@pytest.mark.parametrize("settings", ["eviction=lru", ["eviction"], {}, None, 3])
def test_what_maps_no_keys_to_values_is_refused(settings: Any, trace: Trace) -> None:
    with pytest.raises(UsageError, match=r"^kvsim\.sweep: settings must map keys to values, such as .*, not be "):
        kvsim.sweep(trace, settings)


def test_a_sweep_that_is_interrupted_leaves_no_temporary_folder(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int) -> None:
        assert done == 1 and [one.name.startswith("kvsim-sweep-") for one in tmp_path.iterdir()] == [True]
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        kvsim.sweep(trace, SWEPT, advance=interrupt)
    assert not list(tmp_path.iterdir())


def test_errors_are_text_on_a_page(trace: Trace) -> None:
    swept = kvsim.sweep(trace, {"tiers.gpu.capacity": ["3000pages", "<b>many</b>"]})
    assert list(swept.errors) == ["1"] and "<b>" in swept.errors["1"]
    assert "<b>many" not in swept._repr_html_() and "&lt;b&gt;many" in swept._repr_html_()
