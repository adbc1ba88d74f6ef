"""Preble's E2 by hand: pages of 4 tokens, 1 s for a token of a prompt, 0.5 s for one of an answer."""

from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.core.request import Request
from kvsim.pages.extent_counts import PageCounts
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.preble import Preble
from tests.policies.small_routing import SmallRouter, prompt, router, sent_to


def preble(small: SmallRouter) -> Preble:
    assert isinstance(small.policy, Preble)
    return small.policy


def serve(small: SmallRouter, engine: int, request: Request, at: float) -> None:
    """An engine gets a request, computes it and answers at once."""
    sent_to(small, engine, request, at, is_computed=True)
    small.ended(request, engine, at)


def test_a_prefix_is_exploited_if_it_is_longer_than_the_rest() -> None:
    """Engine 1 has 3 pages, 12 tokens, and 13 s of load: worth it for 12 more tokens or fewer, 11 pages are not."""
    small = router(Preble(balance_threshold=None), engines=2)
    sent_to(small, 1, prompt((0, 3)))
    assert small.send(prompt((0, 3), (10, 2), index=1), 0.0) == 1
    assert small.send(prompt((0, 3), (20, 3), index=2), 0.0) == 0, "12 of 25 tokens; explored: 0 + 25 s against 13 + 9 + 13 s"
    assert preble(small)._loads().tolist() == [25, 13 + 9]


def test_of_engines_with_the_longest_match_the_least_loaded_is_used() -> None:
    """Engines 0 and 2 have the 3 pages, engine 1 has nothing and no load."""
    small = router(Preble(balance_threshold=None))
    for engine, index in ((0, 0), (2, 1), (0, 2)):
        sent_to(small, engine, prompt((0, 3), index=index))
    assert preble(small)._loads().tolist() == [13 + 1, 0, 13]
    assert small.send(prompt((0, 3), index=3), 0.0) == 2


def test_the_heaviest_engine_passes_on_what_it_would_exploit() -> None:
    small = router(Preble(balance_threshold=2.0))
    sent_to(small, 0, prompt((0, 3), index=0))
    sent_to(small, 1, prompt((50, 3), index=1))
    sent_to(small, 2, prompt((70, 1), index=2))
    assert preble(small)._loads().tolist() == [13, 13, 5]
    assert small.send(prompt((0, 3), index=3), 0.0) == 2, "13 is more than 2 * 5"
    assert preble(small)._loads().tolist() == [13, 13, 5 + 13]
    assert small.send(prompt((0, 3), index=4), 0.0) == 0


def test_answers_count_by_the_mean_of_those_that_have_ended() -> None:
    """Answers of 4 and 8 tokens have ended: each of three requests decodes for 6 * 0.5 s."""
    small = router(Preble(), engines=2)
    serve(small, 0, prompt((0, 1), index=0, output_tokens=4), 0.0)
    serve(small, 0, prompt((20, 1), index=1, output_tokens=8), 1.0)
    sent_to(small, 1, prompt((40, 1), index=2, output_tokens=100), 2.0)
    assert preble(small)._loads().tolist() == [2 * (5 + 3), 5 + 3]
    lost = prompt((60, 1), index=3, output_tokens=50)
    sent_to(small, 1, lost, 3.0, is_computed=True)
    small.ended(lost, 1, 4.0)
    small.down(1, 4.0)
    assert preble(small)._window.mean_answer == 6, "a lost request has no answer"


def test_load_is_forgotten_after_the_window() -> None:
    small = router(Preble(window_s=10.0), engines=2)
    serve(small, 0, prompt((0, 1), index=0, output_tokens=4), 0.0)
    serve(small, 1, prompt((20, 2), index=1, output_tokens=8), 5.0)
    window = preble(small)._window
    window.move(10.0)
    assert (window.prefill_s.tolist(), window.mean_answer) == ([5, 9], 6)
    window.move(10.1)
    assert (window.prefill_s.tolist(), window.requests.tolist(), window.mean_answer) == ([0, 9], [0, 1], 8)
    window.move(100.0)
    assert (window.prefill_s.tolist(), window.mean_answer) == ([0, 0], 0)


def test_what_would_be_driven_out_costs_by_its_use() -> None:
    """Each engine has 4 pages, all in use. On engine 0 the oldest two have been used by 2 of 3 requests, on engine 1 by one of 3.
    Two new pages drive out 8 tokens each: 8 s * 2/3 and 8 s * 1/3."""
    small = router(Preble(), engines=2, capacity=4)
    for engine, starts in ((0, (0, 0, 20)), (1, (40, 60, 60))):
        for index, start in enumerate(starts):
            sent_to(small, engine, prompt((start, 2), index=10 * engine + index))
    policy = preble(small)
    new = prompt((90, 2), index=50)
    assert policy._eviction_s(new, 0, 0) == pytest.approx(8 * 2 / 3)
    assert policy._eviction_s(new, 1, 0) == pytest.approx(8 * 1 / 3)
    assert policy._eviction_s(prompt((90, 1), index=51), 0, 0) == pytest.approx(4 * 2 / 3), "its second page alone"
    assert policy._loads().tolist() == [9 + 1 + 9, 9 + 9 + 1]
    assert small.send(new, 0.0) == 1


def test_engines_that_only_decode_share_by_number() -> None:
    small = router(Preble(), prefills=False)
    assert [small.send(prompt((0, 3), index=index), 0.0) for index in range(4)] == [0, 1, 2, 0]


def test_it_needs_to_know_how_long_prompts_take() -> None:
    with pytest.raises(ValueError, match="needs a model and a machine"):
        Preble().bind(RoutingContext())


def test_counts_of_pages_add_up() -> None:
    counts = PageCounts()
    for extent in ((3, 4), (5, 4), (20, 1)):
        counts.add([extent])
    numbers = np.zeros(30, int)
    for start, pages in ((3, 4), (5, 4), (20, 1)):
        numbers[start : start + pages] += 1
    for start in range(25):
        for pages in range(1, 5):
            assert counts.total([(start, pages)]) == numbers[start : start + pages].sum()
    assert counts.total([(0, 10), (20, 5)]) == 9


def test_a_cluster_hits_more_than_by_load_alone() -> None:
    trace: Any = kvsim.load_trace("synthetic", limit=150)
    cluster = ("cluster.engines=4", "cluster.engines_per_host=1", "tiers.gpu.capacity=1000pages")
    aware, unaware = (kvsim.simulate(trace, *cluster, f"routing={name}") for name in ("preble", "least_loaded"))
    assert aware.hit_rate > unaware.hit_rate
