"""Clusters of the small engines of small.py, in the same round numbers.

a page of 4 tokens takes 4 s to compute, 1 s on an engine's own host link, 2 s to or from the disk
between prefill and decode engines it takes 1 s, unless a test says otherwise
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from kvsim.cluster.cluster import Cluster, Failure
from kvsim.cluster.gate import Gate
from kvsim.cluster.hand_over import HandOver
from kvsim.cluster.held_pages import Holders
from kvsim.cluster.router import Changes, Router, known_engines
from kvsim.cluster.scaler import Scaler
from kvsim.core.cache import Cache
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.tier import Edge, Tier
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.layout import Layout
from kvsim.engine.mover import Mover
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.hardware.spec import HardwareSpec
from kvsim.hardware.tier_kinds import LEVELS
from kvsim.policies.admission.base import AdmissionPolicy
from kvsim.policies.admission.context import AdmissionContext
from kvsim.policies.autoscaling.base import AutoscalingPolicy
from kvsim.policies.context import PolicyContext
from kvsim.policies.copies import copied
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.engine.small import HARDWARE, MODEL, PAGE_BYTES, PAGE_TOKENS, Ask, SmallEngine, check_idle, make_requests


class Sent(RoutingPolicy):
    """Sends each request to the engine that a list gives for its number, or to the first that is up if that one is not."""

    def __init__(self, *engines: int) -> None:
        self.list = engines
        self.chosen: list[tuple[int, int]] = []
        """(request, engine) of all choices, in order."""

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        up = [status.engine for status in engines]
        wanted = self.list[request.index % len(self.list)]
        chosen = wanted if wanted in up else up[0]
        self.chosen.append((request.index, chosen))
        return chosen


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Which engines there are, and the numbers of their tiers; capacities are in pages, 0 for no such tier."""

    gpu: int
    cpu: int = 0
    disk: int = 0
    hosts: tuple[int, ...] = (0, 0)
    """The host of each engine."""
    is_cpu_divided: bool = False
    is_disk_shared: bool = False
    prefill: int = 0
    decode_gpu: int = 0
    """Capacity of the GPUs that only decode, if another one."""

    @property
    def layout(self) -> Layout:
        disks = tuple(0 for _ in self.hosts) if self.is_disk_shared else self.hosts
        return Layout(hosts=self.hosts, disks=disks, prefill_engines=self.prefill)

    def owners(self, engine: int) -> tuple[tuple[str, int, int], ...]:
        """(name, number, capacity) of the tiers that an engine uses, from the top."""
        layout = self.layout
        is_decoder = self.prefill and engine >= self.prefill
        tiers = [("gpu", engine, self.decode_gpu if is_decoder and self.decode_gpu else self.gpu)]
        if self.cpu:
            tiers.append(("cpu", engine if self.is_cpu_divided else layout.hosts[engine], self.cpu))
        if self.disk:
            tiers.append(("disk", layout.disks[engine], self.disk))
        return tuple(tiers)

    def groups(self) -> list[list[int]]:
        """Engines that share a tier, directly or through others."""
        groups: dict[tuple[str, int, int], list[int]] = {}
        for engine in range(len(self.hosts)):
            groups.setdefault(self.owners(engine)[-1], []).append(engine)
        return list(groups.values())


def tiers_of(
    shape: Shape, engines: Sequence[int], eviction: Callable[[], Any], placements: Sequence[Callable[[], Any]], page_tokens: int
) -> tuple[list[Tier], list[Edge]]:
    """The tiers of some engines, empty, and the edges between them, with their policies bound."""
    machine = HardwareSpec(**HARDWARE)
    tiers: dict[tuple[str, int], Tier] = {}
    edges: list[Edge] = []
    by_level = [dict.fromkeys([shape.owners(engine)[level] for engine in engines]) for level in range(len(shape.owners(0)))]
    for name, owner, capacity in [one for level in by_level for one in level]:
        policy = eviction().variant()
        known: dict[str, Any] = {
            "tier": len(tiers),
            "level": LEVELS.index(name),
            "tier_name": name,
            "capacity_pages": capacity,
            "page_tokens": page_tokens,
            "model": MODEL,
            "hardware": machine,
        }
        policy.bind(PolicyContext(**known))
        tier = tiers[name, owner] = Tier(name, len(tiers), Pool(capacity), policy, LEVELS.index(name))
        tier.owner = owner
    for level in range(1, len(by_level)):
        for pair in dict.fromkeys([shape.owners(engine)[level - 1 : level + 1] for engine in engines]):
            upper, lower = (tiers[name, owner] for name, owner, _ in pair)
            placement = placements[level - 1]()
            placement.bind(
                PolicyContext(
                    tier=lower.index, level=lower.level, upper_tier=upper.index, upper_level=upper.level, tier_name=lower.name,
                    capacity_pages=lower.pool.capacity, page_tokens=page_tokens, model=MODEL, hardware=machine,
                )
            )  # fmt: skip
            edges.append(Edge(upper, lower, placement))
    return list(tiers.values()), edges


