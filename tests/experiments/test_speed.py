"""The programs that measure speed, on small work: what they compute from what they measure."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.test_studies import EXPERIMENTS, study

TABLES = "results", "billion", "engines"

PROGRAM = """import sys, time
print(sys.argv[1], flush=True)
time.sleep(float(sys.argv[3]))
sys.exit(int(sys.argv[2]))
"""


class AtOnce:
    """A timer that does not wait."""

    def __init__(self, seconds: float, call: Callable[[], object]) -> None:
        self._call = call

    def start(self) -> None:
        self._call()

    def cancel(self) -> None:
        pass


def test_what_the_list_of_studies_says_of_speed_is_in_the_tables() -> None:
    """Rates by page size, a trace of a billion accesses, and how much more a request costs with more engines."""
    listed = (EXPERIMENTS / "README.md").read_text()
    speed, billion, engines = (json.loads((EXPERIMENTS / "speed" / f"{name}.json").read_text()) for name in TABLES)
    measured = {row["what"]: row["measured"] for row in speed["compiled"]["Page sizes"]["rows"]}
    rates = [measured[f"one tier, {size}-token pages"].split("(")[1].rstrip(")") for size in (1, 512)]
    assert f"{rates[0]} to {rates[1]} requests per second on one tier" in listed
    assert f"{measured['fastest over slowest page size']} apart" in listed
    for part, text in (
        ("Replay", "{time} of processor time and {most}; {each}"),
        ("Simulation", "A simulation takes {time} and {most}: {each}"),
    ):
        rows = {row["what"]: row["measured"] for row in billion["compiled"][part]["rows"]}
        said = text.format(time=rows["processor time"], most=rows["peak memory"], each=rows["memory for each request more"])
        assert said in listed
        if part == "Simulation":
            guide = " ".join((EXPERIMENTS.parent / "docs" / "guides" / "logs.md").read_text().split())
            assert f"takes {rows['processor time']} and {rows['peak memory']}" in guide
    own = [run for run in engines if (run["label"], run["build"]) == ("now", "compiled") and run["requests"] > 500_000]
    each = {(run["routing"], run["engines"]): run["run_s"] / run["requests"] for run in own}
    times = {number: [each[name, number] / each[name, 10] for name, of in each if of == 10] for number in (1000, 10_000)}
    least, most = ({number: f"{of(own):.1f}" for number, own in times.items()} for of in (min, max))
    assert (
        f"a thousand engines take {least[1000]} to {most[1000]} times as much and ten thousand {least[10_000]} to {most[10_000]}"
        in listed
    )


def test_what_the_list_of_studies_says_of_slow_policies_is_in_the_table() -> None:
    listed = (EXPERIMENTS / "README.md").read_text()
    lines = (EXPERIMENTS / "policy_speed" / "results_one_tier.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.count("x |") > 1]
    ratios = {row[1]: float(row[5].rstrip("x")) for row in rows}
    slow = {name: ratio for name, ratio in ratios.items() if ratio > 3}
    assert len(ratios) > 30 and f"{len(ratios) - len(slow)} of {len(ratios)} take at most 3 times as long as LRU" in listed
    said = listed[listed.index("Slower are: ") :].partition(". Belady")[0]
    for name, ratio in slow.items():
        assert re.search(rf"\b{name}\b[^,]* {ratio:.1f}\b", said), (name, ratio)
    assert said.count(",") == len(slow) - 1


def test_every_part_is_run_and_listed_with_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails makes the whole fail; one that takes too long is ended."""
    program = tmp_path / "part.py"
    program.write_text(PROGRAM)
    module = study("speed", monkeypatch, "--output", str(tmp_path / "out"), script="everything")
    parts = {
        name: module.Part(program=str(program), table="table.md", whole=(name, str(code), "0"))
        for name, code in (("good", 0), ("bad", 1))
    }
    monkeypatch.setattr(module, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "good", "bad"])
    assert module.main() == 1
    rows = json.loads((tmp_path / "out" / "everything.json").read_text())
    assert [(row["part"], row["exit_code"], row["last_line"]) for row in rows] == [("good", 0, "good"), ("bad", 1, "bad")]
    assert all(row["load_before"] >= 0 and row["cpu_s"] > 0 for row in rows)
    table = (tmp_path / "out" / "everything.md").read_text()
    assert "| good | pure Python | [table.md](table.md) | hold | good |" in table or "| good | compiled |" in table
    monkeypatch.setattr(module, "Timer", AtOnce)
    assert module.play([sys.executable, str(program), "late", "0", "60"], 5.0) == (124, "ended after 5 s; so far: nothing")


def cost(module: Any, **settings: Any) -> Any:
    known = {
        "build": "compiled", "trace": "questions", "routing": "lmetric", "workers": 1, "requests": 10, "elapsed_s": 9.0,
        "router_s": 4.0, "workers_s": [], "critical_s": 4.0, "digest": "a", "where": "here",
    }  # fmt: skip
    return module.Cost(**known | settings)


def test_two_processes_are_compared_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("speed", monkeypatch, script="workers")
    alone, two = cost(module), cost(module, workers=2, router_s=1.0, workers_s=[2.0, 1.5], critical_s=3.0)
    assert two.cpu_s == 4.5 and module.failed([alone, two]) == []
    assert "| lmetric | 2 | 9.0 s | 1.0 + 2.0 + 1.5 s | 3.0 s | 0.75 of one's | <= 0.9 | holds |" in module.table([alone, two])
    assert module.failed([alone, replace(two, critical_s=3.8)]) == ["questions, lmetric: 0.95 of the time of one process"]
    assert module.failed([alone, replace(two, digest="b")]) == ["questions, lmetric: 2 processes give other results than one"]


def test_the_critical_path_goes_through_the_longest_of_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("speed", monkeypatch, script="workers")
    monkeypatch.setattr(module.time, "process_time", lambda: 20.0)
    times = module.Times()
    times.mine = [10.0, 13.0, 14.0, 18.0]
    times.theirs = [[1.0, 4.0, 5.0], [2.0, 3.0, 4.0]]
    assert times.critical_s(meet=True) == max(2, 3) + max(3, 1) + max(1, 4) + 2
    assert times.critical_s(meet=False) == max(8, 5) + 2
    times.theirs = []
    assert times.critical_s(meet=True) == 10


def test_why_a_simulator_is_not_measured_is_what_a_try_says(monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("speed", monkeypatch, script="peers")
    code = "import sys; sys.exit('Traceback\\nsome.errors.NoData: no data\\nCheck your connection.')"
    tries = {"raises": [sys.executable, "-c", code], "none": ["no-such-program"], "runs": [sys.executable, "-c", ""]}
    monkeypatch.setattr(module, "OTHERS", tries)
    assert module.why_not("raises") == "Check your connection."
    assert module.why_not("none").startswith("FileNotFoundError")
    assert module.why_not("runs").startswith("it can be had here")
    tries["raises"][2] = code.replace("NoData", "NoDataError")
    assert module.why_not("raises") == "some.errors.NoDataError: no data"
