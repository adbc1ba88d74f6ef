"""Eviction policies: what every one of them owes the core, and the order in which each lets pages go."""

import numpy as np
import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.random import Random
from kvsim.policies.eviction.slru import SegmentedLRU
from tests.core.small import offered
from tests.policies.small import POLICIES, filled, policy_of


@pytest.mark.parametrize("name", POLICIES)
def test_victims_are_the_evictable_leaves_each_once(name: str) -> None:
    cache = filled(policy_of(name), "abc", "abd", "xyz")
    nodes = list(cache.tree.root.descendants())
    victims = offered(cache.gpu.eviction, 99.0)
    assert sorted(map(id, victims)) == sorted(id(node) for node in nodes if not node.children)
    assert sorted(map(id, offered(cache.gpu.eviction, 99.0))) == sorted(map(id, victims)), "looking changes nothing"


@pytest.mark.parametrize("name", POLICIES)
def test_pinned_pages_are_no_victims(name: str) -> None:
    cache = filled(policy_of(name), "abc", "xyz")
    lease = cache.run("abc")
    assert offered(cache.gpu.eviction, 99.0) == [cache.node("xyz")]
    cache.release(lease)
    assert len(offered(cache.gpu.eviction, 99.0)) == 2


@pytest.mark.parametrize("name", POLICIES)
def test_a_parent_leaves_after_its_children(name: str) -> None:
    order = filled(policy_of(name), "abc", "abd", "abce", "x").leaving_order()
    assert sorted(order) == list("abcdex")
    for earlier, later in ("ec", "cb", "db", "ba"):
        assert order.index(earlier) < order.index(later)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_gives_the_same_order(name: str) -> None:
    orders = {filled(policy_of(name), "abc", "de", "fgh", "de", "abi").leaving_order() for _ in range(2)}
    assert len(orders) == 1


def test_three_uses_can_be_asked_for() -> None:
    assert filled(SegmentedLRU(protected_hits=3), "a", "a", "a", "b", "b", "c").leaving_order() == "bca"


def test_slru_refuses_a_setting_out_of_range() -> None:
    with pytest.raises(ValueError, match="protected_hits must be at least 1, not 0"):
        SegmentedLRU(protected_hits=0)


def test_random_gives_every_leaf_the_same_chance() -> None:
    first = []
    for seed in range(300):
        cache = filled(Random(), "a", "b", "c", gpu=3)
        cache.gpu.eviction.bind(PolicyContext(rng=np.random.default_rng(seed)))
        first.append(cache.leaving_order()[0])
    assert all(70 < first.count(letter) < 130 for letter in "abc")