class SmallCluster(Cluster):
    """A cluster that checks its caches when an engine has failed and, if told to, after the end of every transfer."""

    engines: list[SmallEngine]  # type: ignore[assignment]

    def serve(self, *asks: Ask) -> Outcome:
        """Serve the requests; afterwards nothing is left of them but what is cached."""
        return self.serve_requests(make_requests(asks, self.engines[0].cache.page_tokens))

    def serve_requests(self, requests: list[Request]) -> Outcome:
        outcome = self.run(requests)
        self.check_idle()
        return outcome

    def fail(self, engine: Engine) -> Any:
        yield from super().fail(engine)
        self.check()
        gpu = engine.gpu
        assert not engine.is_up and engine.is_idle and not engine.transfers()
        assert gpu.pool.free == gpu.pool.capacity, (
            f"{gpu.pool.free} of {gpu.pool.capacity}, held {gpu.held_pages}, reserved {gpu.reserved_pages}"
        )
        assert not gpu.held_pages and not gpu.reserved_pages

    def check(self) -> None:
        """Recount everything in every cache."""
        for cache in self.caches:
            cache.check()

    def check_idle(self) -> None:
        """Assert that nothing is left of any request, on the engines, on their way, or in what the router knows."""
        for engine in self.engines:
            check_idle(engine)
            assert engine.is_idle and not engine.running.held and not engine.running.joining
        assert not self._sent and not self._homeless and not self._samples_left
        if self.gate is not None:
            self.gate.check()
            assert not self.gate._where and not self.gate._refused
        for router in [one.router for one in (self, self.hand_over) if one is not None]:
            if router is not None:
                router.hear(inf)
            for known in router.engines.values() if router is not None else ():
                assert not known.outstanding_requests and not known.outstanding_tokens
        if self.hand_over is not None:
            assert not self.hand_over.senders and not self.hand_over._sent
            for receiver in self.hand_over.receivers.values():
                assert not receiver.waiting and not receiver.claims
        substrate = self.engines[0].substrate
        assert not any(channel._active or channel._queue for channel in substrate.wiring.pairs.values())


