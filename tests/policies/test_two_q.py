"""2Q by hand: a tier of 4 pages has 1 page for A1in and 2 ghosts."""

from kvsim.policies.eviction.two_q import TwoQ
from tests.policies.small import filled


def test_a_page_that_comes_back_after_it_has_left_goes_to_the_main_list() -> None:
    cache = filled(TwoQ(), *"abcdef", gpu=4)
    assert cache.on("gpu") == "cdef"
    cache.use("a")
    assert cache.on("gpu") == "adef"
    assert cache.gpu.eviction.sizes == [3, 1]
    assert cache.leaving_order() == "deaf", "A1in gives until it has its share of one page"


def test_a_hit_in_the_first_list_changes_nothing() -> None:
    assert filled(TwoQ(), *"abcdbba", gpu=4).leaving_order() == "abcd"


def test_the_main_list_is_lru() -> None:
    cache = filled(TwoQ(kin=0.1, kout=1.0), *"abcdefab", gpu=4)
    assert cache.gpu.eviction.sizes == [2, 2] and cache.on("gpu") == "abef"
    cache.use("a")
    assert cache.leaving_order() == "efba"


def test_only_the_most_recent_ghosts_are_remembered() -> None:
    cache = filled(TwoQ(), *"abcdefg", gpu=4)
    cache.use("a")
    assert cache.gpu.eviction.sizes == [4, 0], "a, b and c have left, and a is forgotten"
    cache.use("c")
    assert cache.gpu.eviction.sizes == [3, 1], "c is remembered, and d, which left last"


def test_part_of_a_path_may_be_remembered() -> None:
    cache = filled(TwoQ(), "abcd", "x", gpu=4)
    assert cache.on("gpu") == "abcx"
    cache.use("abcd")
    assert cache.on("gpu") == "abcd"
    assert cache.gpu.eviction.sizes == [3, 1], "abc were hit where they are, d came back"
