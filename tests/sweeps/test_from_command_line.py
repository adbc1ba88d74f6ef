"""Multiruns: what is kept, redone, reported and written; by every launcher that is installed."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main

SMALL = ("trace.sessions=5", "tiers.gpu.capacity=3000pages,6000pages", "eviction=lru,arc", "output=sweep")
MEASURED = ("versions", "load_s", "wall_s", "requests_per_s")
COMMAND = [sys.executable, "-c", "import sys; from kvsim.cli import main; sys.exit(main())"]


def needs(plugin: str) -> pytest.MarkDecorator:
    name = f"hydra_plugins.hydra_{plugin}"
    missing = find_spec("hydra_plugins") is None or find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed: pip install kvsim[{plugin.split('_')[0]}]")


def results(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("*/result.json")):
        record = json.loads(path.read_text())
        found[path.parent.name] = {key: value for key, value in record.items() if key not in MEASURED}
    return found


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in MEASURED} for row in csv.DictReader(file)]


def times(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}


def test_a_sweep_writes_one_table_and_one_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "-m", *SMALL]) == 0
    rows = table(folder / "sweep")
    assert [(row["job"], row["eviction"], row["tiers.gpu.capacity"]) for row in rows] == [
        ("0", "lru", "3000pages"), ("1", "arc", "3000pages"), ("2", "lru", "6000pages"), ("3", "arc", "6000pages"),
    ]  # fmt: skip
    for row, record in zip(rows, results(folder / "sweep").values(), strict=True):
        assert float(row["hit_rate"]) == record["hit_rate"]
        assert float(row["hit_rate"]) <= float(row["belady_hit_rate"]) <= float(row["unlimited_hit_rate"])
    for capacity, rate in {(row["tiers.gpu.capacity"], row["belady_hit_rate"]) for row in rows}:
        settings = [SMALL[0], f"tiers.gpu.capacity={capacity}", "eviction=belady", "output=bound"]
        assert main(["replay", *settings]) == 0
        assert json.loads(Path("bound/result.json").read_text())["hit_rate"] == float(rate)
    assert (
        "<title>llama3_8b, synthetic: 4 runs by gpu capacity, eviction</title>" in (folder / "sweep" / "report.html").read_text()
    )
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(("no cache", "belady ", "unlimited "))] == [
        "no", "belady", "belady", "unlimited",
    ]  # fmt: skip


def test_a_larger_sweep_keeps_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "-m", *SMALL]) == 0
    before = times(folder / "sweep")
    wider = [setting if not setting.startswith("eviction") else "eviction=fifo,lru,arc" for setting in SMALL]
    capsys.readouterr()
    assert main(["replay", "-m", *wider]) == 0
    assert capsys.readouterr().out.count("finished before") == 4
    after = times(folder / "sweep")
    assert {name: after[name] for name in before} == before
    assert len(after) == 6
    kinds = [(row["eviction"], row["tiers.gpu.capacity"]) for row in table(folder / "sweep")]
    assert len(set(kinds)) == 6


def test_a_changed_trace_is_played_again(folder: Path) -> None:
    line = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
    Path("trace.jsonl").write_text(line)
    settings = ["trace=mooncake", "trace.path=trace.jsonl", "tiers.gpu.capacity=3000pages,6000pages", "output=sweep"]
    for copies in (1, 3):
        Path("trace.jsonl").write_text(line * copies)
        assert main(["replay", "-m", *settings]) == 0
    assert sorted(record["requests"] for record in results(folder / "sweep").values()) == [1, 1, 3, 3]


def test_a_failing_job_is_said_at_once_and_the_others_go_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "-m", "trace.sessions=5", "tiers.gpu.capacity=40,6000pages", "output=sweep"]) == 2
    errors = capfd.readouterr().err.splitlines()
    assert errors[0] == "kvsim: 1 of 2 jobs cannot run; the others do:"
    assert errors[1].startswith("  job 0: tiers.gpu.capacity: 40 has no unit")
    assert errors[2].startswith("kvsim: 1 of 2 jobs failed; the first is job 0: tiers.gpu.capacity: 40 has no unit")
    assert len(errors) == 3
    assert [(row["job"], row["status"]) for row in table(folder / "sweep")] == [("0", "failed"), ("1", "finished")]
    assert "Failed jobs" in (folder / "sweep" / "report.html").read_text()


def test_a_job_that_failed_is_run_again(folder: Path) -> None:
    settings = ["trace=mooncake", "trace.path=trace.jsonl", "tiers.gpu.capacity=6000pages", "eviction=lru,arc", "output=sweep"]
    assert main(["replay", "-m", *settings]) == 2
    Path("trace.jsonl").write_text('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n')
    assert main(["replay", "-m", *settings]) == 0
    assert {row["status"] for row in table(folder / "sweep")} == {"finished"}
    assert not list((folder / "sweep").glob("*/error.json"))


def test_fail_fast_begins_no_other_job(folder: Path) -> None:
    settings = ["trace.sessions=5", "tiers.gpu.capacity=6000pages,10pages,7000pages", "output=sweep", "sweep.fail_fast=true"]
    assert main(["replay", "-m", *settings]) == 2
    assert list(results(folder / "sweep")) == ["0"]


def test_a_dry_run_lists_the_jobs_and_runs_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "-m", "trace.sessions=5", "tiers.gpu.capacity=3000pages", "eviction=lru", "output=sweep"]) == 0
    before = times(folder / "sweep")
    capsys.readouterr()
    settings = [setting.replace("6000pages", "40") for setting in SMALL]
    assert main(["replay", "-m", *settings, "sweep.dry_run=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "job 0  tiers.gpu.capacity=3000pages eviction=lru  finished before"
    assert lines[1] == "job 1  tiers.gpu.capacity=3000pages eviction=arc"
    assert lines[2].startswith("job 2  tiers.gpu.capacity=40 eviction=lru  cannot work: tiers.gpu.capacity: 40 has no unit")
    assert lines[4] == "4 jobs in sweep, 1 finished before"
    assert times(folder / "sweep") == before


def test_the_objectives_are_numbers_of_the_result() -> None:
    from kvsim.errors import UsageError
    from kvsim.plans.command_settings import SweepSettings
    from kvsim.sweeps.objective import objectives

    tiers = {"gpu": {"capacity_pages": 10}, "cpu": {"capacity_pages": 30}}
    result = {"hit_rate": 0.5, "ttft_s": {"p99": 2.0, "p50": None}, "tiers": tiers, "page_bytes": 4}
    assert objectives(result, SweepSettings(objective=["hit_rate"])) == 0.5
    assert objectives(result, SweepSettings(objective=["ttft_s.p99", "capacity_bytes"])) == [2.0, 160.0]
    assert objectives(result, SweepSettings()) is None
    for name, message in (("ttft_s", "ttft_s.p99"), ("ttft_s.p50", "is not a number"), ("ttft_s.p1", "no ttft_s.p1")):
        with pytest.raises(UsageError, match=message):
            objectives(result, SweepSettings(objective=[name]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep.fail_fast=true"], "sweep.fail_fast has no effect on a single run"),
        (["-m", "sweep.objective=hit_rat"], "sweep.objective: result.json has no number hit_rat; did you mean hit_rate?"),
        (["-m", "sweep.objective=[]"], "sweep.objective is empty"),
        (["-m", "sweep.fail_fast=perhaps"], "sweep.fail_fast"),
    ],
)
def test_mistakes_end_before_any_job(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "trace.sessions=5", "output=sweep", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(folder.glob("sweep/*/result.json"))


def test_a_mistake_in_any_choice_or_key_ends_a_sweep_before_its_first_job(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, message in (
        ("eviction=lru,lruu", "eviction=lruu: there is no such choice; did you mean lru?"),
        ("tiers.gpu.capacitie=1,2", "tiers.gpu.capacitie: there is no such setting; did you mean tiers.gpu.capacity?"),
    ):
        assert main(["replay", "-m", "trace.sessions=5", wrong, "seed=1,2", "output=sweep"]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1 and message in errors[0]
        assert not list(folder.glob("sweep/*/"))


@needs("optuna_sweeper")
def test_a_mistake_ends_an_optimization_before_its_first_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimize = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "sweep.objective=hit_rate", "output=sweep"]
    assert main(["replay", "-m", *optimize, "seed=choice(1,2)", "eviction=choice(lru,lruu)"]) == 2
    assert "eviction=lruu: there is no such choice; did you mean lru?" in capsys.readouterr().err
    assert not (folder / "sweep").exists()


def alone(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """A sweep in a process of its own: joblib's workers outlive a sweep, and stay in the folder where they began."""
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip


