"""The copies of nodes in tiers: how each comes, changes its state and goes, and the sums of pages that follow."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvsim.core.prompt_index import PromptIndex
from kvsim.core.tier import Tier
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, READY, Node, RadixTree
from kvsim.pages.extents import last_pages


@dataclass
class Counts:
    """Pages moved between tiers, and pages lost, since the start of the run."""

    written_pages: int = 0
    """Copied to a tier below."""
    loaded_pages: int = 0
    """Loaded to a GPU."""
    fetched_pages: int = 0
    """Read into a tier between the one that had them and a GPU."""
    revived_pages: int = 0
    """Used again while leaving a GPU, and therefore kept."""
    no_room_pages: int = 0
    """Not copied for lack of room in the target tier."""
    dropped_pages: int = 0
    """Evicted without a copy left in any tier."""
    unreadable_pages: int = 0
    """Copies dropped because they could not be read."""


class Copies:
    """Each tier's copies of the nodes of a tree. Notifies eviction policies of their coming and going."""

    def __init__(self, tiers: list[Tier], width: int | None = None) -> None:
        """``width`` is the number of tiers in a node's lists, if larger than the number of tiers here."""
        self.tiers = tiers
        self.tree = RadixTree(width or len(tiers))
        self.counts = Counts()
        self.doomed: set[Node] = set()
        """Nodes removed from the tree while a copy was in use or leaving, kept until their slots are freed."""
        self.epoch = 0
        """Number of times that everything was given up (``clear``)."""
        self.version = 0
        """Changes when a copy comes or goes and when a load begins or fails: until then, requests can reuse the same pages."""
        self.prompts: PromptIndex | None = None
        """Is told of each such change, if anyone wants to know whose prompts it concerns."""
        self.on_leave: Callable[[Node, Tier], None] | None = None
        """Called when pages (not recurrent states) leave a tier, after the tier's policy has been notified."""

    def index_prompts(self) -> PromptIndex:
        """Return the index that is told of changes, and begin to tell it if nobody has asked before."""
        if self.prompts is None:
            self.prompts = PromptIndex()
        return self.prompts

    def is_last_copy(self, node: Node) -> bool:
        """Whether a node that some tier has is in no other tier."""
        return node.copies == 1

    def add_copy(self, node: Node, tier: Tier, state: int, slots: Any) -> None:
        """Add a copy in a tier that has none of the node."""
        self.version += 1
        if self.prompts is not None:
            self.prompts.changed(node.runs)
        index = tier.index
        node.set_state(index, state)
        node.copies += 1
        node.slots[index] = slots
        self._count_child(node, tier)

    def reserve_copy(self, node: Node, tier: Tier) -> None:
        """Add an incoming copy, to be filled by a transfer, and reserve its slots."""
        self.add_copy(node, tier, INCOMING, None)
        tier.reserved_pages += node.pages

    def add_incoming(self, node: Node, tier: Tier, slots: Any) -> None:
        """Add an incoming copy in slots that a request has taken, and pin it; everything above is pinned."""
        self.add_copy(node, tier, INCOMING, slots)
        pins, index = node.own_pins(), tier.index
        pins[index] = pins[index] + 1

    def place_copies(self, nodes: list[Node], tier: Tier, pages: int) -> None:
        """Give those of these incoming copies that have none the slots reserved for them: ``pages`` in all, which are free."""
        index, pool = tier.index, tier.pool
        tier.reserved_pages -= pages
        for node in nodes:
            if node.slots[index] is None:
                node.slots[index] = pool.take(node.pages)

    def set_ready(self, node: Node, tier: Tier, now: float) -> None:
        """Make a copy usable, and evictable unless it is pinned."""
        self.version += 1
        if self.prompts is not None:
            self.prompts.changed(node.runs)
        index = tier.index
        if not node.state[index]:
            node.copies += 1
        node.set_state(index, READY)
        tier.inserted_pages += node.pages
        if tier.wants_inserts:
            tier.eviction.on_insert(node, now)
        if tier.watches and not node.is_state:
            for watch in tier.watches:
                watch.stored(tier, node.runs)
        if not node.pins[index]:
            tier.evictable_pages += node.pages
            if not node.children_in[index]:
                tier.eviction.on_evictable(node)

    def leave(self, node: Node, tier: Tier) -> None:
        """Mark an evictable copy as leaving: it will be written to the tier below, then freed."""
        if tier.wants_unevictable:
            self._tell_unevictable(node, tier)
        node.set_state(tier.index, LEAVING)
        if self.prompts is not None:
            self.prompts.changed(node.runs)
        tier.evictable_pages -= node.pages
        tier.leaving_pages += node.pages
        if tier.wants_removals or tier.watches:
            self._notify_removed(node, tier)
        self._lose_child(node, tier)
        if self.on_leave is not None:
            self._notify_left(node, tier)

    def revive(self, node: Node, tier: Tier, now: float) -> None:
        """Make a leaving copy ready again."""
        tier.leaving_pages -= node.pages
        tier.inserted_pages -= node.pages  # it was never evicted, and set_ready counts it again
        self._count_child(node, tier)
        self.set_ready(node, tier, now)

    def free(self, node: Node, tier: Tier) -> None:
        """Free the slots of a ready, unpinned copy; a node without any copy leaves the tree."""
        self.version += 1
        if self.prompts is not None:
            self.prompts.changed(node.runs)
        index = tier.index
        if tier.wants_unevictable:
            self._tell_unevictable(node, tier)
        node.set_state(index, ABSENT)
        node.copies -= 1
        tier.evictable_pages -= node.pages
        tier.evicted_pages += node.pages
        tier.pool.give(node.slots[index])
        node.slots[index] = None
        if tier.wants_removals or tier.watches:
            self._notify_removed(node, tier)
        if not node.copies:
            self.tree.remove(node)
        self._lose_child(node, tier)
        if self.on_leave is not None:
            self._notify_left(node, tier)

    def trim(self, node: Node, tier: Tier, pages: int) -> None:
        """Free the last ``pages`` pages of a victim that is in this tier only; its other pages stay evictable."""
        self.version += 1
        if self.prompts is not None:
            self.prompts.changed(last_pages(node.runs, pages))
        if tier.wants_shortenings:
            tier.eviction.on_shorten(node, pages)
        for watch in tier.watches:
            watch.dropped(tier, last_pages(node.runs, pages))
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
        if self.prompts is not None:
            self.prompts.changed(node.runs)
        index = tier.index
        state, slots = node.state[index], node.slots[index]
        if state == READY and not node.pins[index]:
            self.free(node, tier)
            return
        node.set_state(index, ABSENT)
        node.slots[index] = None
        node.copies -= 1
        if state == LEAVING:
            tier.leaving_pages -= node.pages
        elif state == READY:
            self._notify_removed(node, tier)
        if slots is None:
            tier.reserved_pages -= node.pages
        else:
            tier.pool.give(slots)
            if state != INCOMING:
                tier.evicted_pages += node.pages
        if not node.copies:
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
        if tier.watches and not node.is_state:
            for watch in tier.watches:
                watch.dropped(tier, node.runs)

    def _notify_left(self, node: Node, tier: Tier) -> None:
        """Call ``on_leave``. All bookkeeping must be done by then: the listener may cut, drop or merge the node."""
        if self.on_leave is not None and not node.is_state:
            self.on_leave(node, tier)

    @staticmethod
    def _tell_unevictable(node: Node, tier: Tier) -> None:
        """Notify the policy of a tier, before an evictable node is pinned there, gets a child or leaves."""
        if node.is_evictable(tier.index):
            tier.eviction.on_unevictable(node)

    def _count_child(self, node: Node, tier: Tier) -> None:
        """Count a node among its parent's children in a tier."""
        parent, index = node.parent, tier.index
        assert parent is not None
        if tier.wants_unevictable:
            self._tell_unevictable(parent, tier)
        children_in = parent.own_children_in()
        children_in[index] = children_in[index] + 1

    def _lose_child(self, node: Node, tier: Tier) -> None:
        """Count one child less for the parent, which may have become an evictable leaf of the tier."""
        parent, index = node.parent, tier.index
        assert parent is not None
        children_in = parent.own_children_in()  # below 0 where an engine's blocks leave before their children
        left = children_in[index] = children_in[index] - 1
        if not left and parent.state[index] == READY and not parent.pins[index]:
            tier.eviction.on_evictable(parent)

    # --- giving up -------------------------------------------------------------------------------------------------------

    def drop_descendants(self, node: Node) -> None:
        """Give up everything below a node that is about to leave the tree; copies in use become doomed."""
        if not node.children:
            return
        for child in list(node.descendants()):
            if not child.copies or child in self.doomed:
                continue  # given up already: a listener has evicted a node above it
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
        self.epoch += 1
        if self.prompts is not None:
            self.prompts.all_changed()
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
        if node.copies:
            self.doomed.add(node)

    def _doom(self, node: Node, tier: Tier) -> None:
        self.version += 1
        if self.prompts is not None:
            self.prompts.changed(node.runs)
        index = tier.index
        if node.state[index] == READY:
            tier.evicted_pages += node.pages
            if not node.pins[index]:
                tier.evictable_pages -= node.pages
                if tier.wants_unevictable:
                    self._tell_unevictable(node, tier)
            self._notify_removed(node, tier)
        if node.slots[index] is None:
            tier.reserved_pages -= node.pages
            node.slots[index] = tier.pool.take(0)
        node.set_state(index, DOOMED)
        if not node.pins[index]:
            self.free_doomed(node, tier)

    def free_doomed(self, node: Node, tier: Tier) -> None:
        """Free a doomed copy, which nothing uses any more."""
        tier.pool.give(node.slots[tier.index])
        node.set_state(tier.index, ABSENT)
        node.slots[tier.index] = None
        node.copies -= 1
        if not node.copies:
            self.doomed.discard(node)
