"""``sweep.seeds``: which jobs it makes, and where it would have no effect."""

import json
from pathlib import Path

import pytest

from kvsim.cli import main

LINE = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
RECORDED = ("trace=mooncake", "trace.path=trace.jsonl", "tiers.gpu.capacity=64pages")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(LINE * 3)
    return tmp_path


def listed(*arguments: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["replay", "-m", *arguments, "sweep.dry_run=true", "output=sweep"]) == 0
    return [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()[:-1]]


def test_each_configuration_runs_with_seeds_from_the_runs_own_upwards(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = listed("sweep.seeds=2", "seed=7", "eviction=lru,fifo", "trace.sessions=5", capsys=capsys)
    assert jobs == ["eviction=lru seed=7", "eviction=lru seed=8", "eviction=fifo seed=7", "eviction=fifo seed=8"]
    assert listed("sweep.seeds=3", "trace.sessions=5", capsys=capsys) == ["seed=0", "seed=1", "seed=2"]


def test_a_job_of_such_a_sweep_names_the_command_that_repeats_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "-m", "sweep.seeds=2", "trace.sessions=5", "output=sweep"]) == 0
    commands = [json.loads(Path(f"sweep/{job}/result.json").read_text())["command_line"] for job in "01"]
    assert commands == [f"kvsim replay trace.sessions=5 output=sweep seed={seed}" for seed in (0, 1)]
    assert json.loads(Path("sweep/sweep.json").read_text())["command_line"].startswith("kvsim replay -m sweep.seeds=2 ")
    capsys.readouterr()
    assert main(["replay", "-m", "sweep.seeds=3", "trace.sessions=5", "output=sweep"]) == 0
    assert capsys.readouterr().out.count("finished before") == 2


def test_a_random_policy_depends_on_the_seed_where_the_trace_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(listed("sweep.seeds=2", *RECORDED, "eviction=lru,random", capsys=capsys)) == 4
    assert len(listed("sweep.seeds=2", *RECORDED, "eviction@tiers.gpu.eviction=random", capsys=capsys)) == 2


def test_a_policy_of_the_users_own_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    policy = (
        "from kvsim.policies.eviction.lru import LRU\n"
        "class Mine(LRU):\n    def bind(self, context):\n        super().bind(context)"
    )
    for name, line in (("dicing", "        self.dice = context.rng\n"), ("steady", "")):
        Path(f"{name}.py").write_text(f"{policy}\n{line}")
    assert len(listed("sweep.seeds=2", *RECORDED, "eviction._target_=dicing.Mine", capsys=capsys)) == 2
    assert main(["replay", "-m", "sweep.seeds=2", *RECORDED, "eviction._target_=steady.Mine", "output=sweep"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "-m", "sweep.seeds=2", *RECORDED, "eviction=lru,fifo"], "sweep.seeds has no effect: no configuration"),
        (["replay", "-m", "sweep.seeds=2", "trace.sessions=5", "trace.seed=3"], "sweep.seeds has no effect: no configuration"),
        (["replay", "-m", "sweep.seeds=2", "trace.sessions=5", "seed=1,2"], "sweep.seeds and seed both choose the seeds"),
        (["replay", "-m", "sweep.seeds=1", "trace.sessions=5"], "sweep.seeds must be at least 2, not 1"),
        (["replay", "sweep.seeds=2", "trace.sessions=5"], "sweep.seeds has no effect on a single run: add -m"),
        (["curve", "-m", "sweep.seeds=2", "trace.sessions=5"], "sweep.seeds has no effect on kvsim curve"),
    ],
)
def test_seeds_without_effect_end_the_sweep_before_any_job(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "output=sweep"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvsim: {message}") and error.count("\n") == 1
    assert not (folder / "sweep").exists()
