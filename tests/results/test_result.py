import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvsim.engine.columns import hit_tokens
from kvsim.engine.outcome import Disagreement, Outcome
from kvsim.errors import UsageError
from kvsim.results.result import hit_definition, plain, summarize, to_json, warmup_requests

STABLE = (
    "schema command status config versions seed requests rejected prompt_tokens prompt_pages hit_tokens hit_pages hit_rate "
    "page_hit_rate hit_requests request_hit_rate ttft_s tpot_s e2e_s throughput links tiers prefetch placement checkpoints "
    "retractions simulated_s load_s wall_s requests_per_s timeline"
)


def summary(outcome: Outcome, warmup: float = 0.0, **more: Any) -> dict[str, Any]:
    return summarize(outcome, command="replay", config={"page_tokens": 10}, seed=7, warmup=warmup, load_s=0.25, **more)


def test_all_stable_fields_are_there_in_a_fixed_order(replayed: Outcome):
    stable = STABLE.split()
    assert [name for name in summary(replayed) if name in stable] == stable


def test_a_partial_page_weighs_its_own_tokens_in_the_tier_that_held_it(replayed: Outcome):
    assert hit_tokens(replayed).tolist() == [[0, 0, 0], [20, 15, 0], [0, 0, 0], [10, 0, 30]]


@pytest.mark.parametrize(("command", "gpus"), [("simulate", 2), ("simulate", 1), ("replay", 2)])
def test_what_ranks_lost_is_in_the_record_of_a_simulation_with_several(simulated: Outcome, command: str, gpus: int):
    simulated.lost_to_disagreement = Disagreement(pages=3, transfers=1)
    config = {"hardware": {"gpus": gpus}}
    result = summarize(simulated, command=command, config=config, seed=0, warmup=0.0, load_s=0.0)
    expected = {"pages": 3, "transfers": 1} if command == "simulate" and gpus == 2 else None
    assert result.get("lost_to_disagreement") == expected


def test_hits_add_up_by_tier(replayed: Outcome):
    result = summary(replayed)
    assert result["hit_tokens"] == {"gpu": 30, "cpu": 15, "disk": 30}
    assert result["hit_pages"] == {"gpu": 3, "cpu": 2, "disk": 3}


def test_requests_with_a_hit_are_counted_among_those_served(replayed: Outcome):
    result = summary(replayed)
    assert (result["hit_requests"], result["request_hit_rate"]) == (2, 2 / 3)
    assert (summary(replayed, warmup=0.5)["hit_requests"], summary(replayed, warmup=0.5)["request_hit_rate"]) == (1, 1.0)


def test_a_rejected_request_counts_but_does_not_weigh(replayed: Outcome):
    result = summary(replayed)
    assert (result["requests"], result["rejected"]) == (4, 1)
    assert (result["prompt_tokens"], result["prompt_pages"]) == (135, 14)
    assert result["hit_rate"] == 75 / 135
    assert result["page_hit_rate"] == 8 / 14


def test_the_warmup_is_left_out_of_everything_about_requests(replayed: Outcome):
    result = summary(replayed, warmup=0.5)
    assert (result["requests"], result["warmup_requests"], result["rejected"]) == (2, 2, 1)
    assert (result["prompt_tokens"], result["hit_rate"], result["page_hit_rate"]) == (60, 40 / 60, 4 / 6)


def test_the_warmup_does_not_touch_tiers_and_speed(replayed: Outcome):
    result = summary(replayed, warmup=0.5)
    assert result["tiers"]["gpu"] == {"capacity_pages": 4, "peak_pages": 4, "evicted_pages": 7, "inserted_pages": 11}
    assert result["tiers"]["cpu"]["capacity_pages"] is None
    assert result["requests_per_s"] == 4 / 2.0


@pytest.mark.parametrize(("warmup", "requests", "left_out"), [(0, 9, 0), (0.5, 12031, 6015), (0.29, 100, 29), (0.999, 10, 9)])
def test_the_warmup_is_the_whole_part_of_its_fraction(warmup: float, requests: int, left_out: int):
    assert warmup_requests(warmup, requests) == left_out


