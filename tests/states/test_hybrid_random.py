"""Hybrid caches under anything in any order, and hits against a slow and obvious model.

Besides the cache's own ``check`` after every step: nothing leaks, and what is usable of a prompt ends at a state.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import hydra
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.pool import SlotPool
from kvsim.core.request import Request, RetentionRange
from kvsim.core.rules import Rules
from kvsim.core.tier import Edge, Tier, chain
from kvsim.core.tree import INCOMING
from kvsim.engine.prefetching import Prefetching
from kvsim.pages.extents import split_extents
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill
from kvsim.policies.checkpoint.branch import Branch
from kvsim.policies.checkpoint.every_page import EveryPage
from kvsim.policies.checkpoint.interval import Interval
from kvsim.policies.checkpoint.last import Last
from kvsim.policies.checkpoint.retention import Retention
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.flop_aware import FlopAware
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.replaying.server import CacheServer
from kvsim.run.assembly import build_cache, build_setup, build_tiers
from kvsim.run.play import simulate
from tests.core.small import NAMES, Watched
from tests.plans.test_presets import CONF
from tests.policies.test_flop_aware_states import MACHINE, MODEL
from tests.states.slow_hybrid import SlowHybrid
from tests.states.small_hybrid import SmallHybrid, hybrid
from tests.workloads import EXAMPLES

SETTINGS = settings(max_examples=EXAMPLES)
CHECKPOINTS = [EveryPage, Last, Branch, Retention, partial(Interval, tokens=2), partial(Last, max_states_per_path=1)]
PLACEMENTS = [
    WriteThrough,
    WriteBack,
    partial(WriteBack, watermark=0.5),
    Exclusive,
    partial(ByLength, min_tokens=3, disk_min_tokens=4),
]
WORDS = st.text("ab", min_size=1, max_size=7)


CHAIN = (("gpu", None), ("cpu", 0), ("disk", 1))
SHAPES = [CHAIN[:1], CHAIN[:2], CHAIN, (("gpu", None), ("disk", 0)), (("gpu", None), ("cpu", 0), ("disk", 0))]
"""What each tier is, and the place of the tier above it."""


@st.composite
def caches(draw: st.DrawFn) -> SmallHybrid:
    shape = draw(st.sampled_from(SHAPES))
    shared = draw(st.booleans())
    detached = {"detached": True, "detached_states": draw(st.sampled_from([None, 1, 3]))} if draw(st.booleans()) else {}
    policy: CheckpointPolicy = draw(st.sampled_from(CHECKPOINTS))(**detached)
    policy.bind(PolicyContext(page_tokens=1))
    tiers: list[Tier] = []
    edges: list[Edge] = []
    for index, (name, above) in enumerate(shape):
        eviction = draw(st.sampled_from([LRU, SegmentedLRU, partial(FlopAware, alpha=0.5)]))()
        tiers.append(tier_of(index, name, draw(st.integers(4, 16)), eviction))
        if above is not None:
            edges.append(Edge(tiers[above], tiers[index], placement_of(index, name, draw)))
    with_states = [name for name, _ in shape if name != "disk"]
    own = None if shared else [tier_of(at, name, draw(st.integers(1, 5)), LRU()) for at, name in enumerate(with_states)]
    return SmallHybrid(
        tiers,
        edges,
        Rules(recompute_last_token=draw(st.booleans()), cache_output=draw(st.booleans())),
        1,
        policy=policy,
        prefill=Prefill,
        grid_pages=draw(st.sampled_from([1, 1, 2])),
        state_bytes=10,
        state_pages=draw(st.integers(1, 3)) if shared else 1,
        state_tiers=own,
        state_edges=chain(own, [WriteThrough() for _ in own[1:]]) if own else None,
    )


def tier_of(index: int, name: str, capacity: int, eviction: Any) -> Tier:
    eviction.bind(context_of(index, name, capacity))
    return Tier(name, index, SlotPool(capacity), eviction, NAMES.index(name))


def placement_of(index: int, name: str, draw: Any) -> Any:
    placement = draw(st.sampled_from(PLACEMENTS))()
    placement.bind(context_of(index, name, 4))
    return placement


def context_of(index: int, name: str, capacity: int) -> PolicyContext:
    return PolicyContext(
        tier=index,
        tier_name=name,
        level=NAMES.index(name),
        capacity_pages=capacity,
        page_tokens=1,
        model=MODEL,
        hardware=MACHINE,
    )


class Walk:
    """Uses a cache as an engine may: requests at every stage side by side, transfers that end late or fail."""

    def __init__(self, cache: SmallHybrid, data: st.DataObject) -> None:
        self.cache = cache
        self.draw = data.draw
        self.running: list[list[Any]] = []
        self.transfers: list[Any] = []
        self.requests = 0
        self.looked: list[Any] = []
        self.loading: list[Any] = []
        """(lease, load, pages that it set out to bring)"""
        self.watched = [Watched() for _ in cache.tiers]
        for tier, watched in zip(cache.tiers, self.watched, strict=True):
            tier.watches.append(watched)

    def now(self) -> float:
        return float(next(self.cache.clock))

    def step(self) -> None:
        action = self.draw(
            st.sampled_from(["start", "start", "start", "go", "go", "go", "go", "end", "transfer", "abort", "reset"])
        )
        if action == "start" and len(self.running) < 3:
            self.start()
        elif action == "go" and self.running:
            self.go(self.draw(st.sampled_from(self.running)))
        elif action == "end" and self.running:
            self.end(self.draw(st.sampled_from(self.running)))
        elif action in ("transfer", "abort") and self.transfers:
            self.carry(self.draw(st.sampled_from(self.transfers)), fail=action == "abort")
        elif action == "reset" and self.draw(st.integers(0, 5)) == 0:
            self.cache.reset()
        self.cache.check()
        nodes = list(self.cache.tree.root.descendants())
        for tier, watched in zip(self.cache.tiers, self.watched, strict=True):
            watched.check(tier, nodes)
        self.check_states()
        assert all(self.cache.found(one) == found for one, version, found in self.looked if version == self.cache.version)

    def start(self) -> None:
        word, answer = self.draw(WORDS), self.draw(st.text("ab", max_size=2))
        whole, request = (
            self.cache.request(word + answer),
            self.cache.request(word, index=self.requests, output_tokens=len(answer) + 1),
        )
        self.requests += 1
        request.output_runs = split_extents(whole.runs, len(word))[1]
        found = self.cache.found(request)
        self.looked = [*self.looked[-5:], (request, self.cache.version, found)]
        lease = self.cache.match(request)
        assert found == (lease.gpu_pages, lease.leading_pages)
        self.check_end(lease)
        if self.cache.admit(lease, len(word) + len(answer), self.now(), self.draw(st.integers(0, lease.lower_pages))):
            self.learn(lease.waits)
            self.running.append([lease, "admitted"])

    def check_end(self, lease: Any) -> None:
        """What a match reuses ends at a state or at nothing."""
        reused = lease.gpu_pages + lease.lower_pages
        assert reused <= lease.states.known_pages
        state, detached = lease.states.state, lease.states.detached
        assert (state is not None or detached is not None) == (reused > 0)
        if state is not None:
            assert state.partner is None or not self.cache.shares_room or state.depth + state.pages == reused

    def go(self, entry: list[Any]) -> None:
        lease, stage = entry
        if stage == "admitted":
            claim = self.cache.claim(lease, self.now())
            if claim.is_lost:
                self.cache.release(lease)
                self.running.remove(entry)
            elif claim.waits:
                self.learn(claim.waits)
                self.carry(claim.waits[0], fail=False)
            else:
                entry[1] = "claimed"
        elif stage == "claimed":
            load = self.cache.load(lease, self.now())
            transfers, loads = load.transfers, load.loads
            self.learn(transfers)
            self.loading += [(lease, load, load.pages) for load in loads]
            self.check_start(lease)
            entry[1] = "loading"
        elif stage == "loading":
            arriving = lease.arriving()
            self.learn(arriving)
            if arriving:
                self.carry(arriving[0], fail=self.draw(st.integers(0, 4)) == 0)
            elif self.draw(st.booleans()):
                self.cache.end_chunk(lease, self.draw(st.integers(0, lease.request.prompt_tokens - 1)), self.now())
            else:
                self.learn(self.cache.insert(lease, self.now()))
                entry[1] = "computed"
        else:
            self.end(entry)

    def end(self, entry: list[Any]) -> None:
        lease, stage = entry
        self.running.remove(entry)
        if stage == "computed":
            self.learn(self.cache.finish(lease, self.now()))
        else:
            self.cache.release(lease)

    def learn(self, transfers: Any) -> None:
        self.transfers += [transfer for transfer in transfers if transfer not in self.transfers]

    def carry(self, transfer: Any, *, fail: bool) -> None:
        self.learn([transfer])
        while not transfer.done and (waits := self.cache.begin(transfer, self.now()).waits):
            self.learn(waits)
            for wait in waits:
                self.carry(wait, fail=False)
        if not transfer.done:
            arrived = 0
            if fail:
                arrived = self.draw(st.integers(0, transfer.pages))
                transfer.has_fault = arrived < transfer.pages and not transfer.goes_down and self.draw(st.booleans())
                follow = self.cache.abort(transfer, arrived, self.now())
            else:
                follow = self.cache.land(transfer, self.now())
            self.learn(follow)
            self.shorten(transfer)
        self.transfers = [other for other in self.transfers if not other.done]

    def shorten(self, load: Any) -> None:
        """Take what a load has not brought out of its request's hit, as an engine does."""
        for lease, own, planned in self.loading:
            if own is load and lease in self.cache.leases and load.arrived_pages < planned:
                before = lease.gpu_pages + lease.loaded_pages
                lost = self.cache.load(lease, self.now(), load).lost_pages
                assert 0 <= before - lost == lease.gpu_pages + lease.loaded_pages
                self.check_start(lease)

    def check_start(self, lease: Any) -> None:
        """What a request reuses ends at a state that the GPU has or is receiving, and that stays."""
        states, cache = lease.states, self.cache
        reused = lease.gpu_pages + lease.loaded_pages
        assert 0 <= lease.loaded_far_pages <= lease.loaded_pages
        assert (states.state is not None or states.detached is not None) == (reused > 0)
        if states.state is not None:
            assert states.tier is cache.states.gpu and states.state.pins[0] and states.state.state[0]
            assert states.state.depth + states.state.pages == reused

    def check_states(self) -> None:
        """A state is whole; one that no transfer carries and nothing pins has its pages beside it."""
        cache = self.cache
        for state in cache.states.index.values():
            assert state.is_state and state.pages == cache.states.units
            if state.state[0] == INCOMING:
                assert state.transfers
        if cache.policy.max_states_per_path is None and cache.detached is not None and cache.policy.detached_states:
            assert len(cache.detached) <= cache.policy.detached_states

    def finish(self) -> None:
        for entry in list(self.running):
            self.end(entry)
        while self.transfers:
            self.carry(self.transfers[0], fail=False)
        cache = self.cache
        cache.check()
        assert not cache.in_flight and not cache.leases and not cache.states.transfers.in_flight
        cache.reset()
        cache.check()
        for tier in (*cache.tiers, *cache.states.tiers):
            assert tier.pool.free == tier.pool.capacity, f"{tier.name} lost slots"


