"""The contract of what requests are served from, which every cache keeps."""

from typing import Any

import pytest

from kvsim.core.cache import Cache
from kvsim.core.serving import CLAIMED, LOST, NO_LOAD, ServedCache
from kvsim.policies.checkpoint.last import Last
from kvsim.states.cache import HybridCache
from tests.core.small import SmallCache, now, small_cache
from tests.states.small_hybrid import hybrid

CACHES = {"pages": lambda: small_cache(gpu=8, cpu=8), "states": lambda: hybrid(Last(), gpu=8, cpu=8)}


CALLS = (
    "match", "admit", "can_admit", "claim", "grow", "fetch", "load", "arriving", "insert", "finish_request", "release",
    "begin", "finish", "abort", "reset", "check",
)  # fmt: skip


@pytest.mark.parametrize("kind", [Cache, HybridCache])
@pytest.mark.parametrize("call", CALLS)
def test_a_cache_answers_every_call_of_the_contract_itself(kind: type[ServedCache], call: str) -> None:
    assert issubclass(kind, ServedCache)
    assert call in vars(ServedCache) and call in vars(kind)


@pytest.mark.parametrize("kind", CACHES)
def test_tree_counts_time_and_transfers_are_those_of_its_parts(kind: str) -> None:
    cache: SmallCache = CACHES[kind]()
    cache.use("abc")
    core: Any = cache.core
    assert core.tree is core.residency.tree and core.counts is core.residency.counts
    assert core.now == core.residency.now and list(core.in_flight) == list(core.transfers.in_flight)
    assert core.gpu is core.tiers[0] and core.page_tokens == 1


@pytest.mark.parametrize("kind", CACHES)
def test_a_request_passes_through_all_calls(kind: str) -> None:
    cache: SmallCache = CACHES[kind]()
    core: Any = cache.core
    lease = core.match(cache.request("abc"))
    assert core.can_admit(lease, 3) and core.admit(lease, 3, now(cache))
    assert core.claim(lease, now(cache)) == CLAIMED
    assert core.load(lease, now(cache)) == NO_LOAD and core.arriving(lease) == []
    cache.move(core.insert(lease, now(cache)))
    assert core.grow([(lease, 1)], now(cache)).has_room and core.claim(lease, now(cache)) == CLAIMED
    cache.move(core.finish_request(lease, now(cache)))
    core.check()
    assert not core.leases and not core.in_flight
    core.reset()
    core.check()
    assert core.match(cache.request("abc")).gpu_pages == 0


def test_a_claim_is_granted_lost_or_waits() -> None:
    assert (CLAIMED.waits, CLAIMED.is_lost, LOST.waits, LOST.is_lost) == ([], False, [], True)
