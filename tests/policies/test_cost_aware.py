"""Cost-aware: a copy below of pages that are loaded faster than they are computed again."""

from functools import partial

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.placement.cost_aware import CostAware
from tests.core.small import MACHINE, MODEL, small_cache


def cost_aware(tier: int, **settings: float) -> CostAware:
    """Of 4-token pages, the one after p others takes 4,928 + 512 p us to compute, 64,000 to load, 640,000 more from disk."""
    policy = CostAware(**settings)
    policy.bind(PolicyContext(tier=tier, page_tokens=4, model=MODEL, hardware=MACHINE))
    return policy


def test_pages_are_worth_a_copy_from_the_depth_on_where_loading_beats_recomputing() -> None:
    assert cost_aware(1, margin=0.1).first_page == 3  # 4,928 + 512 * 3 = 6,464
    assert cost_aware(2, margin=0.01).first_page == 5  # 4,928 + 512 * 5 = 7,488
    assert cost_aware(1, margin=0.05).first_page == 0
    assert cost_aware(1).first_page == 116


def test_cost_aware_drops_short_prompts_and_keeps_long_ones_whole() -> None:
    cache = small_cache(gpu=5, cpu=9, page_tokens=4, placement=partial(CostAware, margin=0.1))
    cache.use("ab")
    cache.use("cdefg")
    assert (cache.on("gpu"), cache.on("cpu")) == ("cdefg", "")
    assert cache.counts.dropped_pages == 2
    cache.use("vwxyz")
    assert (cache.on("gpu"), cache.on("cpu")) == ("vwxyz", "cdefg")


def test_a_margin_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match="margin must be above 0, not 0"):
        CostAware(margin=0.0)
