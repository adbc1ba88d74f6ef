"""SGLang's hierarchical cache before 0.5.23: one test for each of its rules, then random and real traces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsim.core.request import Request
from kvsim.core.tree import Node
from kvsim.engines.sglang.hosted_nodes import HostedNodeCache
from kvsim.engines.sglang.whole_nodes import NodeLease
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.random import Random
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from kvsim.trace.weka import Weka
from tests.engines.recorded import golden_rows, reference
from tests.engines.slow_radix import SlowRadix, play_slowly
from tests.engines.small import check, make_cache, play
from tests.workloads import EXAMPLES, Words, as_records, random_requests

WEKA = "traces/weka_claude_code_traces_rle.jsonl.gz"
PLACEMENTS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "write_through": (WriteThrough, {"copy_at_hits": 1}),
    "write_through_selective": (WriteThroughSelective, {"copy_at_hits": 2}),
    "write_back": (WriteBack, {"copy_at_eviction": True}),
}


class Small:
    """A cache of one-token pages; ``use`` takes a word, whose next token takes one page more unless ``tail`` is 0."""

    def __init__(self, gpu: int, cpu: int, placement: Any, *, load_min_tokens: int = 0) -> None:
        cache = make_cache(gpu, cpu, eviction=LRU, placement=placement, load_min_tokens=load_min_tokens)
        assert isinstance(cache, HostedNodeCache)
        self.cache = cache
        self.words = Words()
        self.running: list[NodeLease] = []

    def start(self, word: str, *, tail: int = 1, output: int = 0) -> NodeLease | None:
        held = self.cache.serve(self.words.request(word, tail=tail, output=output), len(word) + tail + output, 0.0)
        self.running += [held] if held else []
        check(self.cache, self.running)
        return held

    def finish(self, held: NodeLease | None) -> None:
        assert held is not None
        self.running.remove(held)
        self.cache.finish_request(held)
        check(self.cache, self.running)

    def use(self, *words: str, tail: int = 1, output: int = 0) -> tuple[int, int] | None:
        """Requests from beginning to end; the hits of the last one on GPU and host."""
        hits = None
        for word in words:
            held = self.start(word, tail=tail, output=output)
            hits = held and held.hits[:2]
            if held is not None:
                self.finish(held)
        return hits

    def text(self, node: Node) -> str:
        return self.words.text(node.runs)

    def on(self, tier: int) -> list[str]:
        nodes = sorted(self.cache.tree.root.descendants(), key=lambda node: node.runs)
        return [self.text(node) for node in nodes if node.state[tier]]

    @property
    def gpu(self) -> list[str]:
        """The letters of each node there."""
        return self.on(0)

    @property
    def host(self) -> list[str]:
        return self.on(1)

    def node(self, text: str) -> Node:
        (node,) = [node for node in self.cache.tree.root.descendants() if self.text(node) == text]
        return node


# --- writing ---------------------------------------------------------------------------------------------------------------


def test_write_through_copies_at_the_insert() -> None:
    cache = Small(10, 10, WriteThrough())
    cache.use("abc")
    assert (cache.gpu, cache.host) == (["abc"], ["abc"])


@pytest.mark.parametrize("hits", [2, 3])
def test_selective_copies_at_the_insert_that_reaches_its_hits(hits: int) -> None:
    cache = Small(10, 10, WriteThroughSelective(hits=hits))
    for _ in range(hits - 1):
        cache.use("abc")
        assert cache.host == []
    cache.use("abc")
    assert cache.host == ["abc"]


def test_a_node_is_copied_only_below_a_copied_parent() -> None:
    cache = Small(20, 4, WriteThrough())
    cache.use("abcde", "abcdex")
    assert (cache.gpu, cache.host) == (["abcde", "x"], [])


def test_a_copy_makes_room_for_the_whole_node_not_only_for_what_is_lacking() -> None:
    cache = Small(3, 4, WriteThrough())
    cache.use("a", "b", "c", tail=0)
    cache.use("pq", tail=0)
    assert (cache.gpu, cache.host) == (["c", "pq"], ["c", "pq"])


def test_write_back_counts_no_hits_and_copies_nothing_before_eviction() -> None:
    cache = Small(10, 10, WriteBack())
    cache.use("abc", "abc", "abc")
    assert (cache.node("abc").hits, cache.host) == (1, [])


# --- leaving the GPU ---------------------------------------------------------------------------------------------------------


def test_a_copy_is_safe_until_the_eviction_that_made_it_first_finds_no_room() -> None:
    cache = Small(4, 2, WriteBack())
    cache.use("ab", "cd", "wxyz", tail=0)
    assert (cache.gpu, cache.host) == (["wxyz"], ["ab"])
    cache = Small(6, 2, WriteBack())
    cache.use("ab", "cd", "ef", "uvwxyz", tail=0)
    assert (cache.gpu, cache.host) == (["uvwxyz"], ["ef"])


# --- loading ---------------------------------------------------------------------------------------------------------------


def test_a_load_evicts_its_whole_size_if_there_is_less_room_than_that() -> None:
    cache = Small(6, 20, WriteThrough())
    cache.use("abc", "d", "e", "f", "g", tail=0)
    assert (cache.gpu, cache.cache.gpu.pool.free) == (["d", "e", "f", "g"], 2)
    assert cache.use("abc") == (0, 3)
    assert cache.gpu == ["abc", "g"]


def test_a_load_moves_the_only_copy_if_placement_says_so() -> None:
    cache = Small(4, 6, Exclusive())
    cache.use("ab", "wxyz", tail=0)
    assert cache.use("ab") == (0, 2)
    assert (cache.gpu, cache.host) == (["ab"], ["wxyz"])


@pytest.mark.parametrize(("load_min_tokens", "hits"), [(3, (0, 3)), (4, (0, 0))])
def test_short_hits_on_the_host_are_not_loaded(load_min_tokens: int, hits: tuple[int, int]) -> None:
    cache = Small(4, 9, WriteThrough(), load_min_tokens=load_min_tokens)
    cache.use("abc", "wxyz", tail=0)
    assert cache.use("abc") == hits
    assert (cache.gpu, cache.host) == (["abc"], ["abc", "wxyz"])


def test_computed_pages_take_a_node_of_the_host_to_the_gpu_without_a_hit() -> None:
    cache = Small(4, 9, WriteThrough())
    cache.use("ab", "wxyz", tail=0)
    assert cache.use("ab", tail=0) == (0, 1)
    assert (cache.gpu, cache.host) == (["a", "b"], ["a", "b", "wxyz"])
    assert (cache.node("a").hits, cache.node("b").hits) == (2, 1)
    assert cache.cache.gpu.pool.free == 2


# --- admission -------------------------------------------------------------------------------------------------------------


def test_a_copy_on_the_host_does_not_lower_the_need() -> None:
    cache = Small(5, 20, WriteThrough())
    cache.use("ab", tail=0)
    cache.use("pqrst", tail=0)
    held = cache.start("xyz", tail=0)
    assert cache.start("ab") is None
    assert cache.cache.counts.loaded_pages == 0
    cache.finish(held)
    assert cache.use("ab") == (0, 2)


# --- slower models, real traces, recorded hits -----------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("load_min_tokens", [0, 10])
def test_random_traces_hit_as_in_the_slow_model(placement: str, load_min_tokens: int) -> None:
    make, settings = PLACEMENTS[placement]
    for seed in range(EXAMPLES // 2):
        requests = random_requests(seed)
        gpu, cpu, in_flight = 5 + seed % 19, 1 + seed % 37, 1 + seed % 4
        cache = make_cache(gpu, cpu, eviction=LRU, placement=make(), page_tokens=4, load_min_tokens=load_min_tokens)
        slow = SlowRadix(gpu, cpu, page_tokens=4, load_min_tokens=load_min_tokens, **settings)
        assert play(cache, requests, in_flight=in_flight) == play_slowly(slow, requests, in_flight=in_flight), seed


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("page_tokens", "gpu", "cpu", "in_flight", "load_min_tokens"),
    [(16, 24, 90, 1, 0), (16, 60, 30, 3, 0), (512, 60, 90, 2, 1_024)],
)
def test_conversations_hit_as_in_the_slow_model(
    chats: dict[int, list[Request]], placement: str, page_tokens: int, gpu: int, cpu: int, in_flight: int, load_min_tokens: int
) -> None:
    make, slow_settings = PLACEMENTS[placement]
    shared_settings = {"page_tokens": page_tokens, "load_min_tokens": load_min_tokens}
    mine = play(make_cache(gpu, cpu, eviction=LRU, placement=make(), **shared_settings), chats[page_tokens], in_flight=in_flight)
    slow = SlowRadix(gpu, cpu, **shared_settings, **slow_settings)
    assert mine == play_slowly(slow, chats[page_tokens], in_flight=in_flight)
    assert sum(host for _, host in mine) > 5


@pytest.mark.long
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_random_traces_hit_as_in_the_model_beside_the_repository(shared: Path, placement: str) -> None:
    model = reference(shared, "hicache_model")
    for seed in range(100, 200):
        requests = random_requests(seed)
        gpu, cpu, in_flight = 4 + seed % 21, 1 + seed % 43, 1 + seed % 4
        cache = make_cache(gpu, cpu, eviction=LRU, placement=PLACEMENTS[placement][0](), page_tokens=4)
        rows = model.play(as_records(requests), gpu, cpu, placement, in_flight, 4)
        assert play(cache, requests, in_flight=in_flight) == [tuple(row[2:]) for row in rows], seed


@pytest.mark.long
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_agent_sessions_hit_as_in_the_model_beside_the_repository(shared: Path, placement: str) -> None:
    model = reference(shared, "hicache_model")
    requests = Weka(path=str(shared / WEKA), limit=400).load(64).requests
    cache = make_cache(6_000, 9_000, eviction=LRU, placement=PLACEMENTS[placement][0](), page_tokens=64)
    mine = play(cache, requests, in_flight=3)
    assert mine == [tuple(row[2:]) for row in model.play(as_records(requests), 6_000, 9_000, placement, 3, 64)]
    assert sum(host > 0 for _, host in mine) > 5


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_conversation_hits_what_the_engine_hit(shared: Path, conversation: list[Request], placement: str) -> None:
    rows = golden_rows(shared, f"conv.hicache_6000_12000_{placement}", 2_000)
    cache = make_cache(6_000, 12_000, eviction=LRU, placement=PLACEMENTS[placement][0](), page_tokens=512)
    assert play(cache, conversation) == rows


@pytest.mark.parametrize("eviction", [LRU, Random])
@pytest.mark.parametrize("placement", [WriteThrough, WriteBack, Exclusive])
def test_any_policies_keep_the_books_right(eviction: Callable[[], Any], placement: Callable[[], Any]) -> None:
    for seed in range(20):
        cache = make_cache(7 + seed, 3 + 2 * seed, eviction=eviction, placement=placement(), page_tokens=4)
        running: list[NodeLease] = []
        for request in random_requests(seed):
            while (held := cache.serve(request, request.prompt_pages + 1, 0.0)) is None and running:
                cache.finish_request(running.pop(0))
            check(cache, running + ([held] if held else []))
            running += [held] if held else []
        assert cache.gpu.evicted_pages > 0
