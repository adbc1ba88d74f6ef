"""Recounts a cache from scratch and compares with what it believes: the invariants, in code."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.core.pool import SlotPool
from kvsim.core.runs import count_pages
from kvsim.core.tier import Tier
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, READY, Node

if TYPE_CHECKING:
    from kvsim.core.movement import Movement


@dataclass(frozen=True, kw_only=True)
class Held:
    """What requests hold of a cache."""

    pins: list[tuple[Node, int]] = field(default_factory=list)
    """(node, tier): the node, and what is above it, is kept there."""
    slots: list[Any] = field(default_factory=list)
    """Of the GPU."""
    owed_pages: int = 0


def check(cache: "Movement", held: Held) -> None:
    """Raise AssertionError, saying which, if an invariant does not hold. Costs a walk over the whole tree."""
    nodes = list(cache.tree.root.descendants())
    for node in nodes:
        _check_node(cache, node)
    pins = _count_pins(cache, held)
    for node in [*nodes, *cache.doomed]:
        for tier in cache.tiers:
            assert node.pins[tier.index] == pins.get((node, tier.index), 0), f"{node}: pins in {tier.name}"
    for tier in cache.tiers:
        _check_tier(cache, tier, nodes, held if tier.index == 0 else Held())
    for transfer in cache.transfers:
        _check_transfer(cache, transfer)


def _check_node(cache: "Movement", node: Node) -> None:
    """The tree's own links, and what a node's copies require of its neighbours."""
    parent = node.parent
    assert parent is not None and parent.children[node.runs[0][0]] is node, f"{node}: not where its parent looks for it"
    assert node.pages == count_pages(node.runs) > 0, f"{node}: page count"
    assert node.depth == parent.depth + parent.pages or node.runs[0][0] < 0, f"{node}: depth"
    assert any(node.state), f"{node}: on no tier, but in the tree"
    assert not cache.is_doomed(node), f"{node}: doomed, but in the tree"
    for tier in cache.tiers:
        kids = sum(child.state[tier.index] not in (ABSENT, LEAVING) for child in node.children.values())
        assert node.kids[tier.index] == kids, f"{node}: children in {tier.name}"
    if node.state[0] == READY and parent.parent is not None:
        assert parent.state[0] in (READY, INCOMING), f"{node}: on the GPU without its parent"


def _count_pins(cache: "Movement", held: Held) -> dict[tuple[Node, int], int]:
    """Pins that requests and transfers should have, by node and tier."""
    pins: dict[tuple[Node, int], int] = {}
    for held_node, tier in [*held.pins, *(pin for transfer in cache.transfers for pin in transfer.pins)]:
        node: Node | None = held_node
        while node is not None and node.parent is not None:
            pins[node, tier] = pins.get((node, tier), 0) + 1
            node = node.parent
    return pins


def _check_tier(cache: "Movement", tier: Tier, nodes: list[Node], held: Held) -> None:
    """Every slot has one owner, every page one state, and the running sums are right."""
    index, pool = tier.index, tier.pool
    present = [node for node in [*nodes, *cache.doomed] if node.state[index]]
    slots = [node.slots[index] for node in present if node.slots[index] is not None]
    slots += held.slots
    assert pool.free + sum(pool.count(some) for some in slots) == pool.capacity, f"{tier.name}: slots leaked"
    if isinstance(pool, SlotPool):
        owned = np.concatenate([pool.free_slots(), *slots])
        assert len(np.unique(owned)) == pool.capacity, f"{tier.name}: a slot has two owners"
    sums = {"evictable": 0, "coming": 0, "owed": held.owed_pages}
    for node in present:
        state, some = node.state[index], node.slots[index]
        assert some is None or pool.count(some) == node.pages or state == DOOMED, f"{node}: slots in {tier.name}"
        assert some is not None or state == INCOMING, f"{node}: usable in {tier.name} without slots"
        assert state != INCOMING or node.pins[index], f"{node}: incoming in {tier.name}, but nobody waits for it"
        sums["owed"] += node.pages * (some is None)
        sums["coming"] += node.pages * (state == LEAVING)
        sums["evictable"] += node.pages * (state == READY and not node.pins[index])
    believed = {"evictable": tier.evictable_pages, "coming": tier.coming_pages, "owed": tier.owed_pages}
    assert believed == sums, f"{tier.name}: believes {believed}, has {sums}"


def _check_transfer(cache: "Movement", transfer: object) -> None:
    """What is on its way has a target that waits for it and a source that still has it."""
    from kvsim.core.transfer import Transfer

    assert isinstance(transfer, Transfer) and not transfer.done, "an ended transfer is still listed"
    for node in transfer.nodes:
        assert transfer in node.transfers, f"{node}: does not know its transfer"
        target = transfer.target
        if transfer.begun and node.slots[target.index] is not None:
            assert target.pool.count(node.slots[target.index]) == node.pages, f"{node}: is copied to {target.name} without slots"
        if cache.is_doomed(node):
            continue
        assert node.state[transfer.target.index] == INCOMING, f"{node}: usable in {transfer.target.name} before it arrived"
        is_cut_short = transfer.after and not transfer.begun
        assert node.state[transfer.source.index] or is_cut_short, f"{node}: its source in {transfer.source.name} is gone"
