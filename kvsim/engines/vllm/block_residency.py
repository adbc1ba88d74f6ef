"""The residency of a pool in which pages are stored several times."""

from typing import Any

from kvsim.core.residency import Residency
from kvsim.core.tier import Tier
from kvsim.core.tree import ABSENT, Node


class BlockResidency(Residency):
    """Also keeps nodes outside the tree, and nodes that leave before their children."""

    def ignore_children(self, node: Node, tier: Tier) -> None:
        """Let a node leave before its children in the tier."""
        node.own_children_in()[tier.index] = 0

    def count_children(self, node: Node, tier: Tier) -> None:
        """Let a node, all of whose children are in the tier, leave after them again."""
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
        node.state[index] = ABSENT
        node.copies -= 1
        tier.pool.give(node.slots[index])
        tier.evictable_pages -= node.pages
        tier.evicted_pages += node.pages
        self._notify_removed(node, tier)
