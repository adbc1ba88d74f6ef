"""Where pages are: the tree, the tiers, and the bookkeeping of every copy, pin and slot.

Each method here changes one fact and keeps all counts that depend on it right. What to change is decided in ``cache.py``.
"""

from collections.abc import Iterable
from itertools import pairwise
from math import inf, nextafter
from typing import Any

from kvsim.core.tier import Tier
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, READY, Node, RadixTree


def is_same_history(node: Node, child: Node) -> bool:
    """Whether the same requests have used a node and its child, from the same moment on, and no transfer carries the child.

    A prompt and its answer keep apart here: no policy sees the one's time of creation at the other.
    """
    return child.last_used == node.last_used and child.hits == node.hits and child.created == node.created and not child.transfers


class Residency:
    """The tree over all tiers, top to bottom."""

    def __init__(self, tiers: list[Tier]) -> None:
        self.tiers = tiers
        for upper, lower in pairwise(tiers):
            upper.lower = lower
        for tier in tiers:
            tier.eviction.cut = self.cut
        self.tree = RadixTree(len(tiers))
        self.listeners = [tier for tier in tiers if tier.on_hit]
        self.awaited = [tier.on_arrival for tier in tiers if tier.on_arrival]
        """What hears of an arrival, where requests wait to be admitted."""
        self.announced = [tier.on_request for tier in tiers if tier.on_request]
        """What hears of a request before its hits and inserts; ``finished`` hears of its end."""
        self.finished = [tier.on_finish for tier in tiers if tier.on_finish]
        self.offering = [tier.on_prompt for tier in tiers if tier.on_prompt]
        """What hears of a computed prompt before its nodes are offered to the tiers below."""
        self.doomed: set[Node] = set()
        """Nodes of a tree that was given up, kept until nobody uses their slots."""
        self.now = -inf
        """When the cache was last used, in seconds."""

    def tick(self, now: float) -> float:
        """``now``, or the next later moment if that has been used: no two uses of the cache have the same time."""
        if now <= self.now:
            now = nextafter(self.now, inf)
        self.now = now
        return now

    def tell_hits(self, nodes: Iterable[Node], now: float) -> None:
        """Tell the policies of every tier that has a copy about a hit."""
        for tier in self.listeners:
            for node in nodes:
                if node.state[tier.index] == READY:
                    tier.on_hit(node, now)  # type: ignore[misc]

    def cut(self, node: Node, pages: int) -> Node:
        """Cut a node after ``pages`` pages; returns the upper part. ``node`` itself becomes the lower part."""
        upper = self.tree.cut(node, pages)
        for tier in self.tiers:
            index = tier.index
            state = node.state[index]
            if not state:
                continue
            upper.state[index] = state
            slots = node.slots[index]
            if slots is not None:
                upper.slots[index], node.slots[index] = tier.pool.split(slots, pages)
            if state != LEAVING:
                upper.kids[index] = 1
            if state == READY and tier.on_split:
                tier.on_split(upper, node)
        if node.transfers:
            for transfer in node.transfers:
                transfer.nodes.insert(transfer.nodes.index(node), upper)
            upper.transfers = node.transfers
        return upper

    def merge(self, node: Node) -> None:
        """Join a node with its only child if nothing distinguishes them any more; the child stays as the whole.

        Nothing happens to a node that has been joined to its child before.
        """
        states = node.state
        if len(node.children) != 1 or node.parent is None or node.transfers or not any(states):
            return
        (child,) = node.children.values()
        if child.state != states or child.pins != node.pins or not is_same_history(node, child):
            return
        if node.partner is not None and any(node.partner.state):
            return
        if INCOMING in states or LEAVING in states or DOOMED in states:
            return
        for tier in self.tiers:
            index = tier.index
            if node.state[index] == READY:
                child.slots[index] = tier.pool.join(node.slots[index], child.slots[index])
                if tier.on_merge:
                    tier.on_merge(node, child)
        self.tree.join(node, child)

    def use_path(self, path: list[Node], pages: int, now: float) -> None:
        """A request uses and pins a path from the root on, of so many pages, that is on the GPU as a whole."""
        pinned_pages = 0
        for node in path:
            node.hits += 1
            node.last_used = now
            pins = node.pins
            if pins[0]:
                pinned_pages = node.depth + node.pages
            pins[0] += 1
        self.tiers[0].evictable_pages -= pages - pinned_pages
        if self.listeners:
            self.tell_hits(path, now)

    def leave_path(self, last: Node) -> None:
        """Unpin the path down to a node, all of it ready on the GPU."""
        gpu, node = self.tiers[0], last
        end, pinned_pages = node.depth + node.pages, 0
        while (parent := node.parent) is not None:
            pins = node.pins
            left = pins[0] = pins[0] - 1
            if left and not pinned_pages:
                pinned_pages = node.depth + node.pages
            node = parent
        gpu.evictable_pages += end - pinned_pages
        if end > pinned_pages and not last.kids[0]:
            gpu.on_evictable(last)

    def pin(self, node: Node, tier: int) -> None:
        """Keep the node, and so everything above it, in a tier."""
        evictable = 0
        while (parent := node.parent) is not None:
            pins = node.pins
            if not pins[tier] and node.state[tier] == READY:
                evictable += node.pages
            pins[tier] += 1
            node = parent
        self.tiers[tier].evictable_pages -= evictable

    def unpin(self, node: Node, tier: int) -> None:
        """Take back one ``pin``; what nobody needs any more becomes evictable."""
        level = self.tiers[tier]
        evictable = 0
        while (parent := node.parent) is not None:
            pins = node.pins
            left = pins[tier] = pins[tier] - 1
            if not left and (state := node.state[tier]):
                if state == READY:
                    evictable += node.pages
                    if not node.kids[tier]:
                        level.on_evictable(node)
                elif state == DOOMED:
                    self._free_doomed(node, level)
                elif state == INCOMING:
                    self.drop_copy(node, level)
            node = parent
        level.evictable_pages += evictable

    def add_copy(self, node: Node, tier: Tier, state: int, slots: Any) -> None:
        """Place a copy in a tier where the node has none. A ready one must be pinned already."""
        index = tier.index
        node.state[index] = state
        node.slots[index] = slots
        node.parent.kids[index] += 1  # type: ignore[union-attr]

    def set_ready(self, node: Node, tier: Tier, now: float) -> None:
        """The copy can be used from now on."""
        index = tier.index
        node.state[index] = READY
        if tier.on_insert:
            tier.on_insert(node, now)
        if not node.pins[index]:
            tier.evictable_pages += node.pages
            if not node.kids[index]:
                tier.on_evictable(node)

    def free(self, node: Node, tier: Tier) -> None:
        """Free the slots of an evictable copy at once; a node without any copy leaves the tree."""
        index, pages, parent, state = tier.index, node.pages, node.parent, node.state
        state[index] = ABSENT
        tier.evictable_pages -= pages
        tier.evicted_pages += pages
        tier.pool.give(node.slots[index])
        if tier.on_remove:
            tier.on_remove(node)
        if not any(state):
            del parent.children[node.runs[0][0]]  # type: ignore[union-attr]
        kids = parent.kids  # type: ignore[union-attr]
        left = kids[index] = kids[index] - 1
        if not left and parent.state[index] == READY and not parent.pins[index]:  # type: ignore[union-attr]
            tier.on_evictable(parent)  # type: ignore[arg-type]

    def trim(self, node: Node, tier: Tier, pages: int) -> None:
        """Free the last ``pages`` pages of an evictable leaf that is in this tier only."""
        self.tree.shorten(node, pages)
        node.slots[tier.index], freed = tier.pool.split(node.slots[tier.index], node.pages)
        tier.pool.give(freed)
        tier.evictable_pages -= pages
        tier.evicted_pages += pages

    def drop_copy(self, node: Node, tier: Tier) -> None:
        """Free the copy, whatever its state; a node without any copy leaves the tree, with what is below it."""
        index = tier.index
        state, slots = node.state[index], node.slots[index]
        if state == READY and not node.pins[index]:
            self.free(node, tier)
            return
        if state == LEAVING:
            tier.coming_pages -= node.pages
        elif state == READY and tier.on_remove:
            tier.on_remove(node)
        node.state[index], node.slots[index] = ABSENT, None
        if slots is None:
            tier.owed_pages -= node.pages
        else:
            tier.pool.give(slots)
            if state != INCOMING:
                tier.evicted_pages += node.pages
        if not any(node.state):
            if node not in self.doomed:
                self.drop_descendants(node)
            self.tree.remove(node)
            self.doomed.discard(node)
        if state != LEAVING:
            self.lose_kid(node, tier)

    def lose_kid(self, node: Node, tier: Tier) -> None:
        """The node does not count as resident any more: its parent may become a leaf."""
        parent, index = node.parent, tier.index
        assert parent is not None
        kids = parent.kids
        kids[index] -= 1
        if not kids[index] and parent.is_evictable(index):
            tier.on_evictable(parent)

    def drop_descendants(self, node: Node) -> int:
        """Remove everything below a node that is about to vanish; copies in use are doomed. Returns the pages that are lost."""
        lost = 0
        for child in node.descendants():
            lost += child.pages
            for tier in self.tiers:
                if child.state[tier.index] == READY:
                    tier.evicted_pages += child.pages
            self._give_up(child)
        return lost

    def clear(self) -> None:
        """Empty the tree. Copies in use become doomed and are freed when their last pin or transfer is gone."""
        old, self.tree = self.tree, RadixTree(len(self.tiers))
        for node in old.root.descendants():
            self._give_up(node)

    def _give_up(self, node: Node) -> None:
        """Free the node's copies, and doom those that are in use; what is leaving leaves as it would."""
        for tier in self.tiers:
            if node.state[tier.index] not in (ABSENT, LEAVING):
                self._doom(node, tier)
        if any(node.state):
            self.doomed.add(node)

    def _doom(self, node: Node, tier: Tier) -> None:
        index = tier.index
        if node.state[index] == READY:
            if tier.on_remove:
                tier.on_remove(node)
            if not node.pins[index]:
                tier.evictable_pages -= node.pages
        if node.slots[index] is None:
            tier.owed_pages -= node.pages
            node.slots[index] = tier.pool.take(0)
        node.state[index] = DOOMED
        if not node.pins[index]:
            self._free_doomed(node, tier)

    def _free_doomed(self, node: Node, tier: Tier) -> None:
        tier.pool.give(node.slots[tier.index])
        node.state[tier.index], node.slots[tier.index] = ABSENT, None
        if not any(node.state):
            self.doomed.discard(node)
