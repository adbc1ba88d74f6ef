"""What studies share: options, workers, files, exit code."""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest

import kvsim.report.study
from kvsim.report.study import (
    Claim,
    Recording,
    Study,
)  # fmt: skip


def square(options: Namespace, cell: int) -> tuple[int, int]:
    """The square of a cell, up to the limit, and the process that computed it."""
    return min(cell * cell, options.limit or 100), os.getpid()


def table(rows: dict[int, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    return ((cell, result) for cell, (result, _) in rows.items())


def page(options: Namespace, rows: dict[int, tuple[int, int]]) -> list[str]:
    return [f"# Up to {options.limit}", *(str(result) for result, _ in rows.values())]


def squares(folder: Path, limit: int | tuple[int, ...] | None = None, *, most: int = 9) -> Study[int, tuple[int, int]]:
    """A study of the squares of 1, 2 and 3 that claims none is larger than ``most``."""
    return Study(
        file=str(folder / "run.py"),
        question="How large are squares?",
        traces={"trace": Recording("none.jsonl", "a trace")},
        cells=lambda: [1, 2, 3],
        run=square,
        claims=lambda rows: [Claim("small", "", max(result for result, _ in rows.values()) <= most)],
        table=table,
        page=page,
        figure=lambda rows: go.Figure().update_layout(width=300, height=200),
        limit=limit,
    )


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments that the study reads: a trace, and what a test adds."""
    (tmp_path / "trace.jsonl").touch()
    found = ["run.py", "--trace", str(tmp_path / "trace.jsonl")]
    monkeypatch.setattr(sys, "argv", found)
    monkeypatch.setattr(kvsim.report.study, "take_screenshot", lambda *_, **__: False)
    return found


@pytest.mark.usefixtures("arguments")
def test_results_go_to_the_folder_of_the_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert squares(tmp_path).main() == 0
    assert (tmp_path / "results.csv").read_text() == "1,1\n2,4\n3,9\n"
    assert (tmp_path / "results.md").read_text() == "# Up to None\n1\n4\n9\n"
    assert (tmp_path / "results.html").exists()
    assert "3 cells took" in capsys.readouterr().out


@pytest.mark.usefixtures("arguments")
def test_cells_run_in_other_processes(tmp_path: Path) -> None:
    rows = squares(tmp_path).play(Namespace(limit=None))
    assert list(rows) == [1, 2, 3] and os.getpid() not in {process for _, process in rows.values()}


@pytest.mark.parametrize(("limits", "code"), [([], 1), (["--limit", "9"], 0)])
def test_claims_are_about_the_default_limit(limits: list[str], code: int, arguments: list[str], tmp_path: Path) -> None:
    arguments += ["--output", str(tmp_path / "out"), *limits]
    assert squares(tmp_path, most=8).main() == code
    assert (tmp_path / "out" / "results.md").exists()


def test_a_limit_for_each_trace(arguments: list[str], tmp_path: Path) -> None:
    study = squares(tmp_path, limit=(5, 7))
    assert study.options().limit == (5, 7)
    arguments += ["--requests", "1", "2"]
    assert study.options().limit == [1, 2]


def test_a_trace_must_exist(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments[-1] = "no.jsonl"
    with pytest.raises(SystemExit, match="2"):
        squares(tmp_path).main()
    assert "argument --trace: no trace at no.jsonl" in capsys.readouterr().err


def test_files_may_be_left_out_but_must_exist(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = replace(squares(tmp_path), files={"own": "a trace of your own"})
    assert study.options().own is None
    arguments += ["--own", arguments[2]]
    assert study.options().own == arguments[2]
    arguments[-1] = "no.jsonl"
    with pytest.raises(SystemExit, match="2"):
        study.main()
    assert "argument --own: no trace at no.jsonl" in capsys.readouterr().err
