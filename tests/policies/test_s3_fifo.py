"""S3-FIFO by hand: a tier of 10 pages has 1 page for the small queue."""

from kvsim.policies.eviction.s3_fifo import S3FIFO
from tests.policies.small import filled


def test_two_hits_take_a_page_to_the_main_queue() -> None:
    cache = filled(S3FIFO(fill_main=False), *"abcdefghij", *"aab", "k", gpu=10)
    assert cache.on("gpu") == "acdefghijk", "a had two hits; b had one and left"
    assert cache.gpu.eviction.sizes == [9, 1]
    cache.use("b")
    assert cache.gpu.eviction.sizes == [8, 2], "b was remembered; c left"
    assert cache.leaving_order() == "defghijkab"
