"""A sweep on a terminal marks the latencies of runs whose queue grew for as long as requests arrived."""

import io
from pathlib import Path

import pytest
from rich.console import Console

import kvsim
from kvsim.report.comparison.compare import Comparison, print_comparison
from kvsim.results.runs import Run, read_runs

SERVER = (
    "hardware=linear", "hardware.fixed_s=0.25", "hardware.prefill_token_s=0", "hardware.decode_request_s=0",
    "hardware.chunk_context_s=0", "hardware.decode_context_s=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A server that takes 0.25 s for each request, alone or two at a time; one comes every 0.2 s."""
    trace = kvsim.trace_from_tokens([[number, 1] for number in range(600)], arrivals_s=[0.2 * number for number in range(600)])
    folder = tmp_path_factory.mktemp("overload")
    kvsim.sweep(trace, {"engine.max_running_requests": [1, 2]}, *SERVER, command="simulate", output=folder / "sweep")
    return read_runs([folder / "sweep"])


def printed(runs: list[Run]) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_comparison(runs, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_latencies_of_an_overloaded_run_have_a_mark_and_a_line_says_why(runs: list[Run]) -> None:
    assert Comparison(runs).overloaded() == [0]
    lines = printed(runs).splitlines()
    row = {line.split()[0]: line for line in lines if line[:1] in "01"}
    assert row["0"].count("!") == 2 and "!" not in row["1"], "mean and p99"
    (note,) = [at for at, line in enumerate(lines) if line.startswith("!: the queue grew without end in 0")]
    assert "more requests arrived than were served" in " ".join(lines[note : note + 2])


def test_without_overload_there_is_neither(runs: list[Run]) -> None:
    assert "!" not in printed(runs[1:])


def test_the_note_names_twelve_and_counts_the_rest(runs: list[Run]) -> None:
    many = [Run(name=str(number), folder=Path(), result=runs[0].result) for number in range(20)]
    (note,) = Comparison(many, by_run=True).overload_note()
    assert "10, 11 and 8 more" in note
