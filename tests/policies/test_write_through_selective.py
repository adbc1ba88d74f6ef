"""Selective write-through: a copy below at a later use."""

import pytest

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
