"""LightLLM's pool of recurrent states: running requests, nodes of the tree and detached states share its slots."""

from collections import OrderedDict

from kvsim.core.tier import GPU, Tier
from kvsim.core.tree import Node
from kvsim.pages.extents import Extent
from kvsim.states.store import CheckpointCounts, DetachedStates, Place, first_of_extent


def last_page(node: Node) -> int:
    """Return the id of a node's last page, after which its state is saved."""
    start, pages = node.runs[-1]
    return start + pages - 1


class StatePool:
    """States in slots of one tier. A running request works in one slot; others keep states of nodes, each after its last page.

    room      states of nodes that no request holds leave first, then those of held nodes, both the least recently used first;
              then detached ones, likewise. The first two do not become detached
    recency   a hit refreshes the states on its path, those closer to the root later
    detached  if ``unit_pages`` is set, a state stays when the KV of its node leaves, after multiples of that many pages. It
              replaces a detached state of the same page
    """

    def __init__(self, tier: Tier, unit_pages: int | None) -> None:
        self.tier = tier
        self.counts = CheckpointCounts()
        self.detached: DetachedStates | None = None if unit_pages is None else DetachedStates(None)
        self.places = 0
        """Number of states saved after pages that had none, detached ones included."""
        self._unit_pages = unit_pages or 1
        self._kept: OrderedDict[Node, None] = OrderedDict()
        """Nodes with a state, the least recently used first."""

    def __contains__(self, node: Node) -> bool:
        return node in self._kept

    def begin(self, start: Node) -> None:
        """Take a slot for a request that begins from the state of ``start``, which leaves only if there is no other."""
        self.counts.used += start in self._kept
        if not self._make_room(start):
            self._drop(start)
        self.tier.lend(1)

    def end(self) -> None:
        """Give back the slot of a request."""
        self.tier.get_back(1)

    def save(self, node: Node) -> None:
        """Save a state for a node unless it has one. Without room, none is saved."""
        if node in self._kept:
            return
        if not self._make_room(None):
            self.counts.no_room += 1
            return
        self.tier.store(1)
        self.counts.saved += 1
        self.places += self.detached is None or last_page(node) not in self.detached
        self._kept[node] = None

    def use(self, node: Node) -> None:
        """Refresh the states on the path down to a node."""
        while node.parent is not None:
            if node in self._kept:
                self._kept.move_to_end(node)
            node = node.parent

    def longest_detached(self, extents: tuple[Extent, ...], limit: int) -> int:
        """Return the depth in pages of a prompt's deepest detached state within ``limit`` pages, and refresh it; 0: none."""
        if self.detached is None or not len(self.detached):
            return 0
        found = self.detached.longest(extents, limit)
        if found is None:
            return 0
        self.detached.touch(found[1])
        return found[0]

    def leave(self, node: Node, _tier: Tier) -> None:
        """Detach or drop the state of a node whose KV leaves the GPU."""
        if node not in self._kept:
            return
        depth = node.depth + node.pages
        if self.detached is None or depth % self._unit_pages:
            self._drop(node)
            return
        page = last_page(node)
        if page in self.detached:
            self._free()
        del self._kept[node]
        self.detached.insert(Place(page, depth, first_of_extent(node)))
        self.counts.detached += 1

    def describe(self, state_bytes: int) -> CheckpointCounts:
        """Return the counts, with ``evicted`` and ``bytes`` brought up to date."""
        alive = {last_page(node) for node in self._kept}
        alive.update(self.detached or ())
        self.counts.evicted = self.places - len(alive)
        self.counts.bytes = self.counts.saved * state_bytes
        return self.counts

    def _make_room(self, start: Node | None) -> bool:
        """Free a slot if none is free, but not that of ``start``. Returns whether there is one."""
        if self.tier.pool.free:
            return True
        oldest = next((node for node in self._kept if not node.pins[GPU]), None)
        if oldest is None:
            oldest = next((node for node in self._kept if node is not start), None)
        if oldest is not None:
            self._drop(oldest)
            return True
        if self.detached is not None and len(self.detached):
            self.detached.pop_oldest()
            self._free()
            return True
        return False

    def _drop(self, node: Node) -> None:
        del self._kept[node]
        self._free()

    def _free(self) -> None:
        self.tier.drop(1)
