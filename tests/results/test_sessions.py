"""Times to finish sessions, in ``result.json``."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvsim.engine.outcome import Outcome
from kvsim.report.summary import facts, tables
from kvsim.results.fields import measures_of
from kvsim.results.result import summarize


def summary(outcome: Outcome, sessions: Sequence[int], warmup: float = 0.0) -> dict[str, Any]:
    for request, session in zip(outcome.requests, sessions, strict=True):
        request.session = session
    return summarize(outcome, command="simulate", config={}, seed=0, warmup=warmup, load_s=0.0)


@pytest.fixture
def timed(outcome_of: Callable[..., Outcome]) -> Outcome:
    """Requests that arrive at 0, 1, 4, 10 and 11, and end at 5, 4, 8, 15 and 13."""
    arrivals, ends = (0.0, 1.0, 4.0, 10.0, 11.0), np.array((5.0, 4.0, 8.0, 15.0, 13.0))
    return outcome_of([10] * 5, [(0, 0, 0)] * 5, ttft_s=(ends - arrivals - 2.0).tolist(), arrival_s=arrivals)


def test_a_session_takes_from_its_first_arrival_to_its_last_token(timed: Outcome) -> None:
    """One from 0 to 15, one from 1 to 8, which ends after a request that arrived later had ended; one is in no session."""
    result = summary(timed, [0, 5, 5, 0, -1])
    assert result["sessions"] == 2
    assert result["session_s"] == pytest.approx({"mean": 11.0, "p50": 11.0, "p90": 7 + 0.9 * 8, "p99": 7 + 0.99 * 8})


def test_overlapping_requests_do_not_end_a_session_before_the_last_one_has(timed: Outcome) -> None:
    """From 10 to 15, although the request that arrives last ends at 13."""
    result = summary(timed, [-1, -1, -1, 3, 3])
    assert (result["sessions"], result["session_s"]["mean"]) == (1, 5.0)


def test_sessions_with_a_rejected_request_and_those_that_begin_in_the_warm_up_are_left_out(
    outcome_of: Callable[..., Outcome],
) -> None:
    ttft_s = [1.0, 1.0, 1.0, float("nan")]
    outcome = outcome_of([10] * 4, [(0, 0, 0)] * 4, ttft_s=ttft_s, rejected=[3])
    assert summary(outcome, [0, 1, 0, 1])["sessions"] == 1
    assert summary(outcome, [0, 1, 0, 1])["session_s"]["mean"] == 2 + 3
    none = summary(outcome, [0, 1, 0, 1], warmup=0.25)
    assert none["sessions"] == 0 and none["session_s"] == dict.fromkeys(("mean", "p50", "p90", "p99"))


def test_replays_and_traces_without_sessions_have_none(timed: Outcome, replayed: Outcome) -> None:
    for result in (summary(timed, [-1] * 5), summary(replayed, [0, 0, 1, 1])):
        assert "sessions" not in result and "session_s" not in result
        assert "sessions" not in dict(facts(result)) and not any(
            "session" in row for table in tables(result) for row in table.rows
        )


def test_pages_and_comparisons_show_them(timed: Outcome) -> None:
    result = summary(timed, [0, 5, 5, 0, -1])
    assert dict(facts(result))["sessions"] == "2 finished in 11.0 s on average, p99 14.9 s"
    (times,) = (table for table in tables(result) if table.title == "Times")
    assert times.rows[-1] == ("session", "11.0", "11.0", "14.2", "14.9")
    shown = {measure.key: measure.text(measure.of(result)) for measure in measures_of([result])}
    assert (shown["session_s_mean"], shown["session_s_p99"]) == ("11.0", "14.9")
