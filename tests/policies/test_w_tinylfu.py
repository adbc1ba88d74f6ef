"""W-TinyLFU by hand: a tier of 10 pages with a window of 1."""

from kvsim.policies.eviction.w_tinylfu import WTinyLFU
from tests.policies.small import filled


def test_a_new_page_does_not_push_out_one_that_is_used_as_often() -> None:
    cache = filled(WTinyLFU(window=0.1), *"abcdefghij", "k", gpu=10)
    assert cache.gpu.eviction.sizes == [1, 9, 0]
    assert cache.on("gpu") == "abcdefghik", "j was in the window, and no better than a"


def test_counts_end_at_15() -> None:
    policy = WTinyLFU()
    cache = filled(policy, *"aaaaaaaaaaaaaaaaaaaaaa", gpu=10)
    assert policy.frequency(policy.mark(cache.node("a"))[2]) == 15
