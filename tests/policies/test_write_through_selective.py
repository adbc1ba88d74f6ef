"""Selective write-through: a copy below at a later use."""

import pytest

from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from tests.core.small import small_cache


def test_selective_waits_for_the_second_use() -> None:
    cache = small_cache(gpu=6, cpu=8, placement=WriteThroughSelective)
    cache.use("ab")
    assert cache.on("cpu") == ""
    cache.use("abc")
    assert cache.on("cpu") == "ab"


def test_selective_refuses_a_setting_out_of_range() -> None:
    with pytest.raises(ValueError, match="hits must be at least 1, not 0"):
        WriteThroughSelective(hits=0)


def test_written_back_pages_go_on_to_the_disk_at_the_second_use_if_it_is_selective() -> None:
    cache = small_cache(gpu=3, cpu=8, disk=8, placement=[WriteBack, WriteThroughSelective])
    cache.use("abc")
    cache.use("axy")
    assert (cache.on("cpu"), cache.on("disk")) == ("bc", "")
    assert cache.use("abc") == (1, 2, 0)
    assert (cache.on("cpu"), cache.on("disk")) == ("bcxy", "bc")


def test_what_the_disk_has_above_a_page_makes_no_room_for_it() -> None:
    cache = small_cache(gpu=3, cpu=1, disk=1, placement=[WriteBack, WriteThroughSelective])
    for word in ("a", "a", "xyz", "ab", "u", "ab"):
        cache.use(word)
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("abu", "x", "a")
    cache.use("rst")
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("rst", "b", "a")
