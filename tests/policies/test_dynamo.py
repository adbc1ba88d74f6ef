"""Dynamo's router by hand, in pages of 4 tokens: each is a block. Costs are those of the engines, in order."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

import kvsim
from kvsim.core.request import Request
from kvsim.core.tier import CPU
from kvsim.errors import UsageError
from kvsim.policies.routing.base import EngineStatus
from kvsim.policies.routing.dynamo import Dynamo
from kvsim.policies.routing.kv_aware import KVAware
from tests.policies.small_routing import SmallRouter, prompt, router, sent_to
from tests.workloads import EXAMPLES, random_word

EIGHT = replace(prompt((0, 8), index=99), prompt_tokens=32)
"""A prompt of 8 whole blocks."""


def costs(small: SmallRouter, request: Request = EIGHT, now: float = 0.0) -> list[float]:
    policy = small.policy
    assert isinstance(policy, Dynamo)
    policy._work.offer(small._offered)
    found: list[float] = policy._costs(request, small._offered, now)[0].tolist()
    return found


def test_blocks_count_by_the_tier_that_has_them() -> None:
    """Of 8 blocks, engine 0 has 2 on the GPU, 4 more in CPU memory and 1 more on disk: 8 - (2 + 3 + 0.25). Engine 1 has the first
    6 in CPU memory, engine 2 only the last 7."""
    small = router(Dynamo(), lower=True)
    small.cached(0, (0, 2))
    small.cached(0, (0, 6), level=1)
    small.cached(0, (4, 3), level=2)
    small.cached(1, (0, 6), level=1)
    small.cached(2, (1, 7), level=1)
    assert costs(small) == [2.75 + 8, 3.5 + 8, 8 + 8]
    assert small.send(EIGHT, 0.0) == 0
    assert costs(small)[0] == (32 - 21) / 4 + 2.75 + 8, "5.25 blocks were cached when it was sent; its 8 blocks are in use"


def test_weights_of_what_is_cached_and_of_what_is_left() -> None:
    policy = Dynamo(overlap_score_credit=0.5, host_cache_hit_weight=1.0, disk_cache_hit_weight=0.0, prefill_load_scale=3.0)
    small = router(policy, engines=1, lower=True)
    small.cached(0, (0, 4))
    small.cached(0, (0, 6), level=1)
    small.cached(0, (0, 8), level=2)
    assert costs(small) == [3.0 * (8 - 2 - 2) + 8]


def test_credit_decays_with_prefill_work_above_the_least() -> None:
    """Engine 0 has 16 blocks to compute, engine 1 none: an excess of two prompts. Of its 6 blocks, 6 / (1 + 0.5 * 2) count."""
    small = router(Dynamo(overlap_score_credit_decay=0.5), engines=2)
    small.cached(0, (0, 6))
    sent_to(small, 0, replace(prompt((100, 16), index=0), prompt_tokens=64))
    assert costs(small) == [(16 + 8 - 3) + (16 + 8), 8 + 8]


def test_requests_cost_by_themselves_with_a_weight() -> None:
    small = router(Dynamo(decode_active_request_weight=2.5), engines=2)
    for index in range(2):
        sent_to(small, 1, replace(prompt((100, 1), index=index), prompt_tokens=4), is_computed=True)
    assert costs(small) == [8 + 8, 8 + 1 + 8 + 5]


def test_without_events_what_was_sent_lately_is_cached() -> None:
    small = router(Dynamo(use_kv_events=False, router_ttl_s=10.0), engines=2)
    sent = sent_to(small, 1, replace(EIGHT, index=0), is_computed=True)
    small.ended(sent, 1, 1.0)
    assert costs(small, now=9.0) == [16, 8]
    assert costs(small, now=10.0) == [16, 16]


def test_with_a_prediction_the_larger_one_counts() -> None:
    small = router(Dynamo(router_predicted_ttl_s=5.0), engines=2, lower=True)
    small.cached(1, (0, 3))
    small.cached(1, (8, 2), level=1)
    sent = sent_to(small, 1, replace(EIGHT, index=0), is_computed=True)
    small.ended(sent, 1, 1.0)
    assert costs(small, now=4.0) == [16, 8]
    assert costs(small, now=5.0) == [16, 5 + 8]


def test_what_an_engine_was_sent_is_lost_with_it() -> None:
    small = router(Dynamo(use_kv_events=False), engines=2)
    sent = sent_to(small, 0, replace(EIGHT, index=0), is_computed=True)
    small.ended(sent, 0, 1.0)
    small.down(0, 2.0)
    small.up(0, 3.0)
    assert costs(small, now=3.0) == [16, 16]


def test_engines_that_only_decode_count_blocks_for_each_request() -> None:
    small = router(Dynamo(decode_active_request_weight=1.0), engines=2, prefills=False)
    for index in range(2):
        sent_to(small, 0, replace(EIGHT, index=index))
    assert costs(small) == [16 + 8 + 2, 8]


@pytest.mark.parametrize("seed", range(EXAMPLES // 4))
def test_without_tiers_below_it_chooses_as_kv_aware(seed: int) -> None:
    """The same prompts, computed and ended at the same times, at the same temperature and with the same seed."""
    random = Random(seed)
    scale, temperature, pool = random.choice([0.0, 0.5, 1.0, 4.0]), random.choice([0.0, 0.3]), random.choice(["", "decodes"])
    only: dict[str, Any] = {pool: False} if pool else {}
    dynamo = Dynamo(prefill_load_scale=scale, host_cache_hit_weight=0, disk_cache_hit_weight=0, router_temperature=temperature)
    new = router(dynamo, engines=4, seed=seed, **only)
    old = router(KVAware(overlap_score_weight=scale, router_temperature=temperature), engines=4, seed=seed, **only)
    ids: dict[str, int] = {}
    under_way: list[tuple[Request, int]] = []
    for index in range(60):
        word = random_word(random)
        pages = [ids.setdefault(word[:end], 2 * len(ids)) for end in range(1, len(word) + 1)]
        request = prompt(*[(page, 1) for page in pages], index=index)
        chosen = old.send(request, float(index))
        assert new.send(request, float(index)) == chosen
        assert chosen is not None
        under_way.append((request, chosen))
        for small in (old, new):
            small.cached(chosen, *request.runs)
        if random.random() < 0.5:
            for small in (old, new):
                small.first_token(*under_way[-1], float(index))
        if random.random() < 0.6:
            ended = under_way.pop(random.randrange(len(under_way)))
            for small in (old, new):
                small.ended(*ended, float(index))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("routing.router_ttl_s=60",), "routing.router_ttl_s has no effect with these settings of Dynamo"),
        (("routing.use_kv_events=false", "routing.staleness_s=1"), "routing.staleness_s has no effect"),
        (("routing.overlap_score_credit=1.5",), "routing.overlap_score_credit must be from 0 to 1, not 1.5"),
        (("routing.router_predicted_ttl_s=0",), "routing.router_predicted_ttl_s must be above 0"),
    ],
)
def test_settings_that_cannot_be(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kvsim.simulate(kvsim.load_trace("synthetic", limit=2), "cluster.engines=2", "routing=dynamo", *words)


IN_CPU_MEMORY: list[int] = []
"""How many blocks a router has seen there, each time it asked."""


class Seeing(Dynamo):
    """Notes the blocks in CPU memory that it sees."""

    def _below(self, request: Request, status: EngineStatus, device: int) -> float:
        IN_CPU_MEMORY.extend(pages for level, pages in status.lower_pages(request, device) if level == CPU)
        return super()._below(request, status, device)


@pytest.mark.parametrize("preset", ["vllm_offload", "sglang_hicache", "fastdeploy"])
def test_engines_own_memory_below_their_gpus_counts(preset: str) -> None:
    IN_CPU_MEMORY.clear()
    tiers = ("tiers.gpu.capacity=4GiB", "tiers.cpu.capacity=20GiB", "tiers.cpu.scope=engine")
    kvsim.simulate(kvsim.load_trace("synthetic", limit=100), f"preset={preset}", "cluster.engines=2", *tiers, routing=Seeing())
    assert sum(IN_CPU_MEMORY) > 0


def test_pages_in_the_memory_of_a_host_draw_requests_there() -> None:
    """Conversations on two hosts of two engines: with CPU memory counted, more is found than with GPUs alone."""
    trace = kvsim.load_trace("synthetic", limit=200)
    cluster = ("cluster.engines=4", "cluster.engines_per_host=2", "tiers.gpu.capacity=300pages", "tiers.cpu.capacity=6000pages")
    weights = ("routing.host_cache_hit_weight=0", "routing.disk_cache_hit_weight=0")
    aware, unaware = (kvsim.simulate(trace, *cluster, "routing=dynamo", *more) for more in ((), weights))
    assert aware.hit_rate > unaware.hit_rate
