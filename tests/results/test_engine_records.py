"""What a result says of each engine of several: numbers that can be checked by hand."""

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvsim.engine.outcome import Outcome
from kvsim.report.html import render
from kvsim.report.pictures import MOST_LINES, pictures_of
from kvsim.report.summary import MOST_ENGINES, engine_table, facts
from kvsim.report.table import print_result
from kvsim.results.result import summarize


def summary(outcome: Outcome, warmup: float = 0.0) -> dict[str, Any]:
    return summarize(outcome, command="simulate", config={}, seed=0, warmup=warmup, load_s=0.0, versions={})


def many(result: dict[str, Any], engines: int = 64) -> dict[str, Any]:
    """The result with copies of its first engine, each a little busier than the one before."""
    first, load = result["engines"][0], result["timeline"]["engines"]["load"]
    result["engines"] = [first | {"engine": number, "busy_share": (number + 1) / 100} for number in range(engines)]
    load["requests"] = {str(number): load["requests"]["0"] for number in range(engines)}
    return result


def test_each_engine_has_its_own_requests_and_hits(clustered: Outcome) -> None:
    first, second = summary(clustered)["engines"]
    assert (first["requests"], first["prompt_tokens"], first["hit_rate"]) == (2, 80, 0.25)
    assert first["hit_tokens"] == {"gpu": 10, "cpu": 10, "disk": 0}
    assert (second["requests"], second["prompt_tokens"], second["hit_rate"]) == (1, 40, 0.5)
    assert (first["ttft_s"]["p50"], second["ttft_s"]["p50"]) == (3.5, 2.0)
    assert (first["busy_share"], second["busy_share"]) == (0.6, 0.2)
    assert first["queue"] == {"mean": 0.5, "most": 2}
    assert first["links"] == {"cpu-gpu": {"bytes": 3_000_000_000, "transfers": 2, "busy_s": 3.0, "utilization": 0.3}}
    assert second["links"] == {}


def test_the_warmup_is_left_out_of_the_requests_but_not_of_the_busy_time(clustered: Outcome) -> None:
    first, second = summary(clustered, warmup=0.5)["engines"]
    assert (first["requests"], first["hit_rate"], second["requests"], second["hit_rate"]) == (1, 0.5, 0, None)
    assert (first["busy_share"], second["busy_share"]) == (0.6, 0.2)
    assert second["ttft_s"]["p50"] is None


def test_imbalance_is_the_most_loaded_engine_over_the_mean(clustered: Outcome) -> None:
    """Busy 6 s and 2 s, mean 4 s; computed 40 + 20 tokens and 20, mean 40."""
    assert summary(clustered)["imbalance"] == {"both": {"busy": 1.5, "computed_tokens": 1.5}}


def test_prefill_and_decode_engines_are_compared_apart(handed_over: Outcome) -> None:
    result = summary(handed_over)
    assert result["imbalance"] == {
        "prefill": {"busy": 1.5, "computed_tokens": 1.5},
        "decode": {"busy": 1.0, "output_tokens": 10 / 7.5},
    }
    assert [engine["decoded"] for engine in result["engines"]] == [0, 0, 2, 1]
    assert [engine["tpot_s"]["p50"] for engine in result["engines"]] == [None, None, 0.5, 0.5]


def test_a_link_between_gpus_belongs_to_the_engines_at_both_ends(handed_over: Outcome) -> None:
    links = [engine["links"].get("gpu-gpu", {}) for engine in summary(handed_over)["engines"]]
    assert [link["bytes"] for link in links] == [400, 10, 110, 300]
    assert [link["utilization"] for link in links] == [0.1] * 4


def test_time_down_counts_until_the_run_ends(clustered: Outcome) -> None:
    clustered.outages = {1: [[1.0, 3.0], [8.0, float("inf")]]}
    assert [engine["down_s"] for engine in summary(clustered)["engines"]] == [0.0, 4.0]


def test_a_single_engine_has_no_fields_of_its_own(simulated: Outcome) -> None:
    result = summary(simulated)
    assert not {"engines", "imbalance"} & set(result)
    assert "engines" not in result["timeline"]


