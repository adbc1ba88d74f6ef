"""The switches in which engines differ: each changes one thing."""

from dataclasses import FrozenInstanceError

import pytest

from kvsim.core.rules import CacheSetup, Rules
from kvsim.pages.extents import split_extents
from kvsim.policies.eviction.lru import LRU
from tests.core.small import SmallCache, make_tiers, now


def cache_of(rules: Rules) -> SmallCache:
    tiers, edges = make_tiers([8], [LRU()], [], slots=True, page_tokens=1)
    return SmallCache(tiers, edges, rules, 1)


@pytest.mark.parametrize(("recompute", "hits"), [(True, 2), (False, 3)])
def test_the_last_token_of_a_prompt_is_computed_or_not(recompute: bool, hits: int) -> None:
    cache = cache_of(Rules(recompute_last_token=recompute))
    cache.use("abc")
    assert cache.use("abc") == (hits, 0, 0)


@pytest.mark.parametrize(("cache_output", "hits"), [(True, 4), (False, 2)])
def test_the_pages_of_an_answer_are_cached_or_not(cache_output: bool, hits: int) -> None:
    cache = cache_of(Rules(recompute_last_token=False, cache_output=cache_output))
    answer = split_extents(cache.request("abcd").runs, 2)[1]
    lease = cache.admitted("ab", pages=5, output_tokens=3, output_runs=answer)
    cache.move(cache.insert(lease, now(cache)))
    cache.move(cache.finish(lease, now(cache)))
    cache.check()
    assert cache.use("abcde") == (hits, 0, 0)


def test_by_kvsim_s_own_rules_a_replay_has_the_cache_of_a_simulation() -> None:
    rules = Rules()
    rules.check("replay", ["gpu", "cpu", "disk"])
    rules.check("simulate", ["gpu"])
    tiers, edges = make_tiers([8], [LRU()], [], slots=True, page_tokens=1)
    assert rules.server(CacheSetup(tiers=tiers, edges=edges, page_tokens=1)) is None


def test_rules_do_not_change_in_a_run() -> None:
    with pytest.raises(FrozenInstanceError):
        Rules().cache_output = True  # type: ignore[misc]
