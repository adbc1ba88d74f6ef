"""The cache for runs without a clock: what moves has moved when the call that decides it returns."""

from kvsim.core.cache import NO_TRANSFERS, Lease, TieredCache
from kvsim.core.movement import CPU, DISK, GPU
from kvsim.core.rules import Rules
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.tree import ABSENT, LEAVING, READY, Node


class InstantCache(TieredCache):
    """Decides like ``TieredCache``; copies change hands at once, without the states, pins and records of a transfer.

    No call hands out transfers, and a promise of slots is kept at once. ``fetch`` returns the one that it has carried out.
    """

    def __init__(self, tiers: list[Tier], rules: Rules, page_tokens: int) -> None:
        super().__init__(tiers, rules, page_tokens)
        self._moving: list[list[Node]] = [[] for _ in tiers]
        """Victims of the pass under way, by tier: they move to the tier below at its end."""

    def _leave(self, node: Node, tier: Tier, lower: Tier) -> None:
        index, parent = tier.index, node.parent
        assert parent is not None
        node.state[index] = LEAVING
        tier.evictable_pages -= node.pages
        tier.coming_pages += node.pages
        if tier.on_remove:
            tier.on_remove(node)
        parent.kids[lower.index] += 1
        self._moving[index].append(node)
        kids = parent.kids
        kids[index] -= 1
        if not kids[index] and parent.state[index] == READY and not parent.pins[index]:
            tier.on_evictable(parent)

    def _place(self, tier: Tier, lower: Tier, now: float) -> None:
        moving = self._moving[tier.index]
        if not moving:
            return
        self._moving[tier.index] = []
        pages = tier.coming_pages
        while moving and not self.make_room(lower, pages, now):
            node = moving.pop(0)
            pages -= node.pages
            self.counts.no_room_pages += node.pages
            self._lose(node, tier, lower)
        for node in moving:
            tier.pool.give(node.slots[tier.index])
            node.state[tier.index] = ABSENT
            self._arrive_below(node, lower, now)
        tier.coming_pages -= pages
        tier.evicted_pages += pages
        if lower.lower is not None and lower.lower.after_use:
            for node in moving:
                self._offer(node, lower, lower.lower, now)
        for node in moving:
            self.merge(node)

    def _arrive_below(self, node: Node, lower: Tier, now: float) -> None:
        pages, index = node.pages, lower.index
        self.counts.written_pages += pages
        lower.inserted_pages += pages
        node.slots[index] = lower.pool.take(pages)
        self.set_ready(node, lower, now)

    def _lose(self, node: Node, tier: Tier, lower: Tier) -> None:
        """There is no room below for a victim: it is dropped."""
        node.parent.kids[lower.index] -= 1  # type: ignore[union-attr]
        self.counts.dropped_pages += node.pages + self.drop_descendants(node)
        self.drop_copy(node, tier)

    def _write_down(self, node: Node, tier: Tier, lower: Tier) -> None:
        node.parent.kids[lower.index] += 1  # type: ignore[union-attr]
        self._arrive_below(node, lower, self.now)

    def load(self, lease: Lease, now: float) -> list[Transfer]:
        last, lease.loading = lease.loading, None
        if last is None:
            return NO_TRANSFERS
        nodes = self._path_between(lease.node, last)
        read = self._read_disk_now(nodes, now)
        lease.loaded_disk_pages = sum([node.pages for node in read])
        lease.loaded_pages = 0
        for node in nodes:
            mine, lease.slots = self.gpu.pool.split(lease.slots, node.pages)
            self.add_copy(node, self.gpu, READY, mine)
            node.pins[GPU] += 1
            lease.loaded_pages += node.pages
            if self.gpu.on_insert:
                self.gpu.on_insert(node, now)
            lease.node = node
        self.gpu.inserted_pages += lease.loaded_pages
        self.counts.loaded_pages += lease.loaded_pages
        for tier in self.tiers[CPU:]:
            self.unpin(last, tier.index)
        self._keep_one(read, DISK)
        self._keep_one(nodes, CPU)
        return NO_TRANSFERS

    def _read_disk_now(self, nodes: list[Node], now: float) -> list[Node]:
        """Bring to the CPU what only the disk has; ``nodes`` is cut short where there is no room. Returns what was read."""
        cpu = self.tiers[CPU]
        read: list[Node] = []
        for at, node in enumerate(nodes):
            if node.state[CPU] != READY:
                if not self.make_room(cpu, node.pages, now):
                    del nodes[at:]
                    break
                self.add_copy(node, cpu, READY, cpu.pool.take(node.pages))
                if not node.pins[CPU]:
                    cpu.evictable_pages += node.pages
                if cpu.on_insert:
                    cpu.on_insert(node, now)
                read.append(node)
        pages = sum([node.pages for node in read])
        cpu.inserted_pages += pages
        self.counts.fetched_pages += pages
        return read

    def _keep_one(self, nodes: list[Node], index: int) -> None:
        """Pages that moved up leave the tier, if its policy keeps one copy only."""
        if not nodes or self.tiers[index].placement.keeps_loaded:  # type: ignore[union-attr]
            return
        tier = self.tiers[index]
        for node in reversed(nodes):
            if node.state[tier.index] == READY and not node.pins[tier.index]:
                self.free(node, tier)

    def fetch(self, lease: Lease, pages: int, now: float) -> list[Transfer]:
        nodes = self._first_on_disk(lease, pages)
        if not nodes:
            return NO_TRANSFERS
        last = nodes[-1]
        for tier in self.tiers:
            self.pin(last, tier.index)
        fits = self.make_room(self.tiers[CPU], sum([node.pages for node in nodes]), now)
        read = self._read_disk_now(nodes, now) if fits else []
        for tier in self.tiers:
            self.unpin(last, tier.index)
        self._keep_one(read, DISK)
        done = Transfer(self.tiers[DISK], self.tiers[CPU], read, done=True, arrived_pages=sum([node.pages for node in read]))
        for node in read:
            self.merge(node)
        return [done] if read else NO_TRANSFERS
