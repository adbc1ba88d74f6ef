"""Where pages are: the tree, the tiers, and the bookkeeping of every copy, pin and slot.

Each method changes one fact and keeps all sums that depend on it right. What to change is decided in ``transfers.py`` and
``cache.py``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf, nextafter
from typing import Any

from kvsim.core.answers import cut_after
from kvsim.core.runs import Run
from kvsim.core.tier import Tier
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, NO_LIMIT, READY, Node, RadixTree


@dataclass
class Counts:
    """What became of pages that were moved, or should have been."""

    written_pages: int = 0
    """Copied to a tier below."""
    loaded_pages: int = 0
    """Brought to a GPU."""
    fetched_pages: int = 0
    """Read from disk into a CPU tier."""
    revived_pages: int = 0
    """Used again while they were leaving a GPU, and kept."""
    no_room_pages: int = 0
    """Wanted below, but there was no room."""
    dropped_pages: int = 0
    """Evicted with no copy left anywhere."""
    unreadable_pages: int = 0
    """Copies given up because they could not be read."""


def have_same_history(node: Node, child: Node) -> bool:
    """Whether the same requests have used a node and its child, from the same moment on, policies remember the same of both, and
    no transfer carries the child.

    A prompt and its answer stay apart: no policy sees the creation time of one on the other.
    """
    if child.last_used != node.last_used or child.hits != node.hits or child.created != node.created or child.transfers:
        return False
    return child.notes is node.notes or bool(child.notes == node.notes)


class Residency:
    """The tree over all tiers, and what each tier has of it. The only writer of copies, pins, slots and sums."""

    def __init__(self, tiers: list[Tier], width: int | None = None) -> None:
        """``width``: how many tiers nodes have room for, if that is more than there are."""
        self.tiers = tiers
        self.tree = RadixTree(width or len(tiers))
        self.counts = Counts()
        self.doomed: set[Node] = set()
        """Nodes of a tree that was given up, kept until their slots are no longer in use."""
        self.now = -inf
        """When the cache was last used, in seconds."""
        self.on_leave: Callable[[Node, Tier], None] | None = None
        """Is told of pages (no recurrent states) that leave a tier, after its policy."""
        for tier in tiers:
            tier.eviction.cut = partial(self._cut_for, tier)
        self._hears_arrivals = [tier for tier in tiers if tier.hears_arrivals]
        self._hears_requests = [tier for tier in tiers if tier.hears_requests]
        self._hears_finishes = [tier for tier in tiers if tier.hears_finishes]
        self._hears_hits = [tier for tier in tiers if tier.hears_hits]

    # --- time, and what policies are told ------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """``now``, or the next later moment if that has been used: no two uses of the cache have the same time."""
        if now <= self.now:
            now = nextafter(self.now, inf)
        self.now = now
        return now

    def tell_arrival(self, request: Any, now: float) -> None:
        """Tell policies that a request has arrived and waits."""
        for tier in self._hears_arrivals:
            tier.eviction.on_arrival(request, now)

    def tell_request(self, request: Any, now: float) -> None:
        """Tell policies of a request before its hits and inserts."""
        for tier in self._hears_requests:
            tier.eviction.on_request(request, now)

    def tell_finish(self, request: Any, node: Node, now: float) -> None:
        """Tell policies that a request has finished; its path ends with ``node`` and is still pinned."""
        for tier in self._hears_finishes:
            tier.eviction.on_finish(request, node, now)

    def tell_hits(self, nodes: Iterable[Node], now: float) -> None:
        """Tell the policies of every tier that has a copy about a hit."""
        for tier in self._hears_hits:
            index = tier.index
            for node in nodes:
                if node.state[index] == READY:
                    tier.eviction.on_hit(node, now)

    def reannounce(self, nodes: Iterable[Node], now: float) -> None:
        """Nodes are as recent as ``now`` although no policy is told of a hit: evictable copies are announced anew."""
        for node in nodes:
            node.last_used = now
            for tier in self.tiers:
                if node.is_evictable(tier.index):
                    tier.eviction.on_evictable(node)

    # --- the tree --------------------------------------------------------------------------------------------------------

    def follow(self, node: Node, runs: tuple[Run, ...], limit: int = NO_LIMIT) -> tuple[list[Node], tuple[Run, ...]]:
        """The nodes below ``node`` that agree with ``runs``, over ``limit`` pages at most, and the rest of the runs.

        The last node is cut where that ends.
        """
        path, partial, agreed, rest = self.tree.walk(node, runs, limit)
        if partial is not None:
            path.append(self.cut(partial, agreed))
        return path, rest

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
                upper.children_in[index] = 1
            if state == READY and tier.hears_splits:
                tier.eviction.on_split(upper, node)
        if node.transfers:
            for transfer in node.transfers:
                transfer.nodes.insert(transfer.nodes.index(node), upper)
            upper.transfers = node.transfers
        return upper

    def _cut_for(self, tier: Tier, node: Node, pages: object) -> Node:
        """Cut a node for the tier's eviction policy."""
        return self.cut(node, cut_after(node, pages, self.tree, tier))

    def first_pages(self, nodes: list[Node], pages: int) -> list[Node]:
        """Those of ``nodes`` that hold their first ``pages`` pages; the last one is cut if need be, unless it is a state."""
        first: list[Node] = []
        for node in nodes:
            if pages <= 0:
                break
            if node.pages > pages:
                if node.is_state:
                    break
                node = self.cut(node, pages)
            first.append(node)
            pages -= node.pages
        return first

    def merge(self, node: Node) -> None:
        """Join a node with its only child if nothing distinguishes them any more; the child stays as the whole.

        Does nothing to a node that has left the tree.
        """
        states = node.state
        if len(node.children) != 1 or node.parent is None or node.transfers:
            return
        child = next(iter(node.children.values()))
        if not have_same_history(node, child) or child.state != states or child.pins != node.pins:
            return
        if node.partner is not None and any(node.partner.state):
            return
        copies = 0
        for state in states:
            if state == READY:
                copies += 1
            elif state != ABSENT:
                return
        if not copies:
            return
        for tier in self.tiers:
            index = tier.index
            if node.state[index] == READY:
                child.slots[index] = tier.pool.join(node.slots[index], child.slots[index])
                if tier.hears_merges:
                    tier.eviction.on_merge(node, child)
        self.tree.join(node, child)

    def add_leaf(self, parent: Node, runs: tuple[Run, ...], pages: int, tier: Tier, slots: Any, now: float) -> Node:
        """A new node for pages that are ready in one tier, pinned there."""
        node = self.tree.add(parent, runs, pages, now)
        index = tier.index
        node.slots[index] = slots
        node.pins[index] = 1
        parent.children_in[index] += 1
        self.set_ready(node, tier, now)
        return node

    # --- pins ------------------------------------------------------------------------------------------------------------

    def pin_path(self, path: list[Node], tier: Tier, pages: int) -> None:
        """Pin a path of ``pages`` pages from the root on, all of which the tier has."""
        index = tier.index
        pinned_pages = 0
        for node in path:
            pins = node.pins
            if pins[index]:
                pinned_pages = node.depth + node.pages
            pins[index] += 1
        tier.evictable_pages -= pages - pinned_pages

    def use(self, nodes: list[Node], now: float, *, is_first: bool) -> None:
        """A request uses nodes: a request counts once, however often it is admitted."""
        if not is_first:
            self.reannounce(nodes, now)
            return
        for node in nodes:
            node.last_used = now
            node.hits += 1
        if self._hears_hits:
            self.tell_hits(nodes, now)

    def pin(self, node: Node, tier: Tier) -> None:
        """Keep the node, and so everything above it, in a tier."""
        index, evictable = tier.index, 0
        parent = node.parent
        while parent is not None:
            pins = node.pins
            if not pins[index] and node.state[index] == READY:
                evictable += node.pages
            pins[index] += 1
            node = parent
            parent = node.parent
        tier.evictable_pages -= evictable

    def unpin(self, node: Node, tier: Tier) -> None:
        """Take back one ``pin``; what is no longer pinned becomes evictable."""
        index, evictable = tier.index, 0
        parent = node.parent
        while parent is not None:
            pins = node.pins
            left = pins[index] = pins[index] - 1
            if not left:
                state = node.state[index]
                if state == READY:
                    evictable += node.pages
                    if not node.children_in[index]:
                        tier.eviction.on_evictable(node)
                elif state == DOOMED:
                    self._free_doomed(node, tier)
                elif state == INCOMING:
                    self.drop_copy(node, tier)
            node = parent
            parent = node.parent
        tier.evictable_pages += evictable

    # --- copies ----------------------------------------------------------------------------------------------------------

    def add_copy(self, node: Node, tier: Tier, state: int, slots: Any) -> None:
        """Place a copy in a tier where the node has none."""
        index = tier.index
        node.state[index] = state
        node.slots[index] = slots
        node.parent.children_in[index] += 1  # type: ignore[union-attr]

    def promise_copy(self, node: Node, tier: Tier) -> None:
        """A copy that a transfer will fill, in slots that are promised."""
        self.add_copy(node, tier, INCOMING, None)
        tier.promised_pages += node.pages

    def set_ready(self, node: Node, tier: Tier, now: float) -> None:
        """The copy can be used from now on."""
        index = tier.index
        node.state[index] = READY
        tier.inserted_pages += node.pages
        if tier.hears_inserts:
            tier.eviction.on_insert(node, now)
        if not node.pins[index]:
            tier.evictable_pages += node.pages
            if not node.children_in[index]:
                tier.eviction.on_evictable(node)

    def leave(self, node: Node, tier: Tier) -> None:
        """An evictable copy is about to be written below, and then freed."""
        node.state[tier.index] = LEAVING
        tier.evictable_pages -= node.pages
        tier.leaving_pages += node.pages
        self._tell_removed(node, tier)
        self._lose_child(node, tier)
        self._tell_left(node, tier)

    def stay(self, node: Node, tier: Tier, now: float) -> None:
        """A leaving copy is an ordinary one again."""
        tier.leaving_pages -= node.pages
        tier.inserted_pages -= node.pages  # it was never evicted, and is counted again as it becomes ready
        node.parent.children_in[tier.index] += 1  # type: ignore[union-attr]
        self.set_ready(node, tier, now)

    def free(self, node: Node, tier: Tier) -> None:
        """Free the slots of a ready copy that nothing pins; a node without any copy leaves the tree."""
        index, state = tier.index, node.state
        state[index] = ABSENT
        tier.evictable_pages -= node.pages
        tier.evicted_pages += node.pages
        tier.pool.give(node.slots[index])
        node.slots[index] = None
        self._tell_removed(node, tier)
        if not any(state):
            self.tree.remove(node)
        self._lose_child(node, tier)
        self._tell_left(node, tier)

    def trim(self, node: Node, tier: Tier, pages: int) -> None:
        """Free the last ``pages`` pages of a victim that is in this tier only; it stays with the others."""
        if tier.hears_shortenings:
            tier.eviction.on_shorten(node, pages)
        self.tree.shorten(node, pages)
        node.slots[tier.index], freed = tier.pool.split(node.slots[tier.index], node.pages)
        tier.pool.give(freed)
        tier.evictable_pages -= pages
        tier.evicted_pages += pages
        self.counts.dropped_pages += pages
        tier.eviction.on_evictable(node)

    def drop_copy(self, node: Node, tier: Tier) -> None:
        """Free the copy, whatever its state; a node without any copy leaves the tree, with what is below it."""
        index = tier.index
        state, slots = node.state[index], node.slots[index]
        if state == READY and not node.pins[index]:
            self.free(node, tier)
            return
        node.state[index], node.slots[index] = ABSENT, None
        if state == LEAVING:
            tier.leaving_pages -= node.pages
        elif state == READY:
            self._tell_removed(node, tier)
        if slots is None:
            tier.promised_pages -= node.pages
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
            self._lose_child(node, tier)
        if state == READY:
            self._tell_left(node, tier)

    def _tell_removed(self, node: Node, tier: Tier) -> None:
        if tier.hears_removals:
            tier.eviction.on_remove(node)

    def _tell_left(self, node: Node, tier: Tier) -> None:
        """All is in order without the copy: whatever the listener does may cut, drop or merge the node."""
        if self.on_leave is not None and not node.is_state:
            self.on_leave(node, tier)

    def _lose_child(self, node: Node, tier: Tier) -> None:
        """The node is no longer resident: its parent may have become a leaf of the tier."""
        parent, index = node.parent, tier.index
        assert parent is not None
        children_in = parent.children_in
        left = children_in[index] = children_in[index] - 1
        if not left and parent.state[index] == READY and not parent.pins[index]:
            tier.eviction.on_evictable(parent)

    # --- giving up -------------------------------------------------------------------------------------------------------

    def drop_descendants(self, node: Node) -> None:
        """Remove everything below a node that is about to vanish; copies in use are doomed."""
        if not node.children:
            return
        for child in list(node.descendants()):
            self.counts.dropped_pages += child.pages
            held = [tier for tier in self.tiers if child.state[tier.index] == READY]
            self._give_up(child)
            if self.on_leave is not None and not child.is_state:
                for tier in held:
                    self.on_leave(child, tier)

    def clear(self) -> None:
        """Empty the tree. Copies in use become doomed and are freed when their last pin or transfer is gone."""
        old, self.tree = self.tree, RadixTree(len(self.tiers))
        for node in list(old.root.descendants()):
            self._give_up(node)

    def is_doomed(self, node: Node) -> bool:
        """Whether the node belongs to a tree that was given up."""
        return DOOMED in node.state or node in self.doomed

    def _give_up(self, node: Node) -> None:
        """Free the node's copies, and doom those that are in use; what is leaving leaves as it would."""
        for tier in self.tiers:
            state = node.state[tier.index]
            if state not in (ABSENT, LEAVING):
                self._doom(node, tier)
        if any(node.state):
            self.doomed.add(node)

    def _doom(self, node: Node, tier: Tier) -> None:
        index = tier.index
        if node.state[index] == READY:
            tier.evicted_pages += node.pages
            if not node.pins[index]:
                tier.evictable_pages -= node.pages
            if tier.hears_removals:
                tier.eviction.on_remove(node)
        if node.slots[index] is None:
            tier.promised_pages -= node.pages
            node.slots[index] = tier.pool.take(0)
        node.state[index] = DOOMED
        if not node.pins[index]:
            self._free_doomed(node, tier)

    def _free_doomed(self, node: Node, tier: Tier) -> None:
        tier.pool.give(node.slots[tier.index])
        node.state[tier.index], node.slots[tier.index] = ABSENT, None
        if not any(node.state):
            self.doomed.discard(node)