@pytest.mark.parametrize("warmup", [-0.1, 1, 1.5, float("nan")])
def test_a_warmup_that_leaves_nothing_or_adds_something_is_an_error(warmup: float):
    with pytest.raises(UsageError, match="warmup must be at least 0 and below 1"):
        warmup_requests(warmup, 10)


def test_times_without_a_clock_are_unknown(replayed: Outcome):
    result = summary(replayed)
    assert result["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert set(result["throughput"].values()) == {None}
    assert result["timeline"]["links"] == {"edges_s": [], "utilization": {}}
    assert result["ttft_quantiles_s"] == []


def test_times_of_the_rejected_do_not_enter_the_statistics(simulated: Outcome):
    result = summary(simulated)
    assert result["ttft_s"] == {"mean": 3.0, "p50": 2.0, "p90": pytest.approx(5.2), "p99": pytest.approx(5.92)}
    assert result["tpot_s"]["mean"] == 0.5
    assert result["e2e_s"]["mean"] == 5.0


def test_throughput_counts_from_the_first_arrival_to_the_last_finish(simulated: Outcome):
    # The served requests arrive at 0, 1 and 2 s; the last one ends at 2 + 6 + 2 = 10 s. The rejected one arrives at 3 s.
    throughput = {"offered_requests_per_s": 1.0, "requests_per_s": 0.3, "prompt_tokens_per_s": 12.0, "output_tokens_per_s": 1.5}
    assert summary(simulated)["throughput"] == throughput
    # Without the first half only the one that arrives at 2 s is left: 40 prompt tokens in 8 s.
    assert summary(simulated, warmup=0.5)["throughput"]["prompt_tokens_per_s"] == 5.0


def test_throughput_counts_from_the_first_arrival_even_if_that_was_rejected(outcome_of: Callable[..., Outcome]):
    """The first of three requests, which arrive at 0, 1 and 2 s, is rejected; the last one ends at 2 + 1 + 2 = 5 s."""
    outcome = outcome_of([40] * 3, [(0, 0, 0)] * 3, rejected=[0], ttft_s=[np.nan, 1, 1])
    assert summary(outcome)["throughput"]["requests_per_s"] == 2 / 5


def test_a_backlog_after_the_last_request_does_not_make_a_link_busier_than_it_can_be(simulated: Outcome):
    """The requests end after 10 s; the link, busy from the start, needs 15 s."""
    link = simulated.links["cpu_to_gpu"]
    link.busy_s, link.intervals = 15.0, np.array([[0.0, 9.0, 1e9], [9.0, 15.0, 2e9]])
    assert summary(simulated)["links"]["cpu_to_gpu"]["utilization"] == 1.0


def test_utilization_is_busy_time_over_simulated_time(simulated: Outcome):
    link = {"bytes": 3_000_000_000, "transfers": 2, "busy_s": 3.0, "utilization": 0.3}
    assert summary(simulated)["links"] == {"cpu_to_gpu": link}


def test_a_run_in_which_nothing_was_served_has_no_rates(outcome_of: Callable[..., Outcome]):
    result = summary(outcome_of([40, 40], [(0, 0, 0)] * 2, rejected=[1]), warmup=0.5)
    assert (result["requests"], result["rejected"], result["prompt_tokens"]) == (1, 1, 0)
    assert (result["hit_rate"], result["page_hit_rate"]) == (None, None)


def test_json_has_no_nan_and_reads_back_as_it_was(simulated: Outcome):
    simulated.links["cpu_to_gpu"].busy_s = float("nan")
    result = summary(simulated, command_line="kvsim replay")
    assert result["links"]["cpu_to_gpu"]["busy_s"] is None
    assert json.loads(to_json(result), parse_constant=pytest.fail) == result


def test_values_become_those_of_json():
    value = {"a": np.int64(3), "b": np.array([1.5, np.inf]), 4: (True, None), "c": np.float32("nan")}
    assert plain(value) == {"a": 3, "b": [1.5, None], "4": [True, None], "c": None}


def test_the_definition_of_a_hit_follows_the_settings():
    assert "full pages only, never the whole prompt" in hit_definition({})
    assert hit_definition({}, has_shed=True).endswith("; rejected and shed requests are excluded.")
    loose = hit_definition({"trace": {"tail": "all"}, "rules": {"recompute_last_token": False}})
    assert "the trailing partial one;" in loose
    assert "whole prompt" not in loose
