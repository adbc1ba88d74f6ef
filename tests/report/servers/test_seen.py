"""When requests were admitted, as far as a client can know it."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.report.servers.seen import moments_of
from kvsim.results.observed import ObservedRun, ServerFacts


def run_of(sent_s: list[float], queued_s: list[float]) -> ObservedRun:
    count = len(sent_s)
    sent, ones = np.array(sent_s), np.ones(count, dtype=np.int64)
    return ObservedRun(
        source="test",
        client="test",
        due_s=sent,
        sent_s=sent,
        first_token_s=np.full(count, 9.0),
        end_s=np.full(count, 9.0),
        token_gaps_s=[np.empty(0)] * count,
        prompt_tokens=16 * ones,
        output_tokens=ones,
        cached_tokens=0 * ones,
        tier_tokens={},
        queued_s=np.array(queued_s),
        prefill_s=np.full(count, np.nan),
        errors=[None] * count,
    )


@pytest.mark.parametrize(
    ("queued_s", "admitted_s"),
    [
        ([0.5, 0.395], [0.5, 0.5]),  # 5 ms before the one that was sent earlier: the clocks are not that good
        ([0.5, 0.45], [0.5, 0.55]),
        ([0.5, 0.3], [0.5, 0.4]),  # 100 ms before: the earlier one was passed over
        ([0.5, 0.4015], [0.5, 0.5]),  # one step
    ],
)
def test_requests_are_admitted_in_the_order_of_the_queue_unless_they_clearly_were_not(
    queued_s: list[float], admitted_s: list[float]
) -> None:
    assert moments_of(run_of([0.0, 0.1], queued_s)).admitted_s == pytest.approx(admitted_s)


def test_a_request_without_its_first_token_is_admitted_after_its_time_in_the_queue() -> None:
    moments = moments_of(replace(run_of([0.0, 1.0], [0.5, 0.25]), first_token_s=np.array([np.nan, 2.0])))
    assert moments.admitted_s.tolist() == [0.5, 1.25] and moments.tokens_s[0].tolist() == [0.5]
    answers = replace(run_of([0.0], [1.0]), first_token_s=np.array([np.nan]), output_tokens=np.array([5]))
    assert moments_of(answers).tokens_s[0].tolist() == [1, 3, 5, 7, 9]


def test_a_request_whose_admission_nobody_knows_has_none() -> None:
    moments = moments_of(replace(run_of([0.0, 1.0], [np.nan, np.nan]), first_token_s=np.array([np.nan, 2.0])))
    assert np.isnan(moments.admitted_s[0]) and moments.admitted_s[1] == 2


def test_a_request_without_an_end_ends_with_its_first_token() -> None:
    moments = moments_of(replace(run_of([0.0], [1.0]), end_s=np.array([np.nan]), output_tokens=np.array([3])))
    assert moments.tokens_s[0].tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    ("settings", "admitted_s", "ahead"),
    [
        ({"disable_overlap_schedule": False, "schedule_policy": "fcfs"}, [0.001, 0.164, 0.18], 1),
        ({}, [0.001, 0.092, 0.138], 0),
    ],
)
def test_a_server_that_takes_requests_between_steps_counts_their_time_in_the_queue_from_then_on(
    settings: dict[str, object], admitted_s: list[float], ahead: int
) -> None:
    """Two requests are sent while the first prompt is computed. The server has them with its token, at 164 ms: one is admitted
    then, one after the next step. Both steps of prompts were formed two tokens before theirs."""
    run = replace(
        run_of([0.0, 0.091, 0.122], [0.001, 0.001, 0.016]),
        first_token_s=np.array([0.164, 0.452, 0.772]),
        end_s=np.array([1.0, 1.0, 1.0]),
        token_gaps_s=[np.array([0.016, 0.82]), np.array([0.548]), np.array([0.228])],
        output_tokens=np.array([3, 2, 2]),
        facts=ServerFacts(engine="one", settings=settings),
    )
    moments = moments_of(run)
    assert moments.admitted_s == pytest.approx(admitted_s) and moments.steps_ahead == ahead
    assert (0.001 in moments.formed_s.tolist()) == bool(ahead)
