"""The cache: tracks where pages are stored and decides by its policies. It never waits and never moves a byte."""

from math import inf

from kvsim.core.check import Held, check
from kvsim.core.lease import AHEAD, FINISHED, FIRST, FOR_DECODE, HANDED_OVER, KNOWN, LOOK, LOST, NO_PATH, Lease
from kvsim.core.loading import LowerTiers, gaps_of
from kvsim.core.persistent import PersistentPrompts
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.rules import Rules
from kvsim.core.serving import CLAIMED, LOST_SLOTS, NO_ROOM, ROOM, Claim, Growth, ServedCache
from kvsim.core.tier import Edge, Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.core.transfers import is_gap
from kvsim.core.tree import ABSENT, INCOMING, LEAVING, Node
from kvsim.pages.extents import Extent, count_pages, split_extents


class Cache(ServedCache):
    """The tree, tiers, edges and policies behind one interface.

    Several GPU tiers may stand side by side: the ``gpu`` argument of ``match`` selects the one that serves a request.
    """

    def __init__(self, tiers: list[Tier], edges: list[Edge], rules: Rules, page_tokens: int) -> None:
        self.residency = Residency(tiers)
        self.transfers = LowerTiers(self.residency, edges)
        self.lower = self.transfers if edges else None
        self.tiers = tiers
        self.edges = edges
        self.rules = rules
        self.page_tokens = page_tokens
        self.gpu = tiers[0]
        self.leases = {}
        self.watches = self.transfers.watches
        self.persistent = PersistentPrompts(self.residency)
        self._eviction = self.transfers.eviction
        self._under_way = self.transfers.under_way
        self._write_down = self.transfers.write_down
        self._views = self.transfers.views
        self._recomputes_last_token = rules.recompute_last_token
        self._caches_chunks = rules.cache_chunks
        self._is_single = len(tiers) == 1
        self._levels = 1 + max([tier.level for tier in tiers])
        self.finds_by_pages = True

    # --- match and admit ---------------------------------------------------------------------------------------------------

    def match(self, request: Request, gpu: Tier | None = None, why: int = FIRST, tokens: int = 0) -> Lease:
        lease = Lease(request, gpu or self.gpu, self.residency.tree.root, why)
        pages = request.prompt_pages
        if self._recomputes_last_token:
            pages = request.lookup_pages(self.page_tokens)
        self.rematch(lease, pages)
        if request.images:
            self._end_outside_images(lease, lease.gpu_pages + lease.lower_pages)
            if why == LOOK:
                kept = request.pages_outside_images(lease.gpu_pages + lease.leading_pages, self.page_tokens)
                lease.gpu_pages = min(lease.gpu_pages, kept)
                lease.leading_pages = kept - lease.gpu_pages
        if self.watches and why not in (LOOK, AHEAD):
            for watch in self.watches:
                watch.matched(lease)
        return lease

    def rematch(self, lease: Lease, limit: int) -> None:
        """Match a lease that has not been admitted against the first ``limit`` pages of its prompt only."""
        tree = self.residency.tree
        path, part, agreed, rest = tree.walk(tree.root, lease.request.runs, limit)
        pages = 0
        if path:
            last = path[-1]
            pages = last.depth + last.pages
        if part is not None:
            path.append(part)
            pages += agreed
        lease.set_match(path, pages, rest)
        if not self._is_single:
            self._sort_by_tier(lease, pages)
        if part is not None and lease.why != LOOK and path and path[-1] is part:
            path[-1] = self.residency.cut(part, agreed)

    def _sort_by_tier(self, lease: Lease, pages: int) -> None:
        """Split the path, whose last node may have more than the ``pages`` that match, into pages on the GPU and pages below, and
        cut off what cannot be used now."""
        path, gpu = lease.path, lease.gpu
        index, at = gpu.index, 0
        for node in path:
            state = node.state[index]
            if state == ABSENT or state == INCOMING and is_gap(node, gpu):
                break
            at += 1
        if at == len(path):
            return
        lease.gpu_nodes = at
        lease.gpu_pages = path[at - 1].depth + path[at - 1].pages if at else 0
        view, is_near = self._views[index], True
        below = lease.below = [0] * self._levels
        for node in path[at:]:
            source = view.source_of(node)
            if source is None:
                break
            matching = min(node.pages, pages - node.depth)
            level = source.tier.level
            below[level] += matching
            if level > 1:
                is_near = False
            elif is_near:
                lease.leading_pages += matching
            at += 1
        if at < len(path):
            del path[at:]
            lease.rest = split_extents(lease.request.runs, lease.gpu_pages + lease.lower_pages)[1]

    def _end_outside_images(self, lease: Lease, pages: int) -> bool:
        """Cut a match back before an image that its first ``pages`` pages end inside. Returns whether there is one."""
        limit = lease.request.pages_outside_images(pages, self.page_tokens)
        if limit < pages:
            self.rematch(lease, limit)
        return limit < pages

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0, in_all: int = 0) -> bool:
        has_room = (in_all <= pages or self.can_admit(lease, in_all)) and self._admit(lease, pages, now, load_pages)
        if self.watches and lease.why != AHEAD:
            self._tell_admission(lease, pages, load_pages, is_admitted=has_room)
        return has_room

    def can_admit(self, lease: Lease, pages: int) -> bool:
        """Whether a request could get ``pages`` GPU pages in all now. The lease must be fresh from ``match``."""
        return self._can_evict(lease, pages - lease.gpu_pages - lease.gpu.spare_pages)

    def _admit(self, lease: Lease, pages: int, now: float, load_pages: int) -> bool:
        gpu, residency = lease.gpu, self.residency
        if lease.request.images and self._end_outside_images(lease, lease.gpu_pages + load_pages):
            load_pages = lease.lower_pages
        new_pages = pages - lease.gpu_pages
        missing = new_pages - gpu.spare_pages
        if missing > 0 and not self._can_evict(lease, missing):
            return False
        now = residency.tick(now)
        if lease.why != AHEAD:
            residency.notices.request(lease.request, now, gpu, on_gpu_only=lease.why == FOR_DECODE)
        self._pin(lease, load_pages, now)
        if missing > 0 or not self._is_single:
            self._eviction.make_room(gpu, new_pages, now)
            lease.waits = self._under_way.flush()
        self._reserve(lease, new_pages)
        self.leases[lease] = None
        return True

    def _can_evict(self, lease: Lease, missing: int) -> bool:
        """Whether ``missing`` pages can be evicted from the GPU while the request's path stays."""
        evictable = lease.gpu.evictable_pages
        return missing + lease.gpu_pages <= evictable or missing + self._idle_pages(lease) <= evictable

    def _idle_pages(self, lease: Lease) -> int:
        """Count the matched GPU pages that are evictable or leaving now and will be pinned at admission."""
        index, pages = lease.gpu.index, 0
        for node in lease.path[: lease.gpu_nodes]:
            if node.state[index] == LEAVING or not node.pins[index]:
                pages += node.pages
        return pages

    def _pin(self, lease: Lease, load_pages: int, now: float) -> None:
        """Pin what the request reuses, and record the use."""
        lease.epoch = self.residency.epoch
        residency, reused = self.residency, lease.path
        lower = NO_PATH
        if not self._is_single:
            if lease.gpu_nodes < len(reused):
                lower = residency.first_pages(reused[lease.gpu_nodes :], load_pages)
                reused = reused[: lease.gpu_nodes]
            self._revive(reused, lease.gpu, now)
            if lower:
                lease.loading = lower[-1]
                for tier in self._views[lease.gpu.index].lower:
                    residency.pin(lower[-1], tier)
                for node in lower:
                    lease.loaded_pages += node.pages
        residency.pin_path(reused, lease.gpu, lease.gpu_pages)
        residency.use(reused, now, is_first=lease.is_first, gpu=lease.gpu)
        if reused:
            lease.node = reused[-1]
        if lease.loading is not None:
            residency.use(lower, now, is_first=lease.is_first, gpu=lease.gpu)
        if lease.below and lease.loaded_pages < lease.lower_pages:
            lease.rest = split_extents(lease.request.runs, lease.gpu_pages + lease.loaded_pages)[1]

    def _revive(self, nodes: list[Node], gpu: Tier, now: float) -> None:
        """Keep pages that are leaving the GPU, since they are used again; their copies below are completed nevertheless."""
        for node in nodes:
            if node.state[gpu.index] == LEAVING:
                self._eviction.revive(node, gpu, now)
                self.counts.revived_pages += node.pages

    # --- slots -------------------------------------------------------------------------------------------------------------

    def _reserve(self, lease: Lease, pages: int) -> None:
        """Give the request ``pages`` slots if that many are free and not reserved for others; otherwise reserve them."""
        gpu = lease.gpu
        pool = gpu.pool
        if pool.free - gpu.reserved_pages >= pages:
            slots = self.residency.take(gpu, pages)
            lease.slots = slots if lease.slots is None else pool.join(lease.slots, slots)
        else:
            if lease.slots is None:
                lease.slots = self.residency.take(gpu, 0)
            lease.reserved_pages += pages
            self.residency.reserve(gpu, pages)

    def claim(self, lease: Lease, now: float) -> Claim:
        gpu, pages = lease.gpu, lease.reserved_pages
        while gpu.pool.free < pages:
            if not gpu.leaving_pages and not self._eviction.make_room(gpu, 0, now):
                return LOST_SLOTS
            waits = self._under_way.departing(gpu)
            if waits:
                return Claim(waits)
        if pages:
            lease.reserved_pages = 0
            lease.slots = gpu.pool.join(lease.slots, self.residency.take_reserved(gpu, pages))
        if self.watches and lease.why != AHEAD:
            for watch in self.watches:
                watch.claimed(lease)
        return CLAIMED

    def is_waiting(self, lease: Lease) -> bool:
        return lease.gpu.leaving_pages > 0 and lease.gpu.pool.free < lease.reserved_pages

    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        if not needs:
            return ROOM
        gpu, wanted = needs[0][0].gpu, 0
        for _, pages in needs:
            wanted += pages
        if not self._eviction.make_room(gpu, wanted, now):
            return NO_ROOM
        for lease, pages in needs:
            self._reserve(lease, pages)
        transfers = self._under_way.flush()
        return Growth(True, transfers) if transfers else ROOM

    # --- computed pages --------------------------------------------------------------------------------------------------------

    def end_chunk(self, lease: Lease, tokens: int, now: float) -> None:
        """Add the full pages that have been computed to the tree. Tiers below are offered them by ``insert``, as one prompt.

        After a load that has come short, none are added before the prompt's end: what it has not brought is computed, too.
        """
        if not (self._caches_chunks and lease.rest) or lease.epoch != self.residency.epoch:
            return
        request, last = lease.request, lease.node
        tokens = min(tokens, request.prompt_tokens) - request.bigram  # the key of a pair needs the next token
        pages = tokens // self.page_tokens - last.depth - last.pages
        if pages > 0 and (self._is_single or not gaps_of(lease)):
            computed, rest = split_extents(lease.rest, pages)
            self._add_computed(lease, computed, self._announce_computed(lease, now))
            lease.rest = rest

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        if lease.epoch != self.residency.epoch:
            return NO_TRANSFERS
        now = self._announce_computed(lease, now)
        if not self._is_single:
            self.transfers.fill_gaps(lease, now)
        self._add_computed(lease, lease.rest, now)
        lease.rest, lease.begun_at = (), inf
        return NO_TRANSFERS if self._is_single else self._offer(lease, now)

    def _announce_computed(self, lease: Lease, now: float) -> float:
        """Notify policies of a request before its computed pages are added; for later chunks, if another has come between.

        Returns a time that no other use of the cache has.
        """
        residency = self.residency
        now = residency.tick(now)
        is_first = lease.begun_at == inf
        if is_first:
            lease.begun_at = now
        if is_first or residency.notices.latest is not lease.request:
            residency.notices.request(lease.request, now, lease.gpu)
        return now

    def _add_computed(self, lease: Lease, extents: tuple[Extent, ...], now: float) -> None:
        """Add computed pages to the tree, after the pinned path, and pin them."""
        known = lease.node.children
        if known and extents and extents[0][0] in known:
            extents = self._join_known(lease, extents, now)
        if extents:
            residency, gpu = self.residency, lease.gpu
            pages = extents[0][1] if len(extents) == 1 else count_pages(extents)
            mine, lease.slots = gpu.pool.split(lease.slots, pages)
            lease.node = residency.add_computed(lease.node, extents, pages, gpu, mine, now, lease.begun_at)

    def _offer(self, lease: Lease, now: float) -> list[Transfer]:
        """Offer the path that a request has used to the placement policies, edge by edge from the top."""
        view = self._views[lease.gpu.index]
        if not (lease.is_finishing or lease.why in (KNOWN, FOR_DECODE)):
            for edge in view.edges:
                if edge.wants_requests:
                    edge.placement.on_request(lease.request, now)
        prompt = None if lease.is_finishing else lease.request
        for edge in view.copying:
            self._write_down.offer_path(lease.node, edge, now, prompt)
        transfers = self._under_way.flush()
        for transfer in transfers:
            transfer.request = prompt
        return transfers

    def _join_known(self, lease: Lease, extents: tuple[Extent, ...], now: float) -> tuple[Extent, ...]:
        """Pin the computed pages that the tree has already, from other requests or in tiers below. Returns the new pages."""
        path, rest = self.residency.follow(lease.node, extents)
        for node in path:
            self._take_computed(lease, node, now)
            lease.node = node
        if not self._is_single:
            self.transfers.drop_duplicates_below(path, lease.gpu)
        return rest

    def _take_computed(self, lease: Lease, node: Node, now: float) -> None:
        """Use the computed pages of a known node as its GPU copy, or free their slots if it has one; pin the node."""
        gpu, residency = lease.gpu, self.residency
        state = node.state[gpu.index]
        mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
        if state == ABSENT:
            residency.add_incoming(node, gpu, mine)
        else:
            residency.give(gpu, mine)
            if state == LEAVING:
                self._revive([node], gpu, now)
            residency.pin_alone(node, gpu)
        residency.reannounce((node,), now, gpu)
        if is_gap(node, gpu):
            residency.set_ready(node, gpu, now)

    # --- the end of a request --------------------------------------------------------------------------------------------------

    def finish(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        self.persistent.keep(lease)
        transfers = NO_TRANSFERS
        if self.begin_answer(lease):
            transfers = self.insert(lease, max(now, self.residency.now))
        self.notify_finish(lease, now)
        self.give_back(lease)
        if self._write_down.early_edges:
            transfers = transfers + self.write_early()
        for watch in self.watches:
            watch.released(lease, FINISHED)
        return transfers

    def begin_answer(self, lease: Lease) -> bool:
        """Whether the answer's full pages are to be inserted too; if so, prepare the lease for ``insert``."""
        if not (lease.request.output_runs and self.rules.cache_output):
            return False
        lease.is_finishing = True
        lease.rest = lease.request.output_runs
        return True

    def notify_finish(self, lease: Lease, now: float) -> None:
        """Notify policies that a request has finished, unless it is of a cache that has been emptied since."""
        residency = self.residency
        now = max(now, residency.now)
        if lease.epoch == residency.epoch:
            residency.notices.finish(lease.request, lease.node, now, lease.gpu)
        else:
            residency.tell_departure(lease.request, now, lease.gpu)

    def write_early(self) -> list[Transfer]:
        """Copy pages down where a watermark requires it. Returns the write-downs."""
        self._write_down.write_early(self.residency.now)
        return self._under_way.flush()

    def release(self, lease: Lease, why: str = LOST, now: float = -inf, tokens: int = 0) -> list[Transfer]:
        is_complete = why == HANDED_OVER
        if is_complete:
            self.persistent.keep(lease)
            self.notify_finish(lease, now)
        self.give_back(lease)
        transfers = self.write_early() if is_complete and self._write_down.early_edges else NO_TRANSFERS
        if self.watches and lease.why != AHEAD:
            for watch in self.watches:
                watch.released(lease, why)
        return transfers

    def give_back(self, lease: Lease) -> None:
        """Give back the pins, the slots and the reservations of a request."""
        gpu, residency = lease.gpu, self.residency
        residency.give(gpu, lease.slots)
        if lease.reserved_pages:
            residency.cancel_reservation(gpu, lease.reserved_pages)
        del self.leases[lease]
        if lease.loading is not None:
            for tier in self._views[gpu.index].lower:
                residency.unpin(lease.loading, tier)
        residency.unpin(lease.node, gpu)

    def kept_pages(self, lease: Lease) -> int:
        return self.persistent.pages_beside(lease) if self.persistent.paths else 0

    # --- everything ------------------------------------------------------------------------------------------------------------

    def reset(self, gpu: Tier | None = None, now: float = -inf) -> None:
        if gpu is None:
            self.residency.clear()
        self.persistent.let_go(gpu)
        if gpu is None:
            self.transfers.unpin_fetches()
        else:
            self.transfers.lose(gpu)
        for watch in self.watches:
            watch.emptied(gpu)

    def held(self) -> Held:
        """Return what leases, persistent paths and fetches for waiting requests hold."""
        held = Held()
        held.pins.extend(self.persistent.paths)
        held.pins.extend([(pin.node, pin.tier) for pin in self.transfers.fetch_pins if pin.node is not None])
        for lease in self.leases:
            gpu = lease.gpu
            held.pins.append((lease.node, gpu))
            held.slots.setdefault(gpu, []).append(lease.slots)
            held.reserved_pages[gpu] = held.reserved_pages.get(gpu, 0) + lease.reserved_pages
            if lease.loading is not None:
                held.pins.extend([(lease.loading, tier) for tier in self._views[gpu.index].lower])
        return held

    def check(self) -> None:
        check(self.residency, self.transfers, self.held())
