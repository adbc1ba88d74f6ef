"""The contract of what requests are served from, which every cache keeps."""

from typing import Any

import pytest

from kvsim.core import serving
from kvsim.core.serving import CLAIMED, LOST_SLOTS, Lower, ServedCache
from kvsim.policies.checkpoint.last import Last
from tests.core.small import SmallCache, now, small_cache
from tests.states.small_hybrid import hybrid

CACHES = {"pages": lambda: small_cache(gpu=8, cpu=8), "states": lambda: hybrid(Last(), gpu=8, cpu=8)}


@pytest.mark.skipif(not serving.__file__.endswith(".py"), reason="a compiled class does not list its abstract methods")
def test_the_contracts_have_these_calls_and_no_others() -> None:
    """Whatever else a cache offers is an attribute, or a hook with a default."""
    requests = {"match", "admit", "claim", "grow", "insert", "finish", "release", "reset"}
    assert set(ServedCache.__abstractmethods__) == requests | {"check"}
    assert set(Lower.__abstractmethods__) == {"fetch", "load", "begin", "finish", "abort", "in_flight"}


@pytest.mark.parametrize("kind", CACHES)
def test_tree_counts_time_and_transfers_are_those_of_its_parts(kind: str) -> None:
    cache: SmallCache = CACHES[kind]()
    cache.use("abc")
    core: Any = cache.core
    assert core.tree is core.residency.tree and core.counts is core.residency.counts
    assert core.in_flight == core.transfers.in_flight
    assert core.gpu is core.tiers[0] and core.page_tokens == 1


@pytest.mark.parametrize("kind", CACHES)
def test_a_request_passes_through_all_calls(kind: str) -> None:
    cache: SmallCache = CACHES[kind]()
    core: Any = cache.core
    lease = core.match(cache.request("abc"))
    assert core.admit(lease, 3, now(cache))
    assert core.claim(lease, now(cache)) == CLAIMED
    assert not core.lower.load(lease, now(cache)).transfers and lease.arriving() == []
    cache.move(core.insert(lease, now(cache)))
    assert core.grow([(lease, 1)], now(cache)).has_room and core.claim(lease, now(cache)) == CLAIMED
    cache.move(core.finish(lease, now(cache)))
    core.check()
    assert not core.leases and not core.in_flight
    core.reset()
    core.check()
    assert core.match(cache.request("abc")).gpu_pages == 0


def test_a_claim_is_granted_lost_or_waits() -> None:
    assert (*CLAIMED, *LOST_SLOTS) == ([], False, [], True)


def test_nothing_lies_below_a_single_tier() -> None:
    core = small_cache(gpu=8).core
    assert core.lower is None and core.in_flight == {}
