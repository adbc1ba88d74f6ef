"""What all traces share."""

import pytest

from kvsim.core.request import Request
from kvsim.trace.base import in_order_of_arrival
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.synthetic import Synthetic
from kvsim.trace.tokens import Tokens
from kvsim.trace.weka import Weka


@pytest.mark.parametrize("source", [Mooncake, Weka, Tokens])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"rate": 0.0}, "rate must be above 0, not 0.0"),
        ({"rate": -2.0}, "rate must be above 0, not -2.0"),
        ({"rate": float("nan")}, "rate must be a finite number above 0, not nan"),
        ({"rate": float("inf")}, "rate must be a finite number above 0, not inf"),
    ],
)
def test_a_limit_below_one_and_a_rate_that_is_not_positive_are_refused(source, settings, message):
    with pytest.raises(ValueError, match=message):
        source(path="trace.jsonl", **settings)


@pytest.mark.parametrize("source", [Mooncake, Tokens, Synthetic])
def test_a_tail_is_full_or_all(source):
    settings = {} if source is Synthetic else {"path": "trace.jsonl"}
    with pytest.raises(ValueError, match="tail must be one of full, all, not 'half'"):
        source(tail="half", **settings)


def test_requests_are_numbered_as_they_arrive_and_equal_times_keep_their_order():
    requests = [
        Request(index=0, arrival_s=arrival_s, prompt_tokens=1, output_tokens=1, runs=(), prompt_pages=0, after=after)
        for arrival_s, after in ((0.0, -1), (5.0, 0), (1.0, -1), (1.0, 2))
    ]
    ordered = in_order_of_arrival(requests)
    assert [(request.index, request.arrival_s, request.after) for request in ordered] == [
        (0, 0.0, -1),
        (1, 1.0, -1),
        (2, 1.0, 1),
        (3, 5.0, 0),
    ]
