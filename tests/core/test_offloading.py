"""Which pages are idle, page by page beside a slow model, and what an offload leaves."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.lease import Lease
from kvsim.core.loading import LowerTiers
from kvsim.core.offloading import Offloading
from kvsim.core.tree import READY
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import SmallCache, small_cache
from tests.workloads import pages_of

WORDS = st.text("ab", min_size=1, max_size=6)


def offloading(cache: SmallCache) -> Offloading:
    lower: Any = cache.transfers
    assert isinstance(lower, LowerTiers)
    return Offloading(lower, cache.gpu)


def idle_pages(cache: SmallCache, word: str) -> int:
    return sum(node.pages for node in offloading(cache).idle(cache.request(word).runs))


def offload(cache: SmallCache, word: str) -> bool:
    """Offload what is idle of a word, and carry out the write-downs. Returns whether there was room below."""
    moves = offloading(cache)
    transfers = moves.offload(moves.idle(cache.request(word).runs), 0.0)
    cache.move(transfers or [])
    cache.check()
    return transfers is not None


def paths_on_gpu(cache: SmallCache) -> list[list[int]]:
    """The path of each page that is ready on the GPU, from the root down to that page."""
    paths = []
    for node in cache.tree.root.descendants():
        if node.state[0] == READY:
            pages = [page for above in [*node.path()] for page in pages_of(above.runs)]
            paths += [pages[:end] for end in range(node.depth + 1, len(pages) + 1)]
    return paths


def slow_idle(cache: SmallCache, word: str, running: dict[str, Lease]) -> int:
    """Count from the end those pages of a word on the GPU of which no running word's path and no other page's path has any."""
    path = pages_of(cache.request(word).runs)
    on_gpu = paths_on_gpu(cache)
    used = [pages_of(cache.request(other).runs) for other in running]
    count = 0
    for end in range(len(path), 0, -1):
        prefix = path[:end]
        if prefix not in on_gpu:
            continue
        goes_on = any(other[:end] == prefix and path[: len(other)] != other for other in on_gpu)
        if goes_on or any(other[:end] == prefix for other in used):
            break
        count += 1
    return count


@given(
    st.lists(st.tuples(st.sampled_from(["use", "run", "end", "offload"]), WORDS), max_size=25),
    st.sampled_from([WriteBack, WriteThrough]),
)
def test_idle_pages_are_those_of_a_slow_model(events: list[tuple[str, str]], placement: Any) -> None:
    cache = small_cache(gpu=9, cpu=9, placement=[placement])
    running: dict[str, Lease] = {}
    for event, word in events:
        if event == "offload":
            idle = slow_idle(cache, word, running)
            held = len(cache.on("gpu"))
            assert idle_pages(cache, word) == idle
            is_done = offload(cache, word)
            assert len(cache.on("gpu")) == held - idle * is_done
        elif event == "end":
            if running:
                cache.move(cache.finish(running.pop(min(running))))
        elif word not in running and cache.can_admit(cache.look(word), len(word)):
            if event == "run":
                running[word] = cache.run(word)
            else:
                cache.use(word)
    for lease in running.values():
        cache.move(cache.finish(lease))
    cache.check()


@pytest.mark.parametrize("placement", [WriteBack, WriteThrough])
def test_what_leaves_is_in_the_tier_below(placement: Any) -> None:
    cache = small_cache(gpu=8, cpu=8, placement=[placement])
    cache.use("abcd")
    cache.use("abxy")
    assert idle_pages(cache, "abcd") == 2 and offload(cache, "abcd")
    assert sorted(cache.on("gpu")) == list("abxy") and set("cd") <= set(cache.on("cpu"))
    assert idle_pages(cache, "abxy") == 4 and offload(cache, "abxy")
    assert cache.on("gpu") == "" and sorted(cache.on("cpu")) == list("abcdxy")


def test_nothing_changes_without_room_for_all() -> None:
    """The CPU tier has a and b, which the path continues: there is room for two of three pages more."""
    cache = small_cache(gpu=8, cpu=4, placement=[WriteBack])
    cache.use("ab")
    assert offload(cache, "ab")
    cache.use("abcde")
    before = cache.snapshot()
    assert not offload(cache, "abcde")
    assert cache.snapshot() == before
