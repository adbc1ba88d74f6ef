"""SGLang's radix cache: one test for each of its rules, then random and real traces against slower models and recorded hits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsim.core.request import Request, RetentionRange
from kvsim.engines.sglang.whole_nodes import NodeLease
from kvsim.hardware.spec import HardwareSpec
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.filo import FILO
from kvsim.policies.eviction.lfu import LFU
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.mru import MRU
from kvsim.policies.eviction.priority import Priority
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.trace.weka import Weka
from tests.engine.small import HARDWARE, MODEL
from tests.engines.recorded import golden_rows, reference
from tests.engines.slow_radix import SlowNode, SlowRadix, play_slowly
from tests.engines.small import check, empty_cache, make_cache, play
from tests.policies.small import POLICIES, policy_of
from tests.workloads import EXAMPLES, Words, as_records, random_requests

WEKA = "traces/weka_claude_code_traces_rle.jsonl.gz"


ORDERS: dict[str, tuple[Callable[[], Any], Callable[[SlowNode], Any]]] = {
    "lru": (LRU, lambda node: node.used),
    "lfu": (LFU, lambda node: (node.hits, node.used)),
    "slru": (SegmentedLRU, lambda node: (node.hits >= 2, node.used)),
    "fifo": (FIFO, lambda node: node.created),
    "mru": (MRU, lambda node: -node.used),
    "filo": (FILO, lambda node: -node.created),
}


class Small:
    """A cache of one-token pages; ``use`` takes a word. By default it computes one token more than the pages of the word."""

    def __init__(self, capacity: int, eviction: Callable[[], Any] = LRU) -> None:
        self.cache = make_cache(capacity, eviction=eviction)
        self.words = Words()
        self.running: list[NodeLease] = []

    def start(self, word: str, *, tail: int = 1, output: int = 0) -> NodeLease | None:
        """A request that has computed its prompt; the tail's token takes a page."""
        request = self.words.request(word, tail=tail, output=output)
        held = self.cache.serve(request, len(word) + tail + output, 0.0)
        self.running += [held] if held else []
        check(self.cache, self.running)
        return held

    def finish(self, held: NodeLease | None) -> None:
        assert held is not None
        self.running.remove(held)
        self.cache.finish_request(held)
        check(self.cache, self.running)

    def use(self, *words: str, tail: int = 1, output: int = 0) -> int:
        """Requests from beginning to end; the hits of the last one, -1 if it was rejected."""
        hits = -1
        for word in words:
            held = self.start(word, tail=tail, output=output)
            hits = -1
            if held is not None:
                hits = held.hits[0]
                self.finish(held)
        return hits

    def nodes(self) -> list[str]:
        """The letters of each node, in order of their page ids."""
        nodes = sorted(self.cache.tree.root.descendants(), key=lambda node: node.runs)
        return [self.words.text(node.runs) for node in nodes]


# --- the rules -----------------------------------------------------------------------------------------------------------


def test_the_last_token_is_always_computed() -> None:
    cache = Small(20)
    assert [cache.use("abcd", tail=0), cache.use("abcd", tail=0), cache.use("abcd", tail=1)] == [0, 3, 4]


def test_a_prompt_is_found_as_soon_as_it_is_computed() -> None:
    cache = Small(20)
    cache.start("abc")
    held = cache.start("abc")
    assert held is not None
    assert held.hits == (3, 0, 0)


def test_answers_take_room_until_the_end_and_are_not_cached() -> None:
    cache = Small(10)
    held = cache.start("ab", tail=0, output=6)
    assert cache.cache.gpu.pool.free == 2
    cache.finish(held)
    assert cache.cache.gpu.pool.free == 8
    assert cache.use("abc") == 2


def test_a_whole_leaf_leaves_even_if_less_is_lacking() -> None:
    cache = Small(10)
    cache.use("abcdef")
    cache.use("xyzw", tail=0)
    assert cache.nodes() == ["abcdef", "xyzw"]
    cache.use("q", tail=0)
    assert cache.nodes() == ["xyzw", "q"]
    assert cache.cache.gpu.pool.free == 5


def test_a_node_is_all_that_one_insert_added_however_many_runs_it_has() -> None:
    cache = Small(10)
    cache.words.ids.update({"a": 0, "ab": 1, "abc": 7, "abcd": 8})
    cache.use("abcd")
    assert [node.runs for node in cache.cache.tree.root.descendants()] == [((0, 2), (7, 2))]
    cache.use("pqrstuv", tail=0)
    assert cache.nodes() == ["pqrstuv"]


def test_nodes_are_cut_where_a_look_up_or_an_insert_ends_and_never_joined() -> None:
    cache = Small(30)
    cache.use("abcdef", "abxy", "abc")
    assert cache.nodes() == ["ab", "c", "def", "xy"]
    cache.use("abcdef")
    assert cache.nodes() == ["ab", "c", "def", "xy"]


def test_what_is_cut_off_is_refreshed_too_but_is_older_than_the_new_branch() -> None:
    cache = Small(10)
    cache.use("abcd", "xy", "abe")
    assert cache.nodes() == ["ab", "cd", "xy", "e"]
    cache.use("pqrst", tail=0)
    assert cache.nodes() == ["ab", "cd", "e", "pqrst"]
    cache.use("pqrstuv", tail=0)
    assert cache.nodes() == ["ab", "e", "pqrst", "uv"]


