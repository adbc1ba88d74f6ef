"""Write-back: a copy below when pages are evicted, or earlier above a watermark."""

from functools import partial
from typing import Any

import pytest

from kvsim.policies.placement.cost_aware import CostAware
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import small_cache


def test_write_back_copies_only_what_is_evicted() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=WriteBack)
    cache.use("abc")
    assert cache.on("cpu") == ""
    cache.use("xy")
    assert (cache.on("gpu"), cache.on("cpu")) == ("axy", "bc")


def test_write_back_keeps_the_lower_copy_of_what_is_loaded() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=WriteBack)
    cache.use("abc")
    cache.use("xyz")
    assert cache.use("abc") == (0, 3, 0)
    assert cache.on("gpu") == "abc" and set("abc") <= set(cache.on("cpu"))


@pytest.mark.parametrize("upper", [WriteBack, Exclusive, partial(CostAware, margin=1e-9)])
def test_what_is_written_back_goes_on_to_the_disk_though_its_first_page_never_leaves_the_gpu(upper: Any) -> None:
    cache = small_cache(gpu=3, cpu=2, disk=8, placement=[upper, WriteThrough])
    cache.use("abc")
    assert (cache.on("cpu"), cache.on("disk")) == ("", "")
    cache.use("axy")
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("axy", "bc", "bc")
    cache.use("auv")
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("auv", "xy", "bcxy")
    assert cache.use("abc")[::2] == (1, 2)


def test_of_what_is_written_back_at_once_parents_go_on_to_the_disk_first() -> None:
    cache = small_cache(gpu=4, cpu=8, disk=8, placement=[WriteBack, WriteThrough])
    cache.use("ab")
    cache.use("abc")
    cache.use("xyz")
    assert (cache.on("gpu"), cache.on("cpu"), cache.on("disk")) == ("axyz", "bc", "bc")


def test_of_what_is_written_back_the_first_pages_go_on_to_a_disk_without_room_for_all() -> None:
    cache = small_cache(gpu=4, cpu=8, disk=2, placement=[WriteBack, WriteThrough])
    cache.use("abc")
    cache.use("abcd")
    cache.use("wxyz")
    assert (cache.on("cpu"), cache.on("disk")) == ("abcd", "ab")
    assert cache.counts.no_room_pages == 2


# --- above a watermark ---


def early(watermark: float = 0.5) -> partial[WriteBack]:
    return partial(WriteBack, watermark=watermark)


def test_above_the_watermark_the_first_leaves_to_leave_are_copied_before_they_have_to() -> None:
    cache = small_cache(gpu=8, cpu=8, placement=early())
    cache.use("ab")
    cache.use("cd")
    assert cache.on("cpu") == ""  # half of the GPU is free
    cache.use("ef")
    assert (cache.on("gpu"), cache.on("cpu")) == ("abcdef", "ab")
    cache.use("gh")
    assert (cache.on("gpu"), cache.on("cpu")) == ("abcdefgh", "abcd")


def test_what_was_copied_early_frees_at_once() -> None:
    cache = small_cache(gpu=4, cpu=8, placement=early(0.0))
    cache.use("abcd")
    lease = cache.look("wx")
    assert cache.admit(lease, 2, 100.0) and lease.waits and lease.reserved_pages == 2
    cache = small_cache(gpu=4, cpu=8, placement=early(0.5))
    cache.use("abcd")
    lease = cache.look("wx")
    assert cache.admit(lease, 2, 100.0) and not lease.waits and not lease.reserved_pages


def test_an_early_copy_that_finds_no_room_is_not_made_and_counted() -> None:
    cache = small_cache(gpu=8, cpu=1, placement=early())
    cache.use("abcdef")
    assert (cache.on("gpu"), cache.on("cpu")) == ("abcdef", "f")
    assert cache.counts.no_room_pages == 1 and cache.counts.dropped_pages == 0


def test_early_copies_are_made_again_only_after_half_as_much_was_inserted() -> None:
    cache = small_cache(gpu=20, cpu=40, placement=early(0.6))  # 8 pages are to be free or copied
    cache.use("abcdefghijklm")
    assert cache.on("cpu") == "m"
    cache.use("nop")
    assert cache.on("cpu") == "m"
    cache.use("q")
    assert cache.on("cpu") == "ijklm"


def test_a_watermark_works_on_the_edge_to_the_disk_too() -> None:
    cache = small_cache(gpu=2, cpu=4, disk=8, placement=[WriteBack, early()])
    for word in ("ab", "cd", "ef"):
        cache.use(word)
    assert (cache.on("cpu"), cache.on("disk")) == ("abcd", "ab")


def test_write_back_refuses_a_watermark_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"watermark must be at least 0 and below 1, not 1"):
        WriteBack(watermark=1.0)
