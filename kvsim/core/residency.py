"""Where pages are stored: the tree, the tiers, and the bookkeeping of every pin and slot."""

from collections.abc import Iterable
from functools import partial
from math import inf, nextafter
from typing import Any, Final

import numpy as np

from kvsim.core.copies import Copies
from kvsim.core.notices import Notices
from kvsim.core.pool import UNLIMITED, SlotPool
from kvsim.core.tier import Tier
from kvsim.core.tree import DOOMED, INCOMING, LEAVING, READY, Node
from kvsim.core.victims import cut_after
from kvsim.pages.extents import Extent

NEXT: Final = 2.0**-53 + 2.0**-105
"""Of a positive time, this share of it, added to it, gives the next one (Rump, Zimmermann, Boldo and Melquiond, 2009)."""
SMALLEST: Final = 1e-290
"""That holds of times from this one on."""


def just_after(now: float) -> float:
    """Return the next time that a float can express."""
    return now + now * NEXT if now > SMALLEST else nextafter(now, inf)


def have_same_history(node: Node, child: Node) -> bool:
    """Whether a node and its child have the same creation time, uses and policy notes, and no transfer carries the child.

    A prompt and its answer are never joined, so a policy never sees the creation time of one on the other.
    """
    if child.last_used != node.last_used or child.hits != node.hits or child.created != node.created or child.transfers:
        return False
    if child.own_uses is not node.own_uses and child.own_uses != node.own_uses:
        return False
    return child.notes is node.notes or bool(child.notes == node.notes)


def only_child(node: Node) -> Node:
    """Return the child of a node that has one."""
    for child in node.children.values():
        return child
    raise AssertionError(f"{node} has no child")


