"""FastDeploy's tiers: pages are swapped between GPU and CPU memory, and storage keeps copies. Each move is a transfer."""

from typing import cast

from kvsim.core.lease import FINISHED, LOST, Lease
from kvsim.core.loading import LowerTiers
from kvsim.core.request import Request
from kvsim.core.residency import Residency
from kvsim.core.serving import Load
from kvsim.core.tier import CPU, DISK, GPU, Edge, Tier
from kvsim.core.transfer import Transfer
from kvsim.core.transfers import is_gap
from kvsim.core.tree import ABSENT, INCOMING, LEAVING, READY, Node
from kvsim.core.victims import check_enough, victim, victims
from kvsim.pages.extents import Extent, count_pages, split_extents


class SwapLease(Lease):
    """What a running request holds: a pinned path down to ``node``, and slots for everything after it."""

    __slots__ = ("again", "is_found", "lacking", "tokens")

    def __init__(self, request: Request, gpu: Tier, root: Node, why: int, tokens: int) -> None:
        super().__init__(request, gpu, root, why)
        self.tokens = tokens
        """Tokens that are looked up and computed: those of the prompt and, after a retraction, of the answer so far."""
        self.is_found = False
        """Whether its pages have been looked up, and pinned: from then on it has slots."""
        self.again = 0
        """The last pages of what was found that are computed again, in place, and are no hits."""
        self.lacking = 0
        """In a replay: pages of the answer that have found no room yet."""


