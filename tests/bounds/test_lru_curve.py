"""LRU at every capacity in one pass: what a replay of each capacity hits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.bounds.lru_curve import LruCurve, sums_of_smaller
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.engine.columns import hit_tokens
from tests.replaying.test_replay import make_cache, play
from tests.workloads import branching_requests, long_conversations


def request(index: int, *extents: tuple[int, int], prompt_tokens: int | None = None) -> Request:
    pages = sum(length for _, length in extents)
    return Request(
        index=index,
        arrival_s=0.0,
        prompt_tokens=4 * pages if prompt_tokens is None else prompt_tokens,
        output_tokens=0,
        runs=extents,
        prompt_pages=pages,
    )


def test_a_page_is_hit_from_the_capacity_on_that_is_its_place_in_the_stack() -> None:
    """Pages 0 1 2, then 3 4, then 0 1 2 again: from the top, the stack is 3 4 0 1 2, so they lie at places 3, 4 and 5."""
    curve = LruCurve([request(0, (0, 3)), request(1, (3, 2)), request(2, (0, 3))], 4, recompute_last_token=False)
    assert curve.hit_pages(range(7)).tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert curve.hit_tokens([4, 5]).tolist() == [8, 12]
    assert (curve.largest_pages, curve.unique_pages, curve.prompt_pages, curve.prompt_tokens) == (3, 5, 8, 32)
    assert (curve.reuse_distance(0.5), curve.reuse_distance(1.0), curve.capacity_for(0.5)) == (4, 5, 4)


def test_a_partial_page_weighs_its_own_tokens() -> None:
    curve = LruCurve([request(i, (0, 3), prompt_tokens=10) for i in range(2)], 4, recompute_last_token=False)
    assert curve.hit_tokens([2, 3]).tolist() == [8, 10]


def test_the_page_of_the_last_token_is_no_hit() -> None:
    curve = LruCurve([request(i, (0, 3)) for i in range(2)], 4, recompute_last_token=True)
    assert curve.hit_pages([2, 3, 9]).tolist() == [2, 2, 2]


def test_the_warm_up_is_played_but_not_counted() -> None:
    curve = LruCurve([request(i, (0, 3)) for i in range(3)], 4, recompute_last_token=False, counted_from=2)
    assert (curve.hit_pages(3), curve.prompt_pages) == (3, 3)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=40))
def test_sums_of_smaller_are_sums_over_what_came_before(pairs: list[tuple[int, int]]) -> None:
    values, weights = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    slow = [sum(w for v, w in pairs[:i] if v <= value) for i, (value, _) in enumerate(pairs)]
    assert sums_of_smaller(values, weights).tolist() == slow


@given(
    requests=branching_requests(),
    short=st.lists(st.integers(0, 3), min_size=64, max_size=64),
    recompute=st.booleans(),
    skipped=st.integers(0, 3),
)
@settings(max_examples=40)
def test_the_curve_is_the_replay_of_every_capacity(
    requests: list[Request], short: list[int], recompute: bool, skipped: int
) -> None:
    for prompt in requests:
        prompt.prompt_tokens -= short[prompt.runs[-1][0] % len(short)]
    for capacity in range(1, 24):
        fitting = [prompt for prompt in requests if prompt.prompt_pages <= capacity]
        curve = LruCurve(fitting, 4, recompute_last_token=recompute, counted_from=skipped)
        rules = Rules(recompute_last_token=recompute)
        outcome = play(make_cache((capacity,), rules=rules, page_tokens=4), requests)
        assert curve.hit_pages(capacity) == outcome.hit_pages[skipped:].sum()
        assert curve.hit_tokens(capacity) == hit_tokens(outcome)[skipped:].sum()


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
def test_the_curve_of_long_conversations(recompute: bool) -> None:
    requests = long_conversations(requests=3_000, page_tokens=512)
    curve = LruCurve(requests, 512, recompute_last_token=recompute, counted_from=1_500)
    for capacity in (500, 1_700, 6_000, 60_000):
        cache = make_cache((capacity,), rules=Rules(recompute_last_token=recompute))
        outcome = play(cache, requests)
        assert curve.hit_pages(capacity) == outcome.hit_pages[1_500:].sum()
        assert curve.hit_tokens(capacity) == hit_tokens(outcome)[1_500:].sum()
