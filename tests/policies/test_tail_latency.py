"""Tail-optimised LRU; pages are of one token."""

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.tail_latency import TailLatency
from tests.core.small import SmallCache, make_request, small_cache


def filled(policy: TailLatency, *words: str, output_tokens: int = 0) -> SmallCache:
    cache = small_cache(gpu=16, eviction=[lambda: policy])
    for word in words:
        cache.use(word, output_tokens=output_tokens)
    return cache


def test_what_the_next_prompt_can_do_without_leaves_first() -> None:
    """The second turn ends at 4 tokens; 2 may be computed, so cd may be lost and ab may not. Nor may xyz as a whole."""
    words = "xyz", "ab", "abcd"
    assert filled(TailLatency(threshold=2), *words).leaving_order() == "dczyxba"
    assert filled(TailLatency(), *words).leaving_order() == "zyxdcba", "without a threshold it is LRU"


def test_answer_and_next_prompt_count() -> None:
    words = "xyz", "ab", "abcd"
    assert filled(TailLatency(threshold=2, next_prompt_estimate=1), *words).leaving_order()[0] == "z"
    assert filled(TailLatency(threshold=3, next_prompt_estimate=1), *words).leaving_order()[0] == "d"
    assert filled(TailLatency(threshold=3), *words, output_tokens=1).leaving_order()[0] == "d"
    assert filled(TailLatency(threshold=3), *words, output_tokens=2).leaving_order()[0] == "z"


def test_all_is_safe_within_the_threshold() -> None:
    assert filled(TailLatency(threshold=9), "ab", "xyz").leaving_order() == "bazyx"


def test_the_lower_part_of_a_cut_node_may_have_become_safe() -> None:
    """abcdef is one node, which may not be lost as a whole; cut by ab, cdef may. So may ab, the whole of its last prompt."""
    cache = filled(TailLatency(threshold=4), "xyzuvw", "abcdef")
    assert cache.node("abcdef").depth == 0
    cache.use("ab")
    assert cache.leaving_order() == "fedcbawvuzyx"


@pytest.mark.parametrize("setting", ["threshold", "next_prompt_estimate"])
def test_settings_are_tokens(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be 0 or more tokens, not -1"):
        TailLatency(**{setting: -1})


def test_a_trace_without_sessions_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the session of each request, which this trace does not have"):
        TailLatency().bind(PolicyContext(requests=[make_request([0])]))
