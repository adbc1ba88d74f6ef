"""FastDeploy's cache in time: examples reckoned by hand, random workloads with every count rechecked, the hits of a replay."""

import random
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.core.lease import LOOK, RETRACTED, Lease
from kvsim.core.request import Request, Reset
from kvsim.core.transfer import Transfer
from kvsim.engine.engine import EngineSettings
from kvsim.engine.outcome import FINISHED, REJECTED, Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.substrate import Work
from kvsim.engine.watch import EngineWatch
from kvsim.engines.fastdeploy.stepped import SteppedSwaps
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec, RankFault
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.run import play
from kvsim.settings.configuration import compose
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from kvsim.trace.mooncake import Mooncake
from tests.engine.small import HARDWARE, MODEL, PAGE_BYTES, SmallEngine, ask, hits, make_requests, seconds
from tests.engine.test_images import draw_images
from tests.engines.small_swaps import make_cache
from tests.workloads import EXAMPLES, Words, conversations, random_requests


class Recounts(EngineWatch):
    """Recounts everything in a cache whenever a step begins or a transfer has ended."""

    def __init__(self, cache: SteppedSwaps) -> None:
        self.cache = cache

    def computes(self, work: Work, done: Any) -> None:
        self.cache.check()

    def ended(self, transfer: Transfer) -> None:
        self.cache.check()


def serve(cache: SteppedSwaps, requests: list[Request], machine: dict[str, Any] | None = None, **settings: Any) -> Outcome:
    """Serve requests on the machine of ``tests.engine.small``; afterwards nothing is left of them but what is cached."""
    chosen = EngineSettings(**{"overlap": "none", **settings})
    substrate = SimulatedSubstrate(MODEL, HardwareSpec(**HARDWARE | (machine or {})), cache.page_tokens, links=chosen.links)
    watch, prefetching = Recounts(cache), Prefetching(cache, NoPrefetch(), Offer)
    cache.watch(watch)
    outcome = SmallEngine(substrate, cache, prefetching, chosen, FCFS(), watches=[watch]).run(requests)
    cache.check()
    assert not cache.leases and not cache.in_flight and not cache.residency.doomed
    kept = cache.persistent.nodes(cache.gpu)
    assert all(any(node.pins) == (node in kept) for node in cache.tree.root.descendants())
    for tier in cache.tiers:
        assert tier.reserved_pages == tier.leaving_pages == 0
        pinned = sum(node.pages for node in kept) if tier is cache.gpu else 0
        assert tier.evictable_pages + pinned == tier.pool.capacity - tier.pool.free
    return outcome


def small(gpu: int, cpu: int = 0, disk: int = 0, **rules: Any) -> SteppedSwaps:
    """A cache of pages of four tokens."""
    return make_cache(gpu, cpu, disk, page_tokens=4, **rules).cache


