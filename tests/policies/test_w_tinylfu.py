"""W-TinyLFU by hand: a tier of 10 pages with a window of 1."""

from kvsim.policies.eviction.w_tinylfu import WTinyLFU
from tests.policies.small import filled


def test_a_new_page_does_not_push_out_one_that_is_used_as_often() -> None:
    cache = filled(WTinyLFU(window=0.1), *"abcdefghij", "k", gpu=10)
    assert cache.gpu.eviction.sizes == [1, 9, 0]
    assert cache.on("gpu") == "abcdefghik", "j was in the window, and no better than a"


def test_a_page_that_comes_back_gets_in() -> None:
    cache = filled(WTinyLFU(window=0.1), *"abcdefghij", *"kjl", gpu=10)
    assert cache.on("gpu") == "bcdefghijl", "k gave way to j, which was known; then j was better than a"
    assert cache.gpu.eviction.sizes == [1, 9, 0]


def test_protected_pages_leave_last_and_have_a_share() -> None:
    cache = filled(WTinyLFU(window=0.5), *"abcdefghij", *"abcdefab", gpu=10)
    assert cache.gpu.eviction.sizes[2] == 5, "a b c d e had left the window as they were used again; f had not"
    cache.use("k")
    assert cache.gpu.eviction.sizes[2] == 4, "80 % of 5 pages"


def test_counts_are_halved_as_time_goes_by() -> None:
    policy = WTinyLFU(window=0.5)
    cache = filled(policy, *"aaaaaa", gpu=2)
    assert policy.frequency(policy.mark(cache.node("a")).value) == 6
    for _ in range(14):
        cache.use("b")
    assert policy.frequency(policy.mark(cache.node("a")).value) == 3, "20 pages were requested, 10 times the tier's"


def test_counts_end_at_15() -> None:
    policy = WTinyLFU()
    cache = filled(policy, *"aaaaaaaaaaaaaaaaaaaaaa", gpu=10)
    assert policy.frequency(policy.mark(cache.node("a")).value) == 15
