"""Segmented LRU with sized segments, by hand."""

import pytest

from kvsim.policies.eviction.slru import SegmentedLRU, SizedSegmentedLRU
from tests.policies.small import filled


def test_protected_pages_beyond_the_share_fall_back() -> None:
    policy = SegmentedLRU(segments="sized", protected_fraction=0.5).variant()
    assert isinstance(policy, SizedSegmentedLRU)
    cache = filled(policy, *"aabbccde", gpu=4)
    assert policy.sizes == [2, 2] and cache.on("gpu") == "abce", "a fell back behind d, which left"
    assert cache.leaving_order() == "aebc"


def test_uses_that_protect_can_be_chosen() -> None:
    policy = SegmentedLRU(segments="sized", protected_hits=3).variant()
    assert isinstance(policy, SizedSegmentedLRU)
    filled(policy, *"aabbb", gpu=4)
    assert policy.sizes == [1, 1]


def test_a_class_of_the_users_is_not_replaced_by_another_algorithm() -> None:
    class Mine(SegmentedLRU):
        pass

    assert type(Mine(protected_hits=3).variant()) is Mine
    with pytest.raises(ValueError, match="segments=sized would replace Mine: derive it from SizedSegmentedLRU instead"):
        Mine(segments="sized")