def pages_moved(outcome: Outcome) -> dict[str, int]:
    """Pages by link, of those that moved any."""
    return {name: link.bytes // PAGE_BYTES for name, link in outcome.links.items() if link.bytes}


# --- reckoned by hand: a token takes 1 s, a page on the host link 1 s, to or from storage 2 s --------------------------------


def test_a_request_waits_for_what_is_swapped_out_and_then_for_what_is_swapped_in() -> None:
    outcome = serve(small(5, 20), make_requests([ask("abcd"), ask("efgh", 100), ask("abcd", 200)]))
    assert outcome.ttft_s.tolist() == seconds([17, 4 + 17, 4 + 4 + 1])
    assert [hits(outcome, index) for index in range(3)] == [(0, 0, 0), (0, 0, 0), (0, 4, 0)]
    assert pages_moved(outcome) == {"gpu-cpu": 8, "cpu-gpu": 4}


def test_the_look_up_finds_in_cpu_memory_what_was_swapped_out_for_it() -> None:
    outcome = serve(small(7, 7), make_requests([ask("abcd"), ask("abcdef", 100)]))
    assert hits(outcome, 1) == (0, 4, 0)
    assert outcome.ttft_s[1] == seconds(4 + 4 + 9)


def test_what_is_looked_up_after_a_reset_is_cached_where_others_find_it() -> None:
    """The second request waits for swaps until 104 s; the cache is emptied at 102 s, with the arrival of the third."""
    requests = make_requests([ask("abcd"), ask("efgh", 100), ask("i", 102), ask("efgh", 200), ask("abcd", 300)])
    requests[2].resets = (Reset("now", nan),)
    outcome = serve(small(5, 20), requests)
    assert [sum(hits(outcome, index)) for index in range(5)] == [0, 0, 0, 4, 0]


def test_pages_can_be_found_from_the_step_on_that_computes_them() -> None:
    """The second step computes the last 7 tokens of the first request, and one of the second."""
    outcome = serve(small(20), make_requests([ask("abcd"), ask("abcd", 1)]), max_batch_tokens=10)
    assert hits(outcome, 1) == (4, 0, 0)
    assert outcome.ttft_s.tolist() == seconds([10 + 7 + 1, 10 + 7 + 1 - 1])


def test_the_last_page_of_a_prompt_found_as_a_whole_is_computed_again_in_place() -> None:
    for tiers, found, swaps_s in (((5, 8), (0, 3, 0), 4 + 4), ((5, 0), (3, 0, 0), 0), ((5, 0, 8), (0, 0, 3), 8)):
        outcome = serve(small(*tiers), make_requests([ask("abcd", tokens=0), ask("abcd", 100, tokens=0)]))
        assert hits(outcome, 1) == found
        assert outcome.ttft_s[1] == seconds(swaps_s + 4)


def test_nobody_else_is_admitted_while_pages_are_swapped() -> None:
    """``i`` has room at 101 s, but waits until ``efgh`` has its pages at 104 s; then both are computed in one step."""
    outcome = serve(small(8, 20), make_requests([ask("abcd"), ask("efgh", 100), ask("i", 101)]))
    assert outcome.ttft_s[1:].tolist() == seconds([4 + 17 + 5, 3 + 17 + 5])


def test_a_finished_request_keeps_its_pages_until_they_are_in_storage() -> None:
    outcome = serve(small(3, 0, 20), make_requests([ask("ab"), ask("cd", 10), ask("ab", 100)]))
    assert outcome.e2e_s[0] == seconds(9)
    assert outcome.ttft_s[1] == seconds(3 + 9)  # two pages are written from 9 s to 13 s
    assert outcome.ttft_s[2] == seconds(4 + 1)
    assert hits(outcome, 2) == (0, 0, 2)
    assert pages_moved(outcome) == {"gpu-disk": 4, "disk-gpu": 2}


def test_storage_is_read_after_cpu_memory() -> None:
    """CPU memory has ``ab``, storage ``abcd``; five pages are swapped out first."""
    cache = small(6, 20, 20)
    requests = make_requests([ask("abcd"), ask("uvwxy", 100), ask("abcde")])
    serve(cache, requests[:2])
    cache.swaps.delete(cache.tiers[1], 2, 0.0)
    assert cache.match(requests[2], why=LOOK).below == [0, 2, 2]
    outcome = serve(cache, [replace(requests[2], index=0)])
    assert hits(outcome, 0) == (0, 2, 2)
    assert outcome.ttft_s[0] == seconds(5 + 2 + 4 + 5)


def test_a_retracted_request_computes_what_it_had_not_inserted() -> None:
    """Both decode, 2 s a step, until each needs a third page at 16 s. The first goes on alone until 24 s; then the second finds
    its first page, and computes 5 tokens again."""
    outcome = serve(small(5), make_requests([ask("a", output=12), ask("b", output=12)]))
    assert outcome.retractions == 1
    assert outcome.e2e_s.tolist() == seconds([24, 24 + 5 + 7])


def computed(cache: SteppedSwaps, request: Request, tokens: int) -> tuple[Lease, int]:
    """Admit a request, and compute its first ``tokens`` tokens. Returns its lease, and the pages found."""
    lease = cache.match(request, tokens=tokens)
    assert cache.admit(lease, -(-tokens // cache.page_tokens), 0.0)
    cache.begin_chunk(lease, tokens, 0.0)
    cache.check()
    return lease, lease.gpu_pages


@pytest.mark.parametrize("knows_answer", [False, True])
def test_a_request_retracted_twice_finds_what_its_last_prefill_inserted(knows_answer: bool) -> None:
    cache, words = small(9), Words()
    first, other = (words.request(word, page_tokens=4, tail=1, output=20) for word in ("ab", "abc"))
    if knows_answer:
        first.output_runs = ((1000, 5),)
    found = []
    for tokens in (9, 14, 18, 19):
        lease, pages = computed(cache, first, tokens)
        found.append(pages)
        cache.release(lease, RETRACTED, tokens=tokens)
    assert found == [0, 2, 3, 4]
    assert cache.match(other).gpu_pages == 2


def test_engines_that_share_a_tier_are_refused() -> None:
    overrides = ["preset=fastdeploy", "cluster.engines=2", "tiers.cpu.scope=host", "cluster.engines_per_host=2"]
    plan = build_run(compose(overrides), command="simulate", overrides=overrides)
    with pytest.raises(UsageError, match=r"rules: engines of FastDeploy share no tier here: set tiers.cpu.scope=engine"):
        play.simulate(plan, conversations(page_tokens=64))


def test_an_engine_that_fails_and_comes_back_serves_all_requests() -> None:
    tiers = [f"tiers.{name}.capacity={pages}pages" for name, pages in (("gpu", 60), ("cpu", 60), ("disk", 300))]
    failures = "cluster.failures=[{engine:0,at_s:0.4,back_after_s:1}]"
    overrides = ["preset=fastdeploy", "page_tokens=16", "model=tiny", "rules.cache_output=true", failures, *tiers]
    plan = build_run(compose(overrides), command="simulate", overrides=overrides)
    requests = conversations(2, requests=50)
    for request in requests:
        request.arrival_s = 0.01 * request.index
    outcome = play.simulate(plan, requests)
    assert (outcome.status == FINISHED).all() and outcome.hit_pages.any(axis=0).all()
    assert outcome.e2e_s.max() > 1


def test_cpu_memory_smaller_than_a_prompt_is_refused() -> None:
    overrides = ["preset=fastdeploy", "page_tokens=16", "tiers.gpu.capacity=60pages", "tiers.cpu.capacity=19pages"]
    plan = build_run(compose(overrides), command="simulate", overrides=overrides)
    with pytest.raises(UsageError, match=r"rules: FastDeploy loses .* has 20, and tiers.cpu.capacity is 19;"):
        play.simulate(plan, conversations(2, requests=50))


# --- many requests at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["none", "layerwise"])
def test_random_requests_at_once_all_end_and_every_count_stays_right(overlap: str) -> None:
    retractions, hit_pages = 0, np.zeros(3, dtype=int)
    for seed in range(EXAMPLES):
        draw, requests = random.Random(seed), random_requests(seed, requests=40)
        gap_s = draw.choice([0.5, 3, 10])
        for request in requests:
            request.arrival_s, request.output_tokens = gap_s * request.index, draw.randint(1, 24)
        longest = max(request.pages_in_all(4) for request in requests)
        cpu, disk = draw.choice([0, longest + draw.randint(-3, 15)]), draw.choice([0, 0, draw.randint(3, 60)])
        cache = small(max(5, longest + draw.randint(-1, 12)), max(0, cpu), disk)
        outcome = serve(cache, requests, max_batch_tokens=draw.choice([4, 10, 30, 8192]), overlap=overlap)
        assert np.isin(outcome.status, (FINISHED, REJECTED)).all(), seed
        retractions += outcome.retractions
        hit_pages += outcome.hit_pages.sum(axis=0)
    assert retractions > 0 and hit_pages.all()


def test_what_a_faulty_rank_does_not_write_or_read_is_computed() -> None:
    machine = {"gpus": 2, "rank_faults": [RankFault(rank=1, link=link, share=0.3) for link in ("gpu-disk", "disk-gpu")]}
    hit_pages = []
    for faults in (machine, {}):
        requests = conversations(3)
        for request in requests:
            request.arrival_s = 20.0 * request.index
        outcome = serve(make_cache(40, 40, 200, page_tokens=16).cache, requests, faults, max_batch_tokens=40)
        assert (outcome.status == FINISHED).all()
        hit_pages.append(outcome.hit_pages.sum(axis=0))
    assert 0 < hit_pages[0][2] < hit_pages[1][2]


def test_conversations_at_once_with_answers_and_resets() -> None:
    for seed in range(EXAMPLES // 2):
        draw, requests = random.Random(seed), conversations(2 * seed)
        gap_s = draw.choice([2, 30, 100])
        for request in requests:
            request.arrival_s = gap_s * request.index
        longest = max(request.pages_in_all(16) for request in requests)
        cpu, disk = draw.choice([0, longest + draw.randint(-3, 15)]), draw.choice([0, 0, draw.randint(3, 60)])
        cache = make_cache(longest + draw.randint(-1, 12), cpu, disk, page_tokens=16, cache_output=True).cache
        resets = draw.choice([[], [50.0, 400.0]])
        outcome = serve(cache, requests, max_batch_tokens=draw.choice([16, 40, 300]), reset_at_s=resets)
        assert np.isin(outcome.status, (FINISHED, REJECTED)).all(), seed


# --- as in a replay, if nothing takes time -----------------------------------------------------------------------------------

RATES = (
    "flops_per_s", "memory_bytes_per_s", "host_to_device_bytes_per_s", "device_to_host_bytes_per_s",
    "both_directions_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s",
)  # fmt: skip


def plan_of(command: str, *overrides: str) -> Plan:
    """The preset on a machine on which only the beginning of a step takes time, 1 us."""
    given = ["preset=fastdeploy", "page_tokens=512", *overrides]
    plan = build_run(compose(given), command=command, overrides=given)
    fast = {name: 1e24 * getattr(plan.hardware, name) for name in RATES}
    latencies = {"host_latency_s": 0.0, "disk_latency_s": 0.0, "step_overhead_s": 1e-6}
    return replace(plan, hardware=replace(plan.hardware, **fast, **latencies))


def same_hits(requests: list[Request], *overrides: str) -> Outcome:
    """Assert that one request at a time hits as in a replay. Returns what was simulated."""
    for request in requests:
        request.arrival_s = 1_000.0 * request.index
    replayed = play.replay(plan_of("replay", "replay.in_flight=1", *overrides), requests)
    simulated = play.simulate(plan_of("simulate", *overrides), requests)
    assert (simulated.status == replayed.status).all()
    assert (simulated.hit_pages == replayed.hit_pages).all()
    assert simulated.placement == replayed.placement
    return simulated


def test_images_and_resets_hit_as_in_a_replay() -> None:
    requests = draw_images(conversations(2, requests=100, page_tokens=512), 1)
    for at in (40, 70):
        requests[at].resets = (Reset("drain", nan),)
    tiers = ["tiers.gpu.capacity=60pages", "tiers.cpu.capacity=30pages", "tiers.disk.capacity=200pages"]
    assert same_hits(requests, *tiers).hit_pages.any(axis=0).all()


@pytest.mark.parametrize(
    ("answers", "gpu", "cpu", "disk"),
    [
        ("none", 500, 1500, 0),
        ("none", 600, 400, 3000),
        ("unique", 600, 0, 5000),
        ("inferred", 600, 0, 0),
        ("inferred", 500, 1500, 0),
        ("inferred", 600, 400, 3000),
    ],
)
def test_one_request_at_a_time_hits_as_in_a_replay(shared: Path, answers: str, gpu: int, cpu: int, disk: int) -> None:
    """A replay holds a page for the last token of an answer, whose KV is never computed: such tokens are given company."""
    path = str(shared / "traces" / "mooncake_conversation_trace.jsonl.gz")
    requests = Mooncake(path=path, limit=500, answers=answers).load(512).requests
    for request in requests:
        request.output_tokens += (request.prompt_tokens + request.output_tokens) % 512 == 1
    tiers = [f"tiers.{name}.capacity={pages}pages" for name, pages in (("gpu", gpu), ("cpu", cpu), ("disk", disk))]
    hit_pages = same_hits(requests, f"rules.cache_output={str(answers != 'none').lower()}", *tiers).hit_pages.sum(axis=0)
    assert hit_pages[0] > 0 and hit_pages[1:].any() == bool(cpu or disk)
