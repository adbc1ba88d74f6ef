"""What the cache and the engine know of a request."""

import pytest

from kvsim.core.request import Request
from tests.workloads import make_request


def test_only_its_prompt_and_its_place_must_be_known() -> None:
    request = Request(index=0, arrival_s=0.0, prompt_tokens=9, output_tokens=4, runs=((0, 2),), prompt_pages=2)
    assert (request.after, request.delay_s) == (-1, 0.0), "it arrives at its time"
    assert (request.session, request.turn, request.kind, request.priority) == (-1, 0, "", 0)
    assert request.output_runs is None and not request.persistent


def test_two_requests_for_the_same_prompt_are_two_requests() -> None:
    one, other = make_request([0, 1]), make_request([0, 1])
    assert one != other and len({one, other}) == 2


def test_a_request_has_no_other_fields() -> None:
    with pytest.raises(AttributeError):
        make_request([0]).prompt = "ab"  # type: ignore[attr-defined]
