"""When requests were admitted, as far as a client can know it."""

import numpy as np
import pytest

from kvsim.report.servers.seen import moments_of
from kvsim.results.observed import ObservedRun


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
