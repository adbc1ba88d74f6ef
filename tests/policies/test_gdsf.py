"""GreedyDual-Size with frequency. A page is one token of 16 bytes; the e-th of a prompt costs 1,152 + 32 e FLOPs."""

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.gdsf import GDSF
from tests.core.small import SmallCache, small_cache


def filled(*words: str, gpu: int = 12) -> SmallCache:
    cache = small_cache(gpu=gpu, eviction=GDSF)
    for word in words:
        cache.use(word)
    return cache


def test_the_rank_is_hits_times_cost_by_size_of_the_last_page() -> None:
    cache = filled("abcdefgh", "x", "x")
    policy = cache.gpu.eviction
    assert policy.rank(cache.node("abcdefgh"))[0] == pytest.approx((1152 + 32 * 8) / 1e6 / 16)
    assert policy.rank(cache.node("x"))[0] == pytest.approx(2 * (1152 + 32) / 1e6 / 16)


def test_shallow_pages_leave_before_older_deep_ones() -> None:
    assert filled("abcdefgh", "x").leaving_order()[0] == "x"


def test_hits_weigh_more_than_a_little_depth() -> None:
    assert filled("x", "x", "abcdefgh").leaving_order() == "hgfedcbax"


def test_a_node_that_loses_its_end_is_worth_less() -> None:
    """z and w cost the same; when z has left, y and x cost less than w."""
    cache = filled("xyz", "uvw", gpu=6)
    assert cache.leaving_order() == "zyxwvu"


def test_new_nodes_start_at_the_level_of_the_last_victim() -> None:
    cache = filled("abc", "x", "y", gpu=4)
    level = cache.gpu.eviction.level
    assert cache.on("gpu") == "abcy"
    assert level == pytest.approx((1152 + 32) / 1e6 / 16)
    assert cache.gpu.eviction.rank(cache.node("y"))[0] == pytest.approx(2 * level)


def test_it_needs_a_model() -> None:
    with pytest.raises(ValueError, match="needs a model"):
        GDSF().bind(PolicyContext())
