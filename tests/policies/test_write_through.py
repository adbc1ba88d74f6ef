"""Write-through: a copy below as soon as pages are computed."""

from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import small_cache


def test_write_through_copies_as_soon_as_pages_are_computed() -> None:
    cache = small_cache(gpu=4, cpu=8, disk=8, placement=WriteThrough)
    cache.use("ab")
    assert cache.on("cpu") == cache.on("disk") == "ab"


def test_write_through_tries_again_when_there_was_no_room() -> None:
    cache = small_cache(gpu=8, cpu=3, placement=WriteThrough)
    cache.use("xy")
    cache.use("abcd")
    assert cache.on("cpu") == "xya" and cache.counts.no_room_pages == 3
    cache.use("abc")
    assert cache.on("cpu") == "abc" and cache.counts.no_room_pages == 3


def test_of_a_path_that_finds_no_room_write_through_copies_the_first_pages_into_free_slots() -> None:
    cache = small_cache(gpu=6, cpu=2, placement=WriteThrough)
    cache.use("abc")
    assert cache.on("cpu") == "ab" and cache.counts.no_room_pages == 1
