"""Anything in any order: a Hypothesis state machine that hunts for a state in which an invariant does not hold.

Tiers of a few pages, so that there is never enough room. Beside the cache's own ``check`` after every step, the machine
moves bytes: it writes a page's id into the slots in which it is computed, copies slots as transfers do, and compares what
lies in the slots of every usable page with the page's id. KVSIM_MACHINE_STEPS=20000 runs as many steps.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from kvsim.core.lease import Lease
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.tier import CPU
from kvsim.core.transfer import FetchPin, Transfer
from kvsim.core.transfers import is_arriving
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, READY, Node
from kvsim.pages.extents import count_pages
from kvsim.policies.eviction.arc import ARC
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.lfu import LFU
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.mq import MultiQueue
from kvsim.policies.eviction.queues import QueueEviction
from kvsim.policies.eviction.random import Random
from kvsim.policies.eviction.s3_fifo import S3FIFO
from kvsim.policies.eviction.sieve import Sieve
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.eviction.two_q import TwoQ
from kvsim.policies.eviction.w_tinylfu import WTinyLFU
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.placement.cost_aware import CostAware
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.store_threshold import StoreThreshold
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from kvsim.substrate.hardware.disk.restore import restore
from tests.core.knowing import Knowing
from tests.core.small import SmallCache, Watched, make_tiers
from tests.workloads import make_request, pages_of

QUEUES: list[Callable[[], Any]] = [
    ARC,
    TwoQ,
    S3FIFO,
    Sieve,
    lambda: MultiQueue(queues=3, life_time=12),
    lambda: WTinyLFU(window=0.3),
    lambda: SegmentedLRU(segments="sized", protected_fraction=0.5),
]
EVICTIONS: list[Callable[[], Any]] = [LRU, FIFO, LFU, SegmentedLRU, Random, Knowing]
PLACEMENTS: list[Callable[[], Any]] = [
    WriteThrough,
    WriteThroughSelective,
    WriteBack,
    Exclusive,
    partial(WriteBack, watermark=0.5),
    partial(StoreThreshold, k=2, tracker_pages=9),
    partial(ByLength, min_tokens=3, disk_min_tokens=5),
    partial(CostAware, margin=0.1),
]
STEPS_AT_ONCE = 100
STEPS = int(os.environ.get("KVSIM_MACHINE_STEPS", 3_000))

MOST_REQUESTS = 4
PICK = st.integers(0, 1_000)
PATHS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=2, max_size=7).map(tuple)

ADMITTED, CLAIMED, LOADED, COMPUTED = range(4)

SHAPES: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "one": [("gpu", ())],
    "two": [("gpu", ()), ("cpu", (0,))],
    "chain": [("gpu", ()), ("cpu", (0,)), ("disk", (1,))],
    "disk straight below": [("gpu", ()), ("disk", (0,))],
    "disk beside": [("gpu", ()), ("cpu", (0,)), ("disk", (0,))],
    "a fourth tier below the disk": [("gpu", ()), ("cpu", (0,)), ("disk", (1,)), ("remote", (1, 2))],
    "a fourth tier beside the disk": [("gpu", ()), ("cpu", (0,)), ("disk", (1,)), ("remote", (1,))],
    "a fourth tier for two hosts": [
        *[("gpu", ())] * 2,
        ("cpu", (0,)),
        ("cpu", (1,)),
        ("disk", (2,)),
        ("disk", (3,)),
        ("remote", (2, 3, 4, 5)),
    ],
    "disk below both": [("gpu", ()), ("cpu", (0,)), ("disk", (0, 1))],
    "two gpus": [("gpu", ()), ("gpu", ()), ("cpu", (0, 1))],
    "two gpus and a disk": [("gpu", ()), ("gpu", ()), ("cpu", (0, 1)), ("disk", (2,))],
    "two hosts over a disk": [("gpu", ()), ("gpu", ()), ("cpu", (0,)), ("cpu", (1,)), ("disk", (2, 3))],
    "two hosts of two gpus over a disk": [
        *[("gpu", ())] * 4,
        ("cpu", (0, 1)),
        ("cpu", (2, 3)),
        ("disk", (4, 5)),
    ],
}
"""What each tier is, and the tiers directly above it."""


class Running:
    """A request between admission and release."""

    def __init__(self, lease: Lease, pages: int) -> None:
        self.lease = lease
        self.pages = pages
        """Pages that it should have on the GPU, or be owed."""
        self.stage = ADMITTED


class Flight:
    """What a transfer copies: for each page its id, its slot in the source and its slot in the target.

    A node that is given up before the transfer begins has no slots in the target; -1 stands for its pages' slots.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.pages = ids_of(transfer.nodes)
        self.reads = self.slots(transfer.nodes, transfer.source.index)
        self.writes = self.slots(transfer.nodes, transfer.target.index)

    @staticmethod
    def slots(nodes: list[Node], tier: int) -> np.ndarray:
        nothing = np.empty(0, dtype=np.int64)
        slots = [np.full(node.pages, -1) if DOOMED in node.state else node.slots[tier] for node in nodes]
        return np.concatenate([nothing, *slots])


