"""Write-back: a copy below when pages are evicted, or earlier above a watermark."""

from functools import partial

import pytest

from kvsim.policies.placement.write_back import WriteBack
from tests.core.small import small_cache


def test_write_back_copies_only_what_is_evicted() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=WriteBack)
    cache.use("abc")
    assert cache.on("cpu") == ""
    cache.use("xy")
    assert (cache.on("gpu"), cache.on("cpu")) == ("axy", "bc")


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


def test_early_copies_are_made_again_only_after_half_as_much_was_inserted() -> None:
    cache = small_cache(gpu=20, cpu=40, placement=early(0.6))  # 8 pages are to be free or copied
    cache.use("abcdefghijklm")
    assert cache.on("cpu") == "m"
    cache.use("nop")
    assert cache.on("cpu") == "m"
    cache.use("q")
    assert cache.on("cpu") == "ijklm"


def test_write_back_refuses_a_watermark_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"watermark must be at least 0 and below 1, not 1"):
        WriteBack(watermark=1.0)