class Residency(Copies):
    """The tree over all tiers, and who holds what of it.

    Together with ``Copies`` the only writer of copies, pins, slots and sums. Each method changes one thing and every sum that
    depends on it; what to change is decided elsewhere.
    """

    def __init__(self, tiers: list[Tier], width: int | None = None) -> None:
        """``width`` is the number of tiers in a node's lists, if larger than the number of tiers here."""
        super().__init__(tiers, width)
        self.now = -inf
        """Time of the last use of the cache, in seconds."""
        for tier in tiers:
            tier.eviction.cut = partial(self._cut_for, tier)
        self.notices = Notices(tiers)
        self._has_several_gpus = self.notices.has_several_gpus

    # --- time, and uses ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Return ``now``, moved just past the last use if need be: no two uses of the cache have the same time."""
        if now <= self.now:
            now = just_after(self.now)
        self.now = now
        return now

    def tell_departure(self, request: Any, now: float, gpu: Tier | None = None) -> None:
        """Notify policies that a request which has arrived will not finish."""
        self.notices.departure(request, self.tree, now, gpu)

    def reannounce(self, nodes: Iterable[Node], now: float, gpu: Tier | None = None) -> None:
        """Mark nodes as last used ``now`` without reporting a hit; evictable copies are announced to their policies again."""
        tiers = self.notices.hearing(gpu).tiers
        for node in nodes:
            node.last_used = now
            if gpu is not None and self._has_several_gpus:
                self._use_in(node, gpu, now, 0)
            for tier in tiers:
                if node.is_evictable(tier.index):
                    tier.eviction.on_evictable(node)

    @staticmethod
    def _use_in(node: Node, gpu: Tier, now: float, hits: int) -> None:
        """Record a use, and ``hits`` hits, by a request of one of several GPU tiers. The first use counts as a hit."""
        if node.own_uses is None:
            node.own_uses = {}
        own = node.own_uses.get(gpu.index)
        node.own_uses[gpu.index] = (now, 1, now) if own is None else (now, own[1] + hits, own[2])

    # --- the tree --------------------------------------------------------------------------------------------------------

    def follow(self, node: Node, extents: tuple[Extent, ...], limit: int = UNLIMITED) -> tuple[list[Node], tuple[Extent, ...]]:
        """Return the nodes below ``node`` that match ``extents``, over at most ``limit`` pages, and the rest of the extents.

        A node that matches in part is cut at the end of the match.
        """
        path, partial, agreed, rest = self.tree.walk(node, extents, limit)
        if partial is not None:
            path.append(self.cut(partial, agreed))
        return path, rest

    def cut(self, node: Node, pages: int) -> Node:
        """Cut a node after ``pages`` pages, copies included. Returns the upper part; ``node`` becomes the lower part."""
        upper = self.tree.cut(node, pages)
        upper.copies = node.copies
        upper.share_state(node)
        children_in = upper.own_children_in()
        for tier in self.tiers:
            index = tier.index
            state = node.state[index]
            if not state:
                continue
            slots = node.slots[index]
            if slots is not None:
                upper.slots[index], node.slots[index] = tier.pool.split(slots, pages)
            if state != LEAVING:
                children_in[index] = 1
            if state == READY and tier.wants_splits:
                tier.eviction.on_split(upper, node)
        if node.transfers:
            for transfer in node.transfers:
                transfer.nodes.insert(transfer.nodes.index(node), upper)
            upper.transfers = node.transfers
        return upper

    def _cut_for(self, tier: Tier, node: Node, pages: object) -> Node:
        """Check and carry out a cut that the tier's eviction policy asks for."""
        return self.cut(node, cut_after(node, pages, self.tree, tier))

    def first_pages(self, nodes: list[Node], pages: int) -> list[Node]:
        """Return the nodes that make up the first ``pages`` pages of ``nodes``, cutting the last one if need be.

        The list ends before a recurrent state that does not fit whole.
        """
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
        """Join a node with its only child if nothing distinguishes them any more; the child object becomes the whole.

        A node that has left the tree is ignored.
        """
        states = node.state
        if len(node.children) != 1 or node.parent is None or node.transfers:
            return
        child = only_child(node)
        if not have_same_history(node, child) or child.state != states or child.pins != node.pins:
            return
        if node.partner is not None and node.partner.copies:
            return
        copied = [tier for tier in self.tiers if states[tier.index] == READY]
        if not copied or len(copied) < node.copies:
            return
        for tier in copied:
            index = tier.index
            child.slots[index] = tier.pool.join(node.slots[index], child.slots[index])
            if tier.wants_unevictable:
                self._tell_unevictable(node, tier)
            if tier.wants_merges:
                tier.eviction.on_merge(node, child)
        self.tree.join(node, child)

    def add_computed(
        self, parent: Node, extents: tuple[Extent, ...], pages: int, tier: Tier, slots: Any, now: float, begun_at: float
    ) -> Node:
        """Add a node as ``add_leaf`` for pages of a prompt or an answer whose first pages were added at ``begun_at``.

        All of them have that age, and the last use of all is now: chunks that nothing distinguishes are one node.
        """
        node = self.add_leaf(parent, extents, pages, tier, slots, now, begun_at)
        if parent.created == begun_at and parent.parent is not None:
            earlier: list[Node] = []
            above = parent
            while above.created == begun_at and above.parent is not None:
                earlier.append(above)
                above = above.parent
            self.reannounce(earlier, now, tier)
            self.merge(parent)
        return node

    def add_leaf(
        self, parent: Node, extents: tuple[Extent, ...], pages: int, tier: Tier, slots: Any, now: float, created: float = inf
    ) -> Node:
        """Add a node for pages that are ready in one tier, and pin it there. It is as old as ``created``, if that is earlier."""
        node = self.tree.add(parent, extents, pages, now)
        if created < now:
            node.created = created
        index = tier.index
        node.slots[index] = slots
        node.own_pins()[index] = 1
        self._count_child(node, tier)
        if self._has_several_gpus:
            node.own_uses = {index: (now, 1, node.created)}
        self.set_ready(node, tier, now)
        return node

    # --- pins ------------------------------------------------------------------------------------------------------------

    def pin_path(self, path: list[Node], tier: Tier, pages: int) -> None:
        """Pin a path of ``pages`` pages from the root, all of which the tier has."""
        index, wants_unevictable = tier.index, tier.wants_unevictable
        pinned_pages = 0
        for node in path:
            if wants_unevictable:
                self._tell_unevictable(node, tier)
            pins = node.own_pins()
            if pins[index]:
                pinned_pages = node.depth + node.pages
            pins[index] = pins[index] + 1
        tier.evictable_pages -= pages - pinned_pages

    def use(self, nodes: list[Node], now: float, *, is_first: bool, gpu: Tier | None = None) -> None:
        """Record that a request uses nodes. Only its first admission (``is_first``) counts as a hit."""
        if not is_first:
            self.reannounce(nodes, now, gpu)
            return
        for node in nodes:
            node.last_used = now
            node.hits += 1
        if gpu is not None and self._has_several_gpus:
            for node in nodes:
                self._use_in(node, gpu, now, 1)
        if self.notices.wants_hits:
            self.notices.hits(nodes, now, gpu)

    def pin_alone(self, node: Node, tier: Tier) -> None:
        """Pin a node in a tier, but nothing above it, which is pinned already or needs no pin."""
        index = tier.index
        if tier.wants_unevictable:
            self._tell_unevictable(node, tier)
        pins = node.own_pins()
        if not pins[index] and node.state[index] == READY:
            tier.evictable_pages -= node.pages
        pins[index] = pins[index] + 1

    def unpin_alone(self, node: Node, tier: Tier) -> None:
        """Take back one ``pin_alone``, of a copy that is ready or doomed."""
        index = tier.index
        left = node.pins[index] = node.pins[index] - 1
        if left:
            return
        node.share_pins()
        if node.state[index] == DOOMED:
            self.free_doomed(node, tier)
        else:
            tier.evictable_pages += node.pages
            if not node.children_in[index]:
                tier.eviction.on_evictable(node)

    def pass_over(self, node: Node, tier: Tier) -> None:
        """Pass over a victim as if it had been evicted, so that its parent can be offered next; ``take_back`` undoes it."""
        parent, index = node.parent, tier.index
        assert parent is not None
        if tier.wants_unevictable:
            self._tell_unevictable(node, tier)
        node.own_pins()[index] += 1
        parent.own_children_in()[index] -= 1
        if parent.is_evictable(index):
            tier.eviction.on_evictable(parent)

    def take_back(self, passed: list[Node], tier: Tier) -> None:
        """Make all victims that have been passed over evictable again."""
        index = tier.index
        for node in passed:
            node.pins[index] -= 1
            self._count_child(node, tier)
        for node in passed:
            if not node.children_in[index]:
                tier.eviction.on_evictable(node)

    def pin(self, node: Node, tier: Tier) -> None:
        """Keep the node and everything above it in a tier."""
        index, wants_unevictable = tier.index, tier.wants_unevictable
        evictable = 0
        parent = node.parent
        while parent is not None:
            if wants_unevictable:
                self._tell_unevictable(node, tier)
            pins = node.own_pins()
            if not pins[index] and node.state[index] == READY:
                evictable += node.pages
            pins[index] = pins[index] + 1
            node = parent
            parent = node.parent
        tier.evictable_pages -= evictable

    def unpin(self, node: Node, tier: Tier) -> None:
        """Take back one ``pin``. Ready copies that are no longer pinned become evictable; doomed and incoming ones are freed."""
        index = tier.index
        evictable = 0
        parent = node.parent
        while parent is not None:
            pins = node.pins
            left = pins[index] = pins[index] - 1
            if not left:
                node.share_pins()
                state = node.state[index]
                if state == READY:
                    evictable += node.pages
                    if not node.children_in[index]:
                        tier.eviction.on_evictable(node)
                elif state == DOOMED:
                    self.free_doomed(node, tier)
                elif state == INCOMING:
                    self.drop_copy(node, tier)
            node = parent
            parent = node.parent
        tier.evictable_pages += evictable

    # --- slots of requests -----------------------------------------------------------------------------------------------

    def take(self, tier: Tier, pages: int) -> Any:
        """Take free slots of a tier for a request."""
        return tier.pool.take(pages)

    def take_these(self, tier: Tier, slots: np.ndarray) -> None:
        """Take exactly these slots of a tier that numbers them; raise ValueError if one is not free."""
        pool = tier.pool
        assert isinstance(pool, SlotPool)
        pool.take_these(slots)

    def give(self, tier: Tier, slots: Any) -> None:
        """Give back slots that a request has taken."""
        tier.pool.give(slots)

    def reserve(self, tier: Tier, pages: int) -> None:
        """Reserve slots for a request, which takes them once they are free."""
        tier.reserved_pages += pages

    def take_reserved(self, tier: Tier, pages: int) -> Any:
        """Take slots that were reserved; they are free."""
        tier.reserved_pages -= pages
        return tier.pool.take(pages)

    def cancel_reservation(self, tier: Tier, pages: int) -> None:
        """Cancel a reservation of slots."""
        tier.reserved_pages -= pages
