"""The invariants of SGLang's unified cache, recounted from scratch."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvsim.core.lease import Holder
from kvsim.core.tier import CPU, GPU
from kvsim.core.tree import READY, Node
from kvsim.engines.sglang.moving_nodes import MovingNodeCache


def check_nodes(cache: MovingNodeCache, held: Iterable[Holder], host_slots: Sequence[Any] = ()) -> None:
    """Recount slots, children, pins and evictable pages, with the leases of all running requests, and with slots of the host that
    are in no node. Raises AssertionError."""
    held = list(held)
    nodes = list(cache.tree.root.descendants())
    pins = _pins(cache, nodes, held)
    for tier in cache.tiers[: CPU + 1]:
        index, pool = tier.index, tier.pool
        here = [node for node in nodes if node.state[index]]
        pages = sum([node.pages for node in here])
        own = sum([pool.count(slots) for slots in ([lease.slots for lease in held] if index == GPU else host_slots)])
        assert pages + own + pool.free == pool.capacity, f"pages of {tier.name} are lost"
        assert all(pool.count(node.slots[index]) == node.pages for node in here), f"a node has other slots on {tier.name}"
        loose = sum([node.pages for node in here if not node.pins[index] and node.state[index] == READY])
        assert loose == tier.evictable_pages, f"evictable pages of {tier.name} are counted wrong"
        assert all(node.pins[index] == pins[node, index] for node in nodes), f"pins of {tier.name} are counted wrong"
        for node in [cache.tree.root, *nodes]:
            assert node.children_in[index] == sum([bool(child.state[index]) for child in node.children.values()])
    for node in nodes:
        assert any(node.state), "a node is nowhere"
        assert not node.state[GPU] or node.depth == 0 or node.parent.state[GPU], "a node is on the GPU below one that is not"  # type: ignore[union-attr]


def _pins(cache: MovingNodeCache, nodes: list[Node], held: list[Holder]) -> Counter[tuple[Node, int]]:
    """Return how often each node must be pinned in each tier."""
    pins: Counter[tuple[Node, int]] = Counter()
    to_host, to_gpu, to_store = cache.under_way()
    for last in [lease.node for lease in held] + [carrier.nodes[-1] for carrier in (*to_host, *to_gpu)]:
        pins.update((node, GPU) for node in last.path())
    for carrier in (*to_gpu, *to_store):
        pins.update((node, CPU) for node in carrier.nodes)
        assert all(carrier in node.transfers for node in carrier.nodes)
    if len(cache.tiers) > 1:
        pins.update((node, CPU) for node in nodes if node.state[GPU] and node.state[CPU])
    return pins
