"""The cache's invariants: recounts everything from scratch and compares it with the running sums."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsim.core.at_rest import check_places
from kvsim.core.pool import SlotPool
from kvsim.core.residency import Residency
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.transfers import Transfers
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, READY, Node


@dataclass(frozen=True, kw_only=True)
class Held:
    """Pins and slots of a cache that requests hold."""

    pins: list[tuple[Node, Tier]] = field(default_factory=list)
    """(node, tier) pairs: the node and everything above it is kept in the tier."""
    slots: dict[Tier, list[Any]] = field(default_factory=dict)
    reserved_pages: dict[Tier, int] = field(default_factory=dict)


def check(residency: Residency, transfers: Transfers, held: Held) -> None:
    """Raise AssertionError with a description if an invariant is broken. Walks the whole tree."""
    nodes = check_places(residency.tree)
    for node in nodes:
        _check_node(residency, node)
    pins = _count_pins(residency, transfers, held)
    for node in [*nodes, *residency.doomed]:
        for tier in residency.tiers:
            assert node.pins[tier.index] == pins.get((node, tier.index), 0), f"{node}: pins in {tier.name}"
    for tier in residency.tiers:
        _check_tier(residency, tier, nodes, held)
    for edge in transfers.edges:
        assert not edge.leaving, f"{edge}: victims of an eviction pass were left behind"
    for transfer in transfers.in_flight:
        _check_transfer(residency, transfer)


def _check_node(residency: Residency, node: Node) -> None:
    """Check the tree's links, and what a node's copies require of its parent and children."""
    parent = node.parent
    assert parent is not None
    assert not residency.is_doomed(node), f"{node}: in the tree, but doomed"
    assert node.copies == sum(state != ABSENT for state in node.state), f"{node}: {node.copies} copies"
    for tier in residency.tiers:
        index = tier.index
        count = sum(child.state[index] not in (ABSENT, LEAVING) for child in node.children.values())
        assert node.children_in[index] == count, f"{node}: children in {tier.name}"
        if not tier.above and node.state[index] == READY and parent.parent is not None:
            assert parent.state[index] in (READY, INCOMING), f"{node}: on {tier.name} without its parent"


def _count_pins(residency: Residency, transfers: Transfers, held: Held) -> dict[tuple[Node, int], int]:
    """Count the pins that requests and transfers should hold, by node and tier index."""
    pins: dict[tuple[Node, int], int] = {}
    by_requests = [(node, tier.index) for node, tier in held.pins]
    for held_node, tier in [*by_requests, *(pin for transfer in transfers.in_flight for pin in transfer.pins)]:
        node: Node | None = held_node
        while node is not None and node.parent is not None:
            pins[node, tier] = pins.get((node, tier), 0) + 1
            node = node.parent
    return pins


def _check_tier(residency: Residency, tier: Tier, nodes: list[Node], held: Held) -> None:
    """Check that every slot has one owner and that the running sums are right."""
    index, pool = tier.index, tier.pool
    present = [node for node in [*nodes, *residency.doomed] if node.state[index]]
    slots = [node.slots[index] for node in present if node.slots[index] is not None]
    slots += held.slots.get(tier, [])
    assert pool.free + sum(pool.count(some) for some in slots) == pool.capacity, f"{tier.name}: slots leaked"
    if isinstance(pool, SlotPool):
        owned = np.concatenate([pool.free_slots(), *slots])
        assert len(np.unique(owned)) == pool.capacity, f"{tier.name}: a slot has two owners"
    sums = {"evictable": 0, "leaving": 0, "reserved": held.reserved_pages.get(tier, 0), "held": 0}
    for node in present:
        state, some = node.state[index], node.slots[index]
        assert some is None or pool.count(some) == node.pages or state == DOOMED, f"{node}: slots in {tier.name}"
        assert some is not None or state == INCOMING, f"{node}: has no slots in {tier.name}, but is not incoming"
        assert state != INCOMING or node.pins[index], f"{node}: incoming in {tier.name}, but not pinned"
        sums["reserved"] += node.pages * (some is None)
        sums["leaving"] += node.pages * (state == LEAVING)
        sums["evictable"] += node.pages * (state == READY and not node.pins[index])
        sums["held"] += node.pages * (state in (READY, LEAVING))
    believed = {
        "evictable": tier.evictable_pages, "leaving": tier.leaving_pages, "reserved": tier.reserved_pages,
        "held": tier.held_pages,
    }  # fmt: skip
    assert believed == sums, f"{tier.name}: running sums {believed}, recounted {sums}"


def _check_transfer(residency: Residency, transfer: Transfer) -> None:
    """Check that each node under way has an incoming copy in the target and still has its copy in the source."""
    assert not transfer.done, "an ended transfer is still listed as in flight"
    for node in transfer.nodes:
        assert transfer in node.transfers, f"{node}: does not list its transfer"
        target = transfer.target
        if transfer.begun and node.slots[target.index] is not None:
            assert target.pool.count(node.slots[target.index]) == node.pages, f"{node}: wrong slot count in {target.name}"
        if residency.is_doomed(node):
            continue
        assert node.state[target.index] == INCOMING, f"{node}: not incoming in {target.name} while its transfer is under way"
        is_cut_short = transfer.after and not transfer.begun
        assert node.state[transfer.source.index] or is_cut_short, f"{node}: its source in {transfer.source.name} is gone"
