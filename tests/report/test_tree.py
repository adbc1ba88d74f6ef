"""The radix tree on the terminal."""

from io import StringIO
from typing import Any

from rich.console import Console

from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.report import tree
from tests.core.small import small_cache
from tests.engines.small import make_cache
from tests.workloads import Words

LETTERS = dict(enumerate("abcdxy"))


def lines(cache: Any, names: dict[int, str]) -> list[str]:
    """What is drawn, without colours, one string a line."""
    console = Console(file=StringIO(), width=200, color_system=None)
    console.print(tree.draw_tree(cache, names))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_a_node_shows_its_tokens_slots_pins_and_hits() -> None:
    cache, words = make_cache(10, eviction=LRU), Words()
    first = cache.serve(words.request("abcd", tail=1), 5, 0.0)
    assert first is not None
    cache.finish_request(first)
    assert cache.serve(words.request("abxy", tail=1), 5, 1.0) is not None
    assert lines(cache, LETTERS) == [
        "radix tree: 3 nodes, gpu 7 of 10 pages in use",
        "└── a b  2 pages, 2 hits  gpu slots 0-1, pinned by 1",
        "    ├── c d  2 pages, 1 hit  gpu slots 2-3, leaf",
        "    └── x y  2 pages, 1 hit  gpu slots 4-5, pinned by 1, leaf",
    ]


def test_a_node_shows_every_tier_and_without_tokens_its_page_ids() -> None:
    cache, words = make_cache(3, 5, eviction=LRU, placement=WriteThrough()), Words()
    for word in ("ab", "xyz"):
        held = cache.serve(words.request(word), len(word), 0.0)
        assert held is not None
        cache.finish_request(held)
    assert lines(cache, {}) == [
        "radix tree: 2 nodes, gpu 3 of 3 pages in use, cpu 5 of 5 pages in use",
        "├── pages 0-1  2 pages, 1 hit  cpu slots 0-1, leaf",
        "└── pages 2-4  3 pages, 1 hit  gpu slots 0-2, leaf  cpu slots 2-4, pinned by 1, leaf",
    ]


def test_our_own_cache_is_drawn_too() -> None:
    cache = small_cache(gpu=6)
    cache.use("abc")
    assert lines(cache, LETTERS)[1:] == ["└── a b c  3 pages, 1 hit  gpu slots 0-2, leaf"]


def test_large_trees_and_long_nodes_are_cut_short() -> None:
    cache, words = make_cache(900, eviction=LRU), Words()
    for number in range(tree.MOST_NODES + 50):
        held = cache.serve(words.request(chr(1_000 + number) * 3), 3, 0.0)
        assert held is not None
        cache.finish_request(held)
    drawn = lines(cache, dict.fromkeys(range(900), "word" * 20))
    assert len(drawn) == tree.MOST_NODES + 2
    assert drawn[-1] == "└── 50 more nodes not shown; set a smaller trace.limit for a smaller tree"
    assert drawn[1].startswith("├── " + "word" * 17 + " ...  3 pages")


def test_scattered_slots_are_listed_up_to_a_number() -> None:
    cache = make_cache(40, eviction=LRU)
    slots = cache.gpu.pool.take(0)
    for first in range(0, 40, 5):
        slots = cache.gpu.pool.join(slots, cache.gpu.pool.take(5)[2::-1] if first else cache.gpu.pool.take(5))
    assert tree._slots(slots) == "slots 0-4, 7-5, 12-10, 17-15, 22-20, 27-25, ..."
