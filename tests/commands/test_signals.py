"""Ctrl+C and SIGTERM end a command with one line; what has finished is kept, and nothing is half-written."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

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
            {how}


class InCallback:
    def __del__(self):
        signal.raise_signal(signal.{name})


def in_cleanup():
    try:
        signal.raise_signal(signal.{name})
    finally:
        None.cleaned_up
"""
PLAINLY = "signal.raise_signal(signal.{name})"
ENDS = {"SIGINT": (130, "kvsim: interrupted at mine.py:13, in Mine.bind\n"), "SIGTERM": (143, "kvsim: terminated\n")}
IN_ONE_LINE = {"SIGINT": (130, "kvsim: interrupted\n"), "SIGTERM": (143, "kvsim: terminated\n")}
RUN = ("trace.sessions=3", "eviction=mine", "output=out", "--config-dir", "conf")


def policy(run: int, name: str, how: str = PLAINLY) -> str:
    """A policy whose run of this number is sent a signal."""
    return POLICY.format(run=run, name=name, how=how.format(name=name))


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
    (folder / "mine.py").write_text(policy(1, name))
    code, line = ENDS[name]
    before = signal.getsignal(signal.SIGTERM)
    assert main([command, *RUN]) == code
    assert capfd.readouterr().err == line
    assert not (folder / "out").exists()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ENDS)
def test_a_sweep_keeps_the_jobs_that_have_finished(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(policy(3, name))
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
    (folder / "mine.py").write_text(policy(2, name))
    code, line = ENDS[name]
    assert main(["saturate", "slo.ttft_s=1", *RUN]) == code
    assert capfd.readouterr().err == line
    assert len(list((folder / "out").glob("rate-*/result.json"))) == 1
    assert not list((folder / "out").rglob("*.part")) and not (folder / "out" / "saturate.json").exists()


@pytest.mark.parametrize("name", ENDS)
def test_a_plan_keeps_the_configurations_that_have_run(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(policy(2, name))
    (folder / "prices.yaml").write_text("per: hour\ngpus: {h100: 3, l40s: 1}\n")
    code, line = ENDS[name]
    assert main(["plan", "prices=prices.yaml", "slo.ttft_s=0.001", *RUN]) == code
    assert capfd.readouterr().err == line
    assert [path.parent.name for path in (folder / "out").glob("*/result.json")] == ["0"]
    assert not list((folder / "out").rglob("*.part")) and not (folder / "out" / "plan.json").exists()
    before = (folder / "out" / "0" / "result.json").stat().st_mtime_ns
    assert main(["plan", "prices=prices.yaml", "slo.ttft_s=0.001", *RUN]) == 1
    assert (folder / "out" / "0" / "result.json").stat().st_mtime_ns == before and (folder / "out" / "plan.json").exists()


@pytest.mark.parametrize("name", IN_ONE_LINE)
@pytest.mark.parametrize("how", ["in_cleanup()", "InCallback()"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_is_replaced_or_lost_ends_a_sweep(
    name: str, how: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error in code that cleans up replaces it; Python drops what a callback raises, and the job goes on to its end."""
    (folder / "mine.py").write_text(policy(2, name, how))
    code, line = IN_ONE_LINE[name]
    assert main(["replay", "-m", "seed=1,2,3,4", *RUN]) == code
    assert capfd.readouterr().err == line
    finished = ["0"] if how == "in_cleanup()" else ["0", "1"]
    assert sorted(path.parent.name for path in (folder / "out").glob("*/result.json")) == finished
    assert len((folder / "out" / "sweep.csv").read_text().splitlines()) == 1 + len(finished)
    assert not list((folder / "out").glob("*/error.json"))


def test_an_interrupt_while_the_configuration_is_composed_is_no_mistake_in_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Hydra and OmegaConf turn an error in their own cleaning up into one of theirs."""

    def update(*arguments: Any, **settings: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise ConfigAttributeError("no attribute of None")

    monkeypatch.setattr(OmegaConf, "update", update)
    assert main(["replay", "seed=1", "output=out"]) == 130
    assert capfd.readouterr().err == "kvsim: interrupted\n"
