"""KV-aware routing by hand, in pages of 4 tokens: each is a block. Costs are those of the engines, in order."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from kvsim.core.request import Request
from kvsim.pages.extents import count_pages
from kvsim.policies.routing.base import EngineStatus
from kvsim.policies.routing.kv_aware import KVAware
from tests.policies.small_routing import PAGE_TOKENS, SmallRouter, prompt, router
from tests.workloads import pages_of

EIGHT = replace(prompt((0, 8), index=99), prompt_tokens=32)
"""A prompt of 8 whole blocks."""


def costs(small: SmallRouter, request: Request) -> list[float]:
    policy = small.policy
    assert isinstance(policy, KVAware)
    for known in small.engines.values():
        known.receive(0.0)
    return [policy.cost(request, known) for known in small.engines.values()]


def sent(small: SmallRouter, engine: int, request: Request, *, is_computed: bool = False) -> Request:
    """An engine gets a request, as the only one that is up."""
    others = [number for number in small.engines if number != engine]
    for other in others:
        small.down(other, 0.0)
    assert small.send(request, 0.0) == engine
    for other in others:
        small.up(other, 0.0)
    if is_computed:
        small.first_token(request, engine, 0.0)
    return request


def test_the_cost_is_what_must_be_computed_and_what_is_in_use() -> None:
    """None, 3 and 6 of the 8 blocks are cached. Prompts of 2 and 1 other blocks, computed already, run on the first and last."""
    small = router(KVAware())
    small.cached(1, (0, 3))
    small.cached(2, (0, 6))
    sent(small, 0, prompt((100, 2), index=0), is_computed=True)
    sent(small, 2, prompt((300, 1), index=2), is_computed=True)
    assert costs(small, EIGHT) == [8 + 10, 5 + 8, 2 + 9]
    assert small.send(EIGHT, 1.0) == 2


def test_the_weight_favours_what_is_cached() -> None:
    """Engine 1 has 6 of the 8 blocks, and 10 others in use: 2 + 18 blocks against 8 + 8."""
    for weight, expected in ((0.0, 0), (1.0, 0), (1.5, 0), (1.7, 1)):
        small = router(KVAware(overlap_score_weight=weight), engines=2)
        small.cached(1, (0, 6))
        sent(small, 1, prompt((100, 10), index=0), is_computed=True)
        assert costs(small, EIGHT) == [8 * weight + 8, 2 * weight + 18]
        assert small.send(EIGHT, 1.0) == expected


def test_prompts_that_wait_or_are_computed_count_until_their_first_token() -> None:
    """A prompt of 21 tokens of which 2 blocks are cached: 13 tokens to compute, 5 blocks in use."""
    small = router(KVAware(), engines=1)
    small.cached(0, (100, 2))
    waiting = sent(small, 0, prompt((100, 5), index=0))
    assert costs(small, EIGHT) == [(13 + 32) / 4 + 5 + 8]
    small.cached(0, (102, 3))
    assert costs(small, EIGHT) == [(13 + 32) / 4 + 5 + 8], "as it was when the request was sent"
    small.first_token(waiting, 0, 1.0)
    assert costs(small, EIGHT) == [8 + 5 + 8]
    small.ended(waiting, 0, 2.0)
    assert costs(small, EIGHT) == [8 + 8]


@pytest.mark.parametrize(
    ("pool", "expected"), [({}, 5 + 1.25 + 9), ({"decodes": False}, 5 + 1.25), ({"prefills": False}, 8 + 5 + 4)]
)
def test_engines_that_only_prefill_or_only_decode(pool: dict[str, bool], expected: float) -> None:
    """3 of the 8 blocks are cached. A prompt of the first 5 runs; one of the first 3 and another waits, 5 of its 17 tokens are
    not cached. So 6 different blocks are in use and 3 would be new, or 5 + 4 are in use and 8 would be new."""
    small = router(KVAware(), engines=1, **pool)
    small.cached(0, (0, 3))
    sent(small, 0, prompt((0, 5), index=0), is_computed=True)
    sent(small, 0, prompt((0, 3), (50, 1), index=1))
    assert costs(small, EIGHT) == [expected]


def test_equal_costs_are_drawn() -> None:
    small = router(KVAware(), engines=3)
    small.cached(1, (0, 2))
    small.cached(2, (0, 2))
    chosen = []
    for _ in range(1000):
        chosen.append(small.send(EIGHT, 0.0))
        small.ended(EIGHT, chosen[-1], 0.0)
    assert chosen.count(0) == 0
    assert 430 < chosen.count(1) < 570


@pytest.mark.parametrize(
    ("temperature", "shares"),
    [(0.5, (0.090, 0.245, 0.665)), (1000.0, (1 / 3, 1 / 3, 1 / 3)), (0.01, (0.0, 0.0, 1.0))],
)
def test_a_temperature_spreads_requests(temperature: float, shares: tuple[float, ...]) -> None:
    """The costs are 16, 13 and 10. At temperature 0.5 they are 2, 1 and 0 times 3 = 0.5 * (16 - 10): weights e^-2, e^-1, 1."""
    small = router(KVAware(router_temperature=temperature))
    small.cached(1, (0, 3))
    small.cached(2, (0, 6))
    assert costs(small, EIGHT) == [16, 13, 10]
    chosen = []
    for _ in range(4000):
        chosen.append(small.send(EIGHT, 0.0))
        small.ended(EIGHT, chosen[-1], 0.0)
    assert [chosen.count(engine) / 4000 for engine in range(3)] == [pytest.approx(share, abs=0.03) for share in shares]


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_against_single_pages(seed: int) -> None:
    """The cost of every engine, counted page by page, after each thing that happens."""
    random = Random(seed)
    small = router(KVAware(overlap_score_weight=0.7), engines=3, seed=seed)
    running: list[list[tuple[Request, int]]] = [[], [], []]
    """By engine, its requests with the tokens that they have to compute."""
    cached: list[set[int]] = [set(), set(), set()]
    for index in range(80):
        shared, own = random.randint(0, 6), random.randint(0, 3)
        extents = tuple(extent for extent in ((0, shared), (100 * (shared + 1) + 20 * random.randint(0, 3), own)) if extent[1])
        request = replace(prompt((0, 1), index=index), runs=extents, prompt_pages=shared + own)
        request.prompt_tokens = request.prompt_pages * PAGE_TOKENS + random.randint(0, 3)
        pages = pages_of(extents)
        hits = [next((at for at, page in enumerate(pages) if page not in some), len(pages)) for some in cached]
        tokens = [request.prompt_tokens - PAGE_TOKENS * hit for hit in hits]
        expected = []
        for engine in range(3):
            in_use = {page for other, _ in running[engine] for page in pages_of(other.runs)} | set(pages)
            waiting = sum(left for _, left in running[engine]) + tokens[engine]
            expected.append(0.7 * waiting / PAGE_TOKENS + len(in_use))
        assert costs(small, request) == pytest.approx(expected, rel=1e-12)
        chosen = small.send(request, 0.0)
        assert expected[chosen] == pytest.approx(min(expected), rel=1e-12)
        running[chosen].append((request, tokens[chosen]))
        for engine, requests in enumerate(running):
            if requests and random.random() < 0.3:
                at = random.randrange(len(requests))
                small.first_token(requests[at][0], engine, 0.0)
                requests[at] = (requests[at][0], 0)
            if requests and random.random() < 0.4:
                small.ended(requests.pop(random.randrange(len(requests)))[0], engine, 0.0)
            new = random.randint(0, 6)
            if new not in cached[engine]:
                cached[engine].add(new)
                small.cached(engine, (new, 1))


class Asking(KVAware):
    """A class with costs of its own is asked for that of every engine."""

    def cost(self, request: Request, status: EngineStatus) -> float:
        return super().cost(request, status)


@pytest.mark.parametrize(("weight", "temperature"), [*product([1.0, 0.7, 0.123456789012345], [0.0, 0.3]), (1e-30, 0.3)])
def test_the_index_finds_what_asking_every_engine_finds(weight: float, temperature: float) -> None:
    """160 engines; nearly all of them cache and use the same first pages at times, and have the same cost."""
    random = Random(1)
    small = [router(kind(overlap_score_weight=weight, router_temperature=temperature), engines=160) for kind in (Asking, KVAware)]
    running: list[tuple[Request, int]] = []
    stored: set[tuple[int, int]] = set()
    for index in range(700):
        if index == 350:
            for one in small:
                one.down(3, 0.0)
        own = random.randint(0, 3)
        extents = tuple(extent for extent in ((0, random.choice([4, 4, 2])), (100 + 10 * random.randint(0, 5), own)) if extent[1])
        request = replace(prompt((0, 1), index=index), runs=extents, prompt_pages=count_pages(extents))
        request.prompt_tokens = request.prompt_pages * PAGE_TOKENS + random.randint(-2, 3)
        chosen = {one.send(request, 0.0) for one in small}
        assert len(chosen) == 1
        engine = chosen.pop()
        running.append((request, engine))
        for piece in ((0, 2), (2, 2)):
            if (engine, piece[0]) not in stored:
                stored.add((engine, piece[0]))
                for one in small:
                    one.cached(engine, piece)
        while len(running) > (300 if index < 400 else 20):
            ended, where = running.pop(random.randrange(len(running)))
            if where == 3 and index >= 350:
                continue
            for one in small:
                one.first_token(ended, where, 0.0)
                one.ended(ended, where, 0.0)
    assert len({engine for engine, _ in stored}) > 120
