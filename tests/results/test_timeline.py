from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvsim.engine.columns import hit_tokens, prompt_tokens
from kvsim.engine.link_use import LinkUse
from kvsim.engine.outcome import Outcome
from kvsim.engine.recorder import Recorder
from kvsim.results.timeline import BINS, middles, timeline
from tests.engine.small import small_engine


def timeline_of(outcome: Outcome, skipped: int = 0) -> dict[str, Any]:
    return timeline(outcome, prompt_tokens(outcome), hit_tokens(outcome), skipped)


def test_few_requests_get_a_bin_each_and_the_rejected_none(replayed: Outcome):
    hits = timeline_of(replayed)["hits"]
    assert hits["axis"] == "request"
    assert hits["edges"].tolist() == [0, 1, 3, 3]
    assert hits["hit_rate"]["gpu"].tolist() == pytest.approx([0, 20 / 35, 10 / 60], abs=1e-6)
    assert hits["hit_rate"]["disk"].tolist() == [0, 0, 0.5]


def with_usage(outcome: Outcome, usage: list[tuple[float, str, int]]) -> Outcome:
    outcome.timeline = Recorder(small_engine(gpu=4).env, [])
    outcome.timeline.usage = usage
    return outcome


def test_free_pages_are_what_a_tier_does_not_use(simulated: Outcome):
    """The GPU tier has 4 pages, the run lasts 10 s, and a bin 0.05 s; an unlimited tier has no free pages to count."""
    usage = [(0.0, "gpu", 1), (2.0, "gpu", 3), (2.5, "cpu", 7), (4.025, "gpu", 4), (11.0, "gpu", 0)]
    free = timeline_of(with_usage(simulated, usage))["free_pages"]
    assert list(free["mean"]) == ["gpu"]
    assert free["mean"]["gpu"].tolist() == [3.0] * 40 + [1.0] * 40 + [0.5] + [0.0] * 119


def test_without_a_recorded_timeline_there_is_no_series_of_free_pages(simulated: Outcome):
    assert "free_pages" not in timeline_of(simulated)


def test_many_requests_share_200_bins_equally(outcome_of: Callable[..., Outcome]):
    hits = timeline_of(outcome_of([20] * 1000, [(1, 0, 0)] * 500 + [(0, 2, 0)] * 500))["hits"]
    assert len(hits["edges"]) == BINS + 1
    assert hits["prompt_tokens"].tolist() == [100] * BINS
    assert hits["hit_rate"]["gpu"].tolist() == [0.5] * 100 + [0.0] * 100
    assert hits["hit_rate"]["cpu"].tolist() == [0.0] * 100 + [1.0] * 100


def test_a_clock_orders_requests_by_their_arrival(outcome_of: Callable[..., Outcome]):
    late_first = outcome_of([20, 40], [(2, 0, 0), (0, 0, 0)], ttft_s=[1, 1], arrival_s=[5, 3])
    hits = timeline_of(late_first, skipped=1)["hits"]
    assert (hits["axis"], hits["edges"].tolist(), hits["counted_from"]) == ("arrival_s", [3, 5, 5], 3)
    assert hits["hit_rate"]["gpu"].tolist() == [0, 1]


def test_a_run_without_served_requests_has_no_bins(outcome_of: Callable[..., Outcome]):
    assert timeline_of(outcome_of([20], [(0, 0, 0)], rejected=[0]))["hits"]["edges"] == []


def test_a_link_is_busy_while_a_transfer_is_under_way(simulated: Outcome):
    # 10 s in 200 bins: 20 bins a second; busy from 0 to 2 s and from 5 to 6 s.
    links = timeline_of(simulated)["links"]
    assert links["edges_s"][[0, 20, 200]].tolist() == [0, 1, 10]
    busy = np.zeros(BINS)
    busy[:40] = busy[100:120] = 1
    assert links["utilization"]["cpu_to_gpu"].tolist() == pytest.approx(busy.tolist(), abs=1e-6)


def test_transfers_that_share_a_link_keep_it_busy_once(simulated: Outcome):
    rows = [[0.0, 4.0, 1.0], [1.0, 2.0, 1.0], [3.0, 5.0, 1.0], [9.5, 9.525, 1.0]]
    simulated.links = {"shared": LinkUse(intervals=np.array(rows)), "idle": LinkUse()}
    use = timeline_of(simulated)["links"]["utilization"]
    assert use["shared"][:100].tolist() == pytest.approx([1.0] * 100, abs=1e-6)
    assert use["shared"].sum() == pytest.approx(100.5, abs=1e-4)
    assert not use["idle"].any()


def test_the_middle_of_a_bin_lies_between_its_edges():
    assert middles([0, 2, 3]) == [1, 2.5]