def small_cluster(
    *,
    gpu: int,
    eviction: Callable[[], Any] = LRU,
    placement: Callable[[], Any] | Sequence[Callable[[], Any]] = WriteThrough,
    prefetch: Callable[[], Any] = NoPrefetch,
    scheduling: Callable[[], Any] = FCFS,
    routing: RoutingPolicy | None = None,
    decode_routing: RoutingPolicy | None = None,
    failures: Sequence[Failure] = (),
    page_tokens: int = PAGE_TOKENS,
    recompute_last_token: bool = True,
    cache_output: bool = False,
    hardware: dict[str, Any] | None = None,
    is_checked: bool = True,
    settings: dict[str, Any] | None = None,
    autoscaling: AutoscalingPolicy | None = None,
    admission: AdmissionPolicy | None = None,
    known: dict[str, Any] | None = None,
    scaling: dict[str, Any] | None = None,
    **shape: Any,
) -> SmallCluster:
    """Engines as ``Shape`` says; ``hardware`` changes the round numbers, and ``settings`` are those of each engine.

    An ``admission`` policy refuses requests; it gets what is ``known``, and steps in which a token takes 1 s.
    With an ``autoscaling`` policy, one engine serves at first, and engines start in 2 s, unless ``scaling`` says otherwise.
    """
    form = Shape(gpu=gpu, **shape)
    layout = form.layout
    placements = list(placement) if isinstance(placement, Sequence) else [placement] * 2
    rates: dict[str, Any] = {"interconnect_bytes_per_s": PAGE_BYTES, "interconnect_latency_s": 0.0}
    machine = HardwareSpec(**(HARDWARE | rates | (hardware or {})))
    engine_settings = EngineSettings(**(settings or {}))
    substrate = SimulatedSubstrate(MODEL, machine, page_tokens, links=engine_settings.links, layout=layout)
    engines: dict[int, SmallEngine] = {}
    for group in form.groups():
        tiers, edges = tiers_of(form, group, eviction, placements, page_tokens)
        cache = Cache(tiers, edges, Rules(recompute_last_token=recompute_last_token, cache_output=cache_output), page_tokens)
        mover = Mover(substrate, cache)
        for index in [tier.index for tier in tiers if not tier.above]:
            number = tiers[index].owner
            policy = prefetch()
            if form.cpu:
                context = PolicyContext(
                    tier=1, tier_name="cpu", capacity_pages=form.cpu, page_tokens=page_tokens, model=MODEL, hardware=machine
                )
                policy.bind(context)
            engines[number] = SmallEngine(
                substrate, cache, Prefetching(cache, policy, Offer), engine_settings, scheduling(),
                number=number, gpu=tiers[index], mover=mover,
                steps_in_flight=machine.pipeline_parallel,
            )  # fmt: skip
            engines[number].is_checked = is_checked
    ordered = [engines[number] for number in sorted(engines)]
    router = None if len(ordered) == 1 else router_for(routing or Sent(0), ordered[: form.prefill or len(ordered)], page_tokens)
    scaler = None
    if autoscaling is not None:
        assert router is not None
        scaler = Scaler(autoscaling, ordered, router, **{"least": 1, "first": 1, "start_s": 2.0, **(scaling or {})})
    hand_over = hand_over_for(decode_routing, ordered, form, engine_settings, page_tokens) if form.prefill else None
    return SmallCluster(
        ordered,  # type: ignore[arg-type]
        router,
        scaler=scaler,
        gate=None if admission is None else gate_for(admission, ordered, router, hand_over, known or {}),
        hand_over=hand_over,
        failures=failures,
        layout=layout,
    )


def gate_for(
    policy: AdmissionPolicy, engines: Sequence[Any], router: Router | None, hand_over: HandOver | None, known: dict[str, Any]
) -> Gate:
    """What refuses requests, with a policy of its own for each engine if it goes by the engine."""
    number = len(engines) if policy.goes_by == "engine" else 1
    policies = [policy if number == 1 else copied(policy) for _ in range(number)]
    requests = make_requests([Ask(word="a", at=0.0, tokens=1, output=1, after=-1, delay_s=0.0)] * 3)
    requests[0].priority = -1
    for one in policies:
        one.bind(
            AdmissionContext(
                prefill_s=lambda prefills, requests, context: float(sum(tokens - start for start, tokens in prefills)),
                decode_step_s=lambda requests, context: float(requests),
                **{"requests": requests, **known},
            )
        )
    return Gate(policies, engines, router, hand_over)


def router_for(policy: RoutingPolicy, engines: Sequence[SmallEngine], page_tokens: int) -> Router:
    """A router before some of the engines."""
    env = engines[0].env
    gpus = {engine.number: engine.gpu for engine in engines}
    holders, changes = Holders(sorted(gpus), lambda: float(env.now)), Changes()
    known = known_engines(policy, gpus, lambda: float(env.now), holders, changes)
    context = RoutingContext(
        engines=[engine.number for engine in engines],
        capacities=[engine.gpu.pool.capacity for engine in engines],
        page_tokens=page_tokens,
        holders=holders.of,
        leading=holders.leading,
        changes=changes.collect,
        prefill_s=lambda start, tokens: float(tokens - start),
    )
    policy.bind(context)
    return Router(policy, known)


def hand_over_for(
    policy: RoutingPolicy | None, engines: Sequence[SmallEngine], form: Shape, settings: EngineSettings, page_tokens: int
) -> HandOver:
    """What is between the prefill and the decode engines."""
    router = router_for(policy or Sent(form.prefill), engines[form.prefill :], page_tokens)
    return HandOver(router, engines, is_layerwise=settings.overlap == "layerwise")


def alone(requests: Sequence[Request], numbers: Sequence[int]) -> list[Request]:
    """The requests of these numbers as a trace of their own."""
    return [replace(requests[number], index=index) for index, number in enumerate(numbers)]
