"""Slots that a decoding request has been given and that are lost before they are free."""

import pytest
from simpy import Event

from kvsim.core import cache as core_cache
from kvsim.core.cache import Cache
from kvsim.core.lease import Lease
from kvsim.core.queue_view import Waiting
from kvsim.core.serving import LOST_SLOTS, Claim
from kvsim.core.transfer import Transfer
from kvsim.engine.engine import EngineSettings
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.substrate import Work
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.engine.small import PAGE_TOKENS, SmallEngine, ask, check_idle, make_requests, small_engine


class LosingCache(Cache):
    """Loses the slots of the first request that waits for some beside another one."""

    def __init__(self, like: Cache) -> None:
        super().__init__(like.tiers, like.edges, like.rules, like.page_tokens)
        self.reserved: list[int] = []
        """Pages reserved for each request at that time."""

    def claim(self, lease: Lease, now: float) -> Claim:
        reserved = [other.reserved_pages for other in self.leases]
        if not self.reserved and sum(reserved) > lease.reserved_pages > 0:
            self.reserved = reserved
            return LOST_SLOTS
        return super().claim(lease, now)


class CarefulSubstrate(SimulatedSubstrate):
    """Decodes only for requests that have all the slots that they have reserved."""

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        assert not any(job.lease.reserved_pages for job in work.decoding if job.lease is not None)
        return super().compute(work, loads)


@pytest.mark.skipif(not core_cache.__file__.endswith(".py"), reason="a compiled cache cannot be derived from")
def test_the_others_get_theirs() -> None:
    """Two answers need another page at the same step, and what is cached has to be written down for them. The slots of one are
    lost, so that it waits again; the other one has its own before the next step."""
    plain = small_engine(gpu=4, cpu=8, placement=WriteBack, make_substrate=CarefulSubstrate)
    cache = LosingCache(plain.cache)
    engine = SmallEngine(plain.substrate, cache, Prefetching(cache, NoPrefetch(), Offer), EngineSettings(), FCFS())
    outcome = engine.run(make_requests([ask("ab"), *[ask("", at=5.0, output=PAGE_TOKENS + 2)] * 2]))
    assert cache.reserved == [1, 1]
    assert (outcome.e2e_s > 0).all()
    check_idle(engine)


class LosingAtOnce(Cache):
    """Loses the first slots that a request waits for, as soon as it is admitted."""

    def __init__(self, like: Cache) -> None:
        super().__init__(like.tiers, like.edges, like.rules, like.page_tokens)
        self.lost = 0

    def is_waiting(self, lease: Lease) -> bool:
        return bool(self.lost) and super().is_waiting(lease)

    def claim(self, lease: Lease, now: float) -> Claim:
        if not self.lost:
            self.lost = 1
            return LOST_SLOTS
        return super().claim(lease, now)


class Noting(FCFS):
    """Notes of whom it is told, by arrival."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def on_admitted(self, waiting: Waiting, tokens: int) -> None:
        self.told.append(("admitted", waiting.arrival_s))

    def on_computed(self, waiting: Waiting) -> None:
        self.told.append(("computed", waiting.arrival_s))


@pytest.mark.skipif(not core_cache.__file__.endswith(".py"), reason="a compiled cache cannot be derived from")
def test_a_policy_is_told_first_of_the_admission_and_then_of_its_end() -> None:
    """The second prompt needs slots of the first one, which have to be written down, and are lost at once."""
    plain = small_engine(gpu=4, cpu=8, placement=WriteBack)
    cache, policy = LosingAtOnce(plain.cache), Noting()
    engine = SmallEngine(plain.substrate, cache, Prefetching(cache, NoPrefetch(), Offer), EngineSettings(), policy)
    engine.run(make_requests([ask("abc"), ask("xyz", at=50.0)]))
    assert cache.lost == 1
    assert policy.told == [("admitted", 0.0), ("computed", 0.0)] + [("admitted", 50.0), ("computed", 50.0)] * 2
