"""RLT by hand, and against the rule of marking."""

from random import Random

import numpy as np
import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.rlt import RandomLeaf
from tests.core.small import SmallCache, offered, small_cache
from tests.policies.small import filled
from tests.workloads import random_word


def seeded(seed: int, *words: str, gpu: int) -> SmallCache:
    cache = small_cache(gpu=gpu, eviction=RandomLeaf)
    cache.gpu.eviction.bind(PolicyContext(rng=np.random.default_rng(seed)))
    for word in words:
        cache.use(word)
    return cache


@pytest.mark.parametrize("seed", range(8))
def test_what_was_used_in_this_phase_stays(seed: int) -> None:
    """a, b and c are of the first phase; d begins the second, which then marks one of them again. e takes the other's place."""
    cache = seeded(seed, "a", "b", "c", "d", gpu=3)
    kept, lost = sorted(cache.on("gpu").replace("d", ""))
    cache.use(kept)
    cache.use("e")
    assert set(cache.on("gpu")) == {"d", "e", kept} and lost not in cache.on("gpu")


def test_all_leaves_have_the_same_chance_whatever_their_length() -> None:
    """The first page to leave is the last one of either path."""
    first = [seeded(seed, "abcdefg", "x", gpu=8).leaving_order()[0] for seed in range(300)]
    assert set(first) == {"g", "x"} and 110 < first.count("x") < 190


def test_a_draw_takes_one_page() -> None:
    """Of two paths of two pages, all orders that keep a path's end first come up."""
    orders = {seeded(seed, "ab", "xy", gpu=4).leaving_order() for seed in range(100)}
    assert orders == {"bayx", "byax", "byxa", "ybxa", "ybax", "yxba"}


@pytest.mark.parametrize("seed", range(5))
def test_no_marked_page_leaves_while_an_unmarked_one_could(seed: int) -> None:
    random = Random(seed)
    cache = seeded(seed, gpu=12)
    policy = cache.gpu.eviction
    for _ in range(120):
        cache.use(random_word(random, "abc", longest=5))
        marked = {node for node in cache.tree.root.descendants() if node.notes[0] == policy._phase}
        unmarked = [node not in marked for node in offered(policy, 99.0)]
        assert unmarked == sorted(unmarked, reverse=True), "unmarked leaves come first"


def test_a_phase_forgets_those_that_left() -> None:
    cache = filled(RandomLeaf(), *[f"{number:03}" for number in range(500)], gpu=12)
    policy = cache.gpu.eviction
    assert len(policy._marked.nodes) + len(policy._unmarked.nodes) <= 24
