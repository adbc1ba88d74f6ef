"""MyPolicy by hand: pages of 16 tokens."""

import pytest

from kvsim.commands.templates.prefetch.my_policy import MyPolicy
from kvsim.core.request import Request
from kvsim.policies.context import PolicyContext
from kvsim.policies.prefetch.base import Offer, Refusal

REQUEST = Request(index=0, arrival_s=0.0, prompt_tokens=4096, output_tokens=1, runs=(), prompt_pages=0)


def fetched(policy: MyPolicy, stored: int, available: int = 100) -> int | Refusal:
    """Return what the policy fetches of ``stored`` pages if the CPU tier could take ``available``."""
    policy.bind(PolicyContext(tier=1, capacity_pages=100, page_tokens=16))
    return policy.fetch(
        Offer(request=REQUEST, first_page=0, stored_pages=stored, in_flight_pages=0, available_pages=available, queued_s=0.0)
    )


def test_it_fetches_from_the_threshold_on() -> None:
    assert fetched(MyPolicy(min_tokens=256), 15) is Refusal.THRESHOLD
    assert fetched(MyPolicy(min_tokens=256), 16) == 16


def test_it_fetches_what_fits() -> None:
    assert fetched(MyPolicy(), 50, available=20) == 20
    assert fetched(MyPolicy(), 50, available=0) is Refusal.MEMORY


def test_it_loads_what_the_cpu_has() -> None:
    assert MyPolicy().load(REQUEST, 1, 3, 4) == 3


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at least 1, not 0"):
        MyPolicy(min_tokens=0)
