"""The command line as a whole."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvsim import cli
from kvsim.cli import COMMANDS, main
from kvsim.commands.listing import OTHER_NAMES

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


def test_an_unknown_command_is_named_with_a_close_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulat"]) == 2
    assert capsys.readouterr().err == "kvsim: there is no command 'simulat'; did you mean simulate?\n"


def test_the_package_is_the_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "kvsim", "--help"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("usage: kvsim COMMAND")


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


def run(*arguments: str, output: str) -> tuple[int, str]:
    """Run kvsim with its standard output redirected as a shell would. Returns the exit code and what went to standard error."""
    code = "import sys; from kvsim.cli import main; sys.exit(main())"
    line = f'"$0" -c "$1" {" ".join(arguments)} {output}'
    ended = subprocess.run(["bash", "-c", line, sys.executable, code], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "arguments", [["--help"], ["help", "eviction"], ["replay", "--cfg", "job"], ["replay", "--info"]], ids=" ".join
)
def test_a_full_output_ends_with_one_line(arguments: list[str]) -> None:
    assert run(*arguments, output="> /dev/full") == (1, "kvsim: standard output: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_output_ends_a_sweep_and_fails_no_job(tmp_path: Path) -> None:
    line = ("replay", "-m", "seed=1,2", "trace.sessions=2", f"output={tmp_path}")
    assert run(*line, output="> /dev/full") == (1, "kvsim: standard output: No space left on device\n")
    assert not list(tmp_path.glob("*/error.json"))


def test_a_closed_error_output_leaves_the_exit_code() -> None:
    assert run("replay", "seed=x", output="2>&-") == (2, "")


def test_a_closed_output_ends_with_one_line() -> None:
    assert run("help", "eviction", output=">&-") == (1, "kvsim: standard output is closed\n")


def test_a_pipe_that_is_closed_early_ends_quietly() -> None:
    assert run("simulate", "--help", output="| head -1") == (0, "")


def test_an_error_of_another_file_is_no_error_of_the_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    errors = [OSError(28, "No space left on device"), OSError(5, "Input/output error")]

    def broken(arguments: list[str]) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(cli, "_run", broken)
    assert main(["replay"]) == 2
    assert capfd.readouterr().err == "kvsim: cannot write a file: No space left on device\n"
    with pytest.raises(OSError, match="Input/output"):
        main(["replay"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("sweep", "use kvsim simulate -m or kvsim replay -m"),
        ("compare", "use kvsim report FOLDER"),
        ("run", "use kvsim simulate"),
    ],
)
def test_a_command_by_another_tools_name_is_answered_with_ours(
    word: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "trace.path=x"]) == 2
    assert capsys.readouterr().err.startswith(f"kvsim: there is no command '{word}': {expected}")


def test_no_other_name_hides_a_command_and_all_lead_to_one() -> None:
    assert not set(OTHER_NAMES) & set(COMMANDS)
    for text in OTHER_NAMES.values():
        assert re.match(r"kvsim (\w+|--version)", text) and all(
            name in {*COMMANDS, "--version"} for name in re.findall(r"kvsim ([\w-]+)", text)
        )