def test_load_is_the_mean_number_of_requests_there(clustered: Outcome) -> None:
    """10 s in 200 bins. Engine 0 has request 0 until 3 s and request 2 from 2 s to 10 s; engine 1 has request 1 from 1 to 5 s."""
    load = summary(clustered)["timeline"]["engines"]["load"]
    assert (load["edges_s"][0], load["edges_s"][-1], len(load["edges_s"])) == (0.0, 10.0, 201)
    assert load["requests"]["0"] == [1.0] * 40 + [2.0] * 20 + [1.0] * 140
    assert load["requests"]["1"] == [0.0] * 20 + [1.0] * 80 + [0.0] * 100


def test_a_request_moves_to_the_decode_engine_with_its_first_token(handed_over: Outcome) -> None:
    """Engine 2 decodes request 0 from 1 s to 3 s and request 1 from 3 s to 5 s; engine 0 computes until 1 s, and 2 s to 8 s."""
    requests = summary(handed_over)["timeline"]["engines"]["load"]["requests"]
    assert requests["2"] == [0.0] * 20 + [1.0] * 80 + [0.0] * 100
    assert requests["0"] == [1.0] * 20 + [0.0] * 20 + [1.0] * 120 + [0.0] * 40


def test_hit_rates_by_engine_lie_where_requests_arrive(clustered: Outcome) -> None:
    """So few requests share one bin; the rejected one has no place in it."""
    hits = summary(clustered)["timeline"]["engines"]["hits"]
    assert hits == {"edges_s": [0.0, 2.0], "prompt_tokens": {"0": [80], "1": [40]}, "hit_rate": {"0": [0.25], "1": [0.5]}}


def test_a_run_in_which_nothing_was_served_has_engines_without_numbers(clustered: Outcome) -> None:
    clustered.status[:] = 1
    clustered.columns["engine"] = clustered.columns["decoder"] = np.full(4, -1)
    result = summary(clustered)
    assert result["imbalance"]["both"]["computed_tokens"] is None
    assert result["engines"][0]["hit_rate"] is None
    assert render(result)


def printed(result: dict[str, Any]) -> list[str]:
    raw = io.StringIO()
    print_result(result, Console(file=raw, width=100))
    return [" ".join(line.split()) for line in raw.getvalue().splitlines()]


def test_the_summary_shows_engines_and_imbalance(clustered: Outcome) -> None:
    clustered.engines[1].failures = 1
    lines = printed(summary(clustered))
    assert "0 2 25.00% 60.00% 0.500 3.50 5.95 1" in lines
    told = dict(facts(summary(clustered)))["engines"]
    assert told == "2 with at most 1.50 x the mean busy time and 1.50 x the mean tokens computed, 1 failure"


def test_roles_and_hosts_are_shown_where_they_differ(handed_over: Outcome) -> None:
    table = engine_table(summary(handed_over))
    assert table.columns[:5] == ("engine", "role", "host", "requests", "decoded")
    assert table.rows[2][:5] == ("2", "decode", "1", "0", "2")
    assert dict(facts(summary(handed_over)))["engines"].endswith(", on 2 hosts")
    assert all(len(line) <= 100 for line in printed(summary(handed_over)))


def test_of_many_engines_a_terminal_sees_the_busiest_and_the_idlest(clustered: Outcome) -> None:
    result = many(summary(clustered))
    table = engine_table(result, MOST_ENGINES)
    assert [row[0] for row in table.rows] == [*map(str, range(63, 55, -1)), *map(str, range(7, -1, -1))]
    assert "the 8 busiest and the 8 idlest of 64 engines" in printed(result)
    assert render(result).count("<summary>All 64 engines</summary>") == 1


@pytest.mark.parametrize(("engines", "kind"), [(MOST_LINES, "scatter"), (MOST_LINES + 1, "heatmap")])
def test_many_engines_make_a_heat_map(clustered: Outcome, engines: int, kind: str) -> None:
    figures = {picture.title: picture.figure for picture in pictures_of(many(summary(clustered), engines))}
    figure = figures["Requests by engine"]
    assert figure is not None
    drawn = figure["data"]
    assert drawn[0]["type"] == kind
    assert len(drawn) == (engines if kind == "scatter" else 1)
