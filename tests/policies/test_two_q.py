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
