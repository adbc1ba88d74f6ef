"""Whatever a file of settings contains: a run, or one line that names the file or the setting."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

import kvsim
from kvsim.cli import main
from tests.mutations import changed, changed_bytes, few, memory_budget, shown_problem, work_budget

CONF = Path(kvsim.__file__).parent / "conf"
FILES = {"hardware": "h100", "model": "llama3_8b", "eviction": "slru", "scheduling": "dfs_weight"}
COST = 8
"""Composing takes most of the time of an example."""
TINY = ("trace.sessions=2", "tiers.gpu.capacity=9000pages")


def replay(capsys: pytest.CaptureFixture[str], group: str, content: bytes) -> int:
    """Choose a file with this content for a group, and return the exit code."""
    Path("conf", group).mkdir(parents=True, exist_ok=True)
    Path("conf", group, "mine.yaml").write_bytes(content)
    capsys.readouterr()
    with work_budget(), memory_budget(), warnings.catch_warnings():
        warnings.simplefilter("error")
        code = main(["simulate", *TINY, "--config-dir", "conf", f"{group}=mine", "output=out"])
    error = capsys.readouterr().err
    shown_problem(code, error, "")
    assert code == 0 or "mine" in error or group in error, error
    return code


def as_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("group", [pytest.param(group, marks=[pytest.mark.long] * (group != "eviction")) for group in FILES])
def test_a_changed_file_of_settings_is_used_or_refused(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = (CONF / group / f"{FILES[group]}.yaml").read_bytes()

    @few(cost=COST)
    @given(changed(yaml.safe_load(whole)).map(as_yaml) | changed_bytes(whole))
    def run(content: bytes) -> None:
        replay(capsys, group, content)

    run()
    assert replay(capsys, group, whole) == 0
