"""Where pages are stored: the tree, the tiers, and the bookkeeping of every copy, pin and slot.

Each method changes one thing and updates every sum that depends on it. ``transfers.py`` and ``cache.py`` decide what to change.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf, nextafter
from typing import Any

from kvsim.core.pool import UNLIMITED
from kvsim.core.tier import GPU, Tier
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, READY, Node, RadixTree
from kvsim.core.victims import cut_after
from kvsim.pages.extents import Run, last_pages


@dataclass
class Counts:
    """Pages moved between tiers, and pages lost, since the start of the run."""

    written_pages: int = 0
    """Copied to a tier below."""
    loaded_pages: int = 0
    """Loaded to a GPU."""
    fetched_pages: int = 0
    """Read from disk into a CPU tier."""
    revived_pages: int = 0
    """Used again while leaving a GPU, and therefore kept."""
    no_room_pages: int = 0
    """Not copied for lack of room in the target tier."""
    dropped_pages: int = 0
    """Evicted without a copy left in any tier."""
    unreadable_pages: int = 0
    """Copies dropped because they could not be read."""


def have_same_history(node: Node, child: Node) -> bool:
    """Whether a node and its child have the same creation time, uses and policy notes, and no transfer carries the child.

    A prompt and its answer are never joined, so a policy never sees the creation time of one on the other.
    """
    if child.last_used != node.last_used or child.hits != node.hits or child.created != node.created or child.transfers:
        return False
    if child.own_uses != node.own_uses:
        return False
    return child.notes is node.notes or bool(child.notes == node.notes)


class Listeners:
    """The tiers whose eviction policies are notified of the requests that one GPU tier serves, by kind of notification."""

    __slots__ = ("arrivals", "finishes", "hits", "requests", "tiers")

    def __init__(self, tiers: list[Tier]) -> None:
        self.tiers = tiers
        self.arrivals = [tier for tier in tiers if tier.wants_arrivals]
        self.requests = [tier for tier in tiers if tier.wants_requests]
        self.finishes = [tier for tier in tiers if tier.wants_finishes]
        self.hits = [tier for tier in tiers if tier.wants_hits]


class Residency:
    """The tree over all tiers, and each tier's copies of its nodes. The only writer of copies, pins, slots and sums."""

    def __init__(self, tiers: list[Tier], width: int | None = None) -> None:
        """``width`` is the number of tiers in a node's lists, if larger than the number of tiers here."""
        self.tiers = tiers
        self.tree = RadixTree(width or len(tiers))
        self.counts = Counts()
        self.doomed: set[Node] = set()
        """Nodes removed from the tree while a copy was in use or leaving, kept until their slots are freed."""
        self.now = -inf
        """Time of the last use of the cache, in seconds."""
        self.version = 0
        """Changes when a copy comes or goes and when a load begins or fails: until then, requests can reuse the same pages."""
        self.on_leave: Callable[[Node, Tier], None] | None = None
        """Called when pages (not recurrent states) leave a tier, after the tier's policy has been notified."""
        for tier in tiers:
            tier.eviction.cut = partial(self._cut_for, tier)
        self._all = Listeners(tiers)
        gpus = [tier for tier in tiers if tier.level == GPU]
        self._has_several_gpus = len(gpus) > 1
        self._listeners = {gpu.index: Listeners([gpu, *gpu.all_below()]) for gpu in gpus} if self._has_several_gpus else {}

    def _hearing(self, gpu: Tier | None) -> Listeners:
        """Return the listeners to the requests of a GPU tier; None stands for the only one."""
        return self._listeners[gpu.index] if gpu is not None and self._has_several_gpus else self._all

    # --- time, and notifications to policies ---------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Return ``now``, moved just past the last use if need be: no two uses of the cache have the same time."""
        if now <= self.now:
            now = nextafter(self.now, inf)
        self.now = now
        return now

    def notify_arrival(self, request: Any, now: float, gpu: Tier | None = None) -> None:
        """Notify policies that a request has arrived and waits."""
        for tier in self._hearing(gpu).arrivals:
            tier.eviction.on_arrival(request, now)

    def notify_request(self, request: Any, now: float, gpu: Tier | None = None, *, on_gpu_only: bool = False) -> None:
        """Notify policies of a request before its hits and inserts."""
        for tier in self._hearing(gpu).requests:
            if on_gpu_only and tier is not gpu:
                continue
            tier.eviction.on_request(request, now)

    def notify_finish(self, request: Any, node: Node, now: float, gpu: Tier | None = None) -> None:
        """Notify policies that a request has finished; its path, which ends with ``node``, is still pinned."""
        for tier in self._hearing(gpu).finishes:
            tier.eviction.on_finish(request, node, now)

    def notify_hits(self, nodes: Iterable[Node], now: float, gpu: Tier | None = None) -> None:
        """Notify the policy of every tier that has a ready copy of a hit."""
        for tier in self._hearing(gpu).hits:
            index = tier.index
            for node in nodes:
                if node.state[index] == READY:
                    tier.eviction.on_hit(node, now)

    def reannounce(self, nodes: Iterable[Node], now: float, gpu: Tier | None = None) -> None:
        """Mark nodes as last used ``now`` without reporting a hit; evictable copies are announced to their policies again."""
        tiers = self._hearing(gpu).tiers
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

    def follow(self, node: Node, runs: tuple[Run, ...], limit: int = UNLIMITED) -> tuple[list[Node], tuple[Run, ...]]:
        """Return the nodes below ``node`` that match ``runs``, over at most ``limit`` pages, and the rest of the runs.

        A node that matches in part is cut at the end of the match.
        """
        path, partial, agreed, rest = self.tree.walk(node, runs, limit)
        if partial is not None:
            path.append(self.cut(partial, agreed))
        return path, rest

    def cut(self, node: Node, pages: int) -> Node:
        """Cut a node after ``pages`` pages, copies included. Returns the upper part; ``node`` becomes the lower part."""
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
                if tier.wants_merges:
                    tier.eviction.on_merge(node, child)
        self.tree.join(node, child)

    def add_leaf(self, parent: Node, runs: tuple[Run, ...], pages: int, tier: Tier, slots: Any, now: float) -> Node:
        """Add a node for pages that are ready in one tier, and pin it there."""
        node = self.tree.add(parent, runs, pages, now)
        index = tier.index
        node.slots[index] = slots
        node.pins[index] = 1
        parent.children_in[index] += 1
        if self._has_several_gpus:
            self._use_in(node, tier, now, 0)
        self.set_ready(node, tier, now)
        return node

    # --- pins ------------------------------------------------------------------------------------------------------------

    def pin_path(self, path: list[Node], tier: Tier, pages: int) -> None:
        """Pin a path of ``pages`` pages from the root. The tier must have all of them."""
        index = tier.index
        pinned_pages = 0
        for node in path:
            pins = node.pins
            if pins[index]:
                pinned_pages = node.depth + node.pages
            pins[index] += 1
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
        if self._all.hits:
            self.notify_hits(nodes, now, gpu)

    def pin(self, node: Node, tier: Tier) -> None:
        """Keep the node and everything above it in a tier."""
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
        """Take back one ``pin``. Ready copies that are no longer pinned become evictable; doomed and incoming ones are freed."""
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
                    self.free_doomed(node, tier)
                elif state == INCOMING:
                    self.drop_copy(node, tier)
            node = parent
            parent = node.parent
        tier.evictable_pages += evictable

    # --- copies ----------------------------------------------------------------------------------------------------------

    def add_copy(self, node: Node, tier: Tier, state: int, slots: Any) -> None:
        """Add a copy in a tier that has none of the node."""
        self.version += 1
        index = tier.index
        node.state[index] = state
        node.slots[index] = slots
        node.parent.children_in[index] += 1  # type: ignore[union-attr]

    def promise_copy(self, node: Node, tier: Tier) -> None:
        """Add an incoming copy, to be filled by a transfer, and promise its slots."""
        self.add_copy(node, tier, INCOMING, None)
        tier.promised_pages += node.pages

    def set_ready(self, node: Node, tier: Tier, now: float) -> None:
        """Make a copy usable, and evictable unless it is pinned."""
        self.version += 1
        index = tier.index
        node.state[index] = READY
        tier.inserted_pages += node.pages
        if tier.wants_inserts:
            tier.eviction.on_insert(node, now)
        if tier.watch is not None and not node.is_state:
            tier.watch.stored(node.runs)
        if not node.pins[index]:
            tier.evictable_pages += node.pages
            if not node.children_in[index]:
                tier.eviction.on_evictable(node)

    def leave(self, node: Node, tier: Tier) -> None:
        """Mark an evictable copy as leaving: it will be written to the tier below, then freed."""
        node.state[tier.index] = LEAVING
        tier.evictable_pages -= node.pages
        tier.leaving_pages += node.pages
        self._notify_removed(node, tier)
        self._lose_child(node, tier)
        self._notify_left(node, tier)

    def stay(self, node: Node, tier: Tier, now: float) -> None:
        """Make a leaving copy ready again."""
        tier.leaving_pages -= node.pages
        tier.inserted_pages -= node.pages  # it was never evicted, and set_ready counts it again
        node.parent.children_in[tier.index] += 1  # type: ignore[union-attr]
        self.set_ready(node, tier, now)

    def free(self, node: Node, tier: Tier) -> None:
        """Free the slots of a ready, unpinned copy; a node without any copy leaves the tree."""
        self.version += 1
        index, state = tier.index, node.state
        state[index] = ABSENT
        tier.evictable_pages -= node.pages
        tier.evicted_pages += node.pages
        tier.pool.give(node.slots[index])
        node.slots[index] = None
        if tier.wants_removals or tier.watch is not None:
            self._notify_removed(node, tier)
        if not any(state):
            self.tree.remove(node)
        self._lose_child(node, tier)
        if self.on_leave is not None:
            self._notify_left(node, tier)

    def trim(self, node: Node, tier: Tier, pages: int) -> None:
        """Free the last ``pages`` pages of a victim that is in this tier only; its other pages stay evictable."""
        self.version += 1
        if tier.wants_shortenings:
            tier.eviction.on_shorten(node, pages)
        if tier.watch is not None:
            tier.watch.dropped(last_pages(node.runs, pages))
        self.tree.shorten(node, pages)
        node.slots[tier.index], freed = tier.pool.split(node.slots[tier.index], node.pages)
        tier.pool.give(freed)
        tier.evictable_pages -= pages
        tier.evicted_pages += pages
        self.counts.dropped_pages += pages
        tier.eviction.on_evictable(node)

    def drop_copy(self, node: Node, tier: Tier) -> None:
        """Free a copy in any state; a node without any copy leaves the tree with everything below it."""
        self.version += 1
        index = tier.index
        state, slots = node.state[index], node.slots[index]
        if state == READY and not node.pins[index]:
            self.free(node, tier)
            return
        node.state[index], node.slots[index] = ABSENT, None
        if state == LEAVING:
            tier.leaving_pages -= node.pages
        elif state == READY:
            self._notify_removed(node, tier)
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
            self._notify_left(node, tier)

    def _notify_removed(self, node: Node, tier: Tier) -> None:
        if tier.wants_removals:
            tier.eviction.on_remove(node)
        if tier.watch is not None and not node.is_state:
            tier.watch.dropped(node.runs)

    def _notify_left(self, node: Node, tier: Tier) -> None:
        """Call ``on_leave``. All bookkeeping must be done by then: the listener may cut, drop or merge the node."""
        if self.on_leave is not None and not node.is_state:
            self.on_leave(node, tier)

    def _lose_child(self, node: Node, tier: Tier) -> None:
        """Count one child less for the parent, which may have become an evictable leaf of the tier."""
        parent, index = node.parent, tier.index
        assert parent is not None
        children_in = parent.children_in
        left = children_in[index] = children_in[index] - 1
        if not left and parent.state[index] == READY and not parent.pins[index]:
            tier.eviction.on_evictable(parent)

    # --- giving up -------------------------------------------------------------------------------------------------------

    def drop_descendants(self, node: Node) -> None:
        """Give up everything below a node that is about to leave the tree; copies in use become doomed."""
        if not node.children:
            return
        for child in list(node.descendants()):
            self.counts.dropped_pages += child.pages
            held = [tier for tier in self.tiers if child.state[tier.index] == READY]
            self._give_up(child)
            if self.on_leave is not None and not child.is_state:
                for tier in held:
                    self.on_leave(child, tier)

    def clear(self, outside: Iterable[Node] = ()) -> None:
        """Empty the tree, and give up these nodes ``outside`` it with all that is below them.

        Copies in use become doomed and are freed with their last pin or transfer.
        """
        old, self.tree = self.tree, RadixTree(len(self.tree.no_notes))
        for node in [*old.root.descendants(), *(below for top in outside for below in (top, *top.descendants()))]:
            self._give_up(node)

    def is_doomed(self, node: Node) -> bool:
        """Whether the node was removed from the tree while a copy was in use or leaving."""
        return DOOMED in node.state or node in self.doomed

    def _give_up(self, node: Node) -> None:
        """Free the node's copies, dooming those in use; leaving copies are written down as planned."""
        for tier in self.tiers:
            state = node.state[tier.index]
            if state not in (ABSENT, LEAVING):
                self._doom(node, tier)
        if any(node.state):
            self.doomed.add(node)

    def _doom(self, node: Node, tier: Tier) -> None:
        self.version += 1
        index = tier.index
        if node.state[index] == READY:
            tier.evicted_pages += node.pages
            if not node.pins[index]:
                tier.evictable_pages -= node.pages
            self._notify_removed(node, tier)
        if node.slots[index] is None:
            tier.promised_pages -= node.pages
            node.slots[index] = tier.pool.take(0)
        node.state[index] = DOOMED
        if not node.pins[index]:
            self.free_doomed(node, tier)

    def free_doomed(self, node: Node, tier: Tier) -> None:
        """Free a doomed copy, which nothing uses any more."""
        tier.pool.give(node.slots[tier.index])
        node.state[tier.index], node.slots[tier.index] = ABSENT, None
        if not any(node.state):
            self.doomed.discard(node)
