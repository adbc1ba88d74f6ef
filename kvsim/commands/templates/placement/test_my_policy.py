"""MyPolicy by hand: each word of a prompt is one page."""

import pytest

import kvsim
from kvsim.commands.templates.placement.my_policy import MyPolicy

SETTINGS = ("tiers.cpu.capacity=8pages", "replay.hold_output=false", "rules.recompute_last_token=false")


def copied(policy: MyPolicy, *prompts: str, gpu: int) -> int:
    """Return how many pages a replay of the prompts copies to the CPU tier."""
    trace = kvsim.load_trace("words", page_tokens=1, prompts=list(prompts))
    result = kvsim.replay(trace, *SETTINGS, f"tiers.gpu.capacity={gpu}pages", placement=policy)
    return int(result.record["tiers"]["cpu"]["inserted_pages"])


def test_a_page_is_copied_from_the_hits_th_use_on() -> None:
    assert copied(MyPolicy(hits=2), "a b", gpu=6) == 0
    assert copied(MyPolicy(hits=2), "a b", "a b c", gpu=6) == 2


def test_what_is_evicted_is_copied() -> None:
    assert copied(MyPolicy(hits=9), "a b c", "x y", gpu=3) == 2


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="hits must be at least 1, not 0"):
        MyPolicy(hits=0)
