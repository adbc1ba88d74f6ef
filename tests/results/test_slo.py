"""Which requests meet their objectives, counted by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.cli import main
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.report.summary import facts, slo_table, tables
from kvsim.results.result import summarize
from kvsim.results.slo import Slo
from kvsim.sweeps.objective import objective


@pytest.fixture
def served(outcome_of: Callable[..., Outcome]) -> Outcome:
    """Six requests, one a second from 0 on; each answer takes 4 x 0.5 s after the first token, but for changes below.

    | request | type | priority | TTFT | TPOT | meets 2 s and 0.5 s |
    |---|---|---|---|---|---|
    | 0 | chat | 0 | 1 | 0.5 | yes |
    | 1 | chat | 0 | 2 | 0.5 | yes: not above either |
    | 2 | chat | 1 | 3 | 0.5 | no: TTFT |
    | 3 | agent | 1 | 1 | 0.6 | no: TPOT |
    | 4 | agent | 1 | 1 | none | yes: an answer of one token |
    | 5 | agent | 10 | rejected | | no |
    """
    outcome = outcome_of([40] * 6, [(0, 0, 0)] * 6, rejected=[5], ttft_s=[1, 2, 3, 1, 1, np.nan])
    outcome.tpot_s[3:5] = 0.6, np.nan
    for request, kind, priority in zip(outcome.requests, ["chat"] * 3 + ["agent"] * 3, [0, 0, 1, 1, 1, 10], strict=True):
        request.kind, request.priority = kind, priority
    return outcome


def told(outcome: Outcome, warmup: float = 0.0, **objectives: float) -> dict[str, Any]:
    return summarize(outcome, command="simulate", config={}, seed=0, warmup=warmup, load_s=0, versions={}, slo=Slo(**objectives))


def test_a_request_meets_all_objectives_or_none(served: Outcome) -> None:
    """The last answer ends at 4 + 1 + 2 = 7 s, so three requests in 7 s."""
    slo = told(served, ttft_s=2, tpot_s=0.5)["slo"]
    assert slo["attainment"] == 3 / 6
    assert slo["goodput_requests_per_s"] == 3 / 7
    assert (slo["ttft_s"], slo["tpot_s"]) == (2, 0.5)


def test_one_objective_is_enough(served: Outcome) -> None:
    assert told(served, ttft_s=2)["slo"]["attainment"] == 4 / 6
    assert told(served, tpot_s=0.5)["slo"]["attainment"] == 4 / 6


def test_without_objectives_there_is_nothing_to_meet(served: Outcome) -> None:
    result = told(served)
    assert result["slo"] is None
    assert "SLO" not in dict(facts(result)) and not slo_table(result).rows


def test_the_warmup_does_not_count(served: Outcome) -> None:
    """Without the first three requests, the span begins at 3 s; one of three meets both."""
    slo = told(served, warmup=0.5, ttft_s=2, tpot_s=0.5)["slo"]
    assert (slo["attainment"], slo["goodput_requests_per_s"]) == (1 / 3, 1 / 4)


def test_classes_are_those_that_the_trace_has(served: Outcome) -> None:
    classes = told(served, ttft_s=2, tpot_s=0.5)["slo"]["classes"]
    assert [(one["by"], one["class"], one["requests"], one["attainment"]) for one in classes] == [
        ("type", "agent", 3, 1 / 3),
        ("type", "chat", 3, 2 / 3),
        ("priority", "0", 2, 1),
        ("priority", "1", 3, 1 / 3),
        ("priority", "10", 1, 0),
    ]
    assert classes[1]["ttft_s_p99"] == pytest.approx(2 + 0.98) and classes[1]["tpot_s_p99"] == 0.5
    assert classes[4]["ttft_s_p99"] is None


def test_tenants_are_a_class_too(served: Outcome) -> None:
    for request in served.requests:
        request.kind, request.priority, request.tenant = "", 0, "ab"[request.index % 2]
    classes = told(served, ttft_s=1)["slo"]["classes"]
    assert [(one["by"], one["class"], one["attainment"]) for one in classes] == [("tenant", "a", 2 / 3), ("tenant", "b", 1 / 3)]


def test_the_summary_says_what_was_met(served: Outcome) -> None:
    result = told(served, ttft_s=2, tpot_s=0.5)
    assert dict(facts(result))["SLO"] == "50.00% of the requests with TTFT <= 2 s and TPOT <= 0.5 s; goodput 0.429 requests/s"
    table = next(table for table in tables(result) if table.title == "Service level objectives")
    assert table.rows[1] == ("type chat", "3", "66.67%", "2.98", "0.500")


def test_of_many_classes_the_largest_are_shown(served: Outcome) -> None:
    result = told(served, ttft_s=2)
    one = result["slo"]["classes"][0]
    result["slo"]["classes"] = [one | {"class": str(number), "requests": number} for number in range(40)]
    table = slo_table(result)
    assert [row[0] for row in table.rows][:2] == ["type 39", "type 38"]
    assert table.note == "the 16 classes with the most requests, of 40"


def test_phases_are_shown_below_the_time_that_they_are_parts_of(served: Outcome) -> None:
    served.columns |= {"queue_s": served.ttft_s - 0.75, "load_s": np.full(6, 0.25)}
    times = next(table for table in tables(told(served)) if table.title == "Times")
    assert [row[0] for row in times.rows][:4] == ["time to first token", "  queue", "  load", "  prefill"]
    assert times.rows[3][1] == "0.500"


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_an_objective_is_a_time(value: float) -> None:
    with pytest.raises(ValueError, match=r"ttft_s must be (a finite number )?above 0"):
        Slo(ttft_s=value)


def test_a_command_takes_objectives_and_a_sweep_optimizes_them() -> None:
    trace = kvsim.load_trace("synthetic", sessions=4)
    record = kvsim.simulate(trace, "slo.ttft_s=100", "slo.tpot_s=null").record
    assert objective(record, "slo.attainment") == 1.0
    assert objective(record, "phases_s.queue.p99") >= 0
    assert record["slo"]["goodput_requests_per_s"] == record["throughput"]["requests_per_s"]
    assert {one["by"] for one in record["slo"]["classes"]} == {"type"}
    with pytest.raises(UsageError, match="slo is null"):
        kvsim.simulate(trace, "sweep.objective=slo.attainment")


@pytest.mark.parametrize("command", ["replay", "curve"])
def test_objectives_have_no_effect_without_a_clock(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "slo.ttft_s=1"]) == 2
    assert f"slo.ttft_s has no effect on kvsim {command}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
