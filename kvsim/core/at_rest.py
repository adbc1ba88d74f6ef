"""Invariants of the nodes of any cache, and of one that nobody uses any more: recounted from scratch."""

from collections.abc import Sequence

from kvsim.core.tier import Tier
from kvsim.core.tree import NO_CHILDREN, READY, Node, RadixTree
from kvsim.pages.extents import count_pages


def check_place(node: Node) -> None:
    """Raise AssertionError unless a node is where its parent says, has the pages that it says, and a history that can be."""
    parent = node.parent
    assert parent is not None and parent.children.get(node.runs[0][0]) is node, f"{node}: not found under its parent"
    assert node.pages == count_pages(node.runs) > 0, f"{node}: page count {node.pages}"
    assert node.depth == parent.depth + parent.pages or node.is_state, f"{node}: depth"
    assert any(node.state), f"{node}: in the tree, but in no tier"
    assert node.created <= node.last_used and node.hits > 0, f"{node}: created at {node.created}, used at {node.last_used}"
    assert not min(node.pins) < 0, f"{node}: pins {node.pins}"


def check_places(tree: RadixTree) -> list[Node]:
    """Check each node of a tree, even if it is no tree any more. Returns them."""
    found = len(NO_CHILDREN)
    NO_CHILDREN.clear()
    assert not found, f"{found} children were given to all leaves"
    assert not any(tree.zeros), f"pins or children were counted for all nodes that have none: {tree.zeros}"
    nodes: dict[Node, None] = {}
    stack = [tree.root]
    while stack:
        parent = stack.pop()
        for node in parent.children.values():
            assert node.parent is parent and node not in nodes, f"{node}: not found under its parent"
            check_place(node)
            nodes[node] = None
            stack.append(node)
    return list(nodes)


def check_at_rest(tree: RadixTree, tiers: Sequence[Tier]) -> None:
    """Check a cache whose requests have all ended. Pages outside the tree, as some engines have them, are not counted."""
    nodes = check_places(tree)
    for tier in tiers:
        index, pool = tier.index, tier.pool
        here = [node for node in nodes if node.state[index]]
        for node in here:
            slots = node.slots[index]
            assert slots is not None and pool.count(slots) == node.pages, f"{node}: slots in {tier.name}"
        held = sum([node.pages for node in here])
        assert held <= pool.capacity - pool.free, (
            f"{tier.name}: {held} pages in the tree, {pool.capacity - pool.free} slots taken"
        )
        loose = sum([node.pages for node in here if node.state[index] == READY and not node.pins[index]])
        assert loose <= tier.evictable_pages, f"{tier.name}: {tier.evictable_pages} evictable pages, recounted {loose}"