class Swaps(LowerTiers):
    """The tiers of FastDeploy's cache, and what moves pages between them. On a path, GPU pages come first, then those in CPU
    memory, then those that only storage has.

    A copy to be made has its slots in the target from the beginning of the transfer; one that moves keeps those in the source to
    the end.
    """

    def __init__(self, tiers: list[Tier], edges: list[Edge]) -> None:
        super().__init__(Residency(tiers), edges)
        self.gpu = tiers[GPU]
        self.memory = next((edge for edge in edges if edge.lower.level == CPU), None)
        """Joins the GPU to CPU memory; None if there is none."""
        self.storage = next((edge for edge in edges if edge.lower.level == DISK), None)
        """Joins the GPU to storage; None if there is none."""
        self.leases: dict[Lease, None] = {}
        """Leases of running requests, and of finished ones that are being written to storage."""
        self._writing: dict[Transfer, SwapLease] = {}
        """Requests that have finished and wait for this write to storage."""

    def swaps(self) -> list[Transfer]:
        """Return the transfers under way that FastDeploy's scheduler waits for: all but writes to storage."""
        return [transfer for transfer in self.in_flight if transfer.target.level != DISK]

    # --- look-up and loads -----------------------------------------------------------------------------------------------

    def find(self, lease: SwapLease, extents: tuple[Extent, ...]) -> None:
        """Look up a request's pages, and pin what is found: on the GPU, then in the tiers below, to be loaded."""
        residency, gpu, view = self.residency, self.gpu, self.views[GPU]
        path, rest = residency.follow(residency.tree.root, extents)
        on_gpu = 0
        while on_gpu < len(path) and path[on_gpu].state[GPU] in (READY, INCOMING) and not is_gap(path[on_gpu], gpu):
            on_gpu += 1
        end = on_gpu
        while end < len(path) and view.source_of(path[end]) is not None:
            end += 1
        if end < len(path):
            del path[end:]
            rest = split_extents(extents, pages_down_to(path))[1]
        lease.epoch, lease.is_found = residency.epoch, True
        lease.set_match(path, pages_down_to(path[:on_gpu]), rest)
        lease.gpu_nodes = on_gpu
        residency.pin_path(path[:on_gpu], gpu, lease.gpu_pages)
        lease.node = path[on_gpu - 1] if on_gpu else residency.tree.root  # that of the lease may be gone since a reset
        if end > on_gpu:
            lease.loading = path[-1]
            lease.loaded_pages = pages_down_to(path) - lease.gpu_pages
            for tier in view.lower:
                residency.pin(path[-1], tier)

    def load(self, lease: Lease, now: float, short: Transfer | None = None) -> Load:
        """Load what a request has found below the GPU: first from CPU memory, then from storage."""
        rest, is_first = lease.rest, lease.loading is not None
        load = super().load(lease, now, short)
        lease.rest = rest
        for before, after in zip(load.loads, load.loads[1:], strict=False):
            after.after = [*after.after, before]
            after.begun = False
        if is_first:
            self.leave_out(cast(SwapLease, lease))
        return load

    def leave_out(self, lease: SwapLease) -> None:
        """Take the pages that are computed again out of the hit, deepest tier first; all of it is on the GPU or being loaded."""
        loaded = min(lease.again, lease.loaded_pages)
        lease.loaded_pages -= loaded
        lease.lose_far(loaded)
        lease.gpu_pages -= lease.again - loaded

    # --- computed pages --------------------------------------------------------------------------------------------------

    def insert(self, lease: SwapLease, extents: tuple[Extent, ...], now: float) -> None:
        """Insert pages that a request computes, in its slots, below its path, and pin them."""
        rest = self._join_known(lease, extents, now) if extents[0][0] in lease.node.children else extents
        if rest:
            pages = count_pages(rest)
            mine, lease.slots = self.gpu.pool.split(lease.slots, pages)
            lease.node = self.residency.add_leaf(lease.node, rest, pages, self.gpu, mine, now)

    def _join_known(self, lease: SwapLease, extents: tuple[Extent, ...], now: float) -> tuple[Extent, ...]:
        """Use and pin computed pages that are known already: they give the request's slots back, or take them if the GPU does not
        have them. Returns the new pages."""
        residency, gpu = self.residency, self.gpu
        path, rest = residency.follow(lease.node, extents)
        for node in path:
            mine, lease.slots = gpu.pool.split(lease.slots, node.pages)
            if node.state[GPU] == ABSENT:
                residency.add_incoming(node, gpu, mine)
                residency.set_ready(node, gpu, now)
            else:
                residency.give(gpu, mine)
                if node.state[GPU] == LEAVING:
                    self.eviction.revive(node, gpu, now)
                    self.counts.revived_pages += node.pages
                residency.pin_alone(node, gpu)
                if is_gap(node, gpu):
                    residency.set_ready(node, gpu, now)
            lease.node = node
        self.drop_duplicates_below(path, gpu)
        residency.use(path, now, is_first=False)
        return rest

    # --- the end of a request --------------------------------------------------------------------------------------------

    def store(self, edge: Edge, lease: SwapLease, now: float) -> list[Transfer]:
        """Begin to write a finished request's path to storage, and end the request with that; at once if nothing is written."""
        self._offer(edge, lease.node, now)
        if edge.opened is None:
            self.end(lease)
        else:
            write = self.under_way.open(edge)
            write.request = lease.request
            self._writing[write] = lease
        return self.under_way.flush()

    def _offer(self, edge: Edge, node: Node, now: float) -> None:
        """Write the path's pages down to ``node`` that storage lacks, first page first, if they are wanted and there is room."""
        residency, storage, pages = self.residency, edge.lower, 0
        wanted: list[Node] = []
        for part in node.path():
            if not part.state[storage.index]:
                if not edge.wants_used(part, now):
                    break
                wanted.append(part)
                pages += part.pages
        residency.pin(node, storage)
        self.delete(storage, pages - storage.pool.free, now)
        parts = residency.first_pages(wanted, storage.pool.free)
        self.counts.no_room_pages += pages - sum([part.pages for part in parts])
        if parts:
            self._write(edge, parts)
        residency.unpin(node, storage)

    def finish(self, transfer: Transfer, now: float) -> list[Transfer]:
        follow_ups = super().finish(transfer, now)
        self._is_written(transfer)
        return follow_ups

    def abort(self, transfer: Transfer, pages_arrived: int, now: float) -> list[Transfer]:
        follow_ups = super().abort(transfer, pages_arrived, now)
        self._is_written(transfer)
        return follow_ups

    def _is_written(self, transfer: Transfer) -> None:
        lease = self._writing.pop(transfer, None)
        if lease is not None:
            self.end(lease)

    def end(self, lease: SwapLease) -> None:
        """End a request whose answer is complete and, with storage, written: it gives back what it holds."""
        if lease.epoch == self.residency.epoch:
            self.residency.notices.finish(lease.request, lease.node, self.residency.now)
        self.let_go(lease, FINISHED)

    def let_go(self, lease: SwapLease, why: str = LOST) -> None:
        """Give back the slots, the reservation and the pins of a request."""
        residency, gpu = self.residency, self.gpu
        del self.leases[lease]
        residency.cancel_reservation(gpu, lease.reserved_pages)
        if lease.loading is not None:
            for tier in self.views[GPU].lower:
                residency.unpin(lease.loading, tier)
        if lease.is_found:
            residency.give(gpu, lease.slots)
            residency.unpin(lease.node, gpu)
        for watch in self.watches:
            watch.released(lease, why)

    # --- eviction --------------------------------------------------------------------------------------------------------

    def make_room(self, pages: int, now: float) -> bool:
        """Evict ``pages`` pages if fewer slots are free. Returns whether that many then are, or will be after swaps under way."""
        gpu = self.gpu
        if gpu.spare_pages < pages:
            if self.memory is None:
                self.delete(gpu, pages, now)
            else:
                self.swap_out(self.memory, pages, now)
        return gpu.spare_pages >= pages

    @property
    def leavable_pages(self) -> int:
        """Pages that can leave the GPU now: evictable ones, as far as CPU memory, if there is any, can take them."""
        pages = self.gpu.evictable_pages
        return pages if self.memory is None else min(pages, takes(self.memory.lower))

    def evict_singly(self, pages: int, now: float) -> int:
        """Evict ``pages`` pages one by one, or all that can leave now. Returns their number."""
        pages = min(pages, self.leavable_pages)
        if self.memory is None:
            self.delete(self.gpu, pages, now)
        elif pages > 0:
            self._swap_out_singly(self.memory, pages, now)
        return pages

    def swap_out(self, edge: Edge, pages: int, now: float) -> None:
        """Evict ``pages`` pages together, as far as CPU memory can take them. They do not compete with those in CPU memory for
        the room that they need there."""
        gpu, cpu = edge.upper, edge.lower
        leaving: list[Node] = []
        left = min(pages, self.leavable_pages)
        if left <= 0:
            return
        for offered in victims(gpu, now):
            node = self._victim(offered, left)
            self.residency.leave(node, gpu)
            leaving.append(node)
            left -= node.pages
            if not left:
                break
        check_enough(gpu, left)
        if sum([node.pages for node in leaving]) > cpu.pool.free:
            self.delete(cpu, pages, now)
        leaving.reverse()
        self._write(edge, leaving)

    def _swap_out_singly(self, edge: Edge, pages: int, now: float) -> None:
        """Evict ``pages`` pages, each as soon as CPU memory has room for it.

        Requests finish oldest first, so pages leave the GPU by last use, and all pages in CPU memory were used before. They
        make room before those that arrive.
        """
        gpu, cpu = edge.upper, edge.lower
        for offered in victims(gpu, now):
            node = self._victim(offered, pages)
            pages -= node.pages
            self.delete(cpu, node.pages - cpu.pool.free, now)
            self.residency.leave(node, gpu)
            self._write(edge, [node])
            if not pages:
                break
        check_enough(gpu, pages)

    def _victim(self, offered: object, most: int) -> Node:
        """Return an offered GPU leaf, or its last ``most`` pages if it has more."""
        node = victim(offered, self.residency.tree, self.gpu)
        if node.pages > most:
            self.residency.cut(node, node.pages - most)
        return node

    def _write(self, edge: Edge, nodes: list[Node]) -> None:
        """Begin to copy nodes, topmost first, to the lower tier, which has room for them. Those that leave the GPU move."""
        residency, lower = self.residency, edge.lower
        transfer = self.under_way.open(edge)
        transfer.nodes[0:0] = nodes
        for node in nodes:
            residency.add_copy(node, lower, INCOMING, residency.take(lower, node.pages))
            residency.pin(node, lower)
        self.under_way.carry(transfer, nodes)

    def delete(self, tier: Tier, pages: int, now: float) -> None:
        """Delete ``pages`` pages of a tier, or all that can leave. Copies in storage stay, unless the tier is storage itself."""
        residency = self.residency
        if pages <= 0:
            return
        for offered in victims(tier, now):
            node = victim(offered, residency.tree, tier)
            is_last_copy = residency.is_last_copy(node)
            if node.pages > pages:
                if is_last_copy and tier.may_shorten and not node.children:
                    residency.trim(node, tier, pages)
                    return
                residency.cut(node, node.pages - pages)
            pages -= node.pages
            self.counts.dropped_pages += node.pages * is_last_copy
            if is_last_copy and node.children:  # in storage, which has failed to read this node
                residency.drop_descendants(node)
            residency.free(node, tier)
            if not pages:
                return
        check_enough(tier, min(pages, tier.evictable_pages))


def pages_down_to(path: list[Node]) -> int:
    """Return the number of pages of a path from the root."""
    return path[-1].depth + path[-1].pages if path else 0


def takes(cpu: Tier) -> int:
    """Return how many pages CPU memory can take now, if need be instead of others."""
    return cpu.pool.free + cpu.evictable_pages
