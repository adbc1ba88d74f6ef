"""LightLLM's multi-level cache, behaviour by behaviour, on the core with the choices of ``preset=lightllm`` and a disk tier."""

import hydra
import numpy as np
import pytest
import xxhash

import kvsim
from kvsim.core.cache import Cache
from kvsim.core.request import Request
from kvsim.core.tree import READY
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.hardware.tier_kinds import ALWAYS
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.context import PolicyContext
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.prefetch.base import Offer, Refusal
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.replaying.replay import Replay
from kvsim.replaying.server import CacheServer
from kvsim.trace.page_hasher import PageHasher
from tests.core import page_rules
from tests.core.small import make_tiers
from tests.engines.slow_pages import play as play_plan
from tests.engines.slow_pages import play_slowly
from tests.workloads import make_request, pages_of

PAGE = 256
THREE_TIERS = (f"page_tokens={PAGE}", "tiers.cpu.capacity=100GiB", "tiers.disk.capacity=1000GiB")


def preset(*overrides: str) -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        return build_run(hydra.compose("config", overrides=["preset=lightllm", *THREE_TIERS, *overrides]), command="replay")


def play(prompts: list[tuple[int, int]], capacities: tuple[int, int, int]) -> tuple[Cache, Outcome]:
    """Replay prompts, given as (number of the text, tokens), with the preset's policies and tiers of the given sizes in pages."""
    plan = preset()
    tiers, edges = make_tiers(
        capacities,
        [tier.eviction for tier in plan.tiers],
        [tier.placement for tier in plan.tiers[1:]],
        slots=True,
        page_tokens=plan.page_tokens,
    )
    cache = Cache(tiers, edges, plan.rules, plan.page_tokens)
    plan.prefetch.bind(PolicyContext(tier=1, capacity_pages=capacities[1], page_tokens=plan.page_tokens))
    requests: list[Request] = []
    for index, (text, tokens) in enumerate(prompts):
        pages = [100 * text + at for at in range(tokens // plan.page_tokens)]
        requests.append(make_request(pages, index=index, prompt_tokens=tokens, arrival_s=float(index)))
    outcome = Replay(CacheServer(cache, Prefetching(cache, plan.prefetch, Offer)), plan.replay).run(requests)
    cache.check()
    return cache, outcome


def on(cache: Cache, tier: int) -> dict[int, int]:
    """Pages of each text in a tier."""
    pages: dict[int, int] = {}
    for node in cache.tree.root.descendants():
        if node.state[tier] == READY:
            pages[node.runs[0][0] // 100] = pages.get(node.runs[0][0] // 100, 0) + node.pages
    return pages


def test_keys_are_xxh3_128_over_the_prompt_up_to_the_end_of_each_page() -> None:
    tokens = np.arange(1_000, 1_700, dtype=np.int64)
    stream, expected = xxhash.xxh3_128(), []
    for page in range(2):
        stream.update(tokens[page * PAGE : (page + 1) * PAGE].tobytes())
        expected.append(stream.intdigest())
    assert PageHasher(PAGE).keys(tokens) == expected
    assert expected[1] == xxhash.xxh3_128_intdigest(tokens[: 2 * PAGE].tobytes())


def test_the_page_of_the_last_token_has_no_key() -> None:
    cache, outcome = play([(1, 4 * PAGE), (1, 4 * PAGE), (1, 4 * PAGE + 1)], (20, 40, 80))
    # (4 * PAGE - 1) // PAGE = 3 pages are looked up, and stored; the GPU's tree has the fourth for a longer prompt.
    assert outcome.hit_pages.tolist() == [[0, 0, 0], [3, 0, 0], [4, 0, 0]]
    assert on(cache, 1) == {1: 4}
    cache, _ = play([(1, 4 * PAGE)], (20, 40, 80))
    assert (on(cache, 0), on(cache, 1)) == ({1: 4}, {1: 3})


def test_only_prompts_are_stored_below_the_gpu() -> None:
    plan = preset("rules.cache_output=true", "trace.limit=200", "tiers.gpu.capacity=unlimited", "tiers.cpu.capacity=unlimited")
    requests = plan.trace.load(plan.page_tokens).requests
    tiers, edges = make_tiers(
        [None, None, None],
        [tier.eviction for tier in plan.tiers],
        [tier.placement for tier in plan.tiers[1:]],
        slots=False,
        page_tokens=plan.page_tokens,
    )
    cache = Cache(tiers, edges, plan.rules, plan.page_tokens)
    plan.prefetch.bind(PolicyContext(tier=1, page_tokens=plan.page_tokens))
    Replay(CacheServer(cache, Prefetching(cache, plan.prefetch, Offer)), plan.replay).run(requests)
    cache.check()
    prompts: set[int] = set()
    answers: set[int] = set()
    for request in requests:
        stored = (request.prompt_tokens - 1) // plan.page_tokens
        prompts.update(pages_of(request.runs)[:stored])
        answers.update(pages_of(request.output_runs or ()))
    below = _pages(cache, 1)
    assert below == prompts and answers - prompts and (answers - prompts).isdisjoint(below)
    assert answers <= _pages(cache, 0)


def _pages(cache: Cache, tier: int) -> set[int]:
    nodes = [node for node in cache.tree.root.descendants() if node.state[tier] == READY]
    return {page for node in nodes for page in pages_of(node.runs)}


def test_loads_need_128_missing_tokens_and_a_prompt_of_256() -> None:
    policy = preset().prefetch
    assert isinstance(policy, ThresholdPrefetch)
    for page_tokens, pages, prompt, loaded in ((64, 1, 999, 0), (64, 2, 999, 2), (64, 2, 255, 0), (64, 2, 256, 2)):
        policy.bind(PolicyContext(tier=1, page_tokens=page_tokens))
        assert policy.load(make_request([], prompt_tokens=prompt), 5, pages, 0) == loaded


def test_disk_only_for_prompts_of_2048_tokens_on() -> None:
    cache, _ = play([(1, 2_047), (2, 2_048), (3, 255), (4, 256)], (40, 60, 80))
    assert on(cache, 1) == {1: 7, 2: 7}
    assert on(cache, 2) == {2: 7}
    policy = preset().prefetch
    policy.bind(PolicyContext(tier=1, capacity_pages=60, page_tokens=PAGE))
    offers = [
        Offer(
            request=make_request([], prompt_tokens=tokens),
            first_page=0,
            stored_pages=1,
            in_flight_pages=0,
            available_pages=60,
            queued_s=0.0,
        )
        for tokens in (2_047, 2_048)
    ]
    assert [policy.fetch(offer) for offer in offers] == [Refusal.THRESHOLD, 1]


def test_what_the_disk_has_is_read_before_the_request_is_scheduled_and_loaded_with_what_the_cpu_has() -> None:
    assert preset().prefetch.wait_s(10**6) == float("inf")
    fill = [(2, 8 * PAGE + 1), (3, 8 * PAGE + 1), (4, 8 * PAGE + 1)]
    _, outcome = play([(1, 8 * PAGE + 1), *fill, (1, 8 * PAGE + 1)], (9, 16, 80))
    assert outcome.hit_pages[-1].tolist() == [0, 0, 8]
    assert (outcome.prefetch["fetched_pages"], outcome.prefetch["used_pages"]) == (8, 8)


def test_the_adaptive_boundary_is_a_setting_of_the_preset() -> None:
    placements = [tier.placement for tier in preset("placement.adaptive=true").tiers[1:]]
    assert all(isinstance(placement, ByLength) and placement.adaptive for placement in placements)


@pytest.mark.parametrize(
    ("page_tokens", "sizes", "in_flight"), [(16, (24, 90, 200), 1), (512, (30, 60, 90), 3), (512, (40, 60, 200), 2)]
)
def test_conversations_hit_what_the_slow_model_hits(
    chats: dict[int, list[Request]], page_tokens: int, sizes: tuple[int, int, int], in_flight: int
) -> None:
    tiers = [f"tiers.{name}.capacity={pages}pages" for name, pages in zip(ALWAYS, sizes, strict=True)]
    pages = (f"page_tokens={page_tokens}", f"tiers.cpu.page_tokens={page_tokens}")
    plan = preset(*pages, *tiers, f"replay.in_flight={in_flight}", "rules.cache_output=false")
    rows = play_plan(plan, chats[page_tokens])
    placements = [page_rules.by_length(tokens, page_tokens) for tokens in (256, 2_048)]
    assert rows == play_slowly(plan, chats[page_tokens], placements)
    assert sum(row[1] for row in rows if row) > 100
    assert any(row[2] for row in rows if row) == (page_tokens == 512), "no prompt of 320 tokens goes to the disk"


def test_queues_do_not_mistake_pages_of_a_request_that_ends_for_hits_of_the_latest() -> None:
    """The first answer of two that overlap is inserted while the policy still expects pages of the second request."""
    word = "aaaabbbbaaaabbbb"
    trace = kvsim.trace_from_tokens(
        [[ord(letter) for letter in text] for text in (word + "cc", word[:4] + "aaaaaaaa" + "c", "c")],
        output_tokens=[2, 2, 5],
        page_tokens=4,
    )
    settings = {"model": "tiny", "tiers.gpu.capacity": "10 pages", "rules": "lightllm", "replay.in_flight": 2}
    for eviction in ("mq", "arc", "two_q", "s3_fifo"):
        assert list(kvsim.replay(trace, settings, eviction=eviction).requests["hit_pages_gpu"]) == [0, 0, 0]
