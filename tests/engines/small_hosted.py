"""An engine with SGLang's schedule and host memory, small enough to follow by hand (see ``tests/engine/small.py``)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvsim.cluster.cluster import Cluster, Failure
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup
from kvsim.core.tier import Tier, chain
from kvsim.core.transfer import Transfer
from kvsim.core.watch import Watch
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.engines.sglang.hosted_steps import HostedSteps
from kvsim.engines.sglang.rules import SGLangRules
from kvsim.engines.sglang.schedule import NodeSchedule
from kvsim.hardware.spec import HardwareSpec
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.engine.small import FOREVER, HARDWARE, MODEL
from tests.engines.small_unified import PLACEMENTS
from tests.workloads import Words

INSTANT: dict[str, Any] = {
    **HARDWARE,
    "host_to_device_bytes_per_s": FOREVER,
    "device_to_host_bytes_per_s": FOREVER,
    "both_directions_bytes_per_s": FOREVER,
}


class Log(Watch):
    """Notes when each transfer begins and ends, in seconds."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.copies: list[tuple[str, int, float, float]] = []
        """(source-target, pages, begin, end) by end."""
        self._began: dict[Transfer, float] = {}

    def began(self, transfer: Transfer) -> None:
        self._began[transfer] = self.env.now

    def ended(self, transfer: Transfer) -> None:
        self.copies.append((transfer.name, transfer.pages, round(self._began[transfer], 6), round(self.env.now, 6)))


class Hosted:
    """An engine on which a page takes 4 s to compute and 1 s to copy, unless ``hardware`` says otherwise."""

    def __init__(
        self, gpu: int, cpu: int, *, write: str = "write_through", page_tokens: int = 4, hardware: dict[str, Any] = HARDWARE,
        chunk: int = 8192, load_min_tokens: int = 0, cache_output: bool = False, disk: int = 0,
        prefetch: PrefetchPolicy | None = None, reset_at_s: float | None = None, most_running: int = 256,
        **rules: Any,
    ) -> None:  # fmt: skip
        tiers = []
        for index, capacity in enumerate([gpu, cpu, *[disk] * (disk > 0)]):
            policy = LRU()
            policy.bind(PolicyContext(tier=index, capacity_pages=capacity, page_tokens=page_tokens))
            tiers.append(Tier(("gpu", "cpu", "disk")[index], index, SlotPool(capacity), policy))
        placements: list[Any] = [PLACEMENTS[write](), WriteThrough()][: len(tiers) - 1]
        for index, placement in enumerate(placements):
            placement.bind(PolicyContext(tier=index + 1, upper_tier=index, page_tokens=page_tokens))
        ahead = prefetch or NoPrefetch()
        ahead.bind(PolicyContext(tier=1, capacity_pages=cpu, page_tokens=page_tokens))
        setup = CacheSetup(tiers=tiers, edges=chain(tiers, placements), page_tokens=page_tokens, prefetch=ahead if disk else None)
        settings = SGLangRules(**{"loop": "plain", **rules}, load_min_tokens=load_min_tokens, cache_output=cache_output)
        cache = settings.cache(setup)
        assert isinstance(cache, HostedSteps)
        self.cache = cache
        substrate = SimulatedSubstrate(MODEL, HardwareSpec(**hardware), page_tokens, links="fifo")
        self.log = Log(substrate.env)
        cache.watch(self.log)
        self.prefetching = Prefetching(cache, ahead, Offer)
        resets = [] if reset_at_s is None else [reset_at_s]
        engine = EngineSettings(max_batch_tokens=chunk, max_running_requests=most_running, reset_at_s=resets)
        self.engine = Engine(substrate, cache, self.prefetching, engine, FCFS(), schedule=settings.scheduler())

    def check_in_each_pass(self) -> None:
        """Check the whole cache whenever a pass has gathered what has ended."""
        schedule = self.engine.schedule
        assert isinstance(schedule, NodeSchedule)
        gather = schedule._gather

        def checked() -> None:
            gather()
            self.cache.check()

        schedule._gather = checked  # type: ignore[method-assign]

    def run(self, requests: Sequence[Request], *, failures: Sequence[Failure] = ()) -> Outcome:
        outcome = Cluster([self.engine], failures=failures).run(list(requests))
        self.cache.check()
        assert not self.cache.leases
        return outcome


def alone(requests: Sequence[Request]) -> list[Request]:
    """The same requests, each long after the one before it has finished."""
    return [replace(request, arrival_s=1e7 * at, index=at) for at, request in enumerate(requests)]


OFTEN = 1_000.0
"""Seconds after which everything before has ended."""


def words(*timed: tuple[float, str], output: int = 1) -> list[Request]:
    ids = Words()
    return [ids.request(word, page_tokens=4, tail=1, output=output, index=at, arrival_s=s) for at, (s, word) in enumerate(timed)]


def first_tokens(hosted: Hosted, requests: list[Request]) -> list[float]:
    """When each first token appears, in seconds."""
    outcome = hosted.run(requests)
    return [round(at, 6) for at in (outcome.arrival_s + outcome.ttft_s).tolist()]
