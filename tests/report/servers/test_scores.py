"""Scores of runs with four requests: numbers small enough to check by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsim.report.servers.measures import hit_rate, preemptions, succeeded, times_s, tokens_by_medium
from kvsim.report.servers.scores import Compared, score
from kvsim.report.servers.seen import among_all
from kvsim.report.servers.series import series
from kvsim.results.observed import ObservedRun
from kvsim.results.tolerances import Tolerances
from tests.report.servers.observed_runs import observed

REAL = [observed([0, 50, 50, 0]), observed([0, 50, 50, 0]), observed([0, 50, 48, 0])]


def scored(
    real: list[ObservedRun],
    simulated: list[ObservedRun],
    given: list[ObservedRun] | None = None,
    *,
    skipped: int = 0,
    **tolerances: float,
) -> dict[str, Any]:
    runs = Compared(real=real, given=real if given is None else given, simulated=simulated, skipped=skipped)
    return score(runs, Tolerances(**tolerances))


def checks(record: dict[str, Any]) -> dict[str, bool]:
    return {check["name"]: check["holds"] for check in record["checks"]}


def test_equal_runs_hold() -> None:
    record = scored(REAL[:2], [REAL[0]])
    assert record["holds"] and record["compared"] == record["requests"] == 4
    assert record["given_order"]["differing"] == [0, 0] and record["given_order"]["identical"] == 1
    assert record["simulated_order"]["differing"] == 0 == record["simulated_order"]["between_real"]
    assert list(checks(record)) == ["identical, server's order", "hit_rate, server's order", "hit_rate", "ttft_p50", "ttft_p99"]


def test_requests_that_differ_are_counted_run_by_run() -> None:
    given = [observed([0, 50, 50, 0]), observed([0, 50, 48, 16]), observed([0, 50, 48, 0])]
    record = scored(REAL, [REAL[0]], given)
    order = record["given_order"]
    assert order["differing"] == [0, 2, 0] and order["identical"] == pytest.approx(1 - 2 / 12)
    assert order["hit_rate"]["simulated"] == pytest.approx([0.25, 0.285, 0.245])
    assert order["hit_rate"]["difference"] == pytest.approx(0.035 / 3)
    assert not checks(record)["identical, server's order"] and not checks(record)["hit_rate, server's order"]
    assert scored(REAL, [REAL[0]], given, identical=0.8, hit_rate=0.02)["holds"]


def test_real_runs_differ_among_each_other_too() -> None:
    record = scored(REAL, [observed([0, 50, 50, 0])])
    assert record["simulated_order"]["differing"] == pytest.approx(1 / 3)
    assert record["simulated_order"]["between_real"] == pytest.approx(2 / 3)
    assert record["simulated_order"]["hit_rate"]["spread"] == pytest.approx(0.005)


def test_what_failed_anywhere_is_compared_nowhere() -> None:
    record = scored([REAL[0], observed([0, 50, 50, 90], failed=[3])], [observed([80, 50, 50, 0], failed=[0])])
    assert record["compared"] == 2
    assert record["simulated_order"]["hit_rate"]["means"] == [0.5, 0.5]
    assert record["given_order"]["compared"] == [4, 3]


def test_the_warm_up_is_not_compared() -> None:
    record = scored([observed([7, 50, 50, 0])] * 2, [REAL[0]], skipped=1)
    assert record["compared"] == 3 and record["simulated_order"]["differing"] == 0 and record["holds"]


def test_a_server_that_tells_no_hits_is_compared_by_times_only() -> None:
    record = scored([observed(None)], [observed(None)], [])
    assert record["given_order"] is record["simulated_order"] is None and record["media"] == {}
    assert list(checks(record)) == ["ttft_p50", "ttft_p99"] and record["holds"]


def test_counters_stand_in_for_hits_by_request() -> None:
    counters = {
        'vllm:prefix_cache_hits_total{engine="0"}': 60.0,
        'vllm:external_prefix_cache_hits_total{engine="0"}': 40.0,
        'vllm:prefix_cache_queries_total{engine="0"}': 400.0,
    }
    run = observed(None, counters=counters)
    assert tokens_by_medium(run, succeeded(run)) == {"device": 60.0, "host": 40.0}
    assert hit_rate(run, succeeded(run)) == 0.25
    simulated = observed([0, 50, 50, 0], tiers={"device": [0, 50, 0, 0], "host": [0, 0, 50, 0]})
    record = scored([run], [simulated], [])
    assert record["simulated_order"]["differing"] is None and record["simulated_order"]["hit_rate"]["difference"] == 0
    assert {medium: pair["means"] for medium, pair in record["media"].items()} == {"device": [50, 60], "host": [50, 40]}


@pytest.mark.parametrize(
    ("counters", "found"),
    [
        (
            {
                'vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"}': 5.0,
                'vllm:prompt_tokens_cached_by_source_total{source="disk",engine="0"}': 2.0,
                "vllm:prefix_cache_hits_total": 9.0,
            },
            {"device": 5.0, "storage": 2.0},
        ),
        (
            {'sglang:cached_tokens_total{cache_source="host",model_name="m"}': 3.0, "sglang:num_retractions_total": 1.0},
            {"host": 3.0},
        ),
        (
            {
                'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"}': 8.0,
                'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"}': 6.0,
                'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"}': 4.0,
                'vllm:prefix_cache_hits_total{engine="0"}': 99.0,
            },
            {"device": 6.0, "host": 4.0},
        ),
        ({"process_cpu_seconds_total": 1.0}, {}),
    ],
)
def test_media_are_read_from_the_counters_of_either_engine(counters: dict[str, float], found: dict[str, float]) -> None:
    run = observed(None, counters=counters)
    assert tokens_by_medium(run, succeeded(run)) == found


def test_preemptions_are_read_from_the_counters() -> None:
    counters = {'vllm:num_preemptions_total{engine="0"}': 3.0, "vllm:num_requests": 5.0}
    assert preemptions(observed(None, counters=counters)) == 3 and preemptions(observed(None)) == 0
    assert preemptions(observed(None, counters={"sglang:num_retracted_requests_total": 2.0})) == 2


def test_times_are_those_of_the_servers_clients() -> None:
    run = observed([0, 0], ttft_s=[1.0, 3.0], output=5, token_s=0.5)
    assert times_s(run, "ttft").tolist() == [1, 3] and times_s(run, "e2e").tolist() == [3, 5]
    assert times_s(run, "tpot").tolist() == [0.5, 0.5]
    assert np.isnan(times_s(observed([0], output=1), "tpot")).all()


def test_times_are_compared_with_the_mean_of_the_real_runs() -> None:
    real = [observed([0] * 4, ttft_s=[ttft] * 4) for ttft in (0.9, 1.0, 1.1)]
    times = scored(real, [observed([0] * 4, ttft_s=[1.2] * 4)])["times"]
    assert times["ttft_p50"]["error"] == pytest.approx(0.2) and times["ttft_p50"]["relative_spread"] == pytest.approx(0.2)
    assert times["e2e_mean"]["means"] == pytest.approx([3.2, 3.0])
    assert times["tpot_p99"]["means"] == [0.5, 0.5]
    assert times["requests_per_s"]["means"][0] == pytest.approx(4 / 6.2)
    assert times["output_tokens_per_s"]["means"][0] == pytest.approx(20 / 6.2)


def test_an_error_within_the_spread_of_the_real_runs_holds() -> None:
    simulated = [observed([0] * 4, ttft_s=[1.2] * 4)]
    apart = [observed([0] * 4, ttft_s=[ttft] * 4) for ttft in (0.7, 1.0, 1.3)]
    record = scored(apart, simulated)
    assert checks(record)["ttft_p50"] and not next(one for one in record["checks"] if one["name"] == "ttft_p50")["is_small"]
    close = [observed([0] * 4, ttft_s=[ttft] * 4) for ttft in (0.999, 1.0, 1.001)]
    assert not checks(scored(close, simulated))["ttft_p50"]
    assert not checks(scored(close[:1], simulated))["ttft_p50"]
    assert checks(scored(close[:1], simulated, ttft_p50=0.25))["ttft_p50"]


def test_pictures_have_hits_by_request_and_over_time() -> None:
    runs = Compared(real=[REAL[2]], given=[REAL[0]], simulated=[observed([0, 50, 0, 0])])
    drawn = series(runs)
    assert drawn["requests_cached"]["real"].tolist() == [0, 50, 48, 0]
    assert drawn["requests_cached"]["given_order"].tolist() == [0, 50, 50, 0]
    rates = drawn["hits_over_time"]["real"]
    assert rates[~np.isnan(rates)].tolist() == [0, 0.5, 0.48, 0]


def test_a_run_of_some_requests_is_compared_with_runs_of_all() -> None:
    some = among_all(observed([0, 50], tiers={"device": [0, 50]}), np.array([True, False, True, False]))
    assert some.errors == [None, "not played", None, "not played"] and some.cached_tokens.tolist() == [0, 0, 50, 0]
    assert some.sent_s[2] == 1 and np.isnan(some.sent_s[1]) and some.tier_tokens["device"].tolist() == [0, 0, 50, 0]
    record = scored([observed([0, 9, 50, 9], failed=[1, 3])], [some])
    assert record["compared"] == 2 and record["simulated_order"]["differing"] == 0


def test_nothing_holds_where_nothing_is_compared() -> None:
    record = scored(REAL[:2], [REAL[0]], [REAL[0], observed([0, 50, 50, 0], failed=range(4))])
    assert record["given_order"] is None and "identical, server's order" not in checks(record)
    bare = scored([observed(None, ttft_s=[np.nan] * 4)], [observed(None)], [])
    assert not bare["checks"] and not bare["holds"]


def test_a_request_of_which_nobody_knows_when_it_was_sent_is_in_no_picture_over_time() -> None:
    run = replace(REAL[0], sent_s=np.array([0.0, 1.0, np.nan, 3.0]))
    rates = series(Compared(real=[run], given=[], simulated=[REAL[0]]))["hits_over_time"]
    assert rates["edges_s"][-1] == 3 and rates["real"][~np.isnan(rates["real"])].tolist() == [0, 0.5, 0]
    assert scored([run], [REAL[0]])["times"]["requests_per_s"]["means"][1] == pytest.approx(4 / 6)


def test_counters_are_compared_with_whole_simulations() -> None:
    counters = {"vllm:prefix_cache_hits_total": 100.0}
    simulated = observed([0, 50, 50, 0], tiers={"device": [0, 50, 50, 0]})
    told = scored([observed([0, 50, 50, 0], counters=counters)], [simulated], skipped=2)
    assert told["media"]["device"]["means"] == [100, 100] and told["simulated_order"]["hit_rate"]["means"] == [0.25, 0.25]
    untold = scored([observed(None, counters=counters)], [simulated], [], skipped=3)
    assert untold["media"]["device"]["means"] == [100, 100] and untold["simulated_order"]["hit_rate"]["means"] == [0.25, 0.25]
    by_request = scored([observed([0, 50, 50, 0], tiers={"device": [0, 50, 50, 0]})], [simulated], skipped=2)
    assert by_request["media"]["device"]["means"] == [50, 50]
