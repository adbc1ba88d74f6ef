"""vLLM's pool for hybrid models: a test for each rule, then random and real traces against a slow model and recorded hits.

Pages have four tokens. A prompt is a word, a page for each letter, and one token more unless said otherwise.
"""

from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.engines.vllm.hybrid_cache import step_ends
from kvsim.report.tree import draw_tree
from kvsim.trace.mooncake import Mooncake
from tests.engines.recorded import golden_rows
from tests.engines.slow_hybrid_blocks import SlowHybridBlocks, play_slowly
from tests.engines.small_hybrid_blocks import PAGE_TOKENS, Small, check, make_cache, play
from tests.workloads import EXAMPLES, random_requests


def test_steps_end_at_page_boundaries_at_the_junction_and_before_the_last_token() -> None:
    assert step_ends(0, 30, 0, 4, 8) == [8, 16, 24, 28, 30]
    assert step_ends(4, 30, 16, 4, 8) == [12, 16, 24, 28, 30]
    assert step_ends(0, 30, 0, 4, 10) == [8, 16, 24, 28, 30]
    assert step_ends(0, 32, 20, 4, 0) == [20, 28, 32]
    assert step_ends(8, 12, 0, 4, 0) == [12]
    assert step_ends(0, 3, 0, 4, 0) == [3]


def test_inside_a_page_longer_than_a_chunk_steps_need_not_end_at_a_boundary() -> None:
    assert step_ends(0, 10, 0, 4, 3) == [3, 4, 7, 8, 10]


def test_the_same_prompt_begins_from_the_state_after_the_last_page_that_it_can_reuse() -> None:
    cache = Small(40)
    assert cache.serve("abc", "abc") == 3
    assert cache.states("abc") == [3]
    aligned = Small(40)
    assert aligned.serve("abc", "abc", tokens=0) == 2
    assert aligned.states("abc") == [2], "the state after the whole prompt has no key"


def test_the_junction_gets_a_state_when_it_is_passed_the_second_time() -> None:
    cache = Small(40)
    assert cache.serve("abcd") == 0
    assert cache.serve("abxy") == 0
    assert cache.states("abxy") == [2, 4]
    assert cache.serve("abz") == 2


def test_every_step_s_state_has_a_key_at_an_interval_of_a_page() -> None:
    dense = Small(40, interval=1, chunk=8)
    dense.serve("abcde", tokens=0)
    assert dense.states("abcde") == [2, 4, 5]
    sparse = Small(40, chunk=8)
    sparse.serve("abcde", tokens=0)
    assert sparse.states("abcde") == [4]


def test_pages_between_the_hit_and_the_junction_are_stored_twice() -> None:
    cache = Small(40)
    cache.serve("abcd", "abxy")
    gpu = cache.cache.tiers[0]
    # a, b, c, d and a state; then a, b, x, y and two states
    assert gpu.inserted_pages == 5 + 6
    assert gpu.pool.free == 40 - 11


def test_a_state_is_one_block_for_each_group_and_usable_only_as_a_whole() -> None:
    cache = Small(13, groups=3)
    cache.serve("a")  # a and three blocks of a state
    cache.serve("vw")  # w, v and three more, and 4 are free
    cache.serve("", tokens=3, output=8)  # takes 3 + 3, so a and the first block of its state leave
    assert (cache.states("a"), cache.states("vw")) == ([], [2])
    assert len(cache.cache.pool.states) == 2, "the state's other blocks are still there"


def test_counts_of_states() -> None:
    cache = Small(40)
    cache.serve("abcd", "abxy", "abz")
    counts = cache.cache.describe_checkpoints()
    assert (counts["saved"], counts["used"], counts["evicted"], counts["bytes"]) == (1 + 2 + 1, 1, 0, 40)
    assert counts["tokens_lost_to_missing_state"] == 2 * PAGE_TOKENS


@pytest.mark.parametrize("seed", range(EXAMPLES // 2))
def test_random_traces_hit_what_the_slow_model_hits(seed: int) -> None:
    random = Random(seed)
    requests = random_requests(seed)
    for _ in range(3):
        groups, in_flight = random.choice((1, 1, 2, 3)), random.choice((1, 1, 2, 4))
        interval, chunk = random.choice((0, 0, 1, 8, 12, 16)), random.choice((0, 0, 3, 4, 8, 10, 16))
        capacity = random.randint(8, 40) + (groups - 1) * random.randint(0, 12)
        cache = make_cache(capacity, groups=groups, interval=interval, chunk=chunk, pool=SlotPool)
        slow = SlowHybridBlocks(capacity, groups=groups, interval=None if interval == 1 else interval, chunk=chunk)
        assert play(cache, requests, in_flight) == play_slowly(slow, requests, in_flight), (groups, in_flight, interval, chunk)


@pytest.mark.parametrize("page_tokens", [16, 512])
@pytest.mark.parametrize(("capacity", "in_flight", "groups"), [(60, 1, 1), (150, 3, 1), (200, 2, 3)])
def test_conversations_hit_what_the_slow_model_hits(
    chats: dict[int, list[Request]], page_tokens: int, capacity: int, in_flight: int, groups: int
) -> None:
    settings = {"groups": groups, "chunk": 3 * page_tokens, "page_tokens": page_tokens}
    rows = play(make_cache(capacity, **settings), chats[page_tokens], in_flight)
    assert rows == play_slowly(SlowHybridBlocks(capacity, **settings), chats[page_tokens], in_flight)
    assert sum(rows) > 1_000


def test_counts_hold_while_requests_run() -> None:
    for seed in range(10):
        cache, requests = make_cache(30, groups=1 + seed % 2, chunk=8, pool=SlotPool), random_requests(seed)
        running = []
        for request in requests:
            while (lease := cache.serve(request, -(-(request.prompt_tokens + request.output_tokens) // 4), 0.0)) is None:
                if not running:
                    break
                cache.finish_request(running.pop(0))
                check(cache, running)
            running += [lease] if lease else []
            check(cache, running)


GOLDEN = [("6000", 0), ("6000_dense", 1), ("6000_retention4096", 4_096)]


@pytest.mark.parametrize("limit", [2_000, pytest.param(12_031, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "interval"), GOLDEN)
def test_the_engine_s_own_hits_on_conversation(shared: Path, name: str, interval: int, limit: int) -> None:
    path = shared / "traces" / "mooncake_conversation_trace.jsonl.gz"
    requests = Mooncake(path=str(path), limit=limit).load(512).requests
    rows = play(make_cache(6_000, interval=interval, chunk=8_192, page_tokens=512), requests)
    assert rows == [row[0] for row in golden_rows(shared, f"conv.vllm_hybrid_{name}", limit)]


def test_the_tree_can_be_drawn() -> None:
    cache = make_cache(30, pool=SlotPool)
    for request in random_requests(3)[:3]:
        cache.finish_request(cache.serve(request, 12, 0.0))
    console = Console(width=200)
    with console.capture() as drawn:
        console.print(draw_tree(cache, {}))
    assert drawn.get().startswith("radix tree: ")
