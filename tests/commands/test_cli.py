"""The command line as a whole."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvsim import cli
from kvsim.cli import COMMANDS, main

LOADED = """
import sys
from kvsim.cli import main
main(["--help"])
print(sorted({"hydra", "numpy", "omegaconf", "plotly", "rich", "simpy", "torch"} & set(sys.modules)))
"""


def test_help_loads_nothing_that_is_slow() -> None:
    shown = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {command} ", shown, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", ["simulate", "replay"])
def test_help_of_a_run_lists_groups_and_settings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"usage: kvsim {command} [KEY=VALUE ...]" in shown
    assert re.search(r"eviction: .*\blru, .*\bslru", shown)
    assert "page_tokens: 16" in shown


def test_an_unknown_command_is_named_with_a_close_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulat"]) == 2
    assert capsys.readouterr().err == "kvsim: there is no command 'simulat'; did you mean simulate?\n"


def test_an_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert main(["replay"]) == 130
    assert capsys.readouterr().err == "kvsim: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: list[str]) -> None:
        raise KeyError("nobody expected this")

    monkeypatch.setattr(cli, "_run", broken)
    with pytest.raises(KeyError):
        main(["replay"])


def test_the_configuration_is_shown_without_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "eviction=slru", "--cfg", "job", "eviction.protected_hits=5"]) == 0
    assert "protected_hits: 5" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
