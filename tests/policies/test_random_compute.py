"""RandomCompute by hand, and against comparing all leaves."""

from random import Random

import numpy as np
import pytest

from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.leaves import AHEAD, Draws
from kvsim.policies.eviction.random_compute import RandomCompute
from tests.core.small import MODEL, offered, small_cache
from tests.policies.small import filled
from tests.workloads import random_word


def flops(end: int) -> float:
    """A page of one token that ends at this depth: 1,152 FLOPs, and 32 for each token that it attends to, itself included."""
    return 1152 + 32 * end


def test_a_late_page_is_worth_more_than_an_early_one() -> None:
    """Of two leaves unused since ticks 3 and 6, or so, the one at depth 1 goes first: 1,184 FLOPs against 2,432 at depth 40."""
    long = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
    cache = filled(RandomCompute(), long, "0", gpu=60)
    policy, now = cache.gpu.eviction, 100.0
    deep, shallow = cache.node(long), cache.node("0")
    assert policy.score(deep, now) == pytest.approx(flops(40) / (now - deep.last_used))
    assert policy.score(shallow, now) == pytest.approx(flops(1) / (now - shallow.last_used))
    assert deep.last_used < shallow.last_used and offered(policy, now)[0] is shallow


def test_with_time_age_decides() -> None:
    """Twice as old and 1,248 FLOPs against 1,184: the older one is worth less."""
    cache = filled(RandomCompute(), "abc", "x", gpu=8)
    old, new = cache.node("abc"), cache.node("x")
    now = new.last_used + (new.last_used - old.last_used)
    assert offered(cache.gpu.eviction, now)[0] is old


def test_leaves_of_this_instant_compare_by_compute() -> None:
    cache = filled(RandomCompute(), "abc", "x", gpu=8)
    assert cache.gpu.eviction.score(cache.node("x"), cache.node("x").last_used) == pytest.approx(flops(1) * 1e9)


def slow_victim(leaves: list[Node], now: float) -> Node:
    return min(leaves, key=lambda node: (flops(node.depth + node.pages) / max(now - node.last_used, 1e-9), node.last_used))


@pytest.mark.parametrize("seed", range(4))
def test_with_enough_samples_it_is_the_lowest_of_all(seed: int) -> None:
    random = Random(seed)
    cache = small_cache(gpu=14, eviction=RandomCompute)
    for _ in range(100):
        cache.use(random_word(random, "abc", longest=5))
        leaves = [node for node in cache.tree.root.descendants() if node.is_evictable(0)]
        now = float(next(cache.clock))
        assert len(leaves) <= 32 and offered(cache.gpu.eviction, now)[0] is slow_victim(leaves, now)


def test_a_sample_is_of_leaves_only_and_forgets_the_others() -> None:
    cache = filled(RandomCompute(samples=2), *"abcdefghij", gpu=10)
    lease = cache.run("a")
    assert all(node in offered(cache.gpu.eviction, 99.0) for node in cache.tree.root.descendants() if node.is_evictable(0))
    assert cache.node("a") not in cache.gpu.eviction._leaves.of
    cache.finish(lease)
    assert cache.node("a") in cache.gpu.eviction._leaves.of


def test_settings_and_a_model_are_needed() -> None:
    with pytest.raises(ValueError, match="samples must be at least 1, not 0"):
        RandomCompute(samples=0)
    with pytest.raises(ValueError, match="needs a model"):
        RandomCompute().bind(PolicyContext())
    RandomCompute().bind(PolicyContext(model=MODEL))


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20, (1 << 31) + 1])
def test_places_drawn_ahead_are_those_of_numbers_drawn_one_by_one(size: int) -> None:
    """In the largest lists, the first bits of a number are not enough."""
    draws, slow = Draws(np.random.default_rng(3)), np.random.default_rng(3)
    for at in range(2 * AHEAD + 1):
        number = slow.random()
        assert draws.place(size) == int(number * size)
        if at % 9 == 0:
            assert draws.place_again(size - 1) == int(number * (size - 1)), "the same number, in a shorter list"


def test_a_place_is_right_where_one_list_place_ends_and_the_next_begins() -> None:
    """Numbers on both sides of each border, as no generator draws them in a lifetime."""
    borders = [at / 10 for at in range(1, 10)]
    numbers = [near for border in borders for near in (np.nextafter(border, 0), border, np.nextafter(border, 1))]

    class Borders:
        def random(self, count: int) -> np.ndarray:
            return np.resize(numbers, count)

    draws = Draws(Borders())  # type: ignore[arg-type]
    assert [draws.place(10) for _ in numbers] == [int(number * 10) for number in numbers]