@SETTINGS
@given(cache=caches(), data=st.data())
def test_no_order_of_events_breaks_an_invariant(cache: SmallHybrid, data: st.DataObject) -> None:
    walk = Walk(cache, data)
    for _ in range(40):
        walk.step()
    walk.finish()


# --- hits against a slow model -----------------------------------------------------------------------------------------


@settings(max_examples=2 * EXAMPLES)
@given(
    words=st.lists(st.text("ab", min_size=1, max_size=9), max_size=30),
    make=st.sampled_from(
        [EveryPage, Last, Branch, Retention, partial(Interval, tokens=3), partial(Retention, interval_tokens=2)]
    ),
    states=st.integers(1, 12),
    grid=st.sampled_from([1, 1, 2, 3]),
    recompute=st.booleans(),
)
def test_hits_are_the_longest_prefix_with_a_state(words: list[str], make: Any, states: int, grid: int, recompute: bool) -> None:
    policy = make()
    cache = hybrid(policy, gpu=None, states=states, grid=grid, recompute_last_token=recompute)
    slow = SlowHybrid(policy, states, grid, recompute)
    for word in words:
        expected = slow.use(word)
        assert cache.use(word)[0] == expected
        assert cache.states_on("gpu") == set(slow.states)


# --- the engine, and every eviction policy -----------------------------------------------------------------------------

