"""Sweeps with objectives: which runs no other run beats, and how they are shown."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvsim.cli import main
from kvsim.engine.outcome import Outcome
from kvsim.report.comparison.objective import Objective, usual_direction
from kvsim.report.comparison.pareto import Front, front_of, optimal, print_front
from kvsim.results.result import summarize
from kvsim.results.runs import Run

AIMS = [Objective(name="hit_rate", direction="maximize"), Objective(name="ttft_s.p99", direction="minimize")]


def runs_of(outcome: Outcome, values: Sequence[tuple[float | None, float]], folder: Path = Path("sweep")) -> list[Run]:
    """Runs with these hit rates and times to first token."""
    runs = []
    for number, (rate, ttft_s) in enumerate(values):
        result = summarize(
            outcome, command="simulate", config={"seed": number}, seed=0, warmup=0, load_s=0, versions={}, command_line="",
            bounds={}, page_bytes=2**20,
        )  # fmt: skip
        result["hit_rate"], result["ttft_s"]["p99"] = rate, ttft_s
        runs.append(Run(name=str(number), folder=folder / str(number), result=result))
    return runs


def test_a_run_is_optimal_unless_another_is_nowhere_worse_and_somewhere_better() -> None:
    assert optimal(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [3.0, 1.0], [1.0, 3.0]])) == [True, True, False, True, True]
    assert optimal(np.array([[2.0], [1.0], [1.0]])) == [False, True, True]


def test_directions_are_kept_and_the_best_in_the_first_objective_comes_first(simulated: Outcome) -> None:
    front = Front(runs_of(simulated, [(0.2, 1.0), (0.5, 4.0), (0.4, 4.5), (0.3, 2.0)]), AIMS)
    assert [point.name for point in front.points] == ["1", "2", "3", "0"]
    assert [point.name for point in front.best] == ["1", "3", "0"]
    assert front.title == "Pareto set: hit_rate (maximized), ttft_s.p99 (minimized)"
    assert front.rows()[0] == ["1", "1", "50.00%", "4.00", "1"]
    assert front.columns() == ["job", "seed", "hit_rate", "ttft_s.p99", "rejected"]
    reversed_front = Front(
        front_runs := runs_of(simulated, [(0.2, 1.0), (0.5, 4.0)]), [Objective(name="hit_rate", direction="minimize")]
    )
    assert [point.name for point in reversed_front.best] == ["0"] and len(front_runs) == 2
    assert reversed_front.title == "Best: hit_rate (minimized)"


def test_a_run_without_one_of_the_numbers_is_left_out(simulated: Outcome) -> None:
    front = Front(runs_of(simulated, [(None, 1.0), (0.5, 4.0)]), AIMS)
    assert [point.name for point in front.points] == ["1"]
    assert front.figure() is None


def test_the_csv_has_plain_numbers(simulated: Outcome) -> None:
    rows = list(csv.DictReader(io.StringIO(Front(runs_of(simulated, [(0.25, 1.0), (0.2, 2.0)]), AIMS).csv())))
    assert rows == [{"job": "0", "seed": "0", "hit_rate": "0.25", "ttft_s.p99": "1.0", "rejected": "1"}]


@pytest.mark.parametrize("more", [[], [Objective(name="simulated_s", direction="minimize")]])
def test_the_picture_shows_all_runs_and_joins_the_pareto_set(simulated: Outcome, more: list[Objective]) -> None:
    front = Front(runs_of(simulated, [(0.2, 1.0), (0.5, 4.0), (0.4, 4.5)]), AIMS + more)
    figure = front.figure()
    assert figure is not None
    drawn: list[dict[str, Any]] = figure["data"]
    assert [(trace["name"], list(trace["text"])) for trace in drawn] == [
        ("other runs", ["2: seed=2"]), ("Pareto set", ["1: seed=1", "0: seed=0"]),
    ]  # fmt: skip
    if not more:
        assert (list(drawn[1]["x"]), list(drawn[1]["y"])) == ([0.5, 0.2], [4.0, 1.0])


def test_a_long_set_is_shortened_on_a_terminal(simulated: Outcome) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    print_front(Front(runs_of(simulated, [(n / 100, n) for n in range(25)]), AIMS), console)
    lines = console.export_text().splitlines()
    assert lines[-1] == "5 more are in pareto.csv" and len(lines) == 24


def test_the_objectives_of_a_sweep_come_from_its_folder(simulated: Outcome, tmp_path: Path) -> None:
    runs = runs_of(simulated, [(0.2, 1.0), (0.5, 4.0)], tmp_path)
    assert front_of(runs) is None
    record = {"command": "replay", "command_line": "kvsim replay -m", "swept": [], "objectives": []}
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    assert front_of(runs) is None
    record["objectives"] = [{"name": "hit_rate", "direction": "maximize"}]
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    front = front_of(runs)
    assert front is not None and [point.name for point in front.best] == ["1"]
    assert front_of([*runs, *runs_of(simulated, [(0.1, 1.0)], tmp_path / "other")]) is None


@pytest.mark.parametrize(
    ("name", "direction"),
    [("hit_rate", "maximize"), ("hit_tokens.gpu", "maximize"), ("slo.attainment", "maximize"), ("ttft_s.p99", "minimize"),
     ("capacity_bytes", "minimize"), ("slo.ttft_s", "minimize"), ("throughput.requests_per_s", "maximize")],
)  # fmt: skip
def test_the_usual_direction(name: str, direction: str) -> None:
    assert usual_direction(name) == direction


def test_a_grid_has_a_pareto_set_too_until_it_has_no_objectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["replay", "-m", "trace.sessions=20", "tiers.gpu.capacity=4000pages,6000pages", "output=sweep"]
    assert main([*settings, "sweep.objective=[hit_rate,capacity_bytes]"]) == 0
    assert "Pareto set: hit_rate (maximized), capacity_bytes (minimized)" in capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO((tmp_path / "sweep" / "pareto.csv").read_text())))
    assert [row["tiers.gpu.capacity"] for row in rows] == ["6000pages", "4000pages"]
    assert main(settings) == 0
    assert not (tmp_path / "sweep" / "pareto.csv").exists()


@pytest.mark.parametrize(
    ("direction", "message"),
    [([], "hydra.sweeper.direction is minimize, but sweep.objective is hit_rate: set hydra.sweeper.direction=maximize"),
     (["hydra.sweeper.direction=[maximize,minimize]"], "is [maximize,minimize], but sweep.objective is hit_rate: set"),
     (["hydra.sweeper.direction=up"], "hydra.sweeper.direction must be one of minimize, maximize, not up")],
)  # fmt: skip
def test_an_optimizer_needs_a_direction_for_each_objective(
    direction: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install kvsim[optuna]")
    monkeypatch.chdir(tmp_path)
    arguments = ["replay", "-m", "hydra/sweeper=optuna", *direction, "sweep.objective=hit_rate", "eviction=lru,arc", "output=o"]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