def interrupt(arguments: list[str], folder: Path, how: signal.Signals) -> int:
    """Begin a sweep in a session of its own, signal all its processes when two jobs are finished; returns its exit code."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background inherits that it is ignored
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    until = time.monotonic() + 120
    while len(results(folder)) < 2 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    for _ in range(10):  # as a person would who sees it go on: an interrupt within a callback may be lost
        os.killpg(process.pid, how)
        try:
            return process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("the sweep does not end")


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("basic", signal.SIGINT),
        pytest.param("joblib", signal.SIGKILL, marks=[pytest.mark.long, needs("joblib_launcher")]),
        pytest.param("basic", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("joblib", signal.SIGINT, marks=[pytest.mark.long, needs("joblib_launcher")]),
    ],
)
def test_a_sweep_that_was_ended_goes_on_where_it_was(how: signal.Signals, launcher: str, folder: Path) -> None:
    workers = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    sweep = [f"hydra/launcher={launcher}", *workers, "trace.sessions=60", "tiers.gpu.capacity=6000pages,8000pages",
             "eviction=lru,fifo,arc,slru"]  # fmt: skip
    assert main(["simulate", "-m", *sweep[1 + len(workers) :], "output=undisturbed"]) == 0
    code = interrupt(["simulate", "-m", *sweep, "output=ended"], folder / "ended", how)
    assert code == (130 if how == signal.SIGINT else -signal.SIGKILL)
    kept = times(folder / "ended")
    assert 2 <= len(kept) < 8
    assert (folder / "ended" / "sweep.csv").exists() == (how == signal.SIGINT)
    half = next(str(number) for number in range(8) if str(number) not in kept)
    (folder / "ended" / half).mkdir(exist_ok=True)
    for name in ("requests.csv.gz", ".result.json.part"):
        (folder / "ended" / half / name).write_bytes(b"half")
    assert alone(["simulate", "-m", *sweep, "output=ended"]).returncode == 0
    after = times(folder / "ended")
    assert {name: after[name] for name in kept} == kept
    whole, ended = results(folder / "undisturbed"), results(folder / "ended")
    for record in (*whole.values(), *ended.values()):
        del record["command_line"]
    assert ended == whole
    assert table(folder / "ended") == table(folder / "undisturbed")
    for name in whole:
        csvs = [(folder / sweep_name / name / "requests.csv.gz").read_bytes() for sweep_name in ("undisturbed", "ended")]
        assert csvs[0] == csvs[1]
        assert not list((folder / "ended" / name).glob(".*"))


@pytest.mark.parametrize(
    ("launcher", "more"),
    [
        pytest.param("joblib", ["hydra.launcher.n_jobs=2"], marks=needs("joblib_launcher")),
        pytest.param("submitit_local", [], marks=[pytest.mark.long, needs("submitit_launcher")]),
        pytest.param("ray", [], marks=needs("ray_launcher")),
    ],
)
def test_every_launcher_gives_the_same(launcher: str, more: list[str], folder: Path) -> None:
    """In a process of its own: the launchers leave threads, warnings and settings behind."""
    assert main(["replay", "-m", *SMALL]) == 0
    arguments = ["replay", "-m", f"hydra/launcher={launcher}", *more, *SMALL[:-1], "output=other", "trace.limit=null,0"]
    ended = alone(arguments)
    assert ended.returncode == 2
    assert "4 of 8 jobs cannot run; the others do:\n  jobs 1, 3, 5, 7: trace.limit must be at least 1, not 0" in ended.stderr
    rates = [[row["hit_rate"] for row in table(folder / name) if row["status"] == "finished"] for name in ("sweep", "other")]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 4


@needs("optuna_sweeper")
@pytest.mark.parametrize(
    ("direction", "objective"),
    [
        pytest.param("maximize", "hit_rate", marks=pytest.mark.long),
        ("[maximize,minimize]", "[hit_rate,capacity_bytes]"),
    ],
)
def test_an_optimizer_is_told_the_objectives(direction: str, objective: str, folder: Path) -> None:
    arguments = [
        "replay", "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.sampler.seed=3",
        f"hydra.sweeper.direction={direction}", f"sweep.objective={objective}", "trace.sessions=5", "output=sweep",
        "tiers.gpu.capacity=choice(3000pages,6000pages)", "eviction=choice(lru,slru)", "eviction.protected_hits=choice(3)",
    ]  # fmt: skip
    ended = alone(arguments)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("eviction.protected_hits does not exist for eviction=lru; left out there\n")
    found = (folder / "sweep" / "optimization_results.yaml").read_text()
    ran = results(folder / "sweep").values()
    assert f"{max(record['hit_rate'] for record in ran)}" in found
    assert {(record["choices"]["eviction"], record["config"]["eviction"].get("protected_hits")) for record in ran} == {
        ("lru", None), ("slru", 3),
    }  # fmt: skip
    assert len(ran) <= 4, "what an optimizer tries again is not run again"