def ids_of(nodes: list[Node]) -> np.ndarray:
    """The ids of the nodes' pages."""
    return np.array([page for node in nodes for page in pages_of(node.runs)], dtype=np.int64)


class CacheMachine(RuleBasedStateMachine):
    """Uses a cache as an engine may, but without sense."""

    steps = 0

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        draw = data.draw
        shape = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
        capacities = [draw(st.integers(1, 8)) for _ in shape]
        self.page_tokens = draw(st.integers(1, 2))
        evictions = [draw(st.sampled_from(EVICTIONS + QUEUES))() for _ in capacities]
        placements = [draw(st.sampled_from(PLACEMENTS))() for _, above in shape for _ in above]
        tiers, edges = make_tiers(capacities, evictions, placements, slots=True, page_tokens=self.page_tokens, shape=shape)
        self.gpus = [tier for tier in tiers if not tier.above]
        self.watched = [Watched() for _ in tiers]
        for tier, watched in zip(tiers, self.watched, strict=True):
            tier.watches.append(watched)
        self.recompute = draw(st.booleans())
        self.cache = SmallCache(tiers, edges, Rules(recompute_last_token=self.recompute), self.page_tokens)
        self.gap = draw(st.integers(2, 9))
        self.ids: dict[tuple[int, ...], int] = {}
        self.next_id = 0
        self.now = 0.0
        self.requests: list[Running] = []
        self.transfers: dict[Transfer, None] = {}
        self.flights: dict[Transfer, Flight] = {}
        self.fetch_pins: list[FetchPin] = []
        self.looked: dict[tuple[int, int], tuple[Request, tuple[int, Any]]] = {}
        """By a prompt's last page and GPU: a request, the cache's version, and what the cache had of the prompt then."""
        self.bytes = [np.full(capacity, -1, dtype=np.int64) for capacity in capacities]
        if len(capacities) > 1:
            self.restore(draw(st.lists(PATHS, max_size=3)), draw(st.integers(0, 3)))

    def restore(self, paths: list[tuple[int, ...]], lost: int) -> None:
        """Begin with pages of these prompts in the lowest tier, except every fourth, and with others that no prompt uses."""
        requests, lowest = [self.request(path) for path in paths], self.bytes[-1]
        pages = dict.fromkeys(page for request in requests for page in ids_of_extents(request.runs).tolist())
        left = [page for page in pages if page % 4 != lost][: len(lowest) - 1]
        recovered = {b"%d" % page: slot for slot, page in enumerate([*left, 10**6])}
        lowest[: len(left)] = left
        restored = restore(self.cache.core, requests, lambda page: b"%d" % page, recovered, self.now)
        there = [np.isin(ids_of_extents(request.runs), left).tolist() for request in requests]
        first = {page for request, here in zip(requests, there, strict=True) for page in first_pages(request, here)}
        assert restored == len(first) == self.cache.tiers[-1].pool.capacity - self.cache.tiers[-1].pool.free

    # --- what the rules share ---

    def time(self) -> float:
        """Later than before, or not."""
        CacheMachine.steps += 1
        self.now += CacheMachine.steps % 2
        return self.now

    def page_ids(self, path: tuple[int, ...]) -> list[int]:
        """Chained ids; every ``gap``-th new one is skipped, so that paths have several extents."""
        for end in range(1, len(path) + 1):
            if path[:end] not in self.ids:
                self.next_id += 2 if (self.next_id + 1) % self.gap == 0 else 1
                self.ids[path[:end]] = self.next_id
        return [self.ids[path[:end]] for end in range(1, len(path) + 1)]

    def request(self, path: tuple[int, ...]) -> Request:
        ids = self.page_ids(path)
        return make_request(ids, prompt_tokens=len(ids) * self.page_tokens)

    def learn(self, transfers: list[Transfer]) -> None:
        """Transfers are known from what the calls return, from nothing else."""
        self.transfers.update(dict.fromkeys(transfers))
        for transfer in transfers:
            if transfer.begun and not transfer.done:
                self.take_off(transfer)

    def take_off(self, transfer: Transfer) -> None:
        if transfer not in self.flights:
            self.flights[transfer] = Flight(transfer)

    def snapshot(self) -> list[Any]:
        copies = {
            (page, tier.index): state
            for node in self.cache.tree.root.descendants()
            for page in ids_of([node]).tolist()
            for tier, state in zip(self.cache.tiers, node.state, strict=True)
        }
        sums = [(tier.pool.free, tier.evictable_pages, tier.leaving_pages, tier.reserved_pages) for tier in self.cache.tiers]
        return [copies, sums, len(self.cache.leases), len(self.cache.in_flight)]

    # --- requests ---

    @rule(path=PATHS, extra=st.integers(0, 3), load=st.integers(0, 8), gpu=PICK)
    @precondition(lambda self: len(self.requests) < MOST_REQUESTS)
    def admit(self, path: tuple[int, ...], extra: int, load: int, gpu: int) -> None:
        self.admit_request(self.request(path), extra, load, gpu)

    @rule(path=PATHS, extra=st.integers(0, 3), gpu=PICK)
    def serve(self, path: tuple[int, ...], extra: int, gpu: int) -> None:
        """A request that is admitted and computed without delay, as far as that can be."""
        while not self.admit_request(self.request(path), extra, 8, gpu):
            if not self.requests:
                return
            self.drop(self.requests[0])
        self.hurry(self.requests[-1])

    @rule(pick=PICK, more=st.lists(st.integers(0, 2), max_size=2), extra=st.integers(0, 2), hurry=st.booleans())
    @precondition(lambda self: len(self.requests) < MOST_REQUESTS)
    def admit_what_is_there(self, pick: int, more: list[int], extra: int, hurry: bool) -> None:
        """A prompt that some tier has, leaving or arriving pages first."""
        nodes = list(self.cache.tree.root.descendants())
        if not nodes:
            return
        moving = [node for node in nodes if node.transfers]
        node = (moving or nodes)[pick % len(moving or nodes)]
        if self.admit_request(self.request((*self.path_to(node, pick), *more)), extra, 8, pick) and hurry:
            self.hurry(self.requests[-1])

    def admit_request(self, request: Request, extra: int, load: int, pick: int = 0) -> bool:
        cache = self.cache
        gpu = self.gpus[pick % len(self.gpus)]
        before = self.snapshot()
        found = cache.found(request, gpu)
        assert self.snapshot() == before
        if request.runs:
            self.looked[request.runs[-1][0], gpu.index] = request, (cache.version, found)
        lease = cache.match(request, gpu)
        assert self.snapshot() == before
        assert found == (lease.gpu_pages, lease.leading_pages)
        assert lease.gpu_pages + lease.lower_pages <= min(request.prompt_pages, self.usable_pages(request))
        pages = request.prompt_pages + extra
        if cache.admit(lease, pages, self.time(), min(load, lease.lower_pages)):
            self.requests.append(Running(lease, pages))
            self.learn(lease.waits)
            return True
        assert self.snapshot() == before
        assert pages > gpu.pool.capacity or self.requests or cache.in_flight, "refused by an idle cache"
        return False

    def usable_pages(self, request: Request) -> int:
        return (request.prompt_tokens - 1) // self.page_tokens if self.recompute else request.prompt_pages

    @rule(pick=PICK)
    @precondition(lambda self: self.requests)
    def advance(self, pick: int) -> None:
        """Take a request one stage on."""
        self.take_on(self.requests[pick % len(self.requests)])

    @rule(pick=PICK, pages=st.integers(0, 7), more=st.integers(0, 1))
    @precondition(lambda self: any(running.stage == LOADED for running in self.requests))
    def compute_chunk(self, pick: int, pages: int, more: int) -> None:
        """A chunk that ends after that many pages more than the pinned path has, and perhaps a token."""
        loaded = [running for running in self.requests if running.stage == LOADED]
        running = loaded[pick % len(loaded)]
        lease, epoch = running.lease, self.cache.residency.epoch
        before, left = lease.node.depth + lease.node.pages, ids_of_extents(lease.rest)
        if self.blocking(running) or pages >= len(left):
            return
        had_gaps = any(node.state[lease.gpu.index] == INCOMING for node in self.path(lease.node))
        if lease.epoch == epoch and not had_gaps:
            self.bytes[lease.gpu.index][lease.slots[:pages]] = left[:pages]
        self.cache.end_chunk(lease, (before + pages) * self.page_tokens + more * (self.page_tokens - 1), self.time())
        inserted = lease.node.depth + lease.node.pages - before
        assert inserted == (0 if had_gaps or lease.epoch != epoch else pages)
        assert ids_of_extents(lease.rest).tolist() == left[inserted:].tolist()

    @rule(pick=PICK, pages=st.integers(1, 3))
    @precondition(lambda self: any(running.stage == COMPUTED for running in self.requests))
    def grow(self, pick: int, pages: int) -> None:
        computed = [running for running in self.requests if running.stage == COMPUTED]
        running = computed[pick % len(computed)]
        before = self.snapshot()
        growth = self.cache.grow([(running.lease, pages)], self.time())
        if not growth.has_room:
            assert self.snapshot() == before
        else:
            running.pages += pages
            self.learn(growth.transfers)

    @rule(pick=PICK)
    @precondition(lambda self: self.requests)
    def release(self, pick: int) -> None:
        self.drop(self.requests[pick % len(self.requests)])

    @rule()
    @precondition(lambda self: self.requests)
    def release_oldest(self) -> None:
        self.drop(self.requests[0])

    def take_on(self, running: Running) -> None:
        if running.stage == ADMITTED or running.lease.reserved_pages:
            self.claim(running)
        elif running.stage == CLAIMED:
            self.load(running)
        elif running.stage == LOADED:
            self.insert(running)

    def hurry(self, running: Running) -> None:
        """Take a request to the end of its prompt; of the transfers, only those that it waits for are made."""
        while running in self.requests and running.stage < COMPUTED:
            self.take_on(running)
            for transfer in self.blocking(running):
                self.see_through_one(transfer)

    def blocking(self, running: Running) -> list[Transfer]:
        """What a request waits for: write-downs that free its slots, then the loads of its pages."""
        gpu = running.lease.gpu
        if running.stage == ADMITTED:
            return [transfer for transfer in self.transfers if transfer.source is gpu]
        path = set(self.path(running.lease.node))
        return [transfer for transfer in self.transfers if transfer.target is gpu and path & set(transfer.nodes)]

    def claim(self, running: Running) -> None:
        is_waiting, known = self.cache.is_waiting(running.lease), set(self.transfers)
        claim = self.cache.claim(running.lease, self.time())
        assert not is_waiting or claim.waits and known.issuperset(claim.waits)
        if claim.is_lost:
            self.drop(running)
        elif claim.waits:
            assert not any(transfer.done for transfer in claim.waits)
            self.learn(claim.waits)
        else:
            assert not running.lease.reserved_pages
            running.stage = max(running.stage, CLAIMED)

    def load(self, running: Running) -> None:
        running.stage = LOADED
        load = self.cache.load(running.lease, self.time())
        transfers, loads = load.transfers, load.loads
        self.learn(transfers)
        assert sum(load.pages for load in loads) == running.lease.loaded_pages

    def insert(self, running: Running) -> None:
        """A prompt is computed when everything that it reuses has landed, or has failed to."""
        if self.blocking(running):
            return
        lease = running.lease
        same_tree = lease.epoch == self.cache.residency.epoch
        if same_tree:
            self.compute(lease)
        running.stage = COMPUTED
        self.learn(self.cache.insert(lease, self.time()))
        if same_tree:
            path = self.path(lease.node)
            assert ids_of(path).tolist() == ids_of_extents(lease.request.runs).tolist()
            assert all(node.state[lease.gpu.index] == READY or is_arriving(node, lease.gpu) for node in path)

    def compute(self, lease: Lease) -> None:
        """Write the bytes of the pages after the pinned path, and of those in it that no load brought."""
        rest = ids_of_extents(lease.rest)
        gpu = lease.gpu.index
        self.bytes[gpu][lease.slots[: len(rest)]] = rest
        for node in self.path(lease.node):
            if node.state[gpu] == INCOMING:
                self.bytes[gpu][node.slots[gpu]] = ids_of([node])

    def drop(self, running: Running) -> None:
        self.requests.remove(running)
        if running.stage == COMPUTED:
            self.learn(self.cache.finish(running.lease))
        else:
            self.cache.release(running.lease)

    @rule(pick=PICK)
    @precondition(lambda self: self.only_on_disk())
    def fetch(self, pick: int) -> None:
        """A prefetch for a prompt of which only the disk has some."""
        nodes = self.only_on_disk()
        gpu = self.gpus[pick % len(self.gpus)]
        lease = self.cache.match(self.request(self.path_to(nodes[pick % len(nodes)], pick)), gpu)
        if lease.far_pages and self.cache.lower.views[gpu.index].fetches_to is not None:
            pages = 1 + pick % lease.far_pages
            before = self.snapshot()
            room = self.cache.lower.views[gpu.index].room_to_fetch(lease)
            transfers, fetch, pin = self.cache.fetch(lease, pages, self.time())
            self.learn(transfers)
            if fetch is not None:
                assert fetch.pages <= min(pages, room)
                assert pin is not None
                if pick % 3:
                    self.fetch_pins.append(pin)
                else:
                    pin.let_go()
            else:
                assert self.snapshot() == before

    @rule(pick=PICK)
    @precondition(lambda self: self.fetch_pins)
    def let_go(self, pick: int) -> None:
        """The turn of a request that waited for a fetch."""
        self.fetch_pins.pop(pick % len(self.fetch_pins)).let_go()

    def only_on_disk(self) -> list[Node]:
        """The nodes that no GPU, and no tier next to one, has or is receiving."""
        near = [tier.index for tier in self.cache.tiers if tier.level <= CPU]
        return [node for node in self.cache.tree.root.descendants() if all(node.state[index] == ABSENT for index in near)]

    def path_to(self, node: Node, pick: int) -> tuple[int, ...]:
        """The path that ends with one of the node's pages."""
        last = ids_of([node])[pick % node.pages]
        return next(path for path, page in self.ids.items() if page == last)

    # --- transfers ---

    @rule(pick=PICK)
    @precondition(lambda self: self.transfers)
    def step_transfer(self, pick: int) -> None:
        """Begin a transfer, or finish it if that is done."""
        transfer = self.some_transfer(pick)
        if transfer.begun:
            self.finish(transfer)
        else:
            self.begin(transfer)

    @rule(pick=PICK)
    @precondition(lambda self: self.transfers)
    def see_through(self, pick: int) -> None:
        self.see_through_one(self.some_transfer(pick))

    @rule(pick=PICK, arrived=st.integers(0, 8))
    @precondition(lambda self: self.transfers)
    def abort(self, pick: int, arrived: int) -> None:
        transfer = self.some_transfer(pick)
        self.abort_one(transfer, min(arrived, transfer.pages))

    def abort_one(self, transfer: Transfer, arrived: int) -> None:
        self.land(transfer, arrived if transfer.begun else 0)
        self.learn(self.cache.abort(transfer, arrived, self.time()))
        assert transfer.done
        assert transfer.arrived_pages <= arrived

    @rule(pick=PICK, arrived=st.integers(0, 8))
    @precondition(lambda self: self.reads())
    def meet_fault(self, pick: int, arrived: int) -> None:
        """A read finds a page that cannot be read: it is not offered again, unless somebody keeps it in place."""
        transfer = self.reads()[pick % len(self.reads())]
        while waits := self.begin(transfer):
            self.see_through_one(waits[-1])
        if not transfer.nodes:
            return
        arrived %= transfer.pages
        bad, source = ids_of(transfer.nodes)[arrived], transfer.source.index
        transfer.has_fault = True
        self.abort_one(transfer, arrived)
        for node in self.cache.tree.root.descendants():
            if node.state[source] and bad in ids_of([node]):
                assert node.pins[source], "it can be read again"

    def reads(self) -> list[Transfer]:
        """Transfers from a lower tier, and first of all from the lowest."""
        reads = [transfer for transfer in self.transfers if not transfer.goes_down]
        return [transfer for transfer in reads if transfer.source.level > CPU] or reads

    def some_transfer(self, pick: int) -> Transfer:
        return list(self.transfers)[pick % len(self.transfers)]

    def see_through_one(self, transfer: Transfer) -> None:
        """Begin and finish a transfer, and whatever it waits for."""
        while not transfer.done:
            first = transfer
            while waits := self.begin(first):
                first = waits[-1]
            self.finish(first)

    def begin(self, transfer: Transfer) -> list[Transfer]:
        waits = self.cache.begin(transfer, self.time()).waits
        assert bool(waits) != transfer.begun
        assert not any(wait.done for wait in waits)
        self.learn(waits)
        if transfer.begun:
            self.take_off(transfer)
        return waits

    def finish(self, transfer: Transfer) -> None:
        pages = transfer.pages
        self.land(transfer, pages)
        self.learn(self.cache.land(transfer, self.time()))
        assert transfer.done
        assert transfer.arrived_pages == pages

    def land(self, transfer: Transfer, arrived: int) -> None:
        """Copy bytes as a substrate would have."""
        del self.transfers[transfer]
        flight = self.flights.pop(transfer, None)
        if flight is None:
            return
        source, target = self.bytes[transfer.source.index], self.bytes[transfer.target.index]
        is_doomed = np.repeat([DOOMED in node.state for node in transfer.nodes], [node.pages for node in transfer.nodes])
        assert len(is_doomed) == len(flight.pages)
        kept = ~is_doomed.astype(bool)
        assert (source[flight.reads[kept]] == flight.pages[kept]).all(), "the source changed while it was read"
        kept[arrived:] = False
        target[flight.writes[kept]] = flight.pages[kept]

    @rule(sure=st.integers(0, 40))
    def reset(self, sure: int) -> None:
        if sure == 29:
            self.cache.reset()
            assert not any(self.cache.tree.root.descendants())

    # --- what always holds ---

    @staticmethod
    def path(node: Node) -> list[Node]:
        """From below the root down to ``node``."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @invariant()
    def counts_add_up(self) -> None:
        self.cache.check()
        assert set(self.cache.in_flight) <= set(self.transfers), "a transfer was made, but not handed out"

    @invariant()
    def watched_pages_are_those_that_are_ready(self) -> None:
        nodes = list(self.cache.tree.root.descendants())
        for tier, watched in zip(self.cache.tiers, self.watched, strict=True):
            watched.check(tier, nodes)

    @invariant()
    def the_same_version_has_the_same_of_every_prompt(self) -> None:
        for (last, index), (request, (version, found)) in list(self.looked.items()):
            now_found = self.cache.found(request, self.cache.tiers[index])
            assert now_found == found or self.cache.version != version
            self.looked[last, index] = request, (self.cache.version, now_found)

    @invariant()
    def queues_hold_what_is_there(self) -> None:
        for tier in self.cache.tiers:
            policy = tier.eviction
            if isinstance(policy, QueueEviction):
                nodes = [node for node in self.cache.tree.root.descendants() if node.state[tier.index] == READY]
                assert policy.pages() == {node: node.pages for node in nodes}
                assert sum(policy.sizes) == sum(node.pages for node in nodes)
                leaves = {node for node in nodes if node.is_evictable(tier.index)}
                assert leaves <= {leaf.node for queue in policy.leaves for leaf in queue.all()}
                assert policy.ghosts.pages <= 10 * policy.capacity_pages

    @invariant()
    def policies_are_told_what_is_evictable(self) -> None:
        nodes = list(self.cache.tree.root.descendants())
        for tier in self.cache.tiers:
            if isinstance(tier.eviction, Knowing):
                tier.eviction.check(tier, nodes)

    @invariant()
    def usable_pages_hold_their_own_bytes(self) -> None:
        valid = [np.zeros(len(some), dtype=bool) for some in self.bytes]
        for node in self.cache.tree.root.descendants():
            for tier, state in enumerate(node.state):
                if state in (READY, LEAVING):
                    assert (self.bytes[tier][node.slots[tier]] == ids_of([node])).all(), f"{node}: wrong bytes in tier {tier}"
                    valid[tier][node.slots[tier]] = True
        for some, is_valid in zip(self.bytes, valid, strict=True):
            some[~is_valid] = -1

    @invariant()
    def slots_of_transfers_have_no_other_owner(self) -> None:
        for transfer, flight in self.flights.items():
            for tier, slots in ((transfer.source, flight.reads), (transfer.target, flight.writes)):
                taken = [tier.pool.free_slots()]
                taken += [running.lease.slots for running in self.requests if running.lease.gpu is tier]
                assert not np.isin(slots[slots >= 0], np.concatenate(taken)).any()

    @invariant()
    def what_is_held_stays(self) -> None:
        for pin in self.fetch_pins:
            if pin.node is not None and not self.cache.residency.is_doomed(pin.node):
                assert all(node.pins[pin.tier.index] for node in self.path(pin.node))
                assert pin.node.state[pin.tier.index] in (INCOMING, READY)

    @invariant()
    def requests_have_what_they_asked_for(self) -> None:
        for running in self.requests:
            lease = running.lease
            assert lease.node.depth + lease.node.pages + len(lease.slots) + lease.reserved_pages == running.pages
            if lease.epoch == self.cache.residency.epoch:
                assert all(node.state[lease.gpu.index] in (READY, INCOMING) for node in self.path(lease.node))

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.land_all()
        while self.requests:
            self.drop(self.requests[0])
            self.cache.check()
        self.land_all()
        while self.fetch_pins:
            self.let_go(0)
            self.cache.check()
        self.nothing_is_left()
        for pick in range(len(self.gpus)):
            self.gpu_can_be_had_whole(pick)
        self.land_all()
        self.cache.reset()
        for tier in self.cache.tiers:
            assert tier.pool.free == tier.pool.capacity

    def land_all(self) -> None:
        """See all transfers through, and those that follow from them."""
        while self.transfers:
            self.see_through_one(self.some_transfer(0))
            self.counts_add_up()
            self.usable_pages_hold_their_own_bytes()

    def nothing_is_left(self) -> None:
        nodes = list(self.cache.tree.root.descendants())
        assert not self.cache.residency.doomed
        assert not self.cache.in_flight
        assert not any(any(node.pins) or node.transfers for node in nodes)
        for tier in self.cache.tiers:
            assert not tier.reserved_pages
            assert not tier.leaving_pages
            assert tier.pool.free + sum(node.pages for node in nodes if node.state[tier.index]) == tier.pool.capacity

    def gpu_can_be_had_whole(self, pick: int) -> None:
        """A request that needs a whole GPU is admitted and gets its slots."""
        pages = self.gpus[pick].pool.capacity
        assert self.admit_request(self.request((9,) * pages), 0, 0, pick)
        running = self.requests[0]
        while running.stage == ADMITTED:
            self.claim(running)
            assert self.requests, "an idle cache cannot keep its reservation"
            for transfer in self.blocking(running):
                self.see_through_one(transfer)
        assert len(running.lease.slots) == pages
        self.drop(running)


def first_pages(request: Request, here: list[bool]) -> list[int]:
    """The pages of a prompt before the first one that is not here."""
    return ids_of_extents(request.runs).tolist()[: [*here, False].index(False)]


def ids_of_extents(extents: Any) -> np.ndarray:
    """The page ids in extents."""
    assert count_pages(extents) >= 0
    return np.array(pages_of(extents), dtype=np.int64)


def test_no_order_of_events_breaks_an_invariant(request: pytest.FixtureRequest) -> None:
    CacheMachine.steps = 0
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=STEPS // STEPS_AT_ONCE,
            stateful_step_count=STEPS_AT_ONCE,
        ),
    )
