"""``kvsim COMMAND FILE``, and the same from Python: an existing path is a trace."""

import json
from pathlib import Path

import pytest

import kvsim
from kvsim.cli import main
from kvsim.errors import UsageError
from kvsim.settings.bare_file import with_bare_file


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two prompts of two blocks, the first shared; in the folder where the command runs."""
    monkeypatch.chdir(tmp_path)
    lines = [
        {"timestamp": 1000 * at, "input_length": 1025, "output_length": 1, "hash_ids": [1, 2 + at, 9 + at]} for at in range(4)
    ]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "my log.jsonl").write_bytes((tmp_path / "log").read_bytes())
    return tmp_path / "log"


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("name", ["log", "my log.jsonl", "./log"])
def test_a_bare_file_is_the_trace(command: str, name: str) -> None:
    assert main([command, name, "output=bare"]) == 0
    assert main([command, f"trace.path='{name}'", "output=named"]) == 0
    bare, named = (json.loads(Path(folder, "result.json").read_text()) for folder in ("bare", "named"))
    assert bare["config_hash"] == named["config_hash"] and bare["requests"] == 4
    assert "trace.path=" in bare["command_line"]


def test_it_works_in_a_sweep_and_on_a_curve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "-m", "log", "eviction=lru,fifo", "output=sweep"]) == 0
    assert main(["curve", "log", "output=curve"]) == 0
    assert "belady" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: there is no such file; give a trace file, or settings as KEY=VALUE"),
        (["./log", "my log.jsonl"], "./log and my log.jsonl: a run has one trace"),
        (["log", "trace.path=log"], "log and trace.path=log: a run has one trace"),
    ],
)
def test_what_is_no_single_file_is_one_clear_line(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        with_bare_file(words)


def test_a_word_that_is_neither_stays_for_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "evicton"]) == 2
    assert "use KEY=VALUE" in capsys.readouterr().err


def test_python_takes_a_file_wherever_it_takes_a_trace(log: Path) -> None:
    loaded = kvsim.load_trace("my log.jsonl")
    assert len(loaded.requests) == 4 and len(kvsim.load_trace(log, limit=2).requests) == 2
    whole = kvsim.replay(loaded)
    for file in (str(log), log, "./log"):
        assert kvsim.replay(file).hit_rate == whole.hit_rate
    assert kvsim.replay(log, "trace.limit=2", page_tokens=512).record["requests"] == 2
    assert kvsim.simulate(log).record["requests"] == 4
    assert len(kvsim.sweep(log, {"eviction": ["lru", "fifo"]}, page_tokens=512)) == 2
    assert kvsim.curve(log).points
    with pytest.raises(UsageError, match="are two traces"):
        kvsim.load_trace(log, path="my log.jsonl")


def test_a_folder_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path)]) == 2
    assert f"{tmp_path}: is a folder; give a trace file" in capsys.readouterr().err
