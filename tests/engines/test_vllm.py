"""vLLM's GPU block pool: a test for each rule, then random and real traces against slow models and the engine's recorded hits."""

from pathlib import Path

import hydra
import pytest
from rich.console import Console

import kvsim
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request, RetentionRange
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.plans.build import build_run
from kvsim.report.tree import draw_tree
from tests.core.knowing import Knowing
from tests.engine.small import HARDWARE, MODEL
from tests.engines.recorded import golden_rows, reference
from tests.engines.slow_blocks import SlowBlocks, play_slowly
from tests.engines.small import empty_cache
from tests.engines.small_blocks import PAGE_TOKENS, Small, check, make_cache, play
from tests.policies.small import POLICIES, policy_of
from tests.workloads import EXAMPLES, as_records, random_requests


def test_pages_are_found_from_admission_on() -> None:
    cache = Small(20)
    first = cache.start("abc", tokens=1)
    second = cache.start("abcd", tokens=1)
    assert first is not None and second is not None
    assert (first.hits, second.hits) == ((0, 0, 0), (3, 0, 0))
    check(cache.cache, [first, second])


def test_an_aligned_prompt_that_is_cached_whole_loses_its_last_page() -> None:
    cache = Small(20)
    assert cache.serve("abc", "abc") == (2, 0)
    assert cache.serve("abc", tokens=1) == (3, 0)


def test_a_request_is_as_recent_as_its_end() -> None:
    cache = Small(4)
    first, second = cache.start("ab"), cache.start("cd")
    cache.finish(second, first)
    cache.serve("xy")
    assert (cache.on_gpu("ab"), cache.on_gpu("cd")) == (2, 0)


def test_tail_pages_leave_before_head_pages_and_one_by_one() -> None:
    cache = Small(4)
    cache.serve("abcd", "xyz")
    assert (cache.on_gpu("abcd"), cache.on_gpu("xyz")) == (1, 3)


def test_pages_without_a_key_are_used_again_first() -> None:
    cache = Small(6)
    cache.serve("ab", tokens=1, output=12)  # two pages with a key, four without
    cache.serve("cdef")
    assert (cache.on_gpu("ab"), cache.on_gpu("cdef")) == (2, 4)
    assert cache.cache.tiers[0].evicted_pages == 0


def test_a_page_computed_twice_is_there_twice() -> None:
    cache = Small(6)
    cache.serve("abc", "abc")
    assert cache.cache.tiers[0].pool.free == 2
    assert cache.cache.tiers[0].inserted_pages == 4


def test_the_older_copy_is_found_and_the_younger_leaves_first_when_only_the_older_is_used() -> None:
    cache = Small(6)
    cache.serve("abc", "abc", "abcd")  # in the order of leaving: the younger c, d, the older c, b, a
    cache.serve("xy")
    assert cache.on_gpu("abcd") == 4
    cache.serve("xyz")
    assert cache.on_gpu("abcd") == 3


