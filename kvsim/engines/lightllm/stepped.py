"""LightLLM's caches as an engine in time calls them: answers end before their pages can be found, and copies take time."""

from collections import Counter
from math import inf
from typing import Any, cast

from kvsim.core.lease import FINISHED, FIRST, LOOK, LOST, Lease
from kvsim.core.plain_lower import PlainLower, copy_of_pages
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.serving import CLAIMED, NO_LOAD, Claim, Growth, Load, ServedCache
from kvsim.core.tier import Edge, Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.engines.lightllm.cache import LightLLMCache, RunningLease
from kvsim.pages.extents import Extent, count_pages, split_extents


class SteppedRadix(ServedCache):
    """The caches of LightLLM, call by call. Everything that they decide is that of a replay (``LightLLMCache``).

    arrives   looks up on the CPU; what is found is held until it has been loaded
    match     looks up on the GPU, and cuts nothing
    admit     takes the pages of prompt and answer; until then, what the GPU has can be evicted
    load      copies the CPU pages found that end beyond the GPU's hit, as a whole
    fork      enters the prompt into the tree, for several answers to it, and divides the pages of these
    finish    begins to store the prompt on the CPU. Once it has been copied, prompt and answer enter the tree, and the request
              gives back its pages; until then it counts as running
    reset     drops everything, that of the CPU too: its memory belongs to the engine
    """

    def __init__(self, tiers: list[Tier], edges: list[Edge], rules: Rules, page_tokens: int) -> None:
        self.takes_pages_late, self.pauses_after_retraction = False, True
        self.finds_by_pages = True
        self.nodes = LightLLMCache(tiers, edges, rules, page_tokens)
        self.residency = self.nodes.residency
        self.nodes.counts = self.residency.counts
        self.watches = []
        self.gpu = tiers[0]
        self.tiers = tiers
        self.page_tokens = page_tokens
        self.leases = {}
        self.copies: dict[Transfer, RunningLease] = {}
        """Loads and stores under way, and whose they are."""
        self.lower = PageLower(self) if edges else None
        self._edges = edges

    # --- look-ups ------------------------------------------------------------------------------------------------------------

    def arrives(self, request: Request, now: float) -> None:
        """Look a request up on the CPU, unless it is to be rejected."""
        if self._needed(request) < self.gpu.pool.capacity:
            self.nodes.look_up(request)

    def _needed(self, request: Request) -> int:
        """Return how many pages a request takes, its answer included."""
        return self.nodes.needed_pages(request, request.pages_of_sample(self.page_tokens, hold_output=True))

    def match(self, request: Request, gpu: Tier | None = None, why: int = FIRST, tokens: int = 0) -> Lease:
        nodes, tree = self.nodes, self.tree
        lease = RunningLease(request, self.gpu, tree.root, why)
        path, part, agreed, rest = tree.walk(tree.root, nodes.path_of(request), nodes.usable_pages(request))
        hit_pages = agreed + (path[-1].depth + path[-1].pages if path else 0)
        lease.set_match(path if part is None else [*path, part], hit_pages, rest)
        if loaded := nodes.pages_beyond(request, hit_pages):
            lease.below, lease.leading_pages = [0, loaded], loaded
        if why != LOOK:
            for watch in self.watches:
                watch.matched(lease)
        return lease

    def looked_up(self, request: Request) -> tuple[Extent, ...]:
        return self.nodes.path_of(request)

    # --- admission and pages -------------------------------------------------------------------------------------------------

    def kept_pages(self, lease: Lease) -> int:
        """Return what a request must leave free: it has to need less than the GPU has."""
        return self._needed(lease.request) + 1 - lease.request.pages_in_all(self.page_tokens)

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0, in_all: int = 0) -> bool:
        """Admit a request if it and all that run fit with their whole answers. All that it has found on the CPU is loaded."""
        needed = self._needed(lease.request)
        has_room = self.nodes.has_room(needed)
        if has_room:
            self.nodes.admit(cast(RunningLease, lease), needed, now)
            self.leases[lease] = None
        if self.watches:
            self._tell_admission(lease, needed, lease.loaded_pages, is_admitted=has_room)
        return has_room

    def claim(self, lease: Lease, now: float) -> Claim:
        """Do nothing: nothing was reserved."""
        return CLAIMED

    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        """Do nothing: requests have the pages of their answers."""
        return Growth(True, NO_TRANSFERS)

    def begin_load(self, lease: RunningLease) -> Load:
        """Start to copy what a request loads, in whole CPU pages."""
        nodes = self.nodes
        if not lease.loaded_pages:
            nodes.end_load(lease)
            return NO_LOAD
        store, unit = nodes.store, self.tiers[1].unit_pages
        assert store is not None
        loaded = split_extents(lease.found, lease.gpu_pages // unit)[1]
        lease.load = copy_of_pages(
            self._edges[0],
            count_pages(loaded) * unit,
            self.tree,
            goes_down=False,
            upper_slots=self.gpu.pool.split(lease.slots, lease.loaded_pages)[0],
            lower_slots=store.slots_of(loaded),
        )
        self.copies[lease.load] = lease
        return Load([lease.load], [lease.load], 0)

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """Do nothing: prompts enter the tree with their answers."""
        return NO_TRANSFERS

    def fork(self, lease: Lease, now: float) -> list[Lease]:
        leases: list[Lease] = []
        for other in self.nodes.fork(cast(RunningLease, lease), now):
            self.leases[other] = None
            leases.append(other)
            if self.watches:
                self._tell_admission(other, other.pages, 0, is_admitted=True)
        return leases

    # --- the end of a request ------------------------------------------------------------------------------------------------

    def finish(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        held = cast(RunningLease, lease)
        del self.leases[lease]
        self.nodes.begin_store(held)
        transfers = NO_TRANSFERS
        if held.stored.copied:
            store = self._store(held)
            self.copies[store] = held
            transfers = [store]
        else:
            self.nodes.end_store(held)
            self.nodes.end_request(held, now)
        for watch in self.watches:
            watch.released(lease, FINISHED)
        return transfers

    def _store(self, lease: RunningLease) -> Transfer:
        """Return the copy of the pages of a prompt that its CPU pages lack."""
        store, pool, unit = self.nodes.store, self.gpu.pool, self.tiers[1].unit_pages
        assert store is not None
        copied, rest = pool.split(self._slots_of(lease), 0)
        for extent in lease.stored.held:
            pages, rest = pool.split(rest, extent[1] * unit)
            if extent in lease.stored.copied:
                copied = pool.join(copied, pages)
        transfer = copy_of_pages(
            self._edges[0],
            count_pages(lease.stored.copied) * unit,
            self.tree,
            goes_down=True,
            upper_slots=copied,
            lower_slots=store.slots_of(lease.stored.copied),
        )
        transfer.request = lease.request
        return transfer

    def _slots_of(self, lease: RunningLease) -> Any:
        """Return the slots on the GPU of all pages of a request, in order."""
        slots, node = lease.slots, lease.node
        while node.parent is not None:
            slots = self.gpu.pool.join(node.slots[self.gpu.index], slots)
            node = node.parent
        return slots

    def ended(self, copy: Transfer, now: float) -> None:
        """Let the end of a load or a store take effect."""
        lease = self.copies.pop(copy)
        if copy.goes_down:
            self.nodes.end_store(lease, is_copied=copy.arrived_pages == copy.pages)
            self.nodes.end_request(lease, now)
        else:
            self.nodes.end_load(lease)

    def release(self, lease: Lease, why: str = LOST, now: float = -inf, tokens: int = 0) -> list[Transfer]:
        held = cast(RunningLease, lease)
        del self.leases[lease]
        self.nodes.give_up(held)
        for watch in self.watches:
            watch.released(lease, why)
        return NO_TRANSFERS

    def reset(self, gpu: Tier | None = None, now: float = -inf) -> None:
        self.nodes.reset()
        for watch in self.watches:
            watch.emptied(gpu)

    def held_pages(self, name: str) -> tuple[int, int] | None:
        return None

    def check(self) -> None:
        gpu, nodes = self.gpu, self.nodes
        stores = [lease for copy, lease in self.copies.items() if copy.goes_down]
        loads = [lease for copy, lease in self.copies.items() if not copy.goes_down]
        holders = [*[cast(RunningLease, lease) for lease in self.leases], *stores]
        assert nodes.running_pages == sum([lease.pages for lease in holders]), "pages of running requests are counted wrong"
        tree = list(self.tree.root.descendants())
        held = sum([node.pages for node in tree]) + sum([gpu.pool.count(lease.slots) for lease in holders])
        held += sum([node.pages for node in self.residency.doomed])
        assert gpu.pool.free + held == gpu.pool.capacity, "pages are lost"
        pinned = Counter([node for lease in holders for node in lease.node.path()])
        for node in tree:
            assert node.pins[gpu.index] == pinned[node], f"{node}: pins"
        loose = sum([node.pages for node in tree if not node.pins[gpu.index]])
        assert loose == gpu.evictable_pages, "evictable pages are counted wrong"
        if nodes.store is not None:
            now = [lease for lease in [*loads, *stores] if lease.epoch == self.residency.epoch]
            nodes.store.check([*nodes.waiting.values(), *[lease.found for lease in now], *[lease.stored.held for lease in now]])


class PageLower(PlainLower):
    """The copies between LightLLM's GPU and CPU caches."""

    def __init__(self, cache: SteppedRadix) -> None:
        super().__init__(cache.gpu, cache.watches)
        self._cache = cache

    def load(self, lease: Lease, now: float, short: Transfer | None = None) -> Load:
        assert short is None, "a load that its engine survives brings everything"
        return self._cache.begin_load(cast(RunningLease, lease))

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        super().abort(transfer, pages_arrived, now)
        self._cache.ended(transfer, now)
        return NO_TRANSFERS
