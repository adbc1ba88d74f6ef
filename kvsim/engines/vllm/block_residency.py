"""The residency of a pool in which pages are stored several times."""

from typing import Any

from kvsim.core.residency import Residency
from kvsim.core.tier import Tier
from kvsim.core.tree import ABSENT, READY, Node
from kvsim.pages.extents import Extent


class BlockResidency(Residency):
    """Also keeps nodes outside the tree, and nodes that leave before their children."""

    def ignore_children(self, node: Node, tier: Tier) -> None:
        """Let a node leave before its children in the tier, and say so to a policy that has been told otherwise."""
        node.own_children_in()[tier.index] = 0
        if tier.wants_unevictable and node.is_evictable(tier.index):
            tier.eviction.on_evictable(node)

    def count_children(self, node: Node, tier: Tier) -> None:
        """Let a node, all of whose children are in the tier, leave after them again."""
        if tier.wants_unevictable and node.children:
            self._tell_unevictable(node, tier)
        node.own_children_in()[tier.index] = len(node.children)

    def add_outside_tree(self, node: Node, tier: Tier, slots: Any, now: float) -> None:
        """Make a node outside the tree ready in a tier, and pin it there."""
        index = tier.index
        node.slots[index] = slots
        node.own_pins()[index] = 1
        self.set_ready(node, tier, now)

    def free_in_place(self, node: Node, tier: Tier) -> None:
        """Free the slots of a ready, unpinned node wherever it is; its place in the tree stays."""
        self.version += 1
        index = tier.index
        if tier.wants_unevictable:
            self._tell_unevictable(node, tier)
        node.set_state(index, ABSENT)
        node.copies -= 1
        tier.pool.give(node.slots[index])
        tier.evictable_pages -= node.pages
        tier.evicted_pages += node.pages
        self._notify_removed(node, tier)

    # --- blocks without nodes: those of groups with a window ---------------------------------------------------------------

    def add_blocks(self, tier: Tier, blocks: int, extent: Extent) -> None:
        """Count blocks that can be found from now on, and are held; ``extent`` are their pages."""
        self._tell_change(extent)
        tier.inserted_pages += blocks

    def add_idle(self, tier: Tier, blocks: int) -> Node:
        """Let blocks leave that no request holds any more, later than all others. Returns the node that stands for them."""
        node = Node((), blocks, 0, None, self.tree, self.tick(self.now))
        node.is_state = True
        node.set_state(tier.index, READY)
        tier.evictable_pages += blocks
        tier.eviction.on_evictable(node)
        return node

    def keep(self, node: Node, tier: Tier, blocks: int) -> None:
        """Keep blocks from leaving with the node that stands for them."""
        tier.evictable_pages -= blocks
        self._shrink(node, tier, blocks)

    def evict_blocks(self, node: Node, tier: Tier, blocks: int, slots: Any, extent: Extent) -> None:
        """Evict some blocks that a node stands for, and free their slots."""
        self._tell_change(extent)
        tier.evictable_pages -= blocks
        tier.evicted_pages += blocks
        tier.pool.give(slots)
        self.counts.dropped_pages += blocks
        self._shrink(node, tier, blocks)

    def doom_blocks(self, tier: Tier, blocks: int, slots: Any, node: Node | None) -> None:
        """Give up blocks because the cache is emptied: those that a node stands for are free at once, others when they are not
        held any more."""
        tier.evicted_pages += blocks
        if node is not None:
            tier.evictable_pages -= blocks
            tier.pool.give(slots)
            self._shrink(node, tier, blocks)

    def _tell_change(self, extent: Extent) -> None:
        self.version += 1
        if self.prompts is not None:
            self.prompts.changed((extent,))

    def _shrink(self, node: Node, tier: Tier, blocks: int) -> None:
        node.pages -= blocks
        if not node.pages:
            if tier.wants_unevictable:
                self._tell_unevictable(node, tier)
            node.set_state(tier.index, ABSENT)