def test_priority_takes_what_only_unimportant_requests_have_used() -> None:
    cache = Small(7, Priority)
    for word, priority in (("ab", 5), ("cd", 1), ("ef", 1)):
        request = cache.words.request(word, tail=1)
        request.priority = priority
        held = cache.cache.serve(request, 3, 0.0)
        assert held is not None
        cache.cache.finish_request(held)
    cache.use("xyz", tail=0)
    assert cache.nodes() == ["ab", "ef", "xyz"]


@pytest.mark.parametrize(("eviction", "stays"), [(LRU, ["ab", "pqr"]), (MRU, ["cd", "pqr"])])
def test_a_request_that_does_not_fit_was_looked_up_all_the_same(eviction: Callable[[], Any], stays: list[str]) -> None:
    cache = Small(6, eviction)
    cache.use("ab", "cd")
    assert cache.use("ab", output=9) == -1
    cache.use("pqr", tail=0)
    assert cache.nodes() == stays


@pytest.mark.parametrize("name", POLICIES)
def test_any_policy_is_asked_by_the_contract_alone(name: str) -> None:
    requests = random_requests(1, requests=200)
    for request in requests:
        request.turn, request.session = divmod(request.index, 7)
        request.priority, request.kind = request.index % 3, "chat"
        request.retention = (RetentionRange(0, request.prompt_tokens, 30 + 10 * request.priority, 5.0),)
    for placement, cpu in ((None, 0), (WriteThrough(), 30), (WriteBack(), 30)):
        known = {"requests": requests, "model": MODEL, "hardware": HardwareSpec(**HARDWARE), "empty_cache": empty_cache}
        cache = make_cache(14, cpu, eviction=lambda: policy_of(name), placement=placement, page_tokens=4, **known)
        rows = play(cache, requests, in_flight=2)
        assert cache.gpu.evicted_pages > 100
        assert sum(hits for hits, _ in rows) > 100


# --- slower models, real traces, recorded hits -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hold_output", [True, False])
def test_random_traces_hit_as_in_the_slow_model(order: str, hold_output: bool) -> None:
    eviction, rank = ORDERS[order]
    for seed in range(EXAMPLES // 2):
        requests = random_requests(seed)
        capacity, in_flight = 5 + seed % 19, 1 + seed % 4
        mine = play(
            make_cache(capacity, eviction=eviction, page_tokens=4), requests, in_flight=in_flight, hold_output=hold_output
        )
        slow = SlowRadix(capacity, order=rank, page_tokens=4)
        assert mine == play_slowly(slow, requests, in_flight=in_flight, hold_output=hold_output), seed


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("page_tokens", "capacity", "in_flight"), [(16, 24, 1), (16, 90, 3), (512, 60, 2)])
def test_conversations_hit_as_in_the_slow_model(
    chats: dict[int, list[Request]], order: str, page_tokens: int, capacity: int, in_flight: int
) -> None:
    eviction, rank = ORDERS[order]
    mine = play(make_cache(capacity, eviction=eviction, page_tokens=page_tokens), chats[page_tokens], in_flight=in_flight)
    slow = SlowRadix(capacity, order=rank, page_tokens=page_tokens)
    assert mine == play_slowly(slow, chats[page_tokens], in_flight=in_flight)
    assert sum(hits for hits, _ in mine) > 1_000


@pytest.mark.long
@pytest.mark.parametrize("order", ["lru", "lfu", "slru", "fifo", "mru"])
def test_random_traces_hit_as_in_the_model_beside_the_repository(shared: Path, order: str) -> None:
    model = reference(shared, "sglang_model")
    for seed in range(100, 200):
        requests = random_requests(seed)
        capacity, in_flight = 4 + seed % 21, 1 + seed % 4
        mine = play(make_cache(capacity, eviction=ORDERS[order][0], page_tokens=4), requests, in_flight=in_flight)
        rows = model.play(as_records(requests), capacity, order, in_flight, 4)
        assert mine == [(row[2], 0) for row in rows], seed


@pytest.mark.long
@pytest.mark.parametrize("order", ["lru", "mru"])
def test_agent_sessions_hit_as_in_the_model_beside_the_repository(shared: Path, order: str) -> None:
    model = reference(shared, "sglang_model")
    requests = Weka(path=str(shared / WEKA), limit=400).load(64).requests
    mine = play(make_cache(6_000, eviction=ORDERS[order][0], page_tokens=64), requests, in_flight=3)
    rows = model.play(as_records(requests), 6_000, order, 3, 64)
    assert mine == [(row[2], 0) for row in rows]
    assert sum(hits > 0 for hits, _ in mine) > 100


@pytest.mark.parametrize(
    ("name", "order", "capacity", "in_flight"),
    [
        ("sglang_lru_6000", "lru", 6_000, 1),
        ("sglang_lru_6000_inflight4", "lru", 6_000, 4),
        ("sglang_lfu_6000", "lfu", 6_000, 1),
        ("sglang_slru_6000", "slru", 6_000, 1),
        ("sglang_lru_30000", "lru", 30_000, 1),
    ],
)
def test_conversation_hits_what_the_engine_hit(
    shared: Path, conversation: list[Request], name: str, order: str, capacity: int, in_flight: int
) -> None:
    rows = golden_rows(shared, f"conv.{name}", 2_000)
    mine = play(make_cache(capacity, eviction=ORDERS[order][0], page_tokens=512), conversation, in_flight=in_flight)
    assert [(hits,) for hits, _ in mine] == rows
