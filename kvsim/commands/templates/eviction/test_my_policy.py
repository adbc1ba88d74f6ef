"""MyPolicy by hand: each prompt is one page, and there is room for two."""

import pytest

import kvsim
from kvsim.commands.templates.eviction.my_policy import MyPolicy

SETTINGS = ("tiers.gpu.capacity=2pages", "replay.hold_output=false", "rules.recompute_last_token=false")


def hits(policy: MyPolicy, prompts: str) -> list[int]:
    """Return the hit pages of prompts that come one after another, one per second."""
    trace = kvsim.load_trace("words", page_tokens=1, prompts=prompts.split())
    return [int(pages) for pages in kvsim.replay(trace, *SETTINGS, eviction=policy).hit_pages[:, 0]]


def test_a_page_that_was_hit_often_outlasts_newer_ones() -> None:
    assert hits(MyPolicy(seconds_per_hit=100), "a a a b c a") == [0, 1, 1, 0, 0, 1]


def test_without_a_weight_for_hits_it_is_lru() -> None:
    assert hits(MyPolicy(seconds_per_hit=0), "a a a b c a") == [0, 1, 1, 0, 0, 0]


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds_per_hit must be 0 or more, not -1"):
        MyPolicy(seconds_per_hit=-1)
