"""Aliases in files of settings: those that stand for very many values, or for themselves, are refused at once."""

from pathlib import Path

import pytest

from kvsim.cli import main

BOMB = "a0: &a0 [1]\n" + "".join(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]\n" for at in range(1, 10))
LRU = "_target_: kvsim.policies.eviction.lru.LRU\n"


@pytest.mark.parametrize(
    "text", [BOMB, "a: &a [*a]\n", "a: &a {b: *a}\n"], ids=["ten of each", "a list in itself", "a mapping in itself"]
)
def test_endless_aliases_are_refused(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "eviction").mkdir()
    (tmp_path / "eviction" / "mine.yaml").write_text(LRU + text)
    assert main(["replay", "eviction=mine", f"--config-dir={tmp_path}", "trace.sessions=2"]) == 2
    shown = capfd.readouterr().err
    assert "eviction/mine.yaml:1: not valid YAML: its aliases stand for more than 100,000 values" in shown
    assert shown.count("\n") == 1


def test_other_aliases_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eviction").mkdir()
    (tmp_path / "eviction" / "mine.yaml").write_text(
        "_target_: kvsim.policies.eviction.slru.SegmentedLRU\nprotected_hits: 2\nsegments: &how unsized\n"
    )
    assert main(["replay", "eviction=mine", f"--config-dir={tmp_path}", "trace.sessions=2", f"output={tmp_path}/out"]) == 0
