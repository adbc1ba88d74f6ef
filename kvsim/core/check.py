"""Recounts a cache from scratch and compares with what it believes: the invariants, in code."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.core.pool import SlotPool
from kvsim.core.residency import Residency
from kvsim.core.runs import count_pages
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.core.transfers import Transfers
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, LEAVING, READY, Node

if TYPE_CHECKING:
    from kvsim.core.cache import Cache


@dataclass(frozen=True, kw_only=True)
class Held:
    """What requests hold of a cache."""

    pins: list[tuple[Node, Tier]] = field(default_factory=list)
    """The node, and what is above it, is kept in the tier."""
    slots: dict[Tier, list[Any]] = field(default_factory=dict)
    promised_pages: dict[Tier, int] = field(default_factory=dict)


def held_by_requests(cache: "Cache") -> Held:
    """What the leases of a cache, and its persistent paths, hold."""
    held = Held()
    held.pins.extend(cache.persistent)
    for lease in cache.leases:
        gpu = lease.gpu
        held.pins.append((lease.node, gpu))
        held.slots.setdefault(gpu, []).append(lease.slots)
        held.promised_pages[gpu] = held.promised_pages.get(gpu, 0) + lease.promised_pages
        if lease.loading is not None:
            held.pins.extend((lease.loading, tier) for tier in cache.views[gpu.index].lower)
    return held


def check(residency: Residency, transfers: Transfers, held: Held) -> None:
    """Raise AssertionError, saying which, if an invariant does not hold. Costs a walk over the whole tree."""
    nodes = list(residency.tree.root.descendants())
    for node in nodes:
        _check_node(residency, node)
    pins = _count_pins(residency, transfers, held)
    for node in [*nodes, *residency.doomed]:
        for tier in residency.tiers:
            assert node.pins[tier.index] == pins.get((node, tier.index), 0), f"{node}: pins in {tier.name}"
    for tier in residency.tiers:
        _check_tier(residency, tier, nodes, held)
    for edge in transfers.edges:
        assert not edge.leaving, f"{edge}: a pass left something behind"
    for transfer in transfers.in_flight:
        _check_transfer(residency, transfer)


def _check_node(residency: Residency, node: Node) -> None:
    """The tree's own links, and what a node's copies require of its neighbours."""
    parent = node.parent
    assert parent is not None and parent.children[node.runs[0][0]] is node, f"{node}: not where its parent looks for it"
    assert node.pages == count_pages(node.runs) > 0, f"{node}: page count"
    assert node.depth == parent.depth + parent.pages or node.is_state, f"{node}: depth"
    assert any(node.state), f"{node}: on no tier, but in the tree"
    assert not residency.is_doomed(node), f"{node}: doomed, but in the tree"
    for tier in residency.tiers:
        index = tier.index
        count = sum(child.state[index] not in (ABSENT, LEAVING) for child in node.children.values())
        assert node.children_in[index] == count, f"{node}: children in {tier.name}"
        if not tier.above and node.state[index] == READY and parent.parent is not None:
            assert parent.state[index] in (READY, INCOMING), f"{node}: on {tier.name} without its parent"


def _count_pins(residency: Residency, transfers: Transfers, held: Held) -> dict[tuple[Node, int], int]:
    """Pins that requests and transfers should have, by node and tier."""
    pins: dict[tuple[Node, int], int] = {}
    by_requests = [(node, tier.index) for node, tier in held.pins]
    for held_node, tier in [*by_requests, *(pin for transfer in transfers.in_flight for pin in transfer.pins)]:
        node: Node | None = held_node
        while node is not None and node.parent is not None:
            pins[node, tier] = pins.get((node, tier), 0) + 1
            node = node.parent
    return pins


def _check_tier(residency: Residency, tier: Tier, nodes: list[Node], held: Held) -> None:
    """Every slot has one owner, every page one state, and the running sums are right."""
    index, pool = tier.index, tier.pool
    present = [node for node in [*nodes, *residency.doomed] if node.state[index]]
    slots = [node.slots[index] for node in present if node.slots[index] is not None]
    slots += held.slots.get(tier, [])
    assert pool.free + sum(pool.count(some) for some in slots) == pool.capacity, f"{tier.name}: slots leaked"
    if isinstance(pool, SlotPool):
        owned = np.concatenate([pool.free_slots(), *slots])
        assert len(np.unique(owned)) == pool.capacity, f"{tier.name}: a slot has two owners"
    sums = {"evictable": 0, "leaving": 0, "promised": held.promised_pages.get(tier, 0), "held": 0}
    for node in present:
        state, some = node.state[index], node.slots[index]
        assert some is None or pool.count(some) == node.pages or state == DOOMED, f"{node}: slots in {tier.name}"
        assert some is not None or state == INCOMING, f"{node}: usable in {tier.name} without slots"
        assert state != INCOMING or node.pins[index], f"{node}: incoming in {tier.name}, but nothing waits for it"
        sums["promised"] += node.pages * (some is None)
        sums["leaving"] += node.pages * (state == LEAVING)
        sums["evictable"] += node.pages * (state == READY and not node.pins[index])
        sums["held"] += node.pages * (state in (READY, LEAVING))
    believed = {
        "evictable": tier.evictable_pages, "leaving": tier.leaving_pages, "promised": tier.promised_pages,
        "held": tier.held_pages,
    }  # fmt: skip
    assert believed == sums, f"{tier.name}: believes {believed}, has {sums}"


def _check_transfer(residency: Residency, transfer: Transfer) -> None:
    """What is on its way has a target that waits for it and a source that still has it."""
    assert not transfer.done, "an ended transfer is still listed"
    for node in transfer.nodes:
        assert transfer in node.transfers, f"{node}: does not know its transfer"
        target = transfer.target
        if transfer.begun and node.slots[target.index] is not None:
            assert target.pool.count(node.slots[target.index]) == node.pages, f"{node}: is copied to {target.name} without slots"
        if residency.is_doomed(node):
            continue
        assert node.state[target.index] == INCOMING, f"{node}: usable in {target.name} before it arrived"
        is_cut_short = transfer.after and not transfer.begun
        assert node.state[transfer.source.index] or is_cut_short, f"{node}: its source in {transfer.source.name} is gone"