SMALL = (
    "model=qwen3_next_80b", "hardware.gpus=2", "page_tokens=64",
    "trace.sessions=8", "trace.max_prompt_tokens=10002", "trace.sessions_per_s=2",
)  # fmt: skip
SHARED = ("tiers.gpu.capacity=500pages", "tiers.cpu.capacity=500pages")
DISK = ("tiers.disk.capacity=500pages",)
STRAIGHT = (*DISK, "tiers.disk.below=gpu")
OWN = (*SHARED, "tiers.gpu.states=9states", "tiers.cpu.states=12states")


def plan_of(command: str, *overrides: str) -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=[*SMALL, *overrides, "output=unused"])
    return build_run(cfg, command=command, overrides=overrides)


def requests_of(plan: Plan) -> list[Request]:
    requests = plan.trace.load(plan.page_tokens).requests
    for request in requests:
        request.priority = request.index % 3
        request.retention = (RetentionRange(0, request.prompt_tokens, 30 + request.index % 3, 5.0),)
    return requests


@pytest.mark.parametrize("room", [SHARED, OWN, (*SHARED, *DISK, "prefetch=threshold"), (*SHARED, *STRAIGHT), (*OWN, *STRAIGHT)])
@pytest.mark.parametrize("checkpoint", ["every_page", "branch"])
def test_simulated_requests_all_end(room: tuple[str, ...], checkpoint: str) -> None:
    placement = "write_back" if (len(room) + len(checkpoint)) % 2 else "write_through"
    plan = plan_of("simulate", *room, f"checkpoint={checkpoint}", f"placement={placement}", "rules.cache_output=true")
    result = simulate(plan, requests_of(plan))
    served = result.status == 0
    assert served.sum() > len(served) / 2
    assert not np.isnan(result.e2e_s[served]).any()
    assert result.known_pages is not None and len(result.known_pages) == len(served)
    assert (result.hit_pages.sum(axis=1) <= result.known_pages).all()