@pytest.mark.parametrize("seed", range(EXAMPLES // 2))
def test_random_traces_hit_what_the_slow_models_hit(seed: int) -> None:
    requests = random_requests(seed)
    for capacity, in_flight in ((9, 1), (12, 2), (16, 3), (24, 4), (7, 4)):
        rows = play(make_cache(capacity), requests, in_flight)
        assert rows == play_slowly(SlowBlocks(capacity), requests, in_flight)


@pytest.mark.parametrize("seed", range(3))
def test_policies_are_told_what_is_evictable_also_of_pages_that_are_stored_twice(seed: int) -> None:
    """Blocks may leave before their children. The policy itself checks each notification."""
    requests = random_requests(seed)
    for capacity, in_flight in ((9, 1), (12, 2), (24, 4)):
        cache = make_cache(capacity, eviction=Knowing)
        assert play(cache, requests, in_flight) == play(make_cache(capacity), requests, in_flight)
        gpu, policy = cache.pool.gpu, cache.pool.gpu.eviction
        assert isinstance(policy, Knowing)
        policy.check(gpu, [*cache.pool.tree.root.descendants(), *[node for node in policy.evictable if node.is_evictable(0)]])


@pytest.mark.parametrize("page_tokens", [16, 512])
@pytest.mark.parametrize(("capacity", "in_flight"), [(24, 1), (60, 3), (150, 2)])
def test_conversations_hit_what_the_slow_model_hits(
    chats: dict[int, list[Request]], page_tokens: int, capacity: int, in_flight: int
) -> None:
    rows = play(make_cache(capacity, page_tokens=page_tokens), chats[page_tokens], in_flight)
    assert rows == play_slowly(SlowBlocks(capacity, page_tokens=page_tokens), chats[page_tokens], in_flight)
    assert sum(gpu for gpu, _ in rows) > 1_000


@pytest.mark.long
def test_random_traces_hit_what_the_reference_hits(shared: Path) -> None:
    model = reference(shared, "vllm_model")
    for seed in range(1_000, 1_150):
        requests = random_requests(seed)
        for capacity, in_flight in ((8, 1), (11, 2), (15, 3), (20, 4)):
            expected = model.play(as_records(requests), capacity, in_flight, page_tokens=PAGE_TOKENS)
            assert play(make_cache(capacity), requests, in_flight) == [row[2:4] for row in expected]


@pytest.mark.parametrize("name", POLICIES)
def test_any_eviction_policy_keeps_the_pool_right(name: str) -> None:
    requests = random_requests(7)
    for request in requests:
        request.turn, request.session = divmod(request.index, 7)
        request.priority, request.kind = request.index % 3, "chat"
        request.retention = (RetentionRange(0, request.prompt_tokens, 30 + 10 * request.priority, 5.0),)
    known = {"requests": requests, "model": MODEL, "hardware": HardwareSpec(**HARDWARE), "empty_cache": empty_cache}
    for capacity, in_flight in ((12, 1), (16, 3)):
        cache = make_cache(capacity, eviction=lambda: policy_of(name), **known)
        rows = play(cache, requests, in_flight)
        assert cache.tiers[0].evicted_pages > 0
        assert 0 < sum(gpu for gpu, _ in rows) <= sum(gpu for gpu, _ in play(make_cache(None), requests))


@pytest.mark.parametrize(("name", "gpu", "in_flight"), [("6000", 6_000, 1), ("30000", 30_000, 1), ("6000_inflight4", 6_000, 4)])
def test_the_engine_s_own_hits_on_conversation(
    shared: Path, conversation: list[Request], name: str, gpu: int, in_flight: int
) -> None:
    rows = play(make_cache(gpu, page_tokens=512), conversation, in_flight)
    assert rows == golden_rows(shared, f"conv.vllm_{name}", 2_000)


@pytest.mark.long
@pytest.mark.parametrize(("capacity", "in_flight"), [(600, 1), (600, 4), (2_000, 2)])
def test_the_reference_s_hits_on_conversation(shared: Path, conversation: list[Request], capacity: int, in_flight: int) -> None:
    expected = reference(shared, "vllm_model").play(as_records(conversation), capacity, in_flight)
    assert play(make_cache(capacity, page_tokens=512), conversation, in_flight) == [row[2:4] for row in expected]


@pytest.mark.parametrize("capacity", [1_500, 6_000])
def test_answers_are_found_once_their_request_has_finished(capacity: int) -> None:
    """The schedule names their pages one by one. If no request overlaps another, the hits are the same."""
    trace = kvsim.load_trace("synthetic", page_tokens=16, sessions=15)
    for request in trace.requests:
        request.arrival_s, request.after = 10_000.0 * request.index, -1
    settings = ("preset=vllm", f"tiers.gpu.capacity={capacity}pages")
    replayed, simulated = (run(trace, *settings).hit_pages for run in (kvsim.replay, kvsim.simulate))
    assert (replayed == simulated).all()
    without = kvsim.replay(trace, *settings, "rules.cache_output=false").hit_pages
    assert replayed.sum() > 0 and (replayed != without).any()


def test_the_tree_of_both_tiers_can_be_drawn() -> None:
    cache = Small(6, 9, pool=SlotPool)
    cache.serve("ab", "abc", "x")
    console = Console(width=200)
    with console.capture() as drawn:
        console.print(draw_tree(cache.cache, {}))
    lines = drawn.get().splitlines()
    assert lines[0] == "radix tree: 3 nodes, gpu 4 of 6 pages in use, cpu 4 of 9 pages in use"
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("command", "override", "message"),
    [
        ("curve", "seed=1", "vLLM's rules are for kvsim replay and kvsim simulate"),
        ("replay", "tiers.disk.capacity=10GiB", "vLLM's rules have no disk tier"),
    ],
)
def test_what_the_rules_do_not_know_ends_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, override: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["preset=vllm_offload", override]
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=overrides)
    with pytest.raises(UsageError, match=f"^rules(: |\\.){message}.*, or set rules=default"):
        build_run(cfg, command=command, overrides=[override])
