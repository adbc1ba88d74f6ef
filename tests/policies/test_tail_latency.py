"""Tail-optimised LRU; pages are of one token."""

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.tail_latency import TailLatency
from tests.core.small import SmallCache, small_cache
from tests.workloads import make_request


def filled(policy: TailLatency, *words: str, output_tokens: int = 0) -> SmallCache:
    cache = small_cache(gpu=16, eviction=[lambda: policy])
    for word in words:
        cache.use(word, output_tokens=output_tokens)
    return cache


def test_what_the_next_prompt_can_do_without_leaves_first() -> None:
    """The second turn ends at 4 tokens; 2 may be computed, so cd may be lost and ab may not. Of xyz, yz may be."""
    words = "xyz", "ab", "abcd"
    assert filled(TailLatency(threshold=2), *words).leaving_order() == "zydcxba"
    assert filled(TailLatency(), *words).leaving_order() == "zyxdcba", "without a threshold it is LRU"


@pytest.mark.parametrize(
    ("threshold", "estimate", "output_tokens", "order"),
    [(2, 1, 0, "zdyxcba"), (3, 1, 0, "zydcxba"), (3, 0, 1, "zydcxba"), (3, 0, 2, "zdyxcba")],
)
def test_answer_and_next_prompt_count(threshold: int, estimate: int, output_tokens: int, order: str) -> None:
    policy = TailLatency(threshold=threshold, next_prompt_estimate=estimate)
    assert filled(policy, "xyz", "ab", "abcd", output_tokens=output_tokens).leaving_order() == order


@pytest.mark.parametrize("setting", ["threshold", "next_prompt_estimate"])
def test_settings_are_tokens(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be 0 or more, not -1; it is a number of tokens"):
        TailLatency(**{setting: -1})


def test_a_trace_without_sessions_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the session of each request, which this trace does not have"):
        TailLatency().bind(PolicyContext(requests=[make_request([0])]))
