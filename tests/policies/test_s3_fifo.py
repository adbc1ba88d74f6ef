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


def test_the_main_queue_gives_what_it_has_too_much_and_spares_what_was_hit() -> None:
    cache = filled(S3FIFO(small=0.5, fill_main=False), *"abcdefghij", *"aabbccddeeff", "k", gpu=10)
    assert cache.gpu.eviction.sizes == [5, 5] and cache.on("gpu") == "bcdefghijk", "a to f moved, then a was first"
    for word in "bgghhl":
        cache.use(word)
    assert cache.on("gpu") == "bdefghijkl", "g moved; b had a hit and went to the end, so c was first"