EVICTIONS = sorted(path.stem for path in (CONF / "eviction").glob("*.yaml") if path.stem != "belady")


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_every_eviction_policy_takes_states_beside_pages(eviction: str) -> None:
    plan = plan_of("replay", *SHARED, "checkpoint=last", f"eviction={eviction}", "rules.cache_output=true")
    requests = requests_of(plan)
    tiers, edges = build_tiers(plan, requests)
    cache = build_cache(plan, build_setup(plan, (tiers, edges), requests))
    server, hits = CacheServer(cache, Prefetching(cache, NoPrefetch(), Offer)), 0
    for request, pages in zip(requests, plan.replay.pages_taken(requests, plan.page_tokens), strict=True):
        held = server.serve(request, pages, request.arrival_s)
        if held is not None:
            hits += sum(held.hits)
            server.finish_request(held)
        cache.check()
    states = cache.describe_checkpoints()
    assert hits > 0 and states["evicted"] > 0 and states["used"] > 0
    for upper, lower in pairwise(tiers):
        assert upper.evicted_pages > 0 and lower.inserted_pages > 0


@pytest.mark.parametrize("room", [(*SHARED, *DISK), (*SHARED, *DISK, "prefetch=threshold")])
def test_what_a_disk_fails_to_read_is_no_hit(room: tuple[str, ...]) -> None:
    """Every page fails with a probability of one in fifty, states' pages too."""
    faults = "hardware.rank_faults=[{rank: 0, link: disk-cpu, share: 0.02}]"
    settings = (*room, "tiers.cpu.capacity=100pages", "checkpoint=last", "engine.overlap=none")
    whole, failing = (plan_of("simulate", *settings, *some) for some in ((), (faults,)))
    hits = [simulate(plan, requests_of(plan)) for plan in (whole, failing)]
    assert (hits[1].hit_pages >= 0).all() and (hits[1].status == 0).sum() > 0
    assert hits[1].hit_pages[:, 2].sum() < hits[0].hit_pages[:, 2].sum()
    assert hits[1].known_pages is not None
    assert (hits[1].hit_pages.sum(axis=1)[hits[1].status == 0] <= hits[1].known_pages[hits[1].status == 0]).all()
