"""Ctrl+C and SIGTERM end a command with one line; what has finished is kept, and nothing is half-written."""

import signal
import sys
from pathlib import Path

import pytest

from kvsim.cli import main

POLICY = """
import signal
from kvsim.policies.eviction.lru import LRU

runs = []


class Mine(LRU):
    def bind(self, context):
        super().bind(context)
        runs.append(self)
        if len(runs) == {run}:
            signal.raise_signal(signal.{name})
"""
ENDS = {"SIGINT": (130, "kvsim: interrupted at mine.py:13, in Mine.bind\n"), "SIGTERM": (143, "kvsim: terminated\n")}
RUN = ("trace.sessions=3", "eviction=mine", "output=out", "--config-dir", "conf")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "conf" / "eviction").mkdir(parents=True)
    (tmp_path / "conf" / "eviction" / "mine.yaml").write_text("_target_: mine.Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_a_run_ends_with_one_line(command: str, name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(POLICY.format(run=1, name=name))
    code, line = ENDS[name]
    before = signal.getsignal(signal.SIGTERM)
    assert main([command, *RUN]) == code
    assert capfd.readouterr().err == line
    assert not (folder / "out").exists()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ENDS)
def test_a_sweep_keeps_the_jobs_that_have_finished(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(POLICY.format(run=3, name=name))
    code, line = ENDS[name]
    assert main(["replay", "-m", "seed=1,2,3,4", *RUN]) == code
    assert capfd.readouterr().err == line
    assert sorted(path.parent.name for path in (folder / "out").glob("*/result.json")) == ["0", "1"]
    assert len((folder / "out" / "sweep.csv").read_text().splitlines()) == 3
    assert main(["replay", "-m", "seed=1,2,3,4", *RUN]) == 0
    shown = capfd.readouterr().out
    assert shown.count("finished before") == 2 and len((folder / "out" / "sweep.csv").read_text().splitlines()) == 5


@pytest.mark.parametrize("name", ENDS)
def test_a_search_keeps_the_rates_that_have_run(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(POLICY.format(run=2, name=name))
    code, line = ENDS[name]
    assert main(["saturate", "slo.ttft_s=1", *RUN]) == code
    assert capfd.readouterr().err == line
    assert len(list((folder / "out").glob("rate-*/result.json"))) == 1
    assert not list((folder / "out").rglob("*.part")) and not (folder / "out" / "saturate.json").exists()
