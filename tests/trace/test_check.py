"""Requests that a program has made itself are checked before they are played."""

import pytest

from kvsim.errors import UsageError
from kvsim.trace.check import check_requests
from tests.workloads import make_request


def graph(**last):
    return [*(make_request([number], index=number) for number in range(3)), make_request([3], index=3, **last)]


def test_a_request_may_wait_for_several_earlier_ones():
    requests = graph(after=1, joins=(0, 2))
    check_requests(requests)
    assert [one.predecessors for one in requests] == [(), (), (), (1, 0, 2)]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"after": 3}, "after is 3: a request can wait for an earlier one only"),
        ({"joins": (1,)}, "joins are further requests to wait for: set after, too"),
        ({"after": 1, "joins": (3,)}, "joins has 3: a request can wait for earlier ones only"),
        ({"after": 1, "joins": (-1,)}, "joins has -1: a request can wait for earlier ones only"),
        ({"after": 1, "joins": (0, 1)}, "after and joins name a request twice: 1, 0, 1"),
    ],
)
def test_other_predecessors_are_refused(last, message):
    with pytest.raises(UsageError) as caught:
        check_requests(graph(**last))
    assert str(caught.value) == f"request 3 of the trace: {message}"
