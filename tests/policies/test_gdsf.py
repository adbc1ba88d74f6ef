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


def test_it_needs_a_model() -> None:
    with pytest.raises(ValueError, match="needs a model"):
        GDSF().bind(PolicyContext())
