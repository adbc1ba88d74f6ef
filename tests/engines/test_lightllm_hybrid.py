"""``rules=lightllm_hybrid``: a test for each rule, then random and real traces against a slow model and recorded hits.

Unless said otherwise pages have one token, a prompt is a word, a page for each letter, and a prefill chunk has two pages.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvsim.api import Result, load_trace, replay
from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup, HybridSettings
from kvsim.core.tier import Tier, chain
from kvsim.engines.lightllm.hybrid_cache import HybridLease, LightLLMHybridCache
from kvsim.engines.lightllm.rules import LightLLMHybridRules
from kvsim.errors import UsageError
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.by_length import ByLength
from kvsim.trace.mooncake import Mooncake
from tests.engines.recorded import golden_rows
from tests.engines.slow_lightllm import Row
from tests.engines.slow_lightllm_hybrid import SlowLightLLMHybrid
from tests.engines.small import replayed
from tests.workloads import EXAMPLES, Words, extents_of, make_request, random_requests, write_trace


def make_cache(
    gpu: int, cpu: int = 0, *, states: int = 9, chunk: int = 2, unit: int = 1, page_tokens: int = 1, pool: type[Pool] = SlotPool
) -> LightLLMHybridCache:
    tiers = []
    for index, capacity in enumerate([gpu, cpu] if cpu else [gpu]):
        policy = LRU()
        policy.bind(PolicyContext(tier=index, capacity_pages=capacity, page_tokens=page_tokens))
        tiers.append(Tier(("gpu", "cpu")[index], index, pool(capacity), policy))
    tiers[-1].unit_pages = unit if cpu else 1
    placement = ByLength(min_tokens=1)
    placement.bind(PolicyContext(tier=1, capacity_pages=cpu, page_tokens=page_tokens))
    hybrid = HybridSettings(
        checkpoint=NoCheckpoint(),
        state_tiers=[Tier("gpu", 0, Pool(states), LRU())],
        state_pages=1,
        state_bytes=10,
        grid_pages=1,
        prefill_chunk_tokens=chunk * page_tokens,
    )
    edges = chain(tiers, [placement] if cpu else [])
    return LightLLMHybridRules().server(CacheSetup(tiers=tiers, edges=edges, page_tokens=page_tokens, hybrid=hybrid))


def check(cache: LightLLMHybridCache, running: list[HybridLease]) -> None:
    """Recount slots, pins, what can be evicted, and states."""
    gpu, nodes = cache.gpu, list(cache.tree.root.descendants())
    slots = [node.slots[0] for node in nodes] + [part for one in running for part in (one.slots, one.duplicates)]
    if isinstance(gpu.pool, SlotPool):
        taken = [slot for part in [*slots, gpu.pool.free_slots()] for slot in part.tolist()]
        assert sorted(taken) == list(range(gpu.pool.capacity))
    assert gpu.pool.free + sum(map(gpu.pool.count, slots)) == gpu.pool.capacity
    assert gpu.evictable_pages == sum(node.pages for node in nodes if not node.pins[0])
    for node in nodes:
        assert node.pins[0] == sum(node in lease.node.path() for lease in running)
        assert node.children_in[0] == len(node.children)
    states, pool = cache.states, cache.states.tier.pool
    assert all(node in nodes for node in states._kept)
    assert pool.capacity - pool.free == len(states._kept) + len(states.detached or ()) + len(running)


def play(cache: LightLLMHybridCache, requests: list[Request], in_flight: int = 1) -> list[Row]:
    rows = replayed(cache, requests, in_flight=in_flight)
    check(cache, [])
    return [(gpu, cpu) for gpu, cpu, _ in rows]


class Small:
    """``use`` takes words. A prompt has one token more than its word."""

    def __init__(self, gpu: int, cpu: int = 0, **settings: Any) -> None:
        self.cache = make_cache(gpu, cpu, **settings)
        self.words = Words()
        self.running: list[HybridLease] = []

    def start(self, word: str, *, output: int = 0) -> Any:
        request = self.words.request(word, tail=1, output=output)
        lease = self.cache.serve(request, request.prompt_tokens + output, 0.0)
        self.running += [lease] if isinstance(lease, HybridLease) else []
        check(self.cache, self.running)
        return lease

    def finish(self, *leases: HybridLease) -> None:
        for lease in leases:
            self.cache.finish_request(lease)
            self.running.remove(lease)
            check(self.cache, self.running)

    def use(self, *words: str, output: int = 0) -> Row:
        """Serve requests one after another. Returns the hits of the last one."""
        for word in words:
            lease = self.start(word, output=output)
            self.finish(lease)
        return lease.hits[:2]

    def in_tree(self, word: str) -> int:
        """The pages of the word that the tree has."""
        path, _, agreed, _ = self.cache.tree.walk(self.cache.tree.root, extents_of(self.words.pages(word)))
        return sum(node.pages for node in path) + agreed

    def states(self) -> list[str]:
        """The words after which a state is kept, the least recently used first."""
        pages = [node.runs[-1][0] + node.runs[-1][1] - 1 for node in self.cache.states._kept]
        return [self.word_of(page) for page in pages]

    def detached(self) -> list[str]:
        """The words after which a state is detached, likewise."""
        return [self.word_of(page) for page in self.cache.states.detached or ()]

    def word_of(self, page: int) -> str:
        return next(str(word) for word, other in self.words.ids.items() if other == page)


# --- prefill and hits ----------------------------------------------------------------------------------------------------


def test_each_chunk_but_the_last_is_inserted_with_a_state() -> None:
    small = Small(20)
    small.use("abcd")  # chunks end after b, d and the token behind
    assert small.states() == ["ab", "abcd"] and small.in_tree("abcd") == 4
    small.use("vwx")  # the second chunk ends the prompt
    assert small.in_tree("vwx") == 2


def test_a_hit_ends_at_the_deepest_state_and_chunks_begin_there() -> None:
    small = Small(20)
    small.use("abc")
    assert small.use("abcdef") == (2, 0)
    assert small.states() == ["ab", "abcd", "abcdef"]


def test_pages_that_the_tree_has_by_then_stay_with_the_request_as_duplicates() -> None:
    small = Small(20, states=1)  # the running request has the only slot, so no state is saved
    small.use("abcd")
    assert small.in_tree("abcd") == 4 and small.states() == []
    lease = small.start("abcd")
    assert small.cache.gpu.pool.free == 20 - 4 - 5
    small.finish(lease)
    assert small.cache.gpu.pool.free == 20 - 4


# --- states --------------------------------------------------------------------------------------------------------------


def test_running_requests_have_a_state_each() -> None:
    small = Small(30, states=2)
    first, second = small.start("a"), small.start("b")
    assert small.start("c") is None
    small.finish(first, second)
    assert small.use("c") == (0, 0)


def test_the_state_used_least_recently_leaves_and_is_not_detached() -> None:
    small = Small(30, 30, states=3)
    small.use("abc", "vwx")
    small.use("abc")  # refreshes the state after b
    small.use("mno")
    assert small.states() == ["ab", "mn"] and small.detached() == []
    assert small.in_tree("vw") == 2, "its pages stay"


def test_states_of_running_requests_leave_after_all_others() -> None:
    small = Small(30, states=4)
    small.use("abc")
    running = small.start("abx")  # holds the path to b
    small.use("vwx")
    assert small.states() == ["ab", "vw"]
    small.use("mno")
    assert small.states() == ["ab", "mn"]
    small.finish(running)


# --- detached states -----------------------------------------------------------------------------------------------------


def test_a_state_is_detached_when_its_pages_leave_and_used_with_pages_of_the_cpu() -> None:
    small = Small(8, 30)
    small.use("abcd")  # the tree has two nodes of two pages
    small.use("vwxy")  # takes 2 + 2 + 1: c and d leave
    assert small.detached() == ["abcd"] and small.in_tree("abcd") == 2
    assert small.use("abcde") == (2, 2)
    assert small.states()[-1] == "abcd", "inserted again"
    assert small.detached() == ["abcd", "vwxy"], "and still detached"


def test_a_state_within_a_cpu_page_is_not_detached() -> None:
    small = Small(8, 30, unit=4)
    small.use("abcdef")  # states after b, d and f
    small.use("vwxyz")
    assert small.detached() == ["abcd"]


def test_counts_of_states() -> None:
    small = Small(8, 30)
    small.use("abcd", "vwxy", "abcde")
    counts = small.cache.describe_checkpoints()
    assert (counts["saved"], counts["used"], counts["detached"]) == (2 + 2 + 1, 1, counts["detached"])
    assert counts["bytes"] == 50 and counts["detached"] >= 1


# --- against the slow model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(EXAMPLES // 2))
def test_random_traces_hit_what_the_slow_model_hits(seed: int) -> None:
    random, requests = Random(seed), random_requests(seed)
    for _ in range(3):
        gpu, cpu = random.randint(5, 40), random.choice((0, random.randint(2, 40)))
        setting = {
            "states": random.randint(1, 12),
            "chunk": random.randint(0, 4),
            "unit": random.choice((1, 1, 2)),
            "page_tokens": 4,
        }
        in_flight = random.choice((1, 1, 2, 4))
        slow = SlowLightLLMHybrid(gpu, cpu, **setting)
        rows = [slow.serve(request, in_flight) for request in requests]
        assert play(make_cache(gpu, cpu, **setting), requests, in_flight) == rows, (gpu, cpu, setting, in_flight)


@pytest.mark.parametrize("page_tokens", [16, 512])
@pytest.mark.parametrize(("gpu", "cpu", "in_flight"), [(60, 0, 1), (60, 200, 1), (150, 200, 3)])
def test_conversations_hit_what_the_slow_model_hits(
    chats: dict[int, list[Request]], page_tokens: int, gpu: int, cpu: int, in_flight: int
) -> None:
    setting = {"states": 20, "chunk": 3, "page_tokens": page_tokens}
    slow = SlowLightLLMHybrid(gpu, cpu, **setting)
    rows = [slow.serve(request, in_flight) for request in chats[page_tokens]]
    assert play(make_cache(gpu, cpu, **setting), chats[page_tokens], in_flight) == rows
    assert sum(row[0] for row in rows) > 200 and (not cpu or gpu > cpu / 2 or sum(row[1] for row in rows) > 5)


def test_counts_hold_while_requests_run() -> None:
    for seed in range(10):
        cache = make_cache(24, 30 * (seed % 2), states=6, page_tokens=4)
        running: list[HybridLease] = []
        for request in random_requests(seed):
            pages = -(-(request.prompt_tokens + request.output_tokens) // 4)
            while (lease := cache.serve(request, pages, 0.0)) is None:
                cache.finish_request(running.pop(0))
                check(cache, running)
            running += [lease] if isinstance(lease, HybridLease) else []
            check(cache, running)


@pytest.mark.parametrize("limit", [2_000, pytest.param(12_031, marks=pytest.mark.long)])
@pytest.mark.parametrize("cpu", [0, 12_000])
def test_conversation_hits_what_the_engine_hit(shared: Path, cpu: int, limit: int) -> None:
    path = shared / "traces" / "mooncake_conversation_trace.jsonl.gz"
    requests = Mooncake(path=str(path), limit=limit).load(512).requests
    rows = golden_rows(shared, f"conv.lightllm_hybrid_6000_{cpu}_states1000_chunk16", limit)
    assert play(make_cache(6_000, cpu, states=1_000, chunk=16, page_tokens=512, pool=Pool), requests) == rows


# --- settings ------------------------------------------------------------------------------------------------------------


def played(folder: Path, *overrides: str) -> Result:
    lines = [make_request(list(range(1, 12)), prompt_tokens=11 * 256, output_tokens=2) for _ in range(3)]
    write_trace(folder / "trace.jsonl", lines)
    trace = load_trace("mooncake", path=folder / "trace.jsonl", block_tokens=256, page_tokens=256)
    return replay(trace, "preset=lightllm_hybrid", *overrides)


def test_the_preset_plays_these_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert played(tmp_path).hit_pages.sum(axis=1).tolist() == [0, 0, 0], "a prompt of one chunk is not cached"
    small = played(tmp_path, "replay.prefill_chunk_tokens=1024", "tiers.gpu.states=8states", "tiers.gpu.capacity=90pages")
    assert small.hit_pages.tolist() == [[0, 0, 0], [8, 0, 0], [8, 0, 0]]
    assert small.record["checkpoints"]["saved"] == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tiers.cpu.states=10states", "rules: LightLLM keeps states on the GPU only: set tiers.cpu.states=0"),
        ("replay.prefill_chunk_tokens=1000", "rules: replay.prefill_chunk_tokens=1000 must be a multiple of page_tokens=256"),
        ("checkpoint.detached_states=9", "checkpoint.detached_states has no effect under the rules of an engine"),
        (
            "+rules.cache_output=true",
            r"rules\.cache_output=true is not supported by LightLLM's rules for hybrid",
        ),
        (
            "+rules.recompute_last_token=false",
            r"rules\.recompute_last_token=false is not supported by LightLLM's",
        ),
        (
            "placement=write_through",
            "rules: LightLLM stores whole prompts when they finish, but WriteThrough decides node by node",
        ),
    ],
)
def test_what_the_rules_do_not_know_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^{message}"):
        played(tmp_path, override)
