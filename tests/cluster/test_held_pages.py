"""What a router knows of the pages that an engine holds, at once or late."""

from random import Random

import pytest

from kvsim.cluster.held_pages import HeldPages
from kvsim.core.tree import READY
from kvsim.pages.extents import Extent
from tests.core.small import SmallCache, small_cache
from tests.workloads import pages_of

GPU_TIER = small_cache(gpu=4).gpu


def test_pages_are_known_at_once() -> None:
    cache, held = small_cache(gpu=4), HeldPages()
    cache.gpu.watches.append(held)
    cache.use("abc")
    assert held.leading_pages(cache.request("abcd").runs) == 3
    cache.use("xy")
    assert (cache.on("gpu"), held.pages) == ("abxy", 4)
    assert held.leading_pages(cache.request("abc").runs) == held.leading_pages(cache.request("xyz").runs) == 2


def test_a_report_arrives_after_its_delay() -> None:
    now = 0.0
    held = HeldPages(2.0, lambda: now)
    held.stored(GPU_TIER, ((0, 3),))
    now = 1.5
    held.dropped(GPU_TIER, ((2, 1),))
    for time, pages in ((1.9, 0), (2.0, 3), (3.4, 3), (3.5, 2)):
        held.receive(time)
        assert held.leading_pages(((0, 3),)) == held.pages == pages


def test_a_page_that_was_never_stored_cannot_be_dropped() -> None:
    held = HeldPages()
    held.stored(GPU_TIER, ((0, 3),))
    with pytest.raises(AssertionError, match="removed more often than they were added"):
        held.dropped(GPU_TIER, ((2, 2),))


def ready_pages(cache: SmallCache) -> list[int]:
    nodes = [node for node in cache.tree.root.descendants() if node.state[0] == READY]
    return sorted(page for node in nodes for page in pages_of(node.runs))


def leading(extents: tuple[Extent, ...], held: set[int]) -> int:
    pages = pages_of(extents)
    return next((at for at, page in enumerate(pages) if page not in held), len(pages))


@pytest.mark.parametrize("seed", range(8))
def test_late_knowledge_is_what_was_held_then(seed: int) -> None:
    """At every time t, a router knows the pages that were held 3 s before."""
    random, now = Random(seed), 0.0
    cache, held = small_cache(gpu=9, cpu=12), HeldPages(3.0, lambda: now)
    cache.gpu.watches.append(held)
    history: list[list[int]] = [[]]
    for step in range(1, 60):
        now = float(step)
        word = "".join(random.choice("ab") for _ in range(random.randint(1, 7)))
        cache.use(word)
        if random.random() < 0.05:
            cache.reset()
        history.append(ready_pages(cache))
        held.receive(now)
        known = set(history[max(0, step - 3)])
        assert held.pages == len(known)
        for start in ("abab", "bbb", word):
            extents = cache.request(start).runs
            assert held.leading_pages(extents) == leading(extents, known)


def test_of_larger_pages_the_whole_ones_count_that_continue_what_is_known() -> None:
    """Three pages are told of as one, by the last of them: 2 and 5 of a path 0 to 7."""
    held = HeldPages()
    held.stored(GPU_TIER, ((2, 1), (5, 1)))
    path = ((0, 8),)
    assert [held.following_pages(path, after, 3) for after in range(9)] == [6, 5, 4, 3, 2, 1, 0, 0, 0]
    held.dropped(GPU_TIER, ((2, 1),))
    assert [held.following_pages(path, after, 3) for after in (0, 3)] == [0, 3]
    assert [held.following_pages(path, after, 1) for after in (0, 5)] == [0, 1]
