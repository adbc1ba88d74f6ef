"""FastDeploy's prefix cache as a serving engine calls it: look-up, chunks, answers, retractions, finishes."""

from math import inf
from typing import cast

from kvsim.core.check import Held, check
from kvsim.core.lease import FIRST, LOOK, LOST, Lease
from kvsim.core.persistent import PersistentPrompts
from kvsim.core.request import Request
from kvsim.core.serving import CLAIMED, LOST_SLOTS, Claim, Growth, ServedCache
from kvsim.core.tier import CPU, DISK, GPU, Edge, Tier
from kvsim.core.transfer import NO_TRANSFERS, Transfer
from kvsim.core.tree import INCOMING, READY, Node
from kvsim.engines.fastdeploy.swaps import SwapLease, Swaps
from kvsim.engines.own_ids import own_ids
from kvsim.pages.extents import Extent, join_extents, split_extents


class SteppedSwaps(ServedCache):
    """FastDeploy's cache (``Swaps``), call by call.

    match        looks up, and changes nothing: the look-up that counts comes after room has been made
    admit        makes room for the whole prompt; if nothing has to be swapped out for that, looks up and takes the slots. One
                 request after another: False while pages of another are still being swapped
    claim        after the swaps: looks up, and takes the slots
    begin_chunk  inserts the pages that the chunk completes: others find them at once, even in the same step
    grow         takes the next pages of answers, one by one
    finish       caches the answer, if that is on, and writes the path to storage; the pages are given back after that
    release      gives back everything; what chunks have inserted stays, also of an answer that was computed again
    """

    def __init__(
        self,
        tiers: list[Tier],
        edges: list[Edge],
        page_tokens: int,
        *,
        recompute_last_token: bool = True,
        cache_output: bool = False,
    ) -> None:
        self.swaps = Swaps(tiers, edges)
        self.residency = self.swaps.residency
        self.lower = self.swaps if edges else None
        self.tiers = tiers
        self.gpu = tiers[GPU]
        self.page_tokens = page_tokens
        self.leases = self.swaps.leases
        self.watches = self.swaps.watches
        self.persistent = PersistentPrompts(self.residency)
        self.takes_pages_late, self.pauses_after_retraction = self.swaps.memory is None, True
        self.finds_by_pages = True
        self._is_single = len(tiers) == 1
        self._recomputes_last_token = recompute_last_token
        self._caches_output = cache_output
        self._claiming: Lease | None = None
        """The request whose look-up waits for swaps."""

    # --- look-ups --------------------------------------------------------------------------------------------------------

    def lease(self, request: Request, why: int = FIRST, tokens: int = 0) -> SwapLease:
        """Return a lease for a request of which nothing has been looked up yet."""
        return SwapLease(request, self.gpu, self.tree.root, why, tokens or request.prompt_tokens)

    def match(self, request: Request, gpu: Tier | None = None, why: int = FIRST, tokens: int = 0) -> Lease:
        lease = self.lease(request, why, tokens)
        tree = self.tree
        path, part, agreed, _ = tree.walk(tree.root, self._path(request, lease.tokens))
        pages, below = 0, [0] * (DISK + 1)
        for node in path if part is None else [*path, part]:
            found = agreed if node is part else node.pages
            level = self._level_of(node)
            if level == GPU and pages == lease.gpu_pages:
                lease.gpu_pages += found
            elif level > GPU:
                below[level] += found
            else:
                break
            pages += found
        if pages > lease.gpu_pages:
            lease.below, lease.leading_pages = below, below[CPU]
        if why != LOOK:
            for watch in self.watches:
                watch.matched(lease)
        return lease

    def looked_up(self, request: Request) -> tuple[Extent, ...]:
        return self._path(request, request.prompt_tokens)

    def _level_of(self, node: Node) -> int:
        """Return the level of the tier that a look-up finds a node in, after all swaps under way; -1: in none."""
        for tier in self.tiers:
            if node.state[tier.index] in (READY, INCOMING):
                return tier.level
        return -1

    def _path(self, request: Request, tokens: int) -> tuple[Extent, ...]:
        """Return the pages that a request's first ``tokens`` tokens fill; those of the prompt include its partial page, if the
        trace has that."""
        prompt, pages = request.runs, tokens // self.page_tokens
        if pages <= request.prompt_pages or request.prompt_pages * self.page_tokens > request.prompt_tokens:
            return prompt
        answer = request.output_runs
        if answer is None:
            answer = ((own_ids(request), pages - request.prompt_pages),)
        return split_extents(join_extents(prompt, answer), pages)[0]

    # --- admission -------------------------------------------------------------------------------------------------------

    def admit(self, lease: Lease, pages: int, now: float, load_pages: int = 0, in_all: int = 0) -> bool:
        held = cast(SwapLease, lease)
        lease.waits = self.swaps.under_way.flush()
        is_busy = bool(lease.waits) or self._claiming is not None or bool(self.swaps.swaps())
        has_room = not is_busy and self._admit(held, pages, self.residency.tick(now))
        if self.watches:
            self._tell_admission(lease, pages, load_pages, is_admitted=has_room)
        return has_room

    def _admit(self, lease: SwapLease, pages: int, now: float) -> bool:
        """Make room for a request and, unless that takes time, look it up."""
        if not self._is_single:
            has_room = self.swaps.make_room(pages, now)
            lease.waits = self.swaps.under_way.flush()
            if not has_room:
                return False
            if lease.waits:
                self._claiming = lease
                self.leases[lease] = None
                self._reserve(lease, pages)
                return True
        return self._find(lease, pages, now)

    def _find(self, lease: SwapLease, pages: int, now: float) -> bool:
        """Look up a request of ``pages`` pages, and take its slots. With the GPU only, room is made after the look-up: without
        it, the pages found count as used all the same, and the result is False."""
        swaps, residency, gpu = self.swaps, self.residency, self.gpu
        swaps.find(lease, self._path(lease.request, lease.tokens))
        found = lease.gpu_pages + lease.loaded_pages
        if self._is_single and not swaps.make_room(pages - found, now):
            for used in lease.path:
                used.last_used = now
            residency.unpin(lease.node, gpu)
            return False
        residency.notices.request(lease.request, now)
        residency.use(lease.path, now, is_first=lease.is_first)
        lease.slots = residency.take(gpu, pages - lease.gpu_pages)
        self.leases[lease] = None
        lease.again = found - self._kept(lease, found)
        if lease.loading is None:
            swaps.leave_out(lease)
        return True

    def _kept(self, lease: SwapLease, found: int) -> int:
        """Return how many of the pages found a request does not compute again: not the last one if all its tokens were found, and
        none that an image begins before and ends behind."""
        if self._recomputes_last_token and found and found * self.page_tokens >= lease.tokens:
            found -= 1
        return lease.request.pages_outside_images(found, self.page_tokens)

    def kept_pages(self, lease: Lease) -> int:
        """Return the pages beside which a request needs room; with tiers below, it needs that even for what is kept of it."""
        if not self.persistent.paths:
            return 0
        held, tree, request = cast(SwapLease, lease), self.tree, lease.request
        kept = self.persistent.nodes(self.gpu)
        path, part, agreed, _ = tree.walk(tree.root, self._path(request, held.tokens))
        pages = sum([node.pages for node in kept])
        beside = pages - sum([node.pages for node in path if node in kept]) - (agreed if part in kept else 0)
        if self._is_single:
            return beside
        prompt_pages = request.pages_for(held.tokens, self.page_tokens)
        return max(beside, pages + prompt_pages - request.pages_in_all(self.page_tokens))

    def claim(self, lease: Lease, now: float) -> Claim:
        held, gpu, swaps, pages = cast(SwapLease, lease), self.gpu, self.swaps, lease.reserved_pages
        if pages and not (held.is_found and gpu.pool.free >= pages):
            swaps.under_way.flush()
            if waits := swaps.swaps():
                return Claim(waits)
            if gpu.pool.free < pages:  # pages that were leaving have been computed again, and stay
                swaps.evict_singly(pages - gpu.pool.free, now)
                waits = swaps.under_way.flush()
                return Claim(waits) if waits else LOST_SLOTS
        if pages:
            lease.reserved_pages = 0
            self.residency.cancel_reservation(gpu, pages)
            self._take(held, pages, now)
        for watch in self.watches:
            watch.claimed(lease)
        return CLAIMED

    def _take(self, lease: SwapLease, pages: int, now: float) -> None:
        """Take slots that are free: those of the answer, or all, after the look-up."""
        if lease.is_found:
            lease.slots = self.gpu.pool.join(lease.slots, self.residency.take(self.gpu, pages))
        else:
            self._claiming = None
            has_room = self._find(lease, pages, self.residency.tick(now))
            assert has_room, "slots were reserved, but are not free"

    def _reserve(self, lease: Lease, pages: int) -> None:
        lease.reserved_pages += pages
        self.residency.reserve(self.gpu, pages)

    # --- pages, step by step ---------------------------------------------------------------------------------------------

    def begin_chunk(self, lease: Lease, tokens: int, now: float) -> bool:
        held, request = cast(SwapLease, lease), lease.request
        if lease.missing_pages:
            self.swaps.fill_gaps(lease, now)
        if lease.rest and lease.epoch == self.residency.epoch:
            pages = max(tokens // self.page_tokens, request.prompt_pages * (tokens >= request.prompt_tokens))
            pages -= lease.node.depth + lease.node.pages
            if pages > 0:
                extents, lease.rest = split_extents(lease.rest, pages)
                self.swaps.insert(held, extents, self.residency.tick(now))
        return True

    def grow(self, needs: list[tuple[Lease, int]], now: float) -> Growth:
        swaps, gpu = self.swaps, self.gpu
        short = sum([pages for _, pages in needs]) - gpu.spare_pages
        if short > 0:
            if short > swaps.leavable_pages:
                return Growth(False, NO_TRANSFERS)
            swaps.evict_singly(short, now)
        for lease, pages in needs:
            if gpu.pool.free - gpu.reserved_pages >= pages:
                lease.slots = gpu.pool.join(lease.slots, self.residency.take(gpu, pages))
            else:
                self._reserve(lease, pages)
        return Growth(True, swaps.under_way.flush())

    def insert(self, lease: Lease, now: float) -> list[Transfer]:
        """Do nothing: pages have been inserted chunk by chunk."""
        return NO_TRANSFERS

    # --- the end of a request --------------------------------------------------------------------------------------------

    def finish(self, lease: Lease, now: float = -inf) -> list[Transfer]:
        held, request, swaps = cast(SwapLease, lease), lease.request, self.swaps
        is_cached = lease.epoch == self.residency.epoch
        self.persistent.keep(lease)
        if is_cached and self._caches_output and request.output_runs:
            path = join_extents(request.runs, request.output_runs)
            rest = split_extents(path, lease.node.depth + lease.node.pages)[1]
            if rest:
                swaps.insert(held, rest, self.residency.tick(max(now, self.residency.now)))
        if is_cached and swaps.storage is not None:
            return swaps.store(swaps.storage, held, self.residency.now)
        swaps.end(held)
        return NO_TRANSFERS

    def release(self, lease: Lease, why: str = LOST, now: float = -inf, tokens: int = 0) -> list[Transfer]:
        if lease is self._claiming:
            self._claiming = None
        self.swaps.let_go(cast(SwapLease, lease), why)
        return NO_TRANSFERS

    # --- everything ------------------------------------------------------------------------------------------------------

    def reset(self, gpu: Tier | None = None, now: float = -inf) -> None:
        if gpu is None:
            self.residency.clear()
        self.persistent.let_go(gpu)
        if gpu is not None:
            self.swaps.lose(gpu)
        for watch in self.watches:
            watch.emptied(gpu)

    def check(self) -> None:
        held = Held(slots={self.gpu: []}, reserved_pages={self.gpu: 0})
        held.pins.extend(self.persistent.paths)
        for lease in self.leases:
            held.pins.append((lease.node, self.gpu))
            held.reserved_pages[self.gpu] += lease.reserved_pages
            if cast(SwapLease, lease).is_found:
                held.slots[self.gpu].append(lease.slots)
        check(self.residency, self.swaps, held)
